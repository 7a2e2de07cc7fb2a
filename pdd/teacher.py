"""The frozen teacher: its guided velocity, and its Runge-Kutta target on one interval of the grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pdd.backbones import Backbone
from pdd.backbones.base import State
from pdd.config import Config, ConfigError
from pdd.data import Rows
from pdd.grid import Grid

# Butcher tableaus: stage rows a, weights b; c is the row sum
RK_RULES: dict[str, tuple[list[list[float]], list[float]]] = {
    "euler": ([[]], [1.0]),
    "midpoint": ([[], [1 / 2]], [0.0, 1.0]),
    "heun": ([[], [1.0]], [1 / 2, 1 / 2]),
    "rk4": ([[], [1 / 2], [0.0, 1 / 2], [0.0, 0.0, 1.0]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
}

Field = Callable[[State, Tensor], State]  # (state, base clock [B]) -> velocity eps - x0


def rk_target(field: Field, state: State, k: Tensor, grid: Grid, rule: str) -> State:
    """Mean sigma velocity of one Runge-Kutta step over interval ``k`` of the grid (the seed's teacher target).

    The step runs in the noise level of the first modality. Another modality's noise level is a function of it (one
    clock drives both), so its velocity enters times ``dsigma_m / dsigma_1``, and its mean is normalised by the same
    factors: straight lines are exact in every modality and the rule keeps its order.

    Args:
        field: the velocity field.
        state: modality -> states at node ``k``, ``[B, ...]``.
        k: interval of every sample, int64 ``[B]`` on the CPU.
        grid: the fine grid.
        rule: a key of ``RK_RULES``.

    Returns:
        Modality -> ``v`` with ``x_{k+1} = x_k + h_k v``, ``[B, ...]``.
    """
    rows, weights = RK_RULES[rule]
    lead = grid.schedules[grid.modalities[0]]
    sigma, step = grid.sigma[grid.modalities[0]][k], grid.h[grid.modalities[0]][k]  # [B]
    stages: list[tuple[dict[str, Tensor], State]] = []
    for row in rows:
        c = sum(row)
        u = grid.u[k] if c == 0 else grid.u[k + 1] if c == 1 else lead.inverse(sigma + c * step)  # exact at the ends
        slopes = {m: schedule.slope(u) / lead.slope(u) for m, schedule in grid.schedules.items()}  # [B]
        x = {m: _add(v, [(a * step * s[m], f[m]) for a, (s, f) in zip(row, stages) if a]) for m, v in state.items()}
        stages.append((slopes, field(x, u)))
    target = {}
    for m in state:
        used = [(b, s[m], f[m]) for b, (s, f) in zip(weights, stages) if b]
        total = sum(b * s for b, s, _ in used)
        target[m] = _add(torch.zeros_like(used[0][2]), [(b * s / total, f) for b, s, f in used])
    return target


def _add(x: Tensor, terms: list[tuple[Tensor, Tensor]]) -> Tensor:
    """``x + sum_i coefficient_i [B] * tensor_i [B, ...]``."""
    for coefficient, tensor in terms:
        x = x + coefficient.to(x).view(-1, *[1] * (x.ndim - 1)) * tensor.to(x.dtype)
    return x


class Unconditional:
    """What the unconditional forward sees (``cfg_uncond``), column by column.

    Args:
        policies: column -> ``negative_prompt``, ``empty_prompt``, ``zeros`` or ``keep``.
        rows: policy -> conditioning of that prompt, column -> ``[1, ...]``.
    """

    def __init__(self, policies: Mapping[str, str], rows: Mapping[str, dict[str, Tensor]]):
        self.policies, self.rows = dict(policies), dict(rows)

    def __call__(self, cond: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for column, value in cond.items():
            policy = self.policies[column]
            if policy == "keep":
                out[column] = value
            elif policy == "zeros":
                out[column] = torch.zeros_like(value)
            else:
                row = self.rows[policy][column].to(value)
                out[column] = row.expand(len(value), *row.shape[1:])
        return out


class Teacher:
    """The frozen, guided teacher as a velocity field.

    Args:
        model: the base :class:`pdd.student.Velocity`, or an engine around it.
        backbone: its family.
        grid: schedules that turn the base clock into noise levels.
        guidance: ``teacher_guidance_scale``, one for all modalities or modality -> scale (1 if not named); where all are 1
            no unconditional forward is issued.
        unconditional: what the unconditional forward sees; needed when guidance is not 1.
        rescale: ``guidance_rescale``, token-wise.
        skip_layer: ``uncond_skip_layer``, a block that the unconditional forward leaves out.
    """

    def __init__(
        self,
        model: Callable[..., State],
        backbone: Backbone,
        grid: Grid,
        guidance: float | Mapping[str, float] = 1.0,
        unconditional: Unconditional | None = None,
        rescale: bool = False,
        skip_layer: int | None = None,
    ):
        scales = guidance if isinstance(guidance, Mapping) else dict.fromkeys(grid.modalities, guidance)
        self.guidance = {m: float(scales.get(m, 1.0)) for m in grid.modalities}
        self.guided = any(scale != 1 for scale in self.guidance.values())
        if self.guided and unconditional is None:
            raise ValueError(f"teacher_guidance_scale {guidance} needs cfg_uncond")
        self.model, self.backbone, self.grid = model, backbone, grid
        self.unconditional, self.rescale, self.skip_layer = unconditional, rescale, skip_layer
        self.uncond_forwards = 0  # counted, so that a guided target can prove that they ran

    def field(self, cond: dict[str, Tensor]) -> Field:
        """The velocity field under one condition."""
        return lambda state, u: self.velocity(state, u, cond)

    @torch.no_grad()
    def velocity(self, state: State, u: Tensor, cond: dict[str, Tensor]) -> State:
        """Guided velocity ``v_u + scale (v_c - v_u)`` at base clock ``u`` ``[B]``, per modality ``[B, ...]``."""
        device = next(iter(state.values())).device
        sigma = {m: f(u).to(device, torch.float32) for m, f in self.grid.schedules.items()}
        if not self.guided:
            return self._forward(state, sigma, cond)
        self.uncond_forwards += 1
        uncond = self.unconditional(cond)
        if self.backbone.batched_guidance and all(v.shape == cond[c].shape for c, v in uncond.items()):
            both = self._forward(
                {m: torch.cat([x, x]) for m, x in state.items()},
                {m: torch.cat([s, s]) for m, s in sigma.items()},
                {c: torch.cat([v, uncond[c]]) for c, v in cond.items()},
                halves=True,
            )
            halves = {m: v.chunk(2) for m, v in both.items()}
            v_c, v_u = {m: h[0] for m, h in halves.items()}, {m: h[1] for m, h in halves.items()}
        else:
            v_c, v_u = self._forward(state, sigma, cond), self._forward(state, sigma, uncond, unconditional=True)
        guided = {m: v_u[m] + self.guidance[m] * (v_c[m] - v_u[m]) for m in v_c}
        if not self.rescale:
            return guided
        norm_c, norm_g = self.backbone.token_norm(v_c), self.backbone.token_norm(guided)
        return {m: v * norm_c[m] / norm_g[m].clamp(min=1e-5) for m, v in guided.items()}

    def _forward(
        self,
        state: State,
        sigma: dict[str, Tensor],
        cond: dict[str, Tensor],
        unconditional: bool = False,
        halves: bool = False,
    ) -> State:
        """One forward; all samples may be unconditional, or the second half of them."""
        arguments = (state, sigma, cond)
        if self.skip_layer is not None and (unconditional or halves):
            batch = len(next(iter(state.values())))
            past = torch.arange(batch) >= (batch // 2 if halves else 0)
            arguments = (*arguments, None, (self.skip_layer, past))
        return {m: v[:, 0] for m, v in self.model(*arguments).items()}

    def block(self, cond: dict[str, Tensor]) -> Callable[[State, int, int], State]:
        """``predict(state, start, end)`` for :func:`pdd.sampling.walk`: one Euler step a block."""

        def predict(state: State, start: int, end: int) -> State:
            batch = len(next(iter(state.values())))
            return self.velocity(state, self.grid.u[start].expand(batch), cond)

        return predict


def unconditional_condition(config: Config, backbone: Backbone, rows: Rows) -> Unconditional | None:
    """What the knobs say the unconditional forward sees; None without guidance.

    Raises:
        ConfigError: a column that the family does not have, or a prompt that the dataset does not have.
    """
    if not config.guided:
        return None
    given = (
        config.cfg_uncond if isinstance(config.cfg_uncond, dict) else dict.fromkeys(backbone.columns, config.cfg_uncond)
    )
    for column in given:
        if column not in backbone.columns:
            raise ConfigError(f"cfg_uncond names column {column!r}; allowed are {', '.join(backbone.columns)}")
    policies = {column: given.get(column, "keep") for column in backbone.columns}
    prompts = {"negative_prompt": config.negative_prompt, "empty_prompt": ""}
    found = {}
    for policy in set(policies.values()) & set(prompts):
        try:
            found[policy] = rows.cond(rows.row_of(prompts[policy]), "cpu")
        except KeyError:
            raise ConfigError(
                f"cfg_uncond is {policy!r} but data {str(rows.path)!r} has no row whose prompt is {prompts[policy]!r}; encode "
                "it, or choose zeros"
            ) from None
    return Unconditional(policies, found)


def guidance(config: Config, unconditional: Unconditional | None) -> tuple:
    """A :class:`Teacher`'s last four arguments, from the knobs."""
    return config.teacher_guidance_scale, unconditional, config.guidance_rescale, config.uncond_skip_layer
