"""The one fused sampler: validation, the stagger pre-walk, sampling and every baseline walk this code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from pdd.backbones.base import State
from pdd.grid import Grid


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


def initial(noise: State, grid: Grid, x0: State | None = None) -> State:
    """States at the grid's start: the noise scaled by each modality's ``sigma(u_0)``, as in the seed.

    A grid that starts amid the clock has data in its first states, too: ``(1 - sigma(u_0)) x0`` of given latents, which
    is how the states there are distributed.
    """
    state = {m: x * float(grid.sigma[m][0]) for m, x in noise.items()}
    if x0 is None:
        return state
    return {m: x + (1 - float(grid.sigma[m][0])) * x0[m].to(x.dtype) for m, x in state.items()}
