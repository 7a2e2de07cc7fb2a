"""The families: which transformer class is which file's affair."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from pdd.backbones.base import Backbone, Head, State

# transformer class -> module and class here; a new family is one file and one line
REGISTRY = {
    "SD3Transformer2DModel": "sd3:SD3",
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint.

    Raises:
        ValueError: the file is missing or not a JSON object; one line that names it.
    """
    try:
        value = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ValueError(f"{path} cannot be read: {reason}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} cannot be read: it is not a JSON object")
    return value


def backbone_for(transformer_config: dict[str, Any], scheduler_config: dict[str, Any]) -> Backbone:
    """The family of a transformer, by the class name that its configuration records.

    Raises:
        ValueError: no family here serves that class.
    """
    name = transformer_config.get("_class_name")
    if name not in REGISTRY:
        raise ValueError(f"transformer class {name!r} is not supported; allowed are {', '.join(REGISTRY)}")
    module, cls = REGISTRY[name].split(":")
    family = getattr(importlib.import_module(f"pdd.backbones.{module}"), cls)
    return family(transformer_config, scheduler_config)


def read_backbone(teacher_dir: Path) -> Backbone:
    """The family of a teacher folder as Diffusers saves a pipeline; reads two small files and no weights.

    Raises:
        ValueError: no such folder, no ``transformer/config.json`` in it, or an unknown family.
    """
    if not teacher_dir.is_dir():
        raise ValueError(f"teacher {str(teacher_dir)!r} is not a folder")
    scheduler = teacher_dir / "scheduler" / "scheduler_config.json"
    return backbone_for(
        read_json(teacher_dir / "transformer" / "config.json"), read_json(scheduler) if scheduler.exists() else {}
    )


__all__ = ["REGISTRY", "Backbone", "Head", "State", "backbone_for", "read_backbone", "read_json"]
