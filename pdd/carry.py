"""Carried trajectories: the simulate regime's memory between steps (the seed's TrajectoryCarry).

One slot per gradient-accumulation round holds a batch of the student's own trajectories. Every training forward
advances its slot by one rung of the highest-NFE partition; a sample that reaches the end restarts from fresh noise
with a new prompt. What noise and which prompt follow from the trajectory's serial number alone, so a slot is fully
described by its states, its rungs and its trajectories' serial numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdd.backbones.base import State


class Reserve:
    """Starting states that take forwards to make: all ranks make them together, ahead, and keep each until it is wanted.

    Ranks' trajectories end at different times, but ZeRO-3 hangs on unequal forwards. So as soon as one rank is short of a
    state, every rank makes those of all its next trajectories. Each is wanted once in as many rounds as there are rungs, and
    so often they are made. A state follows from its serial number alone, so that nothing of this is saved.

    Args:
        make: serial numbers ``[B]`` -> states; called by all ranks or by none.
        agree: a flag -> the largest of all ranks' flags.
    """

    def __init__(self, make: Callable[[Tensor], State], agree: Callable[[int], int]):
        self.make, self.agree = make, agree
        self.ready: dict[int, State] = {}  # serial number -> state of that one

    def fill(self, serials: Tensor, wanted: Tensor) -> None:
        """Have the states of those ``serials`` ``[B]`` that are ``wanted``, bool ``[B]``; every rank calls it in every round."""
        if self.agree(any(i not in self.ready for i in serials[wanted].tolist())):
            state = self.make(serials)
            self.ready |= {i: {m: x[row] for m, x in state.items()} for row, i in enumerate(serials.tolist())}

    def take(self, serials: Tensor) -> State:
        """States ``[B, ...]`` that :meth:`fill` had made; they are gone from here."""
        states = [self.ready.pop(i) for i in serials.tolist()]
        return {m: torch.stack([state[m] for state in states]) for m in states[0]}


@dataclass
class Slot:
    """One batch of trajectories under way.

    Attributes:
        state: modality -> ``[B, ...]``, at each sample's own rung.
        rung: int64 ``[B]`` on the CPU, the rung that the next forward starts from.
        serial: int64 ``[B]`` on the CPU, serial number of each sample's trajectory.
    """

    state: State
    rung: Tensor
    serial: Tensor


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
        self.first_lap = 0  # laps before it were numbered by another layout of ranks and slots

    @property
    def total(self) -> int:
        """Trajectories under way over all ranks and slots."""
        return self.num_slots * self.world * self.batch

    def positions(self, index: int) -> Tensor:
        """Where a slot's samples stand among all ranks' and slots': int64 ``[B]``."""
        return (index * self.world + self.rank) * self.batch + torch.arange(self.batch)

    def serials(self, index: int, lap: Tensor | int) -> Tensor:
        """Serial numbers of a slot's trajectories of a lap, unique over all ranks, slots and laps: int64 ``[B]``."""
        return lap * self.total + self.positions(index)

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
            serials, offsets = self.serials(index, self.first_lap), self.offsets(index)
            farthest = max(int(self.offsets(index, rank).max()) for rank in range(self.world))
            walker = state = fresh(serials)
            for rung in range(farthest):
                walker = advance(walker, serials, rung)
                state = merge(offsets > rung, walker, state)
            self.slots[index] = Slot(state, offsets, serials)
        return self.slots[index]

    def commit(
        self, index: int, state: State, fresh: Callable[[Tensor], State], reserve: Reserve | None = None
    ) -> Tensor:
        """Move a slot on to ``state``, one rung up; finished samples restart from ``fresh`` noise at rung 0.

        So do samples whose state is no longer finite: those are returned, bool ``[B]``. Where ``fresh`` takes forwards, a
        ``reserve`` stands for it here.
        """
        slot = self.slots[index]
        rung, serial = slot.rung + 1, slot.serial
        lost = ~torch.stack([x.isfinite().flatten(1).all(1) for x in state.values()]).all(0).cpu()
        done = (rung >= self.num_rungs) | lost
        lap = torch.div(serial - self.positions(index), self.total, rounding_mode="floor") + 1
        following = self.serials(index, lap.clamp(min=self.first_lap))
        if reserve is not None:  # by all ranks, whether or not a sample of theirs is done
            reserve.fill(following, done)
            fresh = reserve.take
        if bool(done.any()):
            serial, rung = torch.where(done, following, serial), torch.where(done, 0, rung)
            rows = torch.nonzero(done)[:, 0]
            restarted = fresh(serial[rows])
            state = {m: x.index_copy(0, rows.to(x.device), restarted[m].to(x)) for m, x in state.items()}
        self.slots[index] = Slot(state, rung, serial)
        return lost

    def state_dict(self) -> dict[str, Tensor]:
        """Every slot as flat tensors, on the CPU."""
        out = {}
        for i, slot in enumerate(self.slots):
            if slot is not None:
                out |= {f"{i}.state.{m}": x.detach().cpu().contiguous() for m, x in slot.state.items()}
                out |= {f"{i}.rung": slot.rung, f"{i}.serial": slot.serial}
        return out | ({"layout": torch.tensor([self.num_slots, self.batch, self.first_lap])} if out else {})

    def load_state_dict(
        self, ranks: Sequence[dict[str, Tensor]], device: torch.device, fresh: Callable[[Tensor], State]
    ) -> tuple[int, int] | None:
        """Take up what :meth:`state_dict` gave on every rank.

        Saved by as many ranks with as many slots and as large a batch, everything goes on as it was. Otherwise the
        trajectories are dealt again, in order: too many are dropped, and where there are too few, fresh ones start.

        Args:
            ranks: every saving rank's tensors.
            fresh: serial numbers ``[B]`` -> states at rung 0.

        Returns:
            None, or when they were dealt again how many went on, and how many there now are.
        """
        mine = ranks[self.rank] if len(ranks) == self.world else {}
        if mine and mine["layout"][:2].tolist() == [self.num_slots, self.batch]:
            self.first_lap, slots = int(mine["layout"][2]), _slots(mine, device)
            self.slots[: len(slots)] = slots
            return None
        everything = [tensors for tensors in ranks if tensors]
        if not everything:
            return None
        saved = [_slots(tensors, torch.device("cpu")) for tensors in everything]
        slots, batch, _ = everything[0]["layout"].tolist()
        pool = [(slot, row) for i in range(slots) for mine in saved for slot in mine[i : i + 1] for row in range(batch)]
        self.first_lap = max(int(slot.serial.max()) for slot, _ in pool) // self.total + 1
        # a slot that no rank has anything for starts as in a new run: all ranks or none walk to staggered starts
        for index in range(-(-len(pool) // (self.world * self.batch))):
            if index < self.num_slots:
                self.slots[index] = self._dealt(index, pool, fresh)
        return min(len(pool), self.total), self.total

    def _dealt(self, index: int, pool: list[tuple[Slot, int]], fresh: Callable[[Tensor], State]) -> Slot:
        state, rung = fresh(self.serials(index, self.first_lap)), torch.zeros(self.batch, dtype=torch.int64)
        serial = self.serials(index, self.first_lap)
        for mine, position in enumerate(self.positions(index).tolist()):
            if position < len(pool):
                slot, row = pool[position]
                rung[mine], serial[mine] = slot.rung[row], slot.serial[row]
                for m, x in state.items():
                    x[mine] = slot.state[m][row]
        return Slot(state, rung, serial)


def _slots(tensors: dict[str, Tensor], device: torch.device) -> list[Slot]:
    slots = []
    while f"{(i := len(slots))}.rung" in tensors:
        prefix = f"{i}.state."
        state = {n.removeprefix(prefix): x.to(device) for n, x in tensors.items() if n.startswith(prefix)}
        slots.append(Slot(state, tensors[f"{i}.rung"], tensors[f"{i}.serial"]))
    return slots


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
