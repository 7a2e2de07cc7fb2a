"""A student in its family's own Diffusers pipeline: ``load_student(PATH)(prompt, num_inference_steps=4, guidance_scale=1)``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import nn

from pdd.backbones import read_json
from pdd.config import model_folder
from pdd.formats import LoadedStudent, read_student
from pdd.student import FusedStudent

TEXT = ("text_encoder", "tokenizer", "image_encoder", "feature_extractor", "connectors")  # by the start of their names

# of a pipeline on a hub; the transformer is the student's own
BUT_TEXT = ("vae/*", "audio_vae/*", "vocoder/*")
EVERYTHING = (*BUT_TEXT, "text_encoder*/*", "tokenizer*/*", "connectors/*", "image_encoder/*", "feature_extractor/*")


class PDDScheduler(FlowMatchEulerDiscreteScheduler):
    """Euler steps over the blocks of a student's partition.

    ``set_timesteps`` takes the number of forwards and nothing else to heart: whatever sigmas or shift a pipeline would
    like, the student's heads belong to its own grid.
    """

    student: LoadedStudent
    force: bool = False
    num_inference_steps: int | None = None  # none before the first set_timesteps

    @classmethod
    def of(cls, student: LoadedStudent, force: bool = False) -> PDDScheduler:
        """The scheduler of a student.

        Raises:
            ValueError: its modalities have different schedules, which the pipelines here cannot step.
        """
        shifts = {m: s.shift for m, s in student.grid.schedules.items()}
        if len(set(shifts.values())) > 1:
            raise ValueError(
                f"the student's modalities have different shifts {shifts}; a stock pipeline steps them alike"
            )
        scheduler = cls(shift=1.0)
        scheduler.student, scheduler.force = student, force
        return scheduler

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """Place the steps at the student's partition into ``num_inference_steps`` blocks.

        Raises:
            ValueError: a block would be wider than trained.
        """
        given = sigmas if sigmas is not None else timesteps
        steps = num_inference_steps if given is None else len(given)
        self.nodes = self.student.nodes(steps, self.force)
        first = next(iter(self.student.grid.sigma.values()))
        self.sigmas = first[self.nodes].to(torch.float32)  # [K + 1], the last one 0
        self.timesteps = (self.sigmas[:-1] * self.config.num_train_timesteps).to(device)
        self.num_inference_steps = steps
        self._step_index = self._begin_index = None

    def __deepcopy__(self, memo: dict) -> PDDScheduler:
        # pipelines with two modalities copy the scheduler; a copy steps the same student
        other = type(self).of(self.student, self.force)
        if self.num_inference_steps is not None:
            other.set_timesteps(self.num_inference_steps, self.timesteps.device)
        return other


def load_student(
    path: str | Path | LoadedStudent,
    base_model: str | Path | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    text_encoders: bool = True,
    force: bool = False,
) -> DiffusionPipeline:
    """A trained student as its family's stock pipeline.

    The transformer's last linears are swapped for the fused heads of the block under way, and the scheduler steps over the
    student's partition. Guidance is in the weights: call it with ``guidance_scale=1``.

    Args:
        path: a run's ``student`` folder, or one already read.
        base_model: the teacher's folder, for what is not the transformer; the one it was trained from if not given.
        dtype: of the weights; None keeps the stored one.
        text_encoders: False leaves them on disk, for calls with embeddings.
        force: allow blocks wider than trained.

    Raises:
        ValueError: no student there, or no teacher.
    """
    student = path if isinstance(path, LoadedStudent) else read_student(Path(path), dtype, device, base_model)
    folder = model_folder(str(base_model or student.facts["base_model"]), *(EVERYTHING if text_encoders else BUT_TEXT))
    index = read_json(folder / "model_index.json")
    parts: dict[str, Any] = {}
    for name, value in index.items():
        if not isinstance(value, list):
            continue
        if value[0] is None or (not text_encoders and name.startswith(TEXT)):
            parts[name] = None
    parts |= {"transformer": student.transformer, "scheduler": PDDScheduler.of(student, force)}
    weights = next(student.transformer.parameters()).dtype
    pipe = getattr(diffusers, index["_class_name"]).from_pretrained(folder, dtype=dtype or weights, **parts)
    pipe = pipe.to(device)
    student.backbone.fit_pipeline(pipe)
    use_heads(pipe, student)
    scale_noise(pipe, float(next(iter(student.grid.sigma.values()))[0]))
    return pipe


def use_heads(pipe: DiffusionPipeline, student: LoadedStudent) -> None:
    """Before every forward of the pipeline's transformer, put the fused heads of the scheduler's block in place."""
    fused = FusedStudent(student.transformer, student.backbone, student.grid)

    def place(transformer: nn.Module, args: tuple, kwargs: dict) -> None:
        scheduler = pipe.scheduler
        i = scheduler.step_index or 0
        fused.place(scheduler.nodes[i], scheduler.nodes[i + 1])

    student.transformer.register_forward_pre_hook(place, with_kwargs=True)


def scale_noise(pipe: DiffusionPipeline, sigma: float) -> None:
    """Let noise that the pipeline draws itself start at the grid's first noise level, which may be a little below 1."""
    prepare = pipe.prepare_latents
    signature = inspect.signature(prepare)

    def prepare_scaled(*args: Any, **kwargs: Any) -> Any:
        out = prepare(*args, **kwargs)
        if signature.bind(*args, **kwargs).arguments.get("latents") is not None:
            return out
        return (out[0] * sigma, *out[1:]) if isinstance(out, tuple) else out * sigma

    pipe.prepare_latents = prepare_scaled
