"""The families: which transformer class is which file's affair."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdd.backbones.base import EXPERTS, Backbone, Head, Size, State

# transformer class -> module and class here; a new family is one file and one line
REGISTRY = {
    "SD3Transformer2DModel": "sd3:SD3",
    "FluxTransformer2DModel": "flux:Flux",
    "QwenImageTransformer2DModel": "qwen_image:QwenImage",
    "QwenImage21Transformer2DModel": "qwen_image21:QwenImage21",
    "WanTransformer3DModel": "wan:Wan",
    "LTX2VideoTransformer3DModel": "ltx2:LTX2",
    "MiniMaxH3Transformer3DModel": "minimax_h3:MiniMaxH3",
}

# whose configurations a family may read, beside the transformer's
COMPONENTS = ("scheduler", "audio_scheduler", "vae", "audio_vae", "vocoder", "transformer_2", "connectors")


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


def backbone_for(configs: Mapping[str, dict[str, Any]], size: Size | None = None) -> Backbone:
    """The family of a transformer, by the class name that its configuration records.

    Args:
        configs: component of the pipeline -> its configuration; ``transformer`` must be there.
        size: what is to be made, where the checkpoint's default is not wanted.

    Raises:
        ValueError: no family here serves that class, or the size does not fit it.
    """
    name = configs["transformer"].get("_class_name")
    if name not in REGISTRY:
        raise ValueError(f"transformer class {name!r} is not supported; allowed are {', '.join(REGISTRY)}")
    module, cls = REGISTRY[name].split(":")
    family = getattr(importlib.import_module(f"pdd.backbones.{module}"), cls)
    return family(configs, size or Size())


def read_backbone(teacher_dir: Path, size: Size | None = None) -> Backbone:
    """The family of a teacher folder as Diffusers saves a pipeline; reads its small JSON files and no weights.

    Raises:
        ValueError: no such folder, no ``transformer/config.json`` in it, or an unknown family.
    """
    if not teacher_dir.is_dir():
        raise ValueError(f"teacher {str(teacher_dir)!r} is not a folder")
    configs = {"transformer": read_json(teacher_dir / "transformer" / "config.json")}
    for component in COMPONENTS:
        for name in ("config.json", "scheduler_config.json"):
            if (path := teacher_dir / component / name).exists():
                configs[component] = read_json(path)
    if (path := teacher_dir / "model_index.json").exists():
        configs["pipeline"] = {k: v for k, v in read_json(path).items() if k[0] != "_" and not isinstance(v, list)}
    return backbone_for(configs, size)


__all__ = ["EXPERTS", "REGISTRY", "Backbone", "Head", "Size", "State", "backbone_for", "read_backbone", "read_json"]
