"""Tables of prompts, and of the media that belong to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from pdd.config import ConfigError, model_folder

KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # suffix -> reader of datasets


def is_table(path: str) -> bool:
    """Does the name say that these are prompts, not a dataset of their conditioning?"""
    return Path(path).suffix in (".txt", *KINDS) and not Path(path).is_dir()


def encoded_folder(parent: Path, teacher: str, prompts: list[str], negative_prompt: str, length: int | None) -> Path:
    """Where :func:`encode_prompts.encoded` keeps these prompts' conditioning, by this teacher's encoders."""
    folder = model_folder(teacher)
    configs = [path.read_text() for path in sorted(folder.glob("text_encoder*/config.json"))]
    address = json.dumps([str(folder.resolve()), configs, prompts, negative_prompt, length])
    return parent.resolve() / "encoded" / hashlib.sha256(address.encode()).hexdigest()[:16]


def read_rows(source: str, column: str, media: Sequence[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Prompts of a file, folder or dataset name, in order, and the files of each: ``media`` column -> path or contents.

    Raises:
        ConfigError: unreadable, no such column, no prompt in it, or a row without the first of its ``media``.
    """
    import datasets

    path = Path(source)
    try:
        if path.suffix == ".txt":
            rows = datasets.Dataset.from_dict({column: [line.strip() for line in path.read_text().splitlines()]})
        elif path.suffix in KINDS:
            rows = datasets.load_dataset(KINDS[path.suffix], data_files=str(path), split="train")
        elif (path / "state.json").exists():
            rows = datasets.load_from_disk(str(path))
        else:
            rows = datasets.load_dataset(source, split="train")
        for needed in (column, *media[:1]):
            if needed not in rows.column_names:
                raise ConfigError(f"prompts {source!r} has no column {needed!r}; it has {rows.column_names}")
        media = [name for name in media if name in rows.column_names]
        for name in media:
            if hasattr(rows.features[name], "decode"):  # pictures, say, inside of the dataset: wanted as files
                rows = rows.cast_column(name, type(rows.features[name])(decode=False))
        prompts, files = list(rows[column]), {name: list(rows[name]) for name in media}
    except ConfigError:
        raise
    except Exception as error:  # each reader of datasets has its own
        raise ConfigError(f"prompts {source!r} cannot be read: {str(error).splitlines()[0]}") from None
    if bad := [i for i, prompt in enumerate(prompts) if not isinstance(prompt, str)]:
        raise ConfigError(
            f"prompts {source!r} row {bad[0]} of column {column!r} is {prompts[bad[0]]!r}; allowed is text"
        )
    folder, found = path if path.is_dir() else path.parent, []
    for i, prompt in enumerate(prompts):
        if prompt.strip():
            named = {name: _file(values[i], folder) for name, values in files.items()}
            if media and named[media[0]] is None:
                raise ConfigError(f"prompts {source!r} row {i} names no file in column {media[0]!r}")
            found.append((prompt, {name: file for name, file in named.items() if file is not None}))
    if not found:
        raise ConfigError(f"prompts {source!r} has no prompt in it")
    return found


def _file(value: Any, folder: Path) -> Any:
    """A media column's cell as what can be opened; None where it is empty."""
    if isinstance(value, dict):
        return BytesIO(value["bytes"]) if value.get("bytes") else value.get("path")
    return str(folder / value) if value else None
