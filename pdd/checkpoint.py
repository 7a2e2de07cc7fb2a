"""Checkpoints: every rank's shard of the training state as safetensors, written whole or not at all, checked when read.

    checkpoints/step-000100/
        state-00003-000.safetensors      rank 3's fragments, keys ``parameter|state``, flat; at most ``CHUNK`` bytes a file
        trajectories-00003.safetensors   rank 3's own tensors
        state.json                       step, ranks, small facts
        checksums.json                   size and hash of every other file; written last

A fragment is the part of a flattened parameter that one rank owns under some ZeRO stage, with its place in the whole. So a
checkpoint means the same to any number of ranks and any stage, nothing frozen is in it, and reading it executes nothing.
DeepSpeed's own checkpoints have none of the three.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from pdd.run import sync_folder, write_json, write_text

CHUNK = 2**30  # bytes; while a file is written, so much of a rank's state is in memory twice
CHECKSUMS = "checksums.json"
MASTER = "master"  # the name of the weights themselves among a parameter's states


class Damage(ValueError):
    """A checkpoint is not whole; one line that names the file."""


@dataclass(frozen=True)
class Fragment:
    """A piece of one state of one parameter.

    Attributes:
        parameter: its name in the model.
        state: ``master``, or a name of the optimizer's (``exp_avg``, ``ema``).
        tensor: the piece, flat.
        start: where it begins in the flattened parameter.
        numel: size of the whole parameter.
    """

    parameter: str
    state: str
    tensor: Tensor
    start: int
    numel: int

    @property
    def key(self) -> str:
        return f"{self.parameter}|{self.state}"


# ---------------------------------------------------------------------------------------------- writing


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """Write a safetensors file through to the disk and read it back: its ``{"bytes", "sha256"}``.

    Raises:
        OSError: it cannot be written, or the disk gives back something else.
    """
    data = save({k: t.detach().to("cpu").contiguous() for k, t in tensors.items()}, metadata)
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if file_facts(path) != facts:
        raise OSError(f"{path} reads back differently from what was written")
    return facts


def file_facts(path: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def write_shard(
    folder: Path, rank: int, fragments: Iterable[Fragment], mine: dict[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Write a rank's part of a checkpoint: name -> ``{"bytes", "sha256"}`` of its files.

    Raises:
        OSError: the disk is full, or worse.
    """
    written: dict[str, dict[str, Any]] = {}
    chunk: list[Fragment] = []

    def flush() -> None:
        if chunk:
            places = {f.key: [f.start, f.numel] for f in chunk}
            name = f"state-{rank:05d}-{len(written):03d}.safetensors"
            tensors = {f.key: f.tensor for f in chunk}
            written[name] = write_tensors(folder / name, tensors, {"places": json.dumps(places)})
            chunk.clear()

    size = 0
    for fragment in fragments:
        nbytes = fragment.tensor.numel() * fragment.tensor.element_size()
        if chunk and size + nbytes > CHUNK:
            flush()
            size = 0
        chunk.append(fragment)
        size += nbytes
    flush()
    if mine:
        name = f"trajectories-{rank:05d}.safetensors"
        written[name] = write_tensors(folder / name, mine)
    return written


