"""The fine grid, its integration weights, partitions into blocks, and the plans that read a head bank.

Pure mathematics in float64, on the CPU, with no model in sight.

One convention (design, decision 1): noise level sigma runs from about 1 (noise) to 0 (data), a state is
``x = (1 - sigma) * x0 + sigma * eps`` and a velocity is ``dx / dsigma = eps - x0``. A base clock ``u`` falls
from ``grid_max_t`` to 0, or through an expert's part of that, in N equal intervals; each modality reads its own
``sigma_m(u)`` from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

GRID_MAX_T = 0.999  # the seed's largest noise level; models trained up to sigma = 1 - 1/1000 never saw 1


@dataclass(frozen=True)
class Shift:
    """The rational time shift ``f(u) = s u M / (u (s - 1) + M)``, which keeps 0 and ``M`` in place.

    With ``M = 1`` this is the shift of Diffusers' flow-matching schedulers. Shifts compose:
    ``f_r(f_s(u)) = f_{r s}(u)``, so the inverse of ``f_s`` is ``f_{1/s}``.
    """

    shift: float
    max_t: float = GRID_MAX_T

    def __call__(self, u: Tensor) -> Tensor:
        """Noise level at base clock ``u`` (any shape, in ``[0, max_t]``)."""
        return self.shift * u * self.max_t / self._denominator(u)

    def inverse(self, sigma: Tensor) -> Tensor:
        """Base clock at noise level ``sigma`` (any shape)."""
        return Shift(1 / self.shift, self.max_t)(sigma)

    def fraction(self, sigma: float) -> float:
        """Share of the clock that is left at noise level ``sigma``: :meth:`inverse` over ``max_t``."""
        return sigma / (self.shift * (self.max_t - sigma) + sigma)

    def slope(self, u: Tensor) -> Tensor:
        """``df / du`` at base clock ``u``."""
        return self.shift * self.max_t**2 / self._denominator(u) ** 2

    def _denominator(self, u: Tensor) -> Tensor:
        # u (s - 1) + M would cancel near u = M for a small shift
        return (self.max_t - u) + self.shift * u


class Grid:
    """N equal intervals of the base clock, or of a part of it, and what they are for every modality.

    Args:
        pdd_steps: N, the number of intervals (= heads).
        shifts: modality name -> time shift (> 0).
        max_t: the clock's start; 0.999 as in the seed, 1.0 for students that start from pure noise.
        part: shares of the clock that are left where the grid starts and where it ends; (1, 0) is all of it.

    Raises:
        ValueError: when an integration weight is zero or not finite (the seed's ``validate_finite_nonzero``).
    """

    def __init__(
        self,
        pdd_steps: int,
        shifts: Mapping[str, float],
        max_t: float = GRID_MAX_T,
        part: Sequence[float] = (1.0, 0.0),
    ):
        self.pdd_steps = pdd_steps
        self.max_t = max_t
        self.part = tuple(part)
        self.schedules = {name: Shift(float(shift), max_t) for name, shift in shifts.items()}
        left = torch.arange(pdd_steps, -1, -1, dtype=torch.float64)  # N - k
        # [N+1], falling from part[0] N to part[1] N: N times the share of the clock that is left at every node
        self._left = self.part[0] * left + self.part[1] * (pdd_steps - left)
        self._gone = (1 - self.part[0]) * left + (1 - self.part[1]) * (pdd_steps - left)
        self.u = max_t * self._left / pdd_steps  # [N+1], falling
        for name, h in self.h.items():
            if not bool(torch.isfinite(h).all() & (h != 0).all()):
                raise ValueError(
                    f"shift {self.schedules[name].shift} of modality {name!r} with pdd_steps {pdd_steps} gives an "
                    "integration weight that is zero or not finite; allowed is a moderate positive shift"
                )

    @property
    def starts_from_noise(self) -> bool:
        """Is the grid's start the clock's own? Otherwise states there have a share of data in them."""
        return self.part[0] == 1

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self.schedules)

    @cached_property
    def sigma(self) -> dict[str, Tensor]:
        """Modality -> noise level at every node, ``[N+1]``, falling; from ``max_t`` to 0 on the whole clock."""
        return {m: f.shift * self.max_t * self._left / self._denominators(f.shift) for m, f in self.schedules.items()}

    @cached_property
    def h(self) -> dict[str, Tensor]:
        """Modality -> signed integration weight of every interval, ``[N]``: ``x_{k+1} = x_k + h_k v_k``.

        ``sigma_{k+1} - sigma_k = -s M N p / (d_k d_{k+1})`` for a part of width ``p``, with ``d_k = k + s (N - k)`` on the
        whole clock: never the difference of two nearly equal noise levels.
        """
        weights, width = {}, self.part[0] - self.part[1]
        for m, f in self.schedules.items():
            d = self._denominators(f.shift)
            weights[m] = -f.shift * self.max_t * self.pdd_steps * width / (d[:-1] * d[1:])
        return weights

    def _denominators(self, shift: float) -> Tensor:
        return self._gone + shift * self._left

    def block_weight(self, name: str, start: int, end: int) -> float:
        """``sigma(u_end) - sigma(u_start)`` of a block, as the sum of its interval weights."""
        return float(self.h[name][start:end].sum())

    def fusion_weights(self, name: str, start: int, end: int) -> Tensor:
        """Weights, summing to 1, that turn heads ``start..end-1`` into the block's mean velocity: ``[end - start]``.

        The paper's layer fusion, ``W_{n:n+L} = sum_k (dsigma_k / sum dsigma) W_k``.
        """
        h = self.h[name][start:end]
        return h / h.sum()

    def plan(
        self,
        starts: Sequence[int],
        ends: Sequence[Sequence[int]],
        supervised: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Plan]:
        """Plan one forward: displacements from each sample's start to each of its ends, and supervised heads.

        Args:
            starts: node n of every sample, length B.
            ends: for every sample its D end nodes, each ``>= n``; an end equal to n gives a zero displacement.
            supervised: for every sample the S heads whose velocity is wanted with gradient.

        Returns:
            Modality -> :class:`Plan`. A displacement is ``sum_{k=n}^{end-1} h_k v_k``, to be added to the state.
        """
        lo = torch.tensor(starts)  # [B]
        ends = torch.tensor(ends).reshape(len(starts), -1)  # [B, D]
        width = max(int((ends - lo[:, None]).max()), 1) if ends.numel() else 1
        # a window at the end of the grid is moved back, so that every sample's band has the same width
        lo = torch.minimum(lo, torch.tensor(self.pdd_steps - width))
        heads = lo[:, None] + torch.arange(width)  # [B, W]
        inside = (heads[:, None] >= torch.tensor(starts)[:, None, None]) & (heads[:, None] < ends[..., None])
        k = None if supervised is None else torch.tensor(supervised).reshape(len(starts), -1)
        return {name: Plan(lo, h[heads][:, None] * inside, k) for name, h in self.h.items()}

    def fused_plan(self, start: int, end: int) -> dict[str, Plan]:
        """Plan of one sampling block: the mean velocity over ``[start, end)``, the same for every sample."""
        lo = torch.tensor([start])
        return {m: Plan(lo, self.fusion_weights(m, start, end)[None, None], None) for m in self.modalities}


@dataclass(frozen=True)
class Levels:
    """Noise levels that are given node by node, in the place of a :class:`Shift`; straight lines between the nodes.

    Attributes:
        u: clock at the nodes, falling, ``[N+1]``.
        sigma: noise level at the nodes, falling, ``[N+1]``.
        shift: what stands for one where a single number is asked for.
    """

    u: Tensor
    sigma: Tensor
    shift: float = 1.0

    def __call__(self, u: Tensor) -> Tensor:
        i, share = self._place(u, self.u)
        return torch.lerp(self.sigma[i], self.sigma[i + 1], share)

    def inverse(self, sigma: Tensor) -> Tensor:
        i, share = self._place(sigma, self.sigma)
        return torch.lerp(self.u[i], self.u[i + 1], share)

    def slope(self, u: Tensor) -> Tensor:
        i, _ = self._place(u, self.u)
        return (self.sigma.diff() / self.u.diff())[i]

    @staticmethod
    def _place(value: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Interval of every value, and the share of that interval that is gone there."""
        value = value.to(nodes)
        i = (torch.searchsorted(-nodes, -value, right=True) - 1).clamp(0, len(nodes) - 2)
        return i, (value - nodes[i]) / (nodes[i + 1] - nodes[i])


class Ladder(Grid):
    """A grid whose noise levels are given node by node: that of a student from elsewhere which no shift describes.

    Args:
        sigmas: modality -> noise level at every node, falling from at most 1 to 0, ``N + 1`` of them.

    Raises:
        ValueError: they do not fall so.
    """

    def __init__(self, sigmas: Mapping[str, Sequence[float]]):
        given = {m: torch.tensor(list(levels), dtype=torch.float64) for m, levels in sigmas.items()}
        for name, levels in given.items():
            falling = len(levels) > 1 and bool((levels.diff() < 0).all()) and levels[0] <= 1 and levels[-1] == 0
            if not falling or len(levels) != len(next(iter(given.values()))):
                raise ValueError(
                    f"noise levels of modality {name!r} are {list(sigmas[name])}; allowed are some that fall to 0"
                )
        first = next(iter(given.values()))
        super().__init__(len(first) - 1, dict.fromkeys(given, 1.0), float(first[0]))
        self.schedules = {m: Levels(self.u, levels) for m, levels in given.items()}
        self.sigma = given  # in the place of the properties
        self.h = {m: levels.diff() for m, levels in given.items()}


@dataclass(frozen=True)
class Plan:
    """The few linear combinations of heads wanted from one forward, for one modality (design, decision 2).

    The matrix of the design, ``[B, D, N]``, is kept as its non-zero band: row d of sample b combines heads
    ``lo[b] .. lo[b] + W - 1``. A batch of 1 means that every sample wants the same combinations.

    Attributes:
        lo: first head that each sample's band reads, int64 ``[B]``.
        combine: float64 ``[B, D, W]``; these directions carry no gradient.
        supervised: int64 ``[B, S]`` or None; these heads are returned after the D directions, with gradient.
    """

    lo: Tensor
    combine: Tensor
    supervised: Tensor | None = None

    @property
    def num_directions(self) -> int:
        """D + S, the number of directions one forward returns."""
        return self.combine.shape[1] + (0 if self.supervised is None else self.supervised.shape[1])

    def of(self, sample: int) -> Plan:
        """The plan of one sample alone, a batch of 1."""
        if len(self.lo) == 1:
            return self
        part = slice(sample, sample + 1)
        return Plan(self.lo[part], self.combine[part], None if self.supervised is None else self.supervised[part])

    def dense(self, pdd_steps: int) -> Tensor:
        """The whole matrix, supervised rows included: float64 ``[B, D + S, N]``."""
        matrix = self.combine.new_zeros(len(self.lo), self.combine.shape[1], pdd_steps)
        index = (self.lo[:, None] + torch.arange(self.combine.shape[2]))[:, None].expand_as(self.combine)
        matrix.scatter_(2, index, self.combine)
        if self.supervised is None:
            return matrix
        return torch.cat([matrix, torch.nn.functional.one_hot(self.supervised, pdd_steps).to(matrix)], 1)


def partition(pdd_steps: int, num_blocks: int, configured: Mapping[int, Sequence[int]] | None = None) -> list[int]:
    """Nodes of a ``num_blocks``-block partition of the grid, ``0 .. N`` strictly increasing, length K+1.

    The seed's ``pdd_student_step_indices``: the balanced ``arange(K+1) * N // K`` unless ``configured``
    (``student_grid_indices``) has an explicit list for this K.

    Raises:
        ValueError: K outside ``1 .. N``, or an explicit list that does not run strictly from 0 to N in K blocks.
    """
    if not 1 <= num_blocks <= pdd_steps:
        raise ValueError(f"a grid of pdd_steps {pdd_steps} has 1 to {pdd_steps} blocks, not {num_blocks}")
    nodes = (configured or {}).get(num_blocks)
    if nodes is None:
        return [k * pdd_steps // num_blocks for k in range(num_blocks + 1)]
    nodes = list(nodes)
    rising = all(a < b for a, b in zip(nodes, nodes[1:]))
    if len(nodes) != num_blocks + 1 or nodes[0] != 0 or nodes[-1] != pdd_steps or not rising:
        raise ValueError(
            f"student_grid_indices[{num_blocks}] is {nodes}; allowed are {num_blocks + 1} strictly increasing nodes "
            f"from 0 to pdd_steps {pdd_steps}"
        )
    return nodes


def widest_block(nodes: Sequence[int]) -> int:
    """Width of a partition's widest block, in intervals."""
    return max(b - a for a, b in zip(nodes, nodes[1:]))


def fewest_blocks(pdd_steps: int, block_size_max: int) -> int:
    """The smallest K whose balanced partition has no block wider than ``block_size_max``."""
    return -(-pdd_steps // block_size_max)


def carried_step_count(pdd_steps: int, block_size_min: int) -> int:
    """Number of blocks of the highest-NFE partition, the one that carried trajectories walk.

    Raises:
        ValueError: ``pdd_steps`` is not a multiple of ``block_size_min``.
    """
    if pdd_steps % block_size_min:
        raise ValueError(
            f"pdd_steps {pdd_steps} must be a multiple of block_size_min {block_size_min}: carried trajectories walk "
            "pdd_steps / block_size_min blocks"
        )
    return pdd_steps // block_size_min
