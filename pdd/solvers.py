"""The teacher in few forwards, by solvers that need no training: what a student has to beat.

Each is a role as :class:`pdd.teacher.Teacher` is one (which is Euler's method itself): ``block(cond)`` gives the
``predict`` of :func:`pdd.sampling.walk`, on a grid with one interval a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler
from torch import Tensor

from pdd.backbones.base import State
from pdd.teacher import Teacher, rk_target


class Midpoint:
    """The explicit midpoint rule: two forwards a step."""

    def __init__(self, teacher: Teacher):
        self.teacher = teacher

    def block(self, cond: dict[str, Tensor]) -> Callable[[State, int, int], State]:
        def predict(state: State, start: int, end: int) -> State:
            k = torch.full((len(next(iter(state.values()))),), start)
            return rk_target(self.teacher.field(cond), state, k, self.teacher.grid, "midpoint")

        return predict


class Multistep:
    """A multistep solver of Diffusers in its flow-matching mode, on our noise levels: one forward a step.

    Args:
        teacher: the velocity field, on the coarse grid.
        scheduler: class of the solver.
    """

    def __init__(self, teacher: Teacher, scheduler: type[DPMSolverMultistepScheduler | UniPCMultistepScheduler]):
        self.teacher, self.scheduler = teacher, scheduler

    def _solver(self, modality: str) -> DPMSolverMultistepScheduler | UniPCMultistepScheduler:
        solver = self.scheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
        solver.set_timesteps(self.teacher.grid.pdd_steps)
        # Diffusers shifts the clock before cutting off its first thousandth, this project after; the states here start at
        # the grid's first noise level, so the solver is told the grid's. At exactly 1 it would take a logarithm of 0.
        solver.sigmas = self.teacher.grid.sigma[modality].clamp(max=1 - 1e-6).float()
        solver.set_begin_index(0)
        return solver

    def block(self, cond: dict[str, Tensor]) -> Callable[[State, int, int], State]:
        solvers = {m: self._solver(m) for m in self.teacher.grid.modalities}  # they remember this batch's last steps
        euler = self.teacher.block(cond)

        def predict(state: State, start: int, end: int) -> State:
            velocity, mean = euler(state, start, end), {}
            for m, x in state.items():
                moved = solvers[m].step(velocity[m], solvers[m].timesteps[start], x, return_dict=False)[0]
                mean[m] = (moved - x) / self.teacher.grid.block_weight(m, start, end)
            return mean

        return predict


# name -> (forwards a step, the teacher on a coarse grid as a role)
SOLVERS: dict[str, tuple[int, Callable[[Teacher], Teacher | Midpoint | Multistep]]] = {
    "euler": (1, lambda teacher: teacher),
    "midpoint": (2, Midpoint),
    "dpm-solver++": (1, lambda teacher: Multistep(teacher, DPMSolverMultistepScheduler)),
    "unipc": (1, lambda teacher: Multistep(teacher, UniPCMultistepScheduler)),
}