def complete(folder: Path, written: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write what makes a checkpoint whole, once all ranks' files are there."""
    write_json(folder / "state.json", facts)
    write_json(folder / CHECKSUMS, {**written, "state.json": file_facts(folder / "state.json")})
    sync_folder(folder)


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def publish(run: Path, temporary: Path, step: int, keep_last: int) -> None:
    """Give a whole checkpoint its name, move ``latest`` to it, then drop old ones.

    Killed anywhere in here, a run still has a complete checkpoint under its name, but for the instant in which one of
    the same step is replaced.
    """
    folder, name = run / "checkpoints", step_name(step)
    if (folder / name).exists():  # from before a resume of an earlier checkpoint
        os.rename(folder / name, folder / f"dropping-{name}")
    os.rename(temporary, folder / name)
    sync_folder(folder)
    write_text(run / "latest", name + "\n")
    complete_ones = [p for p in sorted(folder.glob("step-*")) if (p / CHECKSUMS).exists()]
    for old in complete_ones[:-keep_last]:
        if old.name != name:  # a resumed run may be behind checkpoints that it did not trust
            os.rename(old, folder / f"dropping-{old.name}")
    clear(folder)


def clear(folder: Path) -> None:
    """Remove what interrupted saves and drops have left."""
    for stale in [*folder.glob("saving-*"), *folder.glob("dropping-*")]:
        shutil.rmtree(stale, ignore_errors=True)


def set_aside(folder: Path) -> None:
    """Take a damaged checkpoint out of the way, for somebody to look at."""
    if folder.is_dir():
        aside = folder.with_name(f"damaged-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)


# ---------------------------------------------------------------------------------------------- reading


def candidates(run: Path) -> list[Path]:
    """Checkpoints to try, best first: the one that ``latest`` names, then older ones, newest first."""
    found = sorted((run / "checkpoints").glob("step-*"), reverse=True)
    latest = run / "checkpoints" / (run / "latest").read_text().strip() if (run / "latest").exists() else None
    if latest is None:
        return found
    return [latest, *(p for p in found if p.name < latest.name)]


def read_checksums(folder: Path) -> dict[str, dict[str, Any]]:
    """File name -> size and hash.

    Raises:
        Damage: the list is missing or is not one.
    """
    path = folder / CHECKSUMS
    try:
        value = json.loads(path.read_text())
        if not all(Path(name).name == name and {"bytes", "sha256"} <= set(facts) for name, facts in value.items()):
            raise ValueError
    except OSError as error:
        raise Damage(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        raise Damage(f"{path} is damaged") from None
    return value


def verify(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Check a checkpoint's files against their checksums; ``part`` of ``parts`` reads its share of them.

    Raises:
        Damage: a file is missing, truncated, changed or does not belong there.
    """
    if not folder.is_dir():
        raise Damage(f"checkpoint {folder} is missing")
    checksums = read_checksums(folder)
    here = {path.name for path in folder.iterdir()} - {CHECKSUMS}
    for name in sorted(checksums.keys() - here):
        raise Damage(f"{folder / name} is missing")
    for name in sorted(here - checksums.keys()):
        raise Damage(f"{folder / name} does not belong to this checkpoint")
    for name in sorted(checksums)[part::parts]:
        size = (folder / name).stat().st_size
        if size != checksums[name]["bytes"]:
            raise Damage(f"{folder / name} has {size} bytes instead of {checksums[name]['bytes']}")
        if file_facts(folder / name) != checksums[name]:
            raise Damage(f"{folder / name} is not what was written (its checksum differs)")


def read_facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "state.json").read_text())


def read_own(folder: Path, rank: int) -> dict[str, Tensor]:
    """A rank's own tensors; none where it saved none."""
    path = folder / f"trajectories-{rank:05d}.safetensors"
    return load_file(path) if path.exists() else {}


class Own(Sequence):
    """Every saving rank's own tensors, read when they are asked for: a rank of an unchanged layout wants its own alone."""

    def __init__(self, folder: Path, ranks: int):
        self.folder, self.ranks = folder, range(ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rank: int) -> dict[str, Tensor]:
        return read_own(self.folder, self.ranks[rank])


class Shards:
    """The fragments of a checkpoint, whoever wrote them, readable by range.

    Raises:
        Damage: a file cannot be read as safetensors.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self.pieces: dict[str, list[tuple[int, int, Path]]] = {}  # key -> (start, end, file)
        self.numel: dict[str, int] = {}
        for path in sorted(folder.glob("state-*.safetensors")):
            try:
                file = self._open[path] = safe_open(path, "pt")
                places = json.loads(file.metadata()["places"])
                lengths = {key: file.get_slice(key).get_shape()[0] for key in places}
            except (SafetensorError, OSError, KeyError, TypeError, ValueError):
                raise Damage(f"{path} cannot be read") from None
            for key, (start, numel) in places.items():
                self.pieces.setdefault(key, []).append((start, start + lengths[key], path))
                self.numel[key] = numel

    @property
    def states(self) -> list[str]:
        """Names of the states that are there, the masters left out."""
        return sorted({key.rsplit("|", 1)[1] for key in self.numel} - {MASTER})

    def read(self, parameter: str, state: str, start: int, end: int) -> Tensor:
        """Elements ``start .. end`` of a flattened parameter's state, ``[end - start]``.

        Raises:
            Damage: the checkpoint does not have them all.
        """
        key, out, have = f"{parameter}|{state}", None, 0
        for first, last, path in self.pieces.get(key, []):
            low, high = max(start, first), min(end, last)
            if low < high:
                piece = self._open[path].get_slice(key)[low - first : high - first]
                out = piece.new_empty(end - start) if out is None else out
                out[low - start : high - start] = piece
                have += high - low
        if have != end - start:
            raise Damage(f"checkpoint {self.folder} lacks {end - start - have} elements of {state} of {parameter}")
        return torch.empty(0) if out is None else out
