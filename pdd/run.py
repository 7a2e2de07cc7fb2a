"""A run folder: what is in it, which one a command means, and how its files are written.

config.yaml ds_config.json environment.json    what was run, on what
log.jsonl                                      a line each log_every updates
samples/                                       validation pictures and previews
checkpoints/step-000100/  latest               every rank's shard of the state; the newest one's name
student/                                       the result; a run that has it is complete
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pdd.config import KNOBS, ROOT, Config, ConfigError, read_yaml
from pdd.prompts import encoded_folder, is_table, read_rows

RUNS = Path("runs")
DEFAULT_RECIPE = "recipes/digits.yaml"
PACKAGES = ("torch", "deepspeed", "diffusers", "transformers", "datasets", "peft", "einops", "numpy", "safetensors")


def is_complete(run: Path) -> bool:
    return (run / "student" / "pdd_config.json").exists()


def newest(complete: bool) -> Path | None:
    """The newest run under ``runs/`` that is complete, or the newest that is not."""
    runs = [p.parent for p in RUNS.glob("*/config.yaml") if is_complete(p.parent) == complete]
    return max(runs, key=lambda run: (run / "config.yaml").stat().st_mtime, default=None)


def resolve_training(recipe: str | None, flags: dict[str, Any]) -> tuple[Config, Path | None]:
    """The knobs of a new or resumed run, and the folder when it is already known.

    A resumed run starts from its own ``config.yaml``; a recipe given explicitly and flags override it. Knobs that the
    saved trajectories, heads or draws depend on may not change.

    Raises:
        ConfigError: bad knobs, nothing to resume, a folder that already holds a run, a fixed knob changed.
    """
    resume = flags.get("resume", False)
    if not resume:
        config = Config(**{**read_yaml(recipe or DEFAULT_RECIPE), **flags})
        if not config.resume:
            folder = Path(config.run) if config.run else None
            if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigError(
                    f"run folder {config.run!r} is not empty; allowed is a new one, or --resume to continue it"
                )
            return config, folder
    folder = Path(flags["run"]) if flags.get("run") else newest(complete=False)
    if folder is None:
        raise ConfigError("resume is true but there is no unfinished run under runs/; name one with --run")
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"run folder {str(folder)!r} has no config.yaml, so it is not a run that can be resumed")
    if is_complete(folder):
        raise ConfigError(f"run folder {str(folder)!r} is complete; allowed is an unfinished run")
    if not (folder / "latest").exists():
        raise ConfigError(f"run folder {str(folder)!r} has no checkpoint to resume from; start a new run")
    saved = read_yaml(folder / "config.yaml")
    once = {"resume": True, "run": str(folder), "stop_after": 0}
    config = Config(**{**saved, **once, **(read_yaml(recipe) if recipe else {}), **flags, **{"run": str(folder)}})
    before = Config(**saved)
    if is_table(config.data):  # the same prompts as before are no other data
        config = dataclasses.replace(config, data=str(encoded_data(config, folder)[0]))
    for name, spec in KNOBS.items():
        if spec.metadata["fixed"] and getattr(config, name) != getattr(before, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r} but the run was started with {getattr(before, name)!r}; it may not "
                "change when a run is resumed"
            )
    return config, folder


def encoded_data(config: Config, folder: Path | None) -> tuple[Path, list[str], Path]:
    """Of ``data`` that is a table of prompts: where the dataset of its conditioning goes, next to the run; the prompts.

    Raises:
        ConfigError: the table cannot be read.
    """
    prompts = [prompt for prompt, _ in read_rows(str(config.data_dir), "prompt")]
    parent = folder.parent if folder else RUNS
    return encoded_folder(parent, config.teacher, prompts, config.negative_prompt, None), prompts, parent


def new_run_name(recipe: str | None) -> Path:
    stem = Path(recipe or DEFAULT_RECIPE).stem
    name = RUNS / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = 1
    while name.exists():
        tries += 1
        name = RUNS / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{tries}"
    return name


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Let the disk know of names created or moved in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Go on with a warning where something that a run can do without cannot be written."""
    try:
        yield
    except OSError as error:
        print(f"warning: {what} could not be written: {error}", file=sys.stderr, flush=True)


_claims: dict[Path, int] = {}  # open as long as the process lives


def claim(run: Path) -> str | None:
    """Create a run's folder if need be, and hold it until this process ends; why that fails, if it does."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        handle = os.open(run, os.O_RDONLY)
    except OSError as error:
        return f"run folder {str(run)!r} cannot be created: {error.strerror}"
    _claims[run] = handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return f"run folder {str(run)!r} is in use by another process; allowed is another folder, or to wait for its end"
        # a file system without locks
    return None if os.access(run, os.W_OK) else f"run folder {str(run)!r} cannot be written to"


def release() -> None:
    """Remove the folder of a run that came to nothing before it wrote anything."""
    for run in _claims:
        with suppress(OSError):
            run.rmdir()  # only if it is empty


def own_device() -> str:
    """This rank's accelerator, or the CPU."""
    import torch

    if not torch.accelerator.is_available():
        return "cpu"
    index = int(os.environ.get("LOCAL_RANK", 0))
    torch.accelerator.set_device_index(index)
    return f"{torch.accelerator.current_accelerator().type}:{index}"


def environment() -> dict[str, Any]:
    """Git revision (and whether the tree differs from it), package versions and the machine's kind."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        "git_revision": git("rev-parse", "HEAD"),
        "git_modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "packages": versions,
    }


def start(run: Path, config: Config, ds_config: dict[str, Any], world: int) -> None:
    """Create the folder of a new run, or update what a resumed one is run with."""
    (run / "samples").mkdir(parents=True, exist_ok=True)
    (run / "checkpoints").mkdir(exist_ok=True)
    write_text(run / "config.yaml", config.to_yaml())
    write_json(run / "ds_config.json", ds_config)
    write_json(run / "environment.json", {**environment(), "world_size": world})


class Log:
    """``log.jsonl``: one JSON object a line. A resumed run drops lines past the step it resumes from."""

    def __init__(self, run: Path, step: int):
        self.path = run / "log.jsonl"
        if self.path.exists():
            lines = [line for line in self.path.read_text().splitlines() if _step_of(line) <= step]
            write_text(self.path, "".join(line + "\n" for line in lines))

    def write(self, **facts: Any) -> None:
        with best_effort(str(self.path)), open(self.path, "a") as file:
            file.write(json.dumps(facts) + "\n")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")  # a line cut off by a crash
