"""LoRA mode: low-rank adapters on a frozen backbone, which with them is the student and without them the teacher.

What is trained, and all that a student on disk then holds, are the adapters and the bank of heads.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor, nn

from pdd.backbones import Backbone
from pdd.student import head_parameters


def targeted(transformer: nn.Module, backbone: Backbone, lora_targets: str) -> list[str]:
    """Names of the linears that get an adapter; never a last linear, whose bank is trained whole.

    Args:
        transformer: base or widened, with or without weights.
        lora_targets: the knob: ends of module names, separated by commas; empty for the family's own, of which a
            checkpoint need not have all.

    Raises:
        ValueError: one that names no linear; the line proposes near ones.
    """
    heads = [head.module for head in backbone.heads.values()]
    linears = [
        name for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and not any(f"{name}.".startswith(f"{head}.") for head in heads)
    ]  # fmt: skip
    wanted = [target.strip() for target in (lora_targets or backbone.lora_targets).split(",")]
    hits = {target: [name for name in linears if f".{name}".endswith(f".{target}")] for target in wanted}
    for target, names in hits.items():
        if lora_targets and not (target and names):
            # what tells linears of a block apart: the ends of their names, after the block's number
            ends = {".".join(name.split(".")[-i:]) for name in linears for i in (1, 2, 3)}
            near = difflib.get_close_matches(target, sorted(ends), 3, 0.0)
            raise ValueError(
                f"lora_targets names {target!r}, which is no linear but the heads; near are {', '.join(near)}"
            )
    chosen = {name for names in hits.values() for name in names}
    return [name for name in linears if name in chosen]


def add_adapters(
    transformer: nn.Module, backbone: Backbone, lora_targets: str, rank: int, alpha: int, seed: int
) -> None:
    """Put adapters, in place, on a widened transformer that keeps its base heads; they and the banks alone are trained.

    The up matrices are zero, so the student still equals its teacher; the down matrices are drawn from ``seed``.
    """
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targeted(transformer, backbone, lora_targets))
    on_meta = any(p.is_meta for p in transformer.parameters())
    with torch.random.fork_rng(devices=[]), torch.device("meta" if on_meta else "cpu"):
        torch.manual_seed(seed)
        transformer.add_adapter(config)
    for parameter in head_parameters(transformer):
        parameter.requires_grad_(True)
    transformer.eval()  # one backbone for both roles: dropout, if a checkpoint has any, would be the teacher's too


@dataclass
class Adapters:
    """The trained adapters of a student.

    Attributes:
        tensors: module -> (down ``[rank, in]``, up ``[out, rank]``); the module's weight moves by
            ``alpha / rank * up @ down``.
        rank, alpha: the knobs.
        targets: ``lora_targets``, the knob or what stood for it, separated by commas.
    """

    tensors: dict[str, tuple[Tensor, Tensor]]
    rank: int
    alpha: int
    targets: str

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], rank: int, alpha: int, targets: str) -> Adapters:
        """From tensors named as PEFT names them, ``<module>.lora_A.weight`` and ``<module>.lora_B.weight``.

        Raises:
            ValueError: one of a pair is missing.
        """
        modules = sorted({name.rsplit(".lora_", 1)[0] for name in weights})
        for module in modules:
            for name in (f"{module}.lora_A.weight", f"{module}.lora_B.weight"):
                if name not in weights:
                    raise ValueError(f"adapter tensor {name} is missing")
        pairs = {m: (weights[f"{m}.lora_A.weight"], weights[f"{m}.lora_B.weight"]) for m in modules}
        return cls(pairs, rank, alpha, targets)

    def named(self) -> dict[str, Tensor]:
        """The tensors under PEFT's names."""
        letters = {module: zip("AB", pair) for module, pair in self.tensors.items()}
        return {f"{m}.lora_{letter}.weight": tensor for m, pairs in letters.items() for letter, tensor in pairs}

    def config(self) -> dict[str, Any]:
        """PEFT's own description of them, as JSON."""
        config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=list(self.tensors)).to_dict()
        return {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}

    def check(self, transformer: nn.Module, backbone: Backbone) -> None:
        """Refuse adapters that are not whole, or not those of this transformer (base or widened).

        Raises:
            ValueError: one line that names the first wrong one.
        """
        expected = targeted(transformer, backbone, self.targets)
        for module in [*expected, *self.tensors]:
            if module not in self.tensors or module not in expected:
                place = "has none" if module not in self.tensors else "takes none"
                raise ValueError(f"adapters do not fit lora_targets {self.targets!r}: module {module} {place}")
            linear = transformer.get_submodule(module)
            shapes = [tuple(tensor.shape) for tensor in self.tensors[module]]
            wanted = [(self.rank, linear.in_features), (linear.out_features, self.rank)]
            if shapes != wanted:
                raise ValueError(f"adapters of module {module} have shapes {shapes}; needed are {wanted}")

    def merged(self, transformer: nn.Module) -> dict[str, Tensor]:
        """State dict of a base transformer with the adapters added, in float32 and rounded once to each weight's own dtype."""
        weights = transformer.state_dict()
        for module, (down, up) in self.tensors.items():
            weight = weights[f"{module}.weight"]
            moved = weight.float() + self.alpha / self.rank * (up.float() @ down.float())
            weights[f"{module}.weight"] = moved.to(weight.dtype)
        return weights


def trained_parts(
    transformer: nn.Module, backbone: Backbone, weights: dict[str, Tensor], lora_targets: str
) -> tuple[Adapters, dict[str, Tensor]]:
    """A run's trained weights as (adapters, heads: names of the base head's -> ``[N, ...]``).

    Args:
        transformer: with its adapters.
        weights: its trained parameters by name, whole.
    """
    config = transformer.peft_config["default"]
    adapters = get_peft_model_state_dict(transformer, state_dict=weights)
    heads = {}
    for head in backbone.heads.values():
        prefix = f"{head.module}.bank."
        heads |= {f"{head.module}.{n.removeprefix(prefix)}": w for n, w in weights.items() if n.startswith(prefix)}
    targets = lora_targets or backbone.lora_targets
    return Adapters.of(adapters, config.r, config.lora_alpha, targets), heads
