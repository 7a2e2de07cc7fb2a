"""The formats of other programs: which one is which file's affair."""

from __future__ import annotations

import importlib
from types import ModuleType

# name -> module here, with SUMMARY, write (a Portable to a new folder) and read (a path to a Portable); a format that goes
# one way only lacks the other function. A new format is one file and one line
REGISTRY = {
    "diffusers": "diffusers",
    "videox_fun": "videox_fun",
    "comfyui": "comfyui",
    "fastvideo": "fastvideo",
    "modelopt": "modelopt",
}


def format_of(name: str) -> ModuleType:
    return importlib.import_module(f"pdd.exchange.{REGISTRY[name]}")


def formats(function: str) -> list[str]:
    """Names of the formats that have ``write``, or ``read``."""
    return [name for name in REGISTRY if hasattr(format_of(name), function)]
