"""The frozen teacher: its guided velocity, and its Runge-Kutta target on one interval of the grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pdd.backbones import Backbone
from pdd.backbones.base import State
from pdd.config import Config, ConfigError, Guidance
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
        x = x + coefficient.to(x, non_blocking=True).view(-1, *[1] * (x.ndim - 1)) * tensor.to(x.dtype)
    return x


def with_deviation(guided: Tensor, plain: Tensor, state: Tensor, sigma: Tensor, share: float) -> Tensor:
    """A guided velocity whose clean prediction ``x - sigma v`` has, to that share, the deviation of the unguided one.

    "Common Diffusion Noise Schedules and Sample Steps are Flawed" (arXiv:2305.08891), section 3.4; LTX-2's pipeline calls
    it ``guidance_rescale``.

    Args:
        guided, plain: velocities ``[B, ...]``.
        state: where they are, ``[B, ...]``.
        sigma: noise levels ``[B]``.
        share: 0 to 1.
    """
    sigma, axes = sigma.to(guided).view(-1, *[1] * (guided.ndim - 1)), tuple(range(1, guided.ndim))
    deviation, wanted = ((state - sigma * v).std(axes, keepdim=True) for v in (guided, plain))
    change = share * (1 - wanted / deviation)
    # the velocity of (1 - change) times the guided clean prediction; at sigma 0 there is nothing to change
    return torch.lerp(guided, state / sigma.clamp(min=1e-6), change)


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
        backbone: its family, which says what further predictions the knobs ask for.
        grid: schedules that turn the base clock into noise levels.
        knobs: of guidance; a :class:`Config` has them, too.
        unconditional: what the unconditional prediction sees; needed when ``teacher_guidance_scale`` is not 1.

    Raises:
        ValueError: the family cannot be guided like this, or ``unconditional`` is missing.
    """

    def __init__(
        self,
        model: Callable[..., State],
        backbone: Backbone,
        grid: Grid,
        knobs: Guidance = Guidance(),
        unconditional: Unconditional | None = None,
    ):
        self.weaker = backbone.weaker(knobs)
        if unconditional is None and any(w.unconditional for w in self.weaker):
            raise ValueError(f"teacher_guidance_scale {knobs.teacher_guidance_scale} needs cfg_uncond")
        self.model, self.backbone, self.grid = model, backbone, grid
        self.unconditional, self.rescale = unconditional, knobs.guidance_rescale
        self.rescale_x0 = backbone.per_modality(knobs.guidance_rescale_x0, 0.0)
        self.uncond_forwards = 0  # counted, so that a guided target can prove that they ran

    def field(self, cond: dict[str, Tensor]) -> Field:
        """The velocity field under one condition."""
        return lambda state, u: self.velocity(state, u, cond)

    @torch.no_grad()
    def velocity(self, state: State, u: Tensor, cond: dict[str, Tensor]) -> State:
        """Guided velocity at base clock ``u`` ``[B]``, per modality ``[B, ...]``: ``v + sum of weight (v - weaker v)``."""
        device = next(iter(state.values())).device
        sigma = {m: f(u).to(device, torch.float32, non_blocking=True) for m, f in self.grid.schedules.items()}
        v, *weaker = self._predictions(state, sigma, cond)
        if not weaker:
            return v
        guided = {m: v[m] + sum(w.weight[m] * (v[m] - x[m]) for w, x in zip(self.weaker, weaker)) for m in v}
        if self.rescale:
            norm, norm_guided = self.backbone.token_norm(v), self.backbone.token_norm(guided)
            guided = {m: x * norm[m] / norm_guided[m].clamp(min=1e-5) for m, x in guided.items()}
        return {
            m: with_deviation(x, v[m], state[m].to(x), sigma[m], self.rescale_x0[m]) if self.rescale_x0[m] else x
            for m, x in guided.items()
        }

    def _predictions(self, state: State, sigma: dict[str, Tensor], cond: dict[str, Tensor]) -> list[State]:
        """The velocity, then those of :attr:`weaker`: in one forward where the family allows it and conditions are equally
        long, else one after the other. Either depends on nothing but the knobs and the data's shapes, so every rank issues
        the same forwards.
        """
        kinds = [(cond, None)]
        for weaker in self.weaker:
            self.uncond_forwards += weaker.unconditional
            kinds.append((self.unconditional(cond) if weaker.unconditional else cond, weaker.perturbation))
        alike = all(v.shape == cond[c].shape for seen, _ in kinds for c, v in seen.items())
        together = self.backbone.batched_guidance and alike
        out = []
        for group in [kinds] if together else [[kind] for kind in kinds]:
            batch = len(next(iter(state.values())))
            owner = torch.arange(batch * len(group)) // batch  # [samples of the forward], on the CPU
            lacking = [(lack, owner == i) for i, (_, lack) in enumerate(group) if lack is not None]
            made = self.model(
                {m: torch.cat([x] * len(group)) for m, x in state.items()},
                {m: torch.cat([s] * len(group)) for m, s in sigma.items()},
                {c: torch.cat([seen[c] for seen, _ in group]) for c in cond},
                *([None, lacking] if lacking else []),
            )
            parts = {m: v[:, 0].chunk(len(group)) for m, v in made.items()}
            out += [{m: part[i] for m, part in parts.items()} for i in range(len(group))]
        return out

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
