"""What the benchmarks share: a device, a random Wan, turns taken in time, peaks of memory, ranks, a table.

Figures are ratios of cases that take turns in one process: what else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler says when it starts


def parser(doc: str, **defaults: int) -> argparse.ArgumentParser:
    """``--json``, ``--threads`` and whole numbers with a default each."""
    flags = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_argument("--threads", type=int, default=1, help="of a CPU rank (default 1)")
    for name, value in defaults.items():
        flags.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    return flags


def accelerated() -> bool:
    """Is there a GPU?"""
    import torch

    return torch.cuda.is_available()


def device(threads: int):
    """The accelerator, in bfloat16, or the CPU, in float32: ``(device, dtype)``."""
    import torch

    if accelerated():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), torch.bfloat16
    torch.set_num_threads(threads)
    return torch.device("cpu"), torch.float32


# ------------------------------------------------------------------------------------------------ the model


def wan(layers: int, width: int, device="cpu", dtype=None):
    """A random Wan 2.1 of so many layers and channels; 30 and 1536 are the 1.3 B one."""
    import torch
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    heads = width // 128 if width % 128 == 0 else width // 16
    model = WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=width // heads, ffn_dim=width * 35 // 6 // 64 * 64, num_layers=layers,
        text_dim=64,
    )  # fmt: skip
    for parameter in model.parameters():  # not the buffers: positions stay exact
        parameter.data = parameter.data.to(dtype)
    return model.to(device)


def family(model):
    """Its family."""
    from pdd.backbones import backbone_for

    return backbone_for({"transformer": {**model.config, "_class_name": type(model).__name__}})


def latent_shape(tokens: int) -> tuple[int, int, int, int]:
    """Latents ``(16, 1, H, W)`` of so many tokens, as square as they can be."""
    height = next(h for h in range(int(tokens**0.5), 0, -1) if tokens % h == 0)
    return 16, 1, 2 * height, 2 * (tokens // height)


def inputs(tokens: int, batch: int, device="cpu"):
    """A random state and conditioning."""
    import torch

    g = torch.Generator().manual_seed(1)
    state, embeds = torch.randn(batch, *latent_shape(tokens), generator=g), torch.randn(batch, 16, 64, generator=g)
    return {"video": state.to(device)}, {"prompt_embeds": embeds.to(device)}


@dataclass
class Training:
    """A training run's parts, as train_pdd.py puts them together.

    Args:
        args: has ``layers``, ``width``, ``tokens``, ``batch``, ``threads``.
        stage: of ZeRO, as ds_configs/zero3.json has it otherwise.
        lora: adapters of rank 16 on one backbone, instead of all weights and a teacher beside them.
        pdd_steps: N; 0 leaves the last linear as it is, which is then trained like any other weight.
        zero: entries of ``zero_optimization``.
    """

    args: argparse.Namespace
    stage: int
    lora: bool
    pdd_steps: int = 32
    zero: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:

        from pdd.engine import Engine, SharedTeacher, fill_ds_config, freeze, read_ds_config
        from pdd.lora import add_adapters
        from pdd.student import Velocity, head_parameters, widen

        args, world = self.args, int(os.environ["WORLD_SIZE"])
        self.device, dtype = device(args.threads)
        config = self.config("simulate", "")
        ds_config = read_ds_config("ds_configs/zero3.json")
        ds_config["zero_optimization"] |= {"stage": self.stage, **self.zero}
        ds_config = fill_ds_config(ds_config, config, world, self.device.type != "cpu")
        student = wan(args.layers, args.width, dtype=dtype)
        self.backbone = family(student)
        if self.pdd_steps:
            widen(student, self.backbone, self.pdd_steps, keep_base=self.lora)
        if self.lora:
            add_adapters(student, self.backbone, "", config.lora_rank, config.alpha, 0)
            if not self.pdd_steps:
                student.proj_out.requires_grad_(True)
        if getattr(args, "compile", False):
            student.compile_repeated_blocks()
        self.model = Velocity(student, self.backbone)
        if self.lora:
            self.teacher_model = SharedTeacher(self.model)
        else:
            teacher = wan(args.layers, args.width, dtype=dtype)
            if getattr(args, "compile", False):
                teacher.compile_repeated_blocks()
            self.teacher_model = freeze(Velocity(teacher, self.backbone), ds_config, self.device)
        self.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in student.parameters())
        self.engine = Engine(self.model, head_parameters(student), ds_config, 0.0, 0)

    def config(self, regime: str, data: str):
        """The knobs: one Euler target without guidance, the least that a step can do."""
        from pdd.config import Config

        _, _, height, width = latent_shape(self.args.tokens)
        steps = self.pdd_steps or 32
        return Config(
            teacher="random", data=data, rollout_mode=regime, pdd_steps=steps, block_size_min=steps // 4,
            block_size_max=steps, type_rk="euler", teacher_guidance_scale=1.0, train_micro_batch_size_per_gpu=self.args.batch,
            lora_rank=16 * self.lora, height=8 * height, width=8 * width, num_frames=1, prompt_repeats={},
            validation_every=0,
        )  # fmt: skip

    def roles(self):
        """Student and teacher on the grid."""
        from pdd.grid import Grid
        from pdd.student import Student
        from pdd.teacher import Teacher

        grid = Grid(self.pdd_steps, {"video": 3.0})
        return Student(self.model, grid), Teacher(self.teacher_model, self.backbone, grid)

    def step(self, regime: str) -> Callable[[], None]:
        """An update as train_pdd.py makes it: a round of the objective, what is logged of it, backward, the optimizer."""
        import torch
        from datasets import Array2D, Array4D, Dataset, Features, Value, disable_progress_bars

        from pdd.data import Rows
        from pdd.objective import Objective
        from train_pdd import Meter

        disable_progress_bars()
        shape, g = latent_shape(self.args.tokens), torch.Generator().manual_seed(2)
        rows = {
            "prompt": [f"prompt {i}" for i in range(8)],
            "prompt_embeds": torch.randn(8, 16, 64, generator=g).numpy(),
        }
        rows["latents"] = torch.randn(8, *shape, generator=g).numpy()
        kinds = {"prompt_embeds": Array2D((16, 64), "float32"), "latents": Array4D(shape, "float32")}
        self.folder = tempfile.TemporaryDirectory()
        Dataset.from_dict(rows, features=Features({"prompt": Value("string"), **kinds})).save_to_disk(self.folder.name)
        config, rank = self.config(regime, self.folder.name), int(os.environ["RANK"])
        backbone = type(self.backbone)(self.backbone.configs, config.size)
        student, teacher = self.roles()
        world = int(os.environ["WORLD_SIZE"])
        objective = Objective(config, student.grid, student, teacher, Rows(config, backbone), rank, world, self.device)
        meter, steps = Meter(config.pdd_steps, config.block_size_max), itertools.count()

        def step() -> None:
            began = time.perf_counter()
            losses, facts = self.engine(objective, next(steps), 0)
            meter.add(losses, facts)
            meter.updated(time.perf_counter() - began, self.engine.backward_and_step(losses.total))

        return step


# ------------------------------------------------------------------------------------------------ time and memory


def turns(cases: Mapping[Any, Callable[[], Any]], rounds: int, warm: int = 1, wall: bool = False) -> dict[Any, float]:
    """Least seconds of every case; a round runs each case once, every other one in reverse order.

    On a CPU they are seconds that this process had a processor, so that other work on the machine does not count.

    Args:
        wall: seconds that passed, there too.
    """
    import torch

    wait, clock = (lambda: None), time.process_time
    if accelerated():
        wait = torch.cuda.synchronize
    if accelerated() or wall:
        clock = time.perf_counter
    least = dict.fromkeys(cases, float("inf"))
    for i in range(-warm, rounds):
        for name in list(cases) if i % 2 else reversed(list(cases)):
            wait()
            began = clock()
            cases[name]()
            wait()
            if i >= 0:
                least[name] = min(least[name], clock() - began)
    return least


def allocated(function: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of tensors beyond those there before: at most while it runs, and left when it has returned."""
    import torch

    if accelerated():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    now = peak = 0
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(changes, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak, now


def matrix_rate(device, dtype) -> float:
    """Measured FLOP/s of one large matrix product."""
    import torch

    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in "ab")
    return 2 * size**3 / turns({"": lambda: a @ b}, 5, 2)[""]


