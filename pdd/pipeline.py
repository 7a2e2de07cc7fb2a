"""A student in its family's own Diffusers pipeline: ``load_student(PATH)(prompt, num_inference_steps=4, guidance_scale=1)``.

The students of a checkpoint's two experts share one pipeline: ``load_student(HIGH, second=LOW)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import nn

from pdd.backbones import read_json
from pdd.config import model_folder
from pdd.formats import LoadedStudent, is_modular, modular_components, read_student, untrained_student
from pdd.student import FusedStudent

TEACHER = "teacher"  # instead of a second student

TEXT = ("text_encoder", "tokenizer", "image_encoder", "feature_extractor", "connectors")  # by the start of their names

# of a pipeline on a hub; the transformer is the student's own
BUT_TEXT = ("vae/*", "audio_vae/*", "vocoder/*", "processor/*")  # Qwen-Image 2.1's does not start without a processor
EVERYTHING = (*BUT_TEXT, "text_encoder*/*", "tokenizer*/*", "connectors/*", "image_encoder/*", "feature_extractor/*")


@dataclass(frozen=True)
class Course:
    """Whose forwards make a sample: those of one student, or of one expert's and then the other's.

    Attributes:
        student: the student that was asked for.
        second: the other expert's.
        second_steps: how many of the forwards are the second one's; half of them, rounded down, if None.
        force: allow blocks wider than trained.

    Raises:
        ValueError: one expert alone, two that do not belong together, or a second one that has no place.
    """

    student: LoadedStudent
    second: LoadedStudent | None = None
    second_steps: int | None = None
    force: bool = False

    def __post_init__(self) -> None:
        mine = self.student.backbone
        if mine.expert is None:
            for name in ("second", "second_steps"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is given; allowed is none, the student serves the whole clock")
            return
        if self.second is None:
            raise ValueError(
                f"the student is of the {mine.expert} expert alone; needed is second: the other expert's student, or "
                f"{TEACHER!r} for the checkpoint's own"
            )
        other = self.second.backbone
        if other.expert in (None, mine.expert) or other.boundary != mine.boundary:
            raise ValueError(
                f"second is of expert {other.expert} and boundary {other.boundary}; allowed is the other expert than "
                f"{mine.expert}, with boundary {mine.boundary}"
            )

    @property
    def students(self) -> list[LoadedStudent]:
        """In the order in which a sample meets them."""
        both = [self.student] if self.second is None else [self.student, self.second]
        return sorted(both, key=lambda student: -student.grid.part[0])

    def nodes(self, steps: int) -> list[list[int]]:
        """Nodes of every one of :attr:`students` in a sample of so many forwards.

        Raises:
            ValueError: too few or too many for one of them, or a block would be wider than trained.
        """
        share = {id(self.student): steps}
        if self.second is not None:
            theirs = steps // 2 if self.second_steps is None else self.second_steps
            if not 1 <= theirs < steps:
                raise ValueError(f"second_steps is {theirs}; allowed are 1 to {steps - 1} of steps {steps}")
            share = {id(self.student): steps - theirs, id(self.second): theirs}
        nodes = []
        for student in self.students:
            try:
                nodes.append(student.nodes(share[id(student)], self.force))
            except ValueError as error:
                whose = f"{student.backbone.expert} expert: " if self.second else ""
                raise ValueError(f"{whose}{error}") from None
        return nodes


class PDDScheduler(FlowMatchEulerDiscreteScheduler):
    """Euler steps over the blocks of a student's partition, or of one expert's and then the other's.

    ``set_timesteps`` takes the number of forwards and nothing else to heart: whatever sigmas or shift a pipeline would
    like, the student's heads belong to its own grid.
    """

    course: Course
    finished: bool = False  # the latents that the pipeline is given are the end of a walk: it only decodes them
    num_inference_steps: int | None = None  # none before the first set_timesteps

    @classmethod
    def of(cls, course: Course) -> PDDScheduler:
        """The scheduler of a course.

        Raises:
            ValueError: a student's modalities have different schedules, which the pipelines here cannot step.
        """
        for student in course.students:
            shifts = {m: s.shift for m, s in student.grid.schedules.items()}
            if len(set(shifts.values())) > 1:
                raise ValueError(
                    f"the student's modalities have different shifts {shifts}; a stock pipeline steps them alike"
                )
        scheduler = cls(shift=1.0)
        scheduler.course = course
        return scheduler

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """Place the steps at the course's nodes for ``num_inference_steps`` forwards.

        Raises:
            ValueError: a block would be wider than trained.
        """
        given = sigmas if sigmas is not None else timesteps
        steps = num_inference_steps if given is None else len(given)
        if self.finished:
            walks = [(self.course.student, [self.course.student.grid.pdd_steps])]
        else:
            walks = list(zip(self.course.students, self.course.nodes(steps)))
        self.blocks = [block for _, nodes in walks for block in zip(nodes, nodes[1:])]  # of every forward
        levels = [next(iter(student.grid.sigma.values()))[nodes] for student, nodes in walks]
        # an expert ends where the next one starts, [K + 1], the last one 0
        self.sigmas = torch.cat([*(s[:-1] for s in levels), levels[-1][-1:]]).to(torch.float32)
        timesteps = self.sigmas[:-1] * self.config.num_train_timesteps
        if len(walks) > 1:
            # the pipeline gives a step exactly at the boundary to the first expert, but there the second one begins
            boundary = torch.tensor(self.course.student.backbone.boundary * self.config.num_train_timesteps)
            timesteps[len(walks[0][1]) - 1 :].clamp_(max=torch.nextafter(boundary, torch.zeros(())))
        self.timesteps = timesteps.to(device)
        self.num_inference_steps = steps
        self._step_index = self._begin_index = None

    def __deepcopy__(self, memo: dict) -> PDDScheduler:
        # pipelines with two modalities copy the scheduler; a copy steps the same course
        other = type(self).of(self.course)
        other.finished = self.finished
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
    second: str | Path | LoadedStudent | None = None,
    second_steps: int | None = None,
    offload: str = "none",
    finished: bool = False,
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
        second: where the checkpoint has two experts, the other one's student, likewise; or ``"teacher"``, the checkpoint's own
            one, in Euler steps.
        second_steps: how many of ``num_inference_steps`` are the second one's; half of them, rounded down, if not given.
        finished: for latents that are the end of another walk: the pipeline decodes them, and the heads are left alone.
        offload: ``model`` keeps in ``device``'s memory the component at work alone, ``sequential`` its layer at work.

    Raises:
        ValueError: no student there, no teacher, or not one student for every expert.
    """
    home = device if offload == "none" else "cpu"
    student = path if isinstance(path, LoadedStudent) else read_student(Path(path), dtype, home, base_model)
    folder = model_folder(str(base_model or student.facts["base_model"]), *(EVERYTHING if text_encoders else BUT_TEXT))
    dtype = dtype or student.transformer.dtype
    if isinstance(second, (str, Path)):
        second = read_second(student, second, second_steps, base_model, dtype, home)
    course = Course(student, second, second_steps, force)
    if is_modular(folder):
        if offload != "none":
            family = type(student.backbone).__name__
            raise ValueError(f"offload is {offload!r}; allowed is none, {family} has no ordinary pipeline")
        names = ("vae", "audio_vae", *(student.backbone.encoders if text_encoders else ()))
        pipe = student.backbone.modular_pipeline(student, modular_components(folder, names, dtype), force)
        pipe.finished = finished
    else:
        pipe = ordinary_pipeline(course, folder, dtype, text_encoders)
        scale_noise(pipe, float(next(iter(course.students[0].grid.sigma.values()))[0]))
        pipe.scheduler.finished = finished
    for one in () if finished else course.students:
        use_heads(pipe, one, device)
    {
        "none": pipe.to,
        "model": lambda device: pipe.enable_model_cpu_offload(device=device),
        "sequential": lambda device: pipe.enable_sequential_cpu_offload(device=device),
    }[offload](device)
    return pipe


