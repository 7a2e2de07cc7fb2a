"""Where the low-noise expert's trajectories start when there are prompts alone: where the high-noise expert's end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from pdd.backbones import Backbone, read_backbone
from pdd.backbones.base import State
from pdd.config import HIGH_KNOBS, Config, ConfigError, resolve
from pdd.data import Rows
from pdd.formats import CONTRACT, empty_transformer, load_transformer, read_student, student_without_weights
from pdd.grid import Grid
from pdd.sampling import endpoint, initial
from pdd.student import Student, Velocity, widen
from pdd.teacher import Teacher, unconditional_condition

STEPS = 16  # what a sampler of 25 steps gives the high expert at a shift of 12


class HighNoiseRollout:
    """The frozen high-noise expert, walked from noise to the boundary: in guided Euler steps, or by its student.

    Made of small files, so that what is wrong is found early; to be called, it needs the weights of :meth:`load`.

    Args:
        config: the knobs of the low expert's run.
        backbone, grid: the low expert's.
        rows: the run's dataset.

    Raises:
        ConfigError: a knob of the high expert's is wrong.
    """

    def __init__(self, config: Config, backbone: Backbone, grid: Grid, rows: Rows):
        # the same run's knobs as the high expert's own
        scale = config.teacher_guidance_scale if config.high_guidance_scale is None else config.high_guidance_scale
        mine = {"high_student": "", "high_steps": None, "high_guidance_scale": None}
        self.config = replace(config, expert="high", teacher_guidance_scale=scale, **mine)
        self.student = resolve(config.high_student) if config.high_student else None
        try:
            if self.student:
                self._find_student(config, backbone)
            else:
                self._find_teacher(config, grid, rows)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _find_teacher(self, config: Config, low: Grid, rows: Rows) -> None:
        steps = STEPS if config.high_steps is None else config.high_steps
        self.backbone = read_backbone(self.config.teacher_dir, config.size)
        self.backbone.choose("high")
        self.grid = self.backbone.grid(steps, {m: s.shift for m, s in low.schedules.items()}, low.max_t)
        self.nodes = list(range(steps + 1))
        self.unconditional = unconditional_condition(self.config, self.backbone, rows)

    def _find_student(self, config: Config, low: Backbone) -> None:
        knob = f"high_student {config.high_student!r}"
        if not (self.student / CONTRACT).exists():
            raise ConfigError(f"{knob} has no {CONTRACT}; allowed is a student's folder")
        student = student_without_weights(self.student)
        self.backbone, self.grid = student.backbone, student.grid
        if (self.backbone.expert, self.backbone.boundary) != ("high", low.boundary):
            raise ConfigError(
                f"{knob} is of expert {self.backbone.expert} and boundary {self.backbone.boundary}; allowed is the high expert, "
                f"with boundary {low.boundary}"
            )
        fewest, most = student.facts["fewest_steps"], self.grid.pdd_steps
        if not fewest <= config.high_steps <= most:
            raise ConfigError(f"high_steps is {config.high_steps}; allowed by {knob} are {fewest} to {most}")
        self.nodes = student.nodes(config.high_steps)

    def empty(self) -> nn.Module:
        """The transformer that :meth:`load` reads, without weights."""
        transformer = empty_transformer(self.backbone.config)
        return widen(transformer, self.backbone, self.grid.pdd_steps) if self.student else transformer

    def load(self, dtype: torch.dtype) -> Velocity:
        """The model that walks, for :meth:`use`.

        Raises:
            ValueError: a file is missing, or does not fit.
        """
        if self.student:
            transformer = read_student(self.student, dtype).transformer
        else:
            transformer = load_transformer(self.config.teacher_dir, dtype, self.backbone.component)
        return Velocity(transformer, self.backbone)

    def use(self, model: Callable[..., State]) -> None:
        """Walk by what :meth:`load` gave, or by an engine around it."""
        if self.student:
            self.role = Student(model, self.grid)
        else:
            self.role = Teacher(model, self.backbone, self.grid, self.config, self.unconditional)

    @torch.no_grad()
    def __call__(self, noise: State, cond: dict[str, torch.Tensor]) -> State:
        """Noise ``[B, ...]`` -> states at the boundary; the same number of forwards for any batch."""
        return endpoint(self.role.block(cond), initial(noise, self.grid), self.grid, self.nodes)


def high_noise_rollout(config: Config, backbone: Backbone, grid: Grid, rows: Rows) -> HighNoiseRollout | None:
    """The rollout that this run's trajectories start from; None where they start from noise, or from latents.

    Raises:
        ConfigError: see :class:`HighNoiseRollout`; or knobs of it are given and nothing is rolled out.
    """
    if config.starts_at_boundary and not rows.has_latents:
        return HighNoiseRollout(config, backbone, grid, rows)
    for name in HIGH_KNOBS:
        if getattr(config, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}; allowed is none, trajectories start from the latents of data "
                f"{str(rows.path)!r}"
            )
    return None