def flops(function: Callable[[], Any]) -> int:
    """Floating-point operations of matrix products and attention in a call."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    # what is compiled would not be seen
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


# ------------------------------------------------------------------------------------------------ ranks and tables


def on_ranks(measure: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """What ``measure(*args)`` returns on rank 0 of so many ranks, each a fork of this process.

    This process must not have used a GPU: a fork of it could not.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        out, started = Path(folder, "figures.json"), []
        sys.stdout.flush()
        for rank in range(ranks):
            started.append(os.fork())
            if started[-1] == 0:
                place = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({k: str(v) for k, v in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()})
                _rank(measure, args, out)
        if any([os.waitpid(process, 0)[1] for process in started]):
            sys.exit("a rank failed")
        return json.loads(out.read_text())


def _rank(measure: Callable[..., Any], args: Sequence[Any], out: Path) -> None:
    """The life of a rank; nothing of its parent's comes after it."""
    code = 1
    try:
        os.dup2(2, 1)  # what libraries print is no figure
        if not accelerated():
            os.environ["DS_ACCELERATOR"] = "cpu"
        figures = measure(*args)
        if os.environ["RANK"] == "0":
            out.write_text(json.dumps(figures))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on the screen; a float has three digits."""
    text = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(columns))]
    print(title + "\n")
    for row in text:
        print("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))))