def ordinary_pipeline(course: Course, folder: Path, dtype: torch.dtype, text_encoders: bool) -> DiffusionPipeline:
    """The pipeline of a folder's ``model_index.json`` with the students' transformers and a scheduler for them.

    Raises:
        ValueError: no such file, or a student whose modalities have different schedules.
    """
    index = read_json(folder / "model_index.json")
    parts: dict[str, Any] = {}
    for name, value in index.items():
        if not isinstance(value, list):
            continue
        if value[0] is None or (not text_encoders and name.startswith(TEXT)):
            parts[name] = None
    parts |= {s.backbone.component: s.transformer for s in course.students}
    parts["scheduler"] = PDDScheduler.of(course)
    pipe = getattr(diffusers, index["_class_name"]).from_pretrained(folder, dtype=dtype, **parts)
    course.student.backbone.fit_pipeline(pipe)
    return pipe


def read_second(
    student: LoadedStudent,
    second: str | Path,
    steps: int | None,
    base_model: str | Path | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> LoadedStudent:
    """The other expert beside a student: a ``student`` folder's, or the checkpoint's own (``"teacher"``).

    Raises:
        ValueError: no student there, no other expert, or the checkpoint's own without a number of steps.
    """
    dtype = dtype or student.transformer.dtype
    if str(second) != TEACHER:
        return read_student(Path(second), dtype, device)
    if student.backbone.expert is None:
        raise ValueError("second is given; allowed is none, the student serves the whole clock")
    if steps is None or steps < 1:
        raise ValueError(
            f"second_steps is {steps}; allowed is 1 or more, the Euler steps of the checkpoint's own expert"
        )
    return untrained_student(str(base_model or student.facts["base_model"]), student, steps, dtype, device)


def use_heads(pipe: DiffusionPipeline, student: LoadedStudent, device: str) -> None:
    """Before every forward of the pipeline's transformer, put the fused heads of the scheduler's block in place."""
    fused = FusedStudent(student.transformer, student.backbone, student.grid)
    for bank in fused.banks.values():
        bank.to(device)
    fused.place(0, 1)  # from here on the banks are not the transformer's, to be offloaded with it

    def place(transformer: nn.Module, args: tuple, kwargs: dict) -> None:
        fused.place(*pipe.scheduler.blocks[pipe.scheduler.step_index or 0])

    student.transformer.register_forward_pre_hook(place, with_kwargs=True)


def scale_noise(pipe: DiffusionPipeline, sigma: float) -> None:
    """Let noise that the pipeline draws itself start at the grid's first noise level, which may be a little below 1."""

    def scaled(prepare: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(prepare)

        def prepare_scaled(*args: Any, **kwargs: Any) -> Any:
            out = prepare(*args, **kwargs)
            if signature.bind(*args, **kwargs).arguments.get("latents") is not None:
                return out
            return (out[0] * sigma, *out[1:]) if isinstance(out, tuple) else out * sigma

        return prepare_scaled

    for name in ("prepare_latents", "prepare_audio_latents"):
        if hasattr(pipe, name):
            setattr(pipe, name, scaled(getattr(pipe, name)))
