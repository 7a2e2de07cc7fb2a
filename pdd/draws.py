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

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed
        self._order = lru_cache(maxsize=2)(self._permutation)  # a batch may straddle two epochs

    def _permutation(self, epoch: int) -> Tensor:
        return torch.randperm(self.size, generator=generator_for(self.seed, "epoch", epoch))

    def at(self, index: int) -> int:
        return int(self._order(index // self.size)[index % self.size])
