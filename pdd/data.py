"""Datasets: conditioning rows, and real latents where a regime needs them, read from disk by memory map."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, DatasetDict, load_from_disk
from torch import Tensor

from pdd.backbones import Backbone, read_json
from pdd.backbones.base import State
from pdd.buckets import size_of
from pdd.config import Config, ConfigError, unknown
from pdd.draws import Grouped

ENCODING = "pdd_encoding.json"  # beside a dataset: what encoded it


WEIGHTS = (".safetensors", ".bin")


def encoder_fingerprint(teacher_dir: Path, encoders: tuple[str, ...]) -> dict[str, dict[str, str | None]]:
    """What encodes prompts in a pipeline's folder.

    Args:
        encoders: the family's, see :class:`Backbone`.

    Returns:
        Component -> ``class``, ``files`` (hash of its JSON files: configuration and vocabulary) and ``weights`` (hash of
        their files' sizes and ends: reading all of a large encoder would take minutes), None where it has none here.
    """
    index = read_json(teacher_dir / "model_index.json") if (teacher_dir / "model_index.json").exists() else {}
    found = {}
    for folder in sorted(p for p in teacher_dir.iterdir() if p.is_dir() and p.name.startswith(encoders)):
        texts, weights = hashlib.sha256(), hashlib.sha256()
        files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS)
        for path in sorted(folder.glob("*.json")):
            texts.update(path.name.encode() + path.read_bytes())
        for path in files:
            weights.update(f"{path.name} {path.stat().st_size}".encode())
            with open(path, "rb") as file:
                weights.update(file.read(2**20))
                file.seek(max(path.stat().st_size - 2**20, 0))
                weights.update(file.read())
        found[folder.name] = {
            "class": (index.get(folder.name) or [None, None])[1],
            "files": texts.hexdigest()[:16],
            "weights": weights.hexdigest()[:16] if files else None,
        }
    return found if any(name.startswith("text_encoder") for name in found) else {}


def check_encoding(path: Path, teacher_dir: Path, encoders: tuple[str, ...]) -> None:
    """Refuse a dataset that other encoders made; without a record of them, or without them, nothing is known.

    Raises:
        ConfigError: an encoder differs.
    """
    if not (path / ENCODING).exists():
        return
    made = read_json(path / ENCODING).get("encoders", {})
    for name, here in encoder_fingerprint(teacher_dir, encoders).items():
        there = made.get(name, {})
        # a teacher fetched from a hub for training has its encoders' JSON files alone
        known = [key for key in ("files", "weights") if here[key] is not None]
        if any(there.get(key) != here[key] for key in known):
            raise ConfigError(
                f"data {str(path)!r} was encoded by another {name} than that of teacher {str(teacher_dir)!r}; encode it "
                "again with encode_prompts.py"
            )


class Rows:
    """The dataset of a run: which prompts are trained on, and their conditioning.

    A row has a ``prompt``, the family's conditioning columns and, where they are read, its latent columns. Rows of the
    empty and of the negative prompt are there to be looked up, not to be trained on. An optional boolean column
    ``<latents>_mask`` marks the valid elements of padded latents. A ``bucket`` column says that latents have several shapes:
    then they are flat, their shapes are in ``<latents>_shape``, and a row without a bucket has none.

    Args:
        config: the knobs that name the folder, the regime, the expert, the seed and the negative prompt.
        backbone: the family that says which columns.

    Raises:
        ConfigError: no dataset there, columns missing, prompt-only data where latents are needed, nothing to train on.
    """

    def __init__(self, config: Config, backbone: Backbone):
        self.path, self.backbone = config.data_dir, backbone
        self.dataset = open_dataset(self.path)
        check_encoding(self.path, config.teacher_dir, backbone.encoders)
        needed = ["prompt", *backbone.columns]
        missing = [c for c in needed if c not in self.dataset.column_names]
        if missing:
            raise ConfigError(
                f"data {str(self.path)!r} lacks the columns {missing}; it has {self.dataset.column_names}, needed are {needed}"
            )
        latent_columns = backbone.latent_columns
        self.has_latents = all(c in self.dataset.column_names for c in latent_columns.values())
        if config.rollout_mode == "data_latent" and not self.has_latents:
            raise ConfigError(
                f"rollout_mode is 'data_latent' but data {str(self.path)!r} has no {list(latent_columns.values())}; allowed is "
                "rollout_mode simulate, or data with latents"
            )
        reads_latents = config.rollout_mode == "data_latent" or (config.starts_at_boundary and self.has_latents)
        self.masks = {m: f"{c}_mask" for m, c in latent_columns.items() if f"{c}_mask" in self.dataset.column_names}
        self.prompts: list[str] = list(self.dataset["prompt"])
        aside = {"", config.negative_prompt}
        self.trained = [i for i, prompt in enumerate(self.prompts) if prompt not in aside]
        self.buckets: list[str] = []  # of every row; none where all latents have one shape
        if config.rollout_mode == "data_latent" and "bucket" in self.dataset.column_names:
            self.buckets = list(self.dataset["bucket"])
            self.trained = [i for i in self.trained if self.buckets[i]]
        if not self.trained:
            raise ConfigError(
                f"data {str(self.path)!r} has no prompt to train on; needed is at least one that is not empty"
            )
        for prompt in config.prompt_repeats:
            if prompt not in self.prompts:
                raise unknown(f"prompt_repeats: prompt of data {str(self.path)!r}", prompt, self.prompts)
        times = [config.prompt_repeats.get(self.prompts[i], 1) for i in self.trained]
        self._pass = torch.tensor(self.trained).repeat_interleave(torch.tensor(times))
        kinds = {name: kind for kind, name in enumerate(sorted({self._bucket(i) for i in self.trained}))}
        self._shuffle = Grouped(torch.tensor([kinds[self._bucket(i)] for i in self._pass.tolist()]), config.seed)
        self._views: dict[tuple[str, ...], Dataset] = {}
        of_one_shape = latent_columns if reads_latents and not self.buckets else {}
        columns = [*backbone.columns, *of_one_shape.values()]
        self._check_columns(columns)
        if of_one_shape:
            self.latent_shapes = {m: tuple(self._view(c)[self.trained[0]][c].shape) for m, c in latent_columns.items()}
            self._check_channels()
        else:
            try:
                self.latent_shapes = backbone.latent_shapes()
            except ValueError as error:
                raise ConfigError(str(error)) from None
        try:
            if self.buckets:
                self._check_buckets(config)
        except ConfigError:
            raise
        except ValueError as error:  # a size that the teacher cannot make
            raise ConfigError(f"data {str(self.path)!r}: {error}") from None
        # what is read later is looked at then
        self._read(torch.tensor(self.trained[:16]), columns, "cpu")

    def _check_columns(self, columns: list[str]) -> None:
        """Are they numbers, of one shape in all rows? Lengths are read from the table's own offsets, not from its values."""
        for column in columns:
            name = f"data {str(self.path)!r}: column {column!r}"
            value = self._view(column)[self.trained[0]][column]
            if not torch.is_tensor(value):
                raise ConfigError(
                    f"{name} is {self.dataset.features[column]}; allowed are numbers of one shape in all rows"
                )
            arrays = self.dataset.data.column(column).chunks
            while arrays and pa.types.is_list(arrays[0].type):
                lengths = {n for a in arrays for n in pc.unique(pc.list_value_length(a)).to_pylist() if n is not None}
                if len(lengths) > 1:
                    raise ConfigError(f"{name} has lengths {sorted(lengths)[:5]}; allowed is one shape in all rows")
                arrays = [array.flatten() for array in arrays]

    def _check_channels(self) -> None:
        try:
            wanted = self.backbone.latent_shapes()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for m, shape in self.latent_shapes.items():
            if len(shape) != len(wanted[m]) or shape[0] != wanted[m][0]:
                column = self.backbone.latent_columns[m]
                raise ConfigError(
                    f"data {str(self.path)!r}: column {column!r} has latents of shape {list(shape)}; allowed are such as "
                    f"{list(wanted[m])}, with {wanted[m][0]} channels"
                )

    def _bucket(self, row: int) -> str:
        return self.buckets[row] if self.buckets else ""

    def _check_buckets(self, config: Config) -> None:
        """Are the buckets this teacher's, and so near to the run's own size that one grid and shift serve all?"""
        name, latents = f"data {str(self.path)!r}", [f"{c}_shape" for c in self.backbone.latent_columns.values()]
        record = read_json(self.path / ENCODING) if (self.path / ENCODING).exists() else {}
        if sizes := record.get("media", {}).get("buckets"):
            if all(self.backbone.at(size_of(size)).latent_shapes() != self.latent_shapes for size in sizes):
                wanted = ", ".join(f"{knob} {value}" for knob, value in vars(config.size).items())
                raise ConfigError(f"size is {wanted}; allowed by {name} are {', '.join(sizes)}")
        given = config.shift if isinstance(config.shift, dict) else {}
        free = [m for m in self.backbone.heads if m not in given and not isinstance(config.shift, float)]
        own = self.backbone.shifts()
        for bucket in sorted({self.buckets[i] for i in self.trained}):
            row = self.dataset.select_columns(latents)[self.buckets.index(bucket)]
            there = self.backbone.at(size_of(bucket))
            if [tuple(row[c]) for c in latents] != list(there.latent_shapes().values()):
                raise ConfigError(
                    f"{name} has latents of shape {list(row.values())} in bucket {bucket}, where the teacher's are "
                    f"{list(there.latent_shapes().values())}; encode it again with encode_prompts.py"
                )
            for m in free:
                if abs(there.shifts()[m] / own[m] - 1) > 0.1:
                    raise ConfigError(
                        f"shift is not given, and is {there.shifts()[m]:.2f} in bucket {bucket} of {name} by the teacher's "
                        f"scheduler, but {own[m]:.2f} at the run's size; allowed is one shift for all"
                    )

    def shuffled(self, serials: Tensor, group: int) -> Tensor:
        """Rows of the samples with these serial numbers ``[B]``: an endless shuffled pass over the trained rows.

        Args:
            group: samples of the global batch; all of one are of one bucket, so that any micro-batch has one shape.
        """
        return self._pass[[self._shuffle.at(i, group) for i in serials.tolist()]]

    def cond(self, indices: Tensor, device: torch.device | str) -> dict[str, Tensor]:
        """Conditioning of rows, column -> ``[B, ...]``."""
        return self._read(indices, list(self.backbone.columns), device)

    def latents(self, indices: Tensor, device: torch.device | str) -> State:
        """Real latents of rows, modality -> ``[B, ...]``."""
        columns = self.backbone.latent_columns
        if self.buckets:
            shapes = self.dataset.select_columns([f"{c}_shape" for c in columns.values()])[int(indices[0])]
        read = self._read(indices, list(columns.values()), device)
        return {m: read[c].view(-1, *shapes[f"{c}_shape"]) if self.buckets else read[c] for m, c in columns.items()}

    def mask(self, indices: Tensor, device: torch.device | str) -> State | None:
        """Validity of latents, modality -> ``[B, ...]``; None when the data has no mask."""
        if not self.masks:
            return None
        read = self._read(indices, list(self.masks.values()), device)
        return {m: read[c] for m, c in self.masks.items()}

    def look_up_in(self, path: Path) -> None:
        """Take prompts and conditioning from another dataset of the same encoders; latents are not to be asked for then."""
        self.path, self.dataset = path, open_dataset(path)
        self.prompts, self._views = list(self.dataset["prompt"]), {}

    def row_of(self, prompt: str) -> Tensor:
        """:meth:`find` as indices ``[1]``."""
        return torch.tensor([self.find(prompt)])

    def find(self, prompt: str) -> int:
        """Row of a prompt.

        Raises:
            KeyError: no row has it.
        """
        try:
            return self.prompts.index(prompt)
        except ValueError:
            raise KeyError(prompt) from None

    def _read(self, indices: Tensor, columns: list[str], device: torch.device | str) -> dict[str, Tensor]:
        batch = self._view(*columns)[indices.tolist()]
        for c in columns:
            if not bool(batch[c].isfinite().all()):
                row = next(i for i, value in zip(indices.tolist(), batch[c]) if not bool(value.isfinite().all()))
                raise ConfigError(
                    f"data {str(self.path)!r}: column {c!r} of row {row} has a number that is not finite",
                    everywhere=False,
                )
        return {c: batch[c].to(device, non_blocking=True) for c in columns}

    def _view(self, *columns: str) -> Dataset:
        """The dataset with these columns alone, as tensors; kept, for making it takes longer than reading rows."""
        if columns not in self._views:
            self._views[columns] = self.dataset.select_columns(list(columns)).with_format("torch")
        return self._views[columns]


def open_dataset(path: Path) -> Dataset:
    """A dataset folder as ``datasets.save_to_disk`` writes it.

    Raises:
        ConfigError: it is not one.
    """
    if not path.is_dir():
        raise ConfigError(f"data {str(path)!r} is not a folder; allowed is one that datasets.save_to_disk wrote")
    try:
        dataset = load_from_disk(str(path))
    except Exception as error:  # damaged Arrow files raise whatever pyarrow does
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"data {str(path)!r} cannot be read as a dataset: {reason}") from None
    if isinstance(dataset, DatasetDict):
        raise ConfigError(
            f"data {str(path)!r} has splits {list(dataset)}; allowed is one dataset, such as one of those folders"
        )
    return dataset
