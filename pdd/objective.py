"""The parallel decoding loss, and the two regimes that feed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdd.backbones.base import State
from pdd.carry import Reserve, TrajectoryCarry
from pdd.config import Config
from pdd.data import Rows
from pdd.draws import generator_for, noise
from pdd.grid import Grid
from pdd.sampling import endpoint, initial
from pdd.student import Student
from pdd.teacher import Teacher, rk_target

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def supervision_window(n: Tensor, block_size_max: int, pdd_steps: int, segment_end: Tensor | None = None) -> Tensor:
    """End (excluded) of the heads that a start ``n`` ``[B]`` may be supervised on: ``min(n + block_size_max, N)``, or up to a
    given segment end."""
    end = torch.clamp(n + block_size_max, max=pdd_steps)
    return end if segment_end is None else torch.minimum(end, segment_end)


def sample_supervision(n: Tensor, end: Tensor, uniforms: Tensor) -> Tensor:
    """Heads to supervise, one in each of S equal strata of ``[n, end)``: distinct, rising, each uniform (the paper's k).

    Args:
        n, end: int64 ``[B]``, windows of at least S heads.
        uniforms: float64 ``[B, S]`` in [0, 1).

    Returns:
        int64 ``[B, S]``.
    """
    count = uniforms.shape[1]
    width = (end - n)[:, None]  # [B, 1]
    edge = torch.arange(count + 1) * width // count  # [B, S + 1]
    lower, size = edge[:, :-1], edge[:, 1:] - edge[:, :-1]
    return n[:, None] + lower + torch.minimum((uniforms * size).long(), size - 1)


class Losses(NamedTuple):
    """What one forward of the objective gives.

    Attributes:
        total: scalar with gradient, the weighted sum over modalities.
        per_modality: modality -> scalar, unweighted.
        per_sample: float ``[B, S]``, unweighted sum over modalities, no gradient.
        x_next: modality -> states at the plan's last end ``[B, ...]``; None without ``next_nodes``.
        x0: modality -> preview of the data point ``[B, ...]``.
    """

    total: Tensor
    per_modality: dict[str, Tensor]
    per_sample: Tensor
    x_next: State | None
    x0: State


def pd_loss(
    student: Student,
    teacher: Teacher,
    state: State,
    n: Tensor,
    k: Tensor,
    cond: dict[str, Tensor],
    *,
    rule: str,
    next_nodes: Tensor | None = None,
    weights: dict[str, float] | None = None,
    mask: State | None = None,
) -> Losses:
    """The PD loss ``|| u_n(k | x_n) - RK1step_teacher(sg(x_k), k) ||^2`` of one student forward (the paper's Algorithm 3).

    Args:
        state: modality -> states at nodes ``n``, ``[B, ...]``; their dtype is the precision of the integration.
        n: int64 ``[B]``, nodes.
        k: int64 ``[B, S]``, supervised heads, each ``>= n``.
        cond: conditioning.
        rule: Runge-Kutta rule of the target.
        next_nodes: int64 ``[B]``, nodes that the same prediction advances the states to.
        weights: modality -> weight in the total; 1 if not named.
        mask: modality -> validity of elements, broadcastable to the states; invalid ones do not enter the loss.
    """
    grid, targets = student.grid, k.shape[1]
    ends = k if next_nodes is None else torch.cat([k, next_nodes[:, None]], 1)
    out = student.directions(state, n, cond, grid.plan(n.tolist(), ends.tolist(), k.tolist()))
    moves = {m: v[:, : ends.shape[1]].detach() for m, v in out.items()}  # displacements x_n -> each end
    heads = {m: v[:, ends.shape[1] :] for m, v in out.items()}  # u_n(k | x_n), with gradient

    errors = {m: [] for m in state}
    for s in range(targets):
        x_k = {m: x + moves[m][:, s].to(x.dtype) for m, x in state.items()}
        target = rk_target(teacher.field(cond), x_k, k[:, s], grid, rule)
        for m in state:
            errors[m].append((heads[m][:, s] - target[m].to(heads[m].dtype)).square())

    per_modality, per_sample = {}, 0.0
    for m, squares in errors.items():
        square = torch.stack(squares, 1)  # [B, S, ...]
        if mask is None or m not in mask:
            valid = torch.ones_like(square)
        else:
            valid = mask[m].to(square)[:, None].expand_as(square)
        per_modality[m] = (square * valid).sum() / valid.sum().clamp(min=1)
        rows, count = (square.detach() * valid).flatten(2).sum(2), valid.flatten(2).sum(2)
        per_sample = per_sample + rows / count.clamp(min=1)  # [B, S]
    total = sum((weights or {}).get(m, 1.0) * loss for m, loss in per_modality.items())

    if next_nodes is None:
        x_next = None
        x0 = {m: _x0(x_k[m], heads[m][:, -1].detach(), grid.sigma[m][k[:, -1]]) for m in state}
    else:
        x_next = {m: x + moves[m][:, -1].to(x.dtype) for m, x in state.items()}
        x0 = {m: _x0_from_points(state[m], x_next[m], grid.sigma[m][n], grid.sigma[m][next_nodes]) for m in state}
    return Losses(total, per_modality, per_sample, x_next, x0)


def _x0(x: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """Data point of a straight line through ``x`` (the seed's x0_from_local_head)."""
    return x - _column(sigma, x) * velocity.to(x.dtype)


def _x0_from_points(x: Tensor, y: Tensor, sigma_x: Tensor, sigma_y: Tensor) -> Tensor:
    """Data point of the straight line through the two ends of a block (the seed's x0_from_points)."""
    a, b = _column(sigma_x, x), _column(sigma_y, x)
    return (a * y - b * x) / (a - b)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like, non_blocking=True).view(-1, *[1] * (like.ndim - 1))


class Objective:
    """The regimes: which states, prompts and heads the loss of an accumulation round is taken on.

    Args:
        config: the knobs.
        grid: the fine grid.
        student, teacher: the two roles.
        rows: this run's dataset.
        rank, world: this rank and how many there are.
        device: where states live.
        rollout: ``(noise, conditioning) -> states`` at the grid's start, where neither noise alone nor latents give them.
        agree: a flag -> the largest of all ranks' flags; needed with ``rollout``.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        student: Student,
        teacher: Teacher,
        rows: Rows,
        rank: int,
        world: int,
        device: torch.device | str,
        rollout: Callable[[State, dict[str, Tensor]], State] | None = None,
        agree: Callable[[int], int] | None = None,
    ):
        self.config, self.grid, self.student, self.teacher, self.rows = config, grid, student, teacher, rows
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.dtype = DTYPES[config.precision_decoding]
        self.batch = config.train_micro_batch_size_per_gpu
        self.group = self.batch * world * config.gradient_accumulation_steps  # the global batch: of one shape
        self.nodes = torch.tensor(config.starts + [config.pdd_steps])
        self.origin = (0, 0)  # a step, and the samples seen until then, by whatever ranks and batch
        self.carry, self.rollout = None, rollout
        self.reserve = None if rollout is None else Reserve(self._fresh, agree)
        if config.rollout_mode == "simulate":
            self.carry = TrajectoryCarry(
                len(self.nodes) - 1, config.gradient_accumulation_steps, self.batch, rank, world, config.stagger
            )

    def __call__(self, step: int, round: int) -> tuple[Losses, dict[str, Tensor]]:
        """Losses of one accumulation round, and the facts worth logging: ``n`` ``[B]``, ``distance`` ``[B, S]``, ``rung``."""
        if self.carry is None:
            return self._data_latent(step, round)
        return self._simulate(step, round)

    def samples_seen(self, step: int) -> int:
        """Samples over all ranks before a step: the cursor in the data of ``data_latent``."""
        since, seen = self.origin
        return seen + (step - since) * self.config.gradient_accumulation_steps * self.world * self.batch

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's trajectories; empty without any."""
        return self.carry.state_dict() if self.carry is not None else {}

    def load_state_dict(self, ranks: Sequence[dict[str, Tensor]], step: int, seen: int) -> tuple[int, int] | None:
        """Take up every saving rank's :meth:`state_dict`; see :meth:`pdd.carry.TrajectoryCarry.load_state_dict`."""
        if self.rows.buckets:  # a global batch of another size begins with a group of one shape
            seen = -(-seen // self.group) * self.group
        self.origin = (step, seen)
        return self.carry.load_state_dict(ranks, self.device, self._fresh) if self.carry is not None else None

    def _heads(self, step: int, round: int, n: Tensor) -> Tensor:
        """Supervised heads of this rank's samples, ``[B, S]``, cut from a draw for the global batch."""
        generator = generator_for(self.config.seed, "targets", step, round)
        shape = (self.world, self.batch, self.config.num_targets)
        uniforms = torch.rand(shape, generator=generator, dtype=torch.float64)[self.rank]
        return sample_supervision(n, supervision_window(n, self.config.block_size_max, self.config.pdd_steps), uniforms)

    def _loss(self, state: State, n: Tensor, k: Tensor, serials: Tensor, next_nodes: Tensor | None) -> Losses:
        indices = self.rows.shuffled(serials, self.group)
        return pd_loss(
            self.student,
            self.teacher,
            state,
            n,
            k,
            self.rows.cond(indices, self.device),
            rule=self.config.type_rk,
            next_nodes=next_nodes,
            weights=self.config.loss_weights,
            mask=self.rows.mask(indices, self.device),
        )

    # -- data_latent ----------------------------------------------------------------------------------

    def _data_latent(self, step: int, round: int) -> tuple[Losses, dict[str, Tensor]]:
        """Real latents, noised at block starts that are multiples of ``block_size_min``."""
        config = self.config
        position = self.rank * self.batch + torch.arange(self.batch)
        serials = self.samples_seen(step) + round * self.world * self.batch + position
        starts = self.nodes[:-1]
        generator = generator_for(config.seed, "starts", step, round)
        n = starts[torch.randint(len(starts), (self.world, self.batch), generator=generator)[self.rank]]
        x0 = self.rows.latents(self.rows.shuffled(serials, self.group), self.device)
        eps = self._noise(serials, {m: x.shape[1:] for m, x in x0.items()})
        sigma = {m: _column(s[n], x0[m].to(self.dtype)) for m, s in self.grid.sigma.items()}
        state = {m: (1 - sigma[m]) * x.to(self.dtype) + sigma[m] * eps[m] for m, x in x0.items()}
        k = self._heads(step, round, n)
        return self._loss(state, n, k, serials, None), {"n": n, "distance": k - n[:, None]}

    # -- simulate -------------------------------------------------------------------------------------

    def _simulate(self, step: int, round: int) -> tuple[Losses, dict[str, Tensor]]:
        """The student's own trajectories: one forward is supervised and moves its slot one rung on."""
        slot = self.carry.slot(round, self._fresh, self._advance)
        n, following = self.nodes[slot.rung], self.nodes[slot.rung + 1]
        k = self._heads(step, round, n)
        losses = self._loss(slot.state, n, k, slot.serial, following)
        facts = {"n": n, "distance": k - n[:, None], "rung": slot.rung}
        facts["lost"] = self.carry.commit(round, losses.x_next, self._fresh, self.reserve)
        return losses, facts

    def _noise(self, serials: Tensor, shapes: dict[str, tuple[int, ...]]) -> State:
        draw = lambda m, shape: torch.stack([noise(shape, self.config.seed, "noise", m, i) for i in serials.tolist()])  # noqa: E731
        return {m: draw(m, tuple(shape)).to(self.device, self.dtype) for m, shape in shapes.items()}

    def _fresh(self, serials: Tensor) -> State:
        """States at the grid's start of the trajectories with these serial numbers."""
        eps, indices = self._noise(serials, self.rows.latent_shapes), self.rows.shuffled(serials, self.group)
        if self.rollout is not None:
            return self.rollout(eps, self.rows.cond(indices, self.device))
        x0 = None if self.grid.starts_from_noise else self.rows.latents(indices, self.device)
        return initial(eps, self.grid, x0)

    def _advance(self, state: State, serials: Tensor, rung: int) -> State:
        """One rung of the stagger's pre-walk."""
        cond = self.rows.cond(self.rows.shuffled(serials, self.group), self.device)
        return endpoint(self.student.block(cond), state, self.grid, self.nodes[rung : rung + 2].tolist())
