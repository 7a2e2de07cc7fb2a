"""Randomness as a pure function of what it is for.

Nothing in training reads a generator that some earlier step has advanced. Every draw is made from a generator seeded
by the run's seed and by its own address ("noise of trajectory 1234", "targets of step 7"). A resumed run therefore
draws what it would have drawn, and ranks that share a global batch draw what one rank would have drawn for all of it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def generator_for(*address: int | str) -> torch.Generator:
    """A CPU generator seeded by an address such as ``(seed, "noise", 1234)``; equal addresses draw equally."""
    digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def noise(shape: tuple[int, ...], *address: int | str) -> Tensor:
    """Standard normal float32 of one sample's ``shape``; drawn on the CPU, so that no device changes it."""
    return torch.randn(shape, generator=generator_for(*address))


class Shuffle:
    """An endless shuffled pass over ``size`` rows: row ``at(i)`` is the i-th one drawn, every epoch in a new order."""

    def __init__(self, size: int, seed: int, *purpose: str):
        self.size, self.address = size, (seed, *purpose)
        self._order = lru_cache(maxsize=2)(self._permutation)  # a batch may straddle two epochs

    def _permutation(self, epoch: int) -> Tensor:
        return torch.randperm(self.size, generator=generator_for(*self.address, "epoch", epoch))

    def at(self, index: int) -> int:
        return int(self._order(index // self.size)[index % self.size])


class Grouped:
    """An endless shuffled pass over rows of several kinds, of which every ``group`` consecutive draws are of one kind.

    A group's kind is that of a row drawn from an endless pass over all rows; its members are the kind's next ones, in an
    endless pass of its own. So any kind may have fewer rows than a group has, and in as many groups as there are rows
    every row is drawn exactly ``group`` times. Of one kind, it is :class:`Shuffle`.

    Args:
        kinds: int64 ``[R]``, the kind of every row, ``0 .. K-1`` without a gap.
    """

    def __init__(self, kinds: Tensor, seed: int):
        self.kinds = kinds
        self.members = [torch.nonzero(kinds == kind)[:, 0] for kind in range(int(kinds.max()) + 1)]
        self._within = [Shuffle(len(rows), seed) for rows in self.members]
        self._between = Shuffle(len(kinds), seed, "groups")
        self._earlier = lru_cache(maxsize=2)(self._counts)

    def _counts(self, epoch: int) -> Tensor:
        """How many groups of this epoch before each one are of its kind: ``[R]``."""
        drawn, counts = self.kinds[self._between._order(epoch)], torch.empty_like(self.kinds)
        for kind in range(len(self.members)):
            of_kind = drawn == kind
            counts[of_kind] = torch.arange(int(of_kind.sum()))
        return counts

    def at(self, index: int, group: int) -> int:
        number, place = divmod(index, group)
        epoch, position = divmod(number, len(self.kinds))
        kind = int(self.kinds[self._between.at(number)])
        earlier = epoch * len(self.members[kind]) + int(self._earlier(epoch)[position])
        return int(self.members[kind][self._within[kind].at(earlier * group + place)])
