"""Carried trajectories: the simulate regime's memory between steps (the seed's TrajectoryCarry).

One slot per gradient-accumulation round holds a batch of the student's own trajectories. Every training forward
advances its slot by one rung of the highest-NFE partition; a sample that reaches the end restarts from fresh noise
with a new prompt. What noise and which prompt follow from the trajectory's serial number alone, so a slot is fully
described by its states, its rungs and how many trajectories each sample has finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdd.backbones.base import State


@dataclass
class Slot:
    """One batch of trajectories under way.

    Attributes:
        state: modality -> ``[B, ...]``, at each sample's own rung.
        rung: int64 ``[B]`` on the CPU, the rung that the next forward starts from.
        lap: int64 ``[B]`` on the CPU, trajectories that each sample has finished.
    """

    state: State
    rung: Tensor
    lap: Tensor


class TrajectoryCarry:
    """All slots of one rank.

    Args:
        num_rungs: R, blocks of the carried partition.
        num_slots: gradient-accumulation rounds.
        batch: B, samples of one slot on this rank.
        rank, world: this rank and how many there are.
        stagger: ``stream`` starts whole slots at different rungs, ``sample`` every sample of a slot.
    """

    def __init__(self, num_rungs: int, num_slots: int, batch: int, rank: int, world: int, stagger: str = "stream"):
        self.num_rungs, self.num_slots, self.batch = num_rungs, num_slots, batch
        self.rank, self.world, self.stagger = rank, world, stagger
        self.slots: list[Slot | None] = [None] * num_slots

    def serials(self, index: int, lap: Tensor) -> Tensor:
        """Serial numbers, over all ranks and slots, of the trajectories that a slot carries: int64 ``[B]``."""
        position = (index * self.world + self.rank) * self.batch + torch.arange(self.batch)
        return lap * (self.num_slots * self.world * self.batch) + position

    def offsets(self, index: int, rank: int | None = None) -> Tensor:
        """First rungs of a slot (of this rank if none is given), int64 ``[B]``; the seed's stagger over (rank, slot)."""
        stream = index * self.world + (self.rank if rank is None else rank)
        if self.stagger == "stream":
            return torch.full((self.batch,), stagger_offset(stream, self.world * self.num_slots, self.num_rungs))
        total = self.world * self.num_slots * self.batch
        samples = range(stream * self.batch, (stream + 1) * self.batch)
        return torch.tensor([stagger_offset(i, total, self.num_rungs) for i in samples])

    def slot(
        self, index: int, fresh: Callable[[Tensor], State], advance: Callable[[State, Tensor, int], State]
    ) -> Slot:
        """The slot of an accumulation round; filled, staggered, at its first use.

        Args:
            index: the accumulation round.
            fresh: serial numbers ``[B]`` -> states at rung 0.
            advance: ``(state, serials, rung) -> state`` one rung on, one student forward. The pre-walk calls it as
                often on every rank as the farthest rank needs, since ZeRO-3 hangs on unequal forwards.
        """
        if self.slots[index] is None:
            lap = torch.zeros(self.batch, dtype=torch.int64)
            serials, offsets = self.serials(index, lap), self.offsets(index)
            farthest = max(int(self.offsets(index, rank).max()) for rank in range(self.world))
            walker = state = fresh(serials)
            for rung in range(farthest):
                walker = advance(walker, serials, rung)
                state = merge(offsets > rung, walker, state)
            self.slots[index] = Slot(state, offsets, lap)
        return self.slots[index]

    def commit(self, index: int, state: State, fresh: Callable[[Tensor], State]) -> None:
        """Move a slot on to ``state``, one rung up; finished samples restart from ``fresh`` noise at rung 0."""
        slot = self.slots[index]
        rung, lap = slot.rung + 1, slot.lap
        done = rung >= self.num_rungs
        if bool(done.any()):
            lap, rung = lap + done, torch.where(done, 0, rung)
            rows = torch.nonzero(done)[:, 0]
            restarted = fresh(self.serials(index, lap)[rows])
            state = {m: x.index_copy(0, rows.to(x.device), restarted[m].to(x)) for m, x in state.items()}
        self.slots[index] = Slot(state, rung, lap)

    def state_dict(self) -> dict[str, Tensor]:
        """Every slot as flat tensors, on the CPU."""
        out = {}
        for i, slot in enumerate(self.slots):
            if slot is not None:
                out |= {f"{i}.state.{m}": x.detach().cpu().contiguous() for m, x in slot.state.items()}
                out |= {f"{i}.rung": slot.rung, f"{i}.lap": slot.lap}
        return out

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Take up what :meth:`state_dict` gave.

        Raises:
            ValueError: it was saved with another number of slots or another batch.
        """
        slots: list[Slot | None] = [None] * self.num_slots
        for i in sorted({int(name.split(".")[0]) for name in tensors}):
            rung, lap = tensors[f"{i}.rung"], tensors[f"{i}.lap"]
            if i >= self.num_slots or len(rung) != self.batch:
                raise ValueError(
                    f"saved trajectories have slot {i} of {len(rung)} samples; this run has {self.num_slots} slots of "
                    f"{self.batch}"
                )
            prefix = f"{i}.state."
            state = {n.removeprefix(prefix): x.to(device) for n, x in tensors.items() if n.startswith(prefix)}
            slots[i] = Slot(state, rung, lap)
        self.slots = slots


def merge(chosen: Tensor, a: State, b: State) -> State:
    """Samples of ``a`` where ``chosen`` ``[B]``, of ``b`` elsewhere."""
    return {m: torch.where(chosen.to(x.device).view(-1, *[1] * (x.ndim - 1)), x, b[m]) for m, x in a.items()}


def stagger_offset(stream: int, streams: int, num_rungs: int) -> int:
    """First rung of a stream, so that streams cover the rungs evenly from the first step on."""
    return stream % num_rungs if streams >= num_rungs else stream * num_rungs // streams


def uncovered_rungs(carry: TrajectoryCarry, steps: int) -> list[int]:
    """Rungs that no stream visits within so many updates (the seed's coverage check wants none)."""
    starts = {
        int(o) for slot in range(carry.num_slots) for rank in range(carry.world) for o in carry.offsets(slot, rank)
    }
    visited = {(start + step) % carry.num_rungs for start in starts for step in range(min(steps, carry.num_rungs))}
    return sorted(set(range(carry.num_rungs)) - visited)
