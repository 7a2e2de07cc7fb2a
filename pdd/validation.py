"""Validation during training: fixed noise, fixed prompts, the student against the teacher's own fine trajectory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pdd.backbones import Backbone
from pdd.backbones.base import State
from pdd.config import Config, ConfigError
from pdd.data import Rows
from pdd.draws import noise
from pdd.engine import Processes
from pdd.grid import Grid, partition
from pdd.objective import DTYPES
from pdd.pictures import grid as picture_grid
from pdd.run import best_effort
from pdd.sampling import endpoint, initial
from pdd.student import Student
from pdd.teacher import Teacher


def validation_rows(config: Config, rows: Rows) -> list[int]:
    """Dataset row of every validation prompt.

    Raises:
        ConfigError: a prompt that the dataset does not have.
    """
    if not config.validation_prompts:
        return rows.trained[:4]
    try:
        return [rows.find(str(prompt)) for prompt in config.validation_prompts]
    except KeyError as error:
        raise ConfigError(
            f"validation_prompts has {error.args[0]!r}, which data {str(rows.path)!r} has not; allowed are its prompts"
        ) from None


class Validator:
    """Draws its own noise, so that validating changes nothing in training; shares the samples evenly among ranks."""

    def __init__(
        self,
        config: Config,
        grid: Grid,
        backbone: Backbone,
        rows: Rows,
        processes: Processes,
        rollout: Callable[[State, dict[str, Tensor]], State] | None = None,
    ):
        self.config, self.grid, self.backbone, self.rows, self.processes = config, grid, backbone, rows, processes
        self.rollout = rollout
        self.prompts = validation_rows(config, rows)
        self.total = len(self.prompts) * config.validation_num
        share = -(-self.total // processes.world)
        # every rank walks as many samples as any other; what is too many is cut off after gathering
        mine = list(range(processes.rank * share, (processes.rank + 1) * share))
        batch = config.train_micro_batch_size_per_gpu
        self.chunks = [mine[i : i + batch] for i in range(0, share, batch)]
        self.reference: list[State] | None = None
        self.starts: list[State] | None = None

    def __call__(self, student: Student, teacher: Teacher, run: Path, step: int) -> dict[int, float]:
        """Endpoint error (relative L2 to the teacher's N-step trajectory) for each of ``validation_steps``; collective.

        Writes a picture grid per number of forwards, one row a prompt, and the teacher's once.
        """
        nodes = list(range(self.config.pdd_steps + 1))
        if self.reference is None:
            self.reference = [endpoint(teacher.block(cond), x, self.grid, nodes) for x, cond in self._starts()]
            self._picture(self.reference, run / "samples" / "teacher.png")
        errors = {}
        for nfe in self.config.validation_steps:
            nodes = partition(self.config.pdd_steps, nfe, self.config.student_grid_indices)
            ends = [endpoint(student.block(cond), x, self.grid, nodes) for x, cond in self._starts()]
            sums = torch.zeros(2, dtype=torch.float64)
            for chunk, x, y in zip(self.chunks, ends, self.reference):
                valid = sum(i < self.total for i in chunk)  # the rest is there only to keep the ranks in step
                for m in x:
                    a, b = x[m][:valid].double(), y[m][:valid].double()
                    sums += torch.stack([(a - b).square().sum(), b.square().sum()]).cpu()
            squared, norm = self.processes.sum(sums).tolist()
            errors[nfe] = (squared / norm) ** 0.5
            self._picture(ends, run / "samples" / f"step-{step:06d}-nfe{nfe}.png")
        return errors

    def _starts(self) -> list[tuple[State, dict[str, Tensor]]]:
        indices = [torch.tensor([self.prompts[i % self.total // self.config.validation_num] for i in chunk])
                   for chunk in self.chunks]  # fmt: skip
        conds = [self.rows.cond(rows, self.processes.device) for rows in indices]
        if self.starts is None:  # a rollout takes forwards
            self.starts = [self._start(*each) for each in zip(self.chunks, indices, conds)]
        return list(zip(self.starts, conds))

    def _start(self, chunk: list[int], indices: Tensor, cond: dict[str, Tensor]) -> State:
        device, dtype = self.processes.device, DTYPES[self.config.precision_decoding]
        eps = {
            m: torch.stack([noise(shape, self.config.seed, "validation", m, i) for i in chunk]).to(device, dtype)
            for m, shape in self.rows.latent_shapes.items()
        }
        if self.rollout is not None:
            return self.rollout(eps, cond)
        return initial(eps, self.grid, None if self.grid.starts_from_noise else self.rows.latents(indices, device))

    def _picture(self, states: list[State], path: Path) -> None:
        images = self.processes.gather(torch.cat([self.backbone.to_images(s).float() for s in states]))[: self.total]
        if self.processes.rank == 0:
            with best_effort(str(path)):
                picture_grid(images, self.config.validation_num).save(path)
