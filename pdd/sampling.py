"""The one fused sampler: validation, the stagger pre-walk, sampling and every baseline walk this code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pdd.backbones.base import State
from pdd.grid import Grid
from pdd.student import Student


def walk(
    predict: Callable[[State, int, int], State], state: State, grid: Grid, nodes: Sequence[int]
) -> Iterator[tuple[int, State]]:
    """Walk a partition of the grid, one forward a block: ``x_end = x_start + (sigma_end - sigma_start) * mean velocity``.

    Args:
        predict: ``(state, start, end) -> mean velocity`` of a block, per modality ``[B, ...]``.
        state: the state at ``nodes[0]``; its dtype is the precision of the integration.
        grid: the fine grid.
        nodes: strictly increasing nodes; the walk needs ``len(nodes) - 1`` forwards.

    Yields:
        ``(node, state)`` at every node, the first included.
    """
    yield nodes[0], state
    for start, end in zip(nodes, nodes[1:]):
        velocity = predict(state, start, end)
        state = {m: x + grid.block_weight(m, start, end) * velocity[m].to(x.dtype) for m, x in state.items()}
        yield end, state


def endpoint(
    predict: Callable[[State, int, int], State], state: State, grid: Grid, nodes: Sequence[int]
) -> dict[str, Tensor]:
    """The last state of a :func:`walk`."""
    for _, state in walk(predict, state, grid, nodes):
        pass
    return state


@torch.no_grad()
def adaptive(
    student: Student, state: State, cond: dict[str, Tensor], tolerance: float, nodes: Sequence[int], widest: int
) -> Iterator[tuple[int, State]]:
    """Walk with blocks as long as the heads agree: a :func:`walk` whose partition the student chooses on the way.

    A block's heads predict how the path bends. Its *bend* is how far the heads part from the block's first one,
    ``|sum_k h_k (v_k - v_n)|`` relative to the displacement ``|sum_k h_k v_k|``, in one norm over the batch and in the
    modality where it is largest. One forward gives the displacements to all candidate ends, as that many directions more;
    the block ends at the farthest one whose bend is within the tolerance, or else at the nearest.

    Args:
        student: with its bank in place.
        state: states at ``nodes[0]``.
        tolerance: largest bend of a block; 0 takes every node, 1 and more the widest blocks.
        nodes: where blocks may begin and end, rising to N, none farther from the next than ``widest``; where training
            forwards started, as what the student says from elsewhere is a guess (``LoadedStudent.starts``).
        widest: largest width of a block, in intervals.

    Yields:
        ``(node, state)`` at every node visited, the first included; one forward between two of them.
    """
    grid, n = student.grid, nodes[0]
    batch = len(next(iter(state.values())))
    yield n, state
    while n < nodes[-1]:
        ends = [end for end in nodes if n < end <= n + widest]
        moves = student.directions(state, torch.full((batch,), n), cond, grid.plan([n], [[n + 1, *ends]]))
        chosen = ends[0]
        for i, end in enumerate(ends, 1):
            bends = []
            for m, d in moves.items():
                straight = d[:, 0] * (grid.block_weight(m, n, end) / grid.block_weight(m, n, n + 1))
                bends.append(float((d[:, i] - straight).norm() / d[:, i].norm()))
            if max(bends) <= tolerance:
                chosen = end
        state = {m: x + moves[m][:, 1 + ends.index(chosen)].to(x.dtype) for m, x in state.items()}
        n = chosen
        yield n, state


def initial(noise: State, grid: Grid, x0: State | None = None) -> State:
    """States at the grid's start: the noise scaled by each modality's ``sigma(u_0)``, as in the seed.

    A grid that starts amid the clock has data in its first states, too: ``(1 - sigma(u_0)) x0`` of given latents, which
    is how the states there are distributed.
    """
    state = {m: x * float(grid.sigma[m][0]) for m, x in noise.items()}
    if x0 is None:
        return state
    return {m: x + (1 - float(grid.sigma[m][0])) * x0[m].to(x.dtype) for m, x in state.items()}
