"""The student: a transformer with its last linears widened, and the directions wanted from one forward of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from pdd.backbones import Backbone
from pdd.backbones.base import Perturbation, State
from pdd.grid import Grid, Plan
from pdd.heads import ParallelHead, SharedHead


class Velocity(nn.Module):
    """A transformer seen through its family: the one root module that the engine wraps, for student and teacher alike.

    Args:
        transformer: base or widened.
        backbone: its family.
    """

    def __init__(self, transformer: nn.Module, backbone: Backbone):
        super().__init__()
        self.transformer = transformer
        self.backbone = backbone

    def forward(
        self,
        state: State,
        sigma: dict[str, Tensor],
        cond: dict[str, Tensor],
        plans: Mapping[str, Plan] | None = None,
        perturbations: Sequence[tuple[Perturbation, Tensor]] = (),
    ) -> State:
        """Velocities ``[B, D, ...]`` per modality: the plans' directions, or D = 1 of a base transformer.

        Args:
            perturbations: what samples lack, and which ones, bool ``[B]``.
        """
        if not self.backbone.batched and (batch := len(next(iter(state.values())))) > 1:
            # as many forwards on every rank, since every rank has as many samples
            samples = [self._sample(i, state, sigma, cond, plans, perturbations) for i in range(batch)]
            return {m: torch.cat([sample[m] for sample in samples]) for m in state}
        directions = dict.fromkeys(self.backbone.modalities, 1)
        for name, head in self.backbone.heads.items():
            if plans is not None:
                directions[name] = plans[name].num_directions
            module = self.transformer.get_submodule(head.module)
            if isinstance(module, (ParallelHead, SharedHead)):
                module.plan = None if plans is None else plans[name]
        with ExitStack() as stack:
            for perturbation, samples in perturbations:
                stack.enter_context(perturbation(self.transformer, samples))
            return self.backbone.forward(self.transformer, state, sigma, cond, directions)

    def _sample(
        self,
        i: int,
        state: State,
        sigma: dict[str, Tensor],
        cond: dict[str, Tensor],
        plans: Mapping[str, Plan] | None,
        perturbations: Sequence[tuple[Perturbation, Tensor]],
    ) -> State:
        """The forward of one sample of a batch."""
        state, sigma, cond = ({name: value[i : i + 1] for name, value in d.items()} for d in (state, sigma, cond))
        plans = None if plans is None else {m: plan.of(i) for m, plan in plans.items()}
        return self.forward(state, sigma, cond, plans, [(lack, samples[i : i + 1]) for lack, samples in perturbations])


def widen(transformer: nn.Module, backbone: Backbone, pdd_steps: int, keep_base: bool = False) -> nn.Module:
    """Repeat every modality's last linear ``pdd_steps`` times, in place; at once the student equals its teacher.

    The paper's parallel decoder; the seed's widened transformer.

    Args:
        keep_base: leave the base head beside its bank, for forwards without a plan.

    Returns:
        The transformer.
    """
    for head in backbone.heads.values():
        linear = transformer.get_submodule(head.module)
        bank = ParallelHead(linear, pdd_steps, head.patch)
        transformer.set_submodule(head.module, SharedHead(linear, bank) if keep_base else bank)
    return transformer


def head_parameters(transformer: nn.Module) -> list[nn.Parameter]:
    """The banks' parameters, which have a learning rate of their own."""
    return [p for module in transformer.modules() if isinstance(module, ParallelHead) for p in module.parameters()]


class Student:
    """A widened :class:`Velocity` on a grid.

    Args:
        model: the widened :class:`Velocity`. Under an engine its forwards belong inside a call of that engine.
        grid: the grid its heads belong to.
    """

    def __init__(self, model: Callable[..., State], grid: Grid):
        self.model, self.grid = model, grid

    def directions(self, state: State, starts: Tensor, cond: dict[str, Tensor], plans: Mapping[str, Plan]) -> State:
        """One forward at nodes ``starts`` ``[B]``: the plans' directions ``[B, D, ...]`` per modality."""
        device = next(iter(state.values())).device
        sigma = {m: s[starts].to(device, torch.float32, non_blocking=True) for m, s in self.grid.sigma.items()}
        return self.model(state, sigma, cond, plans)

    def block(self, cond: dict[str, Tensor]) -> Callable[[State, int, int], State]:
        """``predict(state, start, end)`` for :func:`pdd.sampling.walk`: the fused block's mean velocity, no gradient."""

        @torch.no_grad()
        def predict(state: State, start: int, end: int) -> State:
            batch = len(next(iter(state.values())))
            plans = self.grid.fused_plan(start, end)
            out = self.directions(state, torch.full((batch,), start), cond, plans)
            return {m: v[:, 0] for m, v in out.items()}

        return predict


class FusedStudent:
    """A widened transformer for sampling alone: every block's heads fused once into plain linears (the paper's layer fusion).

    Args:
        transformer: widened, on its device; its heads are swapped for the block's linears at each forward.
        backbone: its family.
        grid: the grid its heads belong to.
    """

    def __init__(self, transformer: nn.Module, backbone: Backbone, grid: Grid):
        self.model, self.backbone, self.grid = Velocity(transformer, backbone), backbone, grid
        self.banks = {m: transformer.get_submodule(head.module) for m, head in backbone.heads.items()}
        self._linears: dict[tuple[str, int, int], nn.Linear] = {}

    def linear(self, modality: str, start: int, end: int) -> nn.Linear:
        """The fused head of a block."""
        key = (modality, start, end)
        if key not in self._linears:
            self._linears[key] = self.banks[modality].fuse(self.grid.fused_plan(start, end)[modality])
        return self._linears[key]

    def place(self, start: int, end: int) -> None:
        """Swap a block's linears in; the transformer then is a plain one that predicts the block's mean velocity."""
        for m, head in self.backbone.heads.items():
            self.model.transformer.set_submodule(head.module, self.linear(m, start, end))

    def unfused(self) -> Student:
        """Put the banks back and give the student that is read through plans, until the next :meth:`place`."""
        for m, head in self.backbone.heads.items():
            self.model.transformer.set_submodule(head.module, self.banks[m])
        return Student(self.model, self.grid)

    def block(self, cond: dict[str, Tensor]) -> Callable[[State, int, int], State]:
        """``predict(state, start, end)`` for :func:`pdd.sampling.walk`."""

        @torch.no_grad()
        def predict(state: State, start: int, end: int) -> State:
            self.place(start, end)
            x = next(iter(state.values()))
            there = {m: s[start].to(x.device, torch.float32, non_blocking=True) for m, s in self.grid.sigma.items()}
            sigma = {m: s.expand(len(x)) for m, s in there.items()}
            return {m: v[:, 0] for m, v in self.model(state, sigma, cond).items()}

        return predict
