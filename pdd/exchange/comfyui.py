"""ComfyUI, MiniMax-H3: adapters under its modules' names, and a bank on two axes: head 0, then offsets from it.

One file that its stock adapter loader takes: ``diffusion_model.<module>.lora_A.weight``, ``.lora_B.weight`` and ``.alpha``, and
``diffusion_model.final_layer.<modality>_out.set_weight`` and ``.set_bias``. A student that is a whole transformer comes as two
files, its trunk as a diffusion model and its bank as such an adapter; both are needed. There query, key and value are one linear,
and the halves of the feed-forward's first linear are exchanged. The grid starts at noise level 1.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pdd.backbones import Backbone
from pdd.exchange.base import (
    ALONE,
    DTYPES,
    HEAD_MAJOR,
    LAYOUT,
    OFFSETS,
    SHIFT,
    Options,
    Portable,
    base_backbone,
    checked,
    foreign,
    head_shapes,
    integer,
    metadata,
    number,
    read_file,
    require_grid,
    require_plain,
    shifts_of,
    skeleton,
    spoken,
    step_counts,
    unflatten,
    wanted_shifts,
)
from pdd.grid import Grid
from pdd.lora import Adapters, targeted

SUMMARY = "MiniMax-H3 for ComfyUI's own loaders: its names, a bank of head 0 and offsets"
BANK, TRUNK = "comfyui_pdd.safetensors", "comfyui_diffusion_model.safetensors"
HINT = (
    f"In ComfyUI: `{BANK}` through the stock adapter loader at strength 1, on the base model, or on `{TRUNK}` where that "
    "is here too; sampler euler, scheduler simple, CFG 1, the shifts below, and a number of steps whose blocks are all "
    "equally wide."
)
PREFIX = "diffusion_model."
# Diffusers' names -> ComfyUI's, by the start and by the end of a module's name
STARTS = {
    "transformer_blocks.": "blocks.",
    "token_refiner.refiner_blocks.": "token_refiner.blocks.",
    "audio_proj_in": "audio_patch_proj",
    "proj_in": "video_patch_proj",
    "context_embedder": "condition_proj",
    "time_embedder.linear_1": "time_embedder.proj_in",
    "time_embedder.linear_2": "time_embedder.proj_out",
    "norm_out.linear": "final_layer.adaln_proj.linear",
    "norm_out.norm": "final_layer.norm",
    "audio_proj_out": "final_layer.audio_out",
    "proj_out": "final_layer.video_out",
}
ENDS = {
    ".attn.to_out.0": ".attn.out_proj",
    ".attn.norm_q": ".attn.q_norm",
    ".attn.norm_k": ".attn.k_norm",
    ".ff.net.0.proj": ".mlp.fc1",
    ".ff.net.2": ".mlp.fc2",
}
QKV = ("to_q", "to_k", "to_v")
FUSED, SWAPPED = ".attn.qkv_proj", ".mlp.fc1"


def theirs(module: str) -> str:
    """ComfyUI's name of a module; ``to_q``, ``to_k`` and ``to_v`` all have that of the linear that they are part of."""
    module = re.sub(r"\.attn\.to_[qkv]$", FUSED, module)
    for start, name in STARTS.items():
        if module.startswith(start):
            module = name + module.removeprefix(start)
            break
    for end, name in ENDS.items():
        if module.endswith(end):
            module = module.removesuffix(end) + name
    return module


def exchanged(rows: Tensor) -> Tensor:
    """The two halves of the rows, exchanged: (value, gate) <-> (gate, value)."""
    return torch.cat(rows.chunk(2)[::-1])


def write(student: Portable, folder: Path, options: Options) -> None:
    """
    Raises:
        ValueError: another family, or another grid.
    """
    require_family(student.backbone)
    require_plain(student, "comfyui")
    facts, shifts = student.facts, shifts_of(student)
    require_grid(student, Grid(facts["pdd_steps"], shifts, 1.0), options, "comfyui", "grid_max_t 1.0 in training")
    own = {
        "adapter_type": "MiniMax-H3-PDD",
        LAYOUT: OFFSETS,
        "pdd_head_dtype": spelled(next(iter(student.heads.values())).dtype),
        "pdd_num_steps": facts["pdd_steps"],
        "pdd_block_size": facts["block_size_min"],
        "pdd_block_size_max": facts["block_size_max"],
        "grid_max_t": facts["grid_max_t"],
        "sampler_steps": list(step_counts(facts)),
        **{f"{SHIFT}{m}": shift for m, shift in shifts.items()},
    }
    tensors = {}
    for name, head in student.heads.items():
        module, _, kind = name.rpartition(".")
        tensors[f"{PREFIX}{theirs(module)}.set_{kind}"] = offsets(name, head)
    if student.adapters is not None:
        adapters = student.adapters
        own |= {"lora_rank": adapters.rank, "lora_alpha": float(adapters.alpha), "lora_targets": adapters.targets}
        for module, (down, up) in fused(adapters).items():
            alpha = float(adapters.alpha * len(down) // adapters.rank)
            tensors |= {
                f"{PREFIX}{module}.lora_A.weight": down.contiguous(),
                f"{PREFIX}{module}.lora_B.weight": up.contiguous(),
                f"{PREFIX}{module}.alpha": torch.tensor(alpha),
            }
    else:
        plain = student.trunk | {name: head[0] for name, head in student.heads.items()}
        save_file(to_comfyui(plain, student.backbone), folder / TRUNK, metadata(student, options, **own))
    save_file(tensors, folder / BANK, metadata(student, options, **own))


def require_family(backbone: Backbone) -> None:
    if type(backbone).__name__ != "MiniMaxH3":
        raise ValueError(
            f"the student is of {backbone.config['_class_name']}; comfyui allows MiniMaxH3Transformer3DModel"
        )


def spelled(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def offsets(name: str, head: Tensor) -> Tensor:
    """``[N, ...]`` -> head 0, then each other's offset from it, in the narrowest dtype from which all can be had back exactly."""
    for dtype in (torch.float32, torch.float64):
        wide = head.to(dtype)
        bank = torch.cat([wide[:1], wide[1:] - wide[:1]])
        if torch.equal(absolute(bank).to(head.dtype), head):
            return bank.flatten(0, 1)
    raise ValueError(f"tensor {name} has heads too far apart in size to be kept as offsets exactly")


def absolute(bank: Tensor) -> Tensor:
    return torch.cat([bank[:1], bank[:1] + bank[1:]])


def fused(adapters: Adapters) -> dict[str, tuple[Tensor, Tensor]]:
    """ComfyUI's module -> (down, up). Three adapters on one linear are one of three times the rank, block-diagonal."""
    groups: dict[str, list[tuple[Tensor, Tensor] | None]] = {}
    for module, pair in adapters.tensors.items():
        parent, _, name = module.rpartition(".")
        if name in QKV:
            groups.setdefault(f"{theirs(module)}", [adapters.tensors.get(f"{parent}.{n}") for n in QKV])
        else:
            down, up = pair
            groups[theirs(module)] = [(down, exchanged(up) if theirs(module).endswith(SWAPPED) else up)]
    merged = {}
    for module, pairs in groups.items():
        if len(pairs) == 1:
            merged[module] = pairs[0]
            continue
        rows = next(len(p[1]) for p in pairs if p)  # query, key and value are equally wide
        present = [(i, p) for i, p in enumerate(pairs) if p]
        up = present[0][1][1].new_zeros(3 * rows, sum(len(p[0]) for _, p in present))
        for column, (i, (down, part)) in enumerate(present):
            up[i * rows : (i + 1) * rows, column * len(down) : (column + 1) * len(down)] = part
        merged[module] = torch.cat([p[0] for _, p in present]), up
    return merged


def to_comfyui(weights: dict[str, Tensor], backbone: Backbone) -> dict[str, Tensor]:
    """A plain transformer's weights under ComfyUI's names."""
    out = {"rope.inv_freq": dict(skeleton(backbone).named_buffers())["rope.inv_freq"].clone()}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        key, last = f"{theirs(module)}.{kind}", module.rpartition(".")[2]
        if last in QKV:
            parts = [weights[f"{module.removesuffix(last)}{n}.{kind}"] for n in QKV]
            out[key] = torch.cat(parts)
        else:
            out[key] = exchanged(weight) if theirs(module).endswith(SWAPPED) else weight.contiguous()
    return out


def read(path: Path, options: Options) -> Portable:
    """
    Raises:
        ValueError: one line: another family, damage, a bank whose layout nobody says, a trunk alone, adapters of other ranks.
    """
    backbone = base_backbone(options, "comfyui")
    require_family(backbone)
    file = path / BANK if path.is_dir() else path
    tensors, header = read_file(file)
    said, where = spoken(header), str(file)
    for name in ("pdd_num_steps", "pdd_block_size"):
        if name not in said:
            raise ValueError(f"{where}: {name} is missing in its header")
    steps, block = (integer(said[name], name, where) for name in ("pdd_num_steps", "pdd_block_size"))
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    heads = read_bank(tensors, backbone, steps, said, options, where)
    widest = said.get("pdd_block_size_max", options.block_size_max or block)
    knobs = {
        "pdd_steps": steps,
        "block_size_min": block,
        "block_size_max": integer(widest, "pdd_block_size_max", where),
        "shift": wanted_shifts(backbone, options, said, where),
        "grid_max_t": number(said.get("grid_max_t", 1.0), "grid_max_t", where),
    }
    facts = foreign("comfyui", backbone, options, knobs, header.get("pdd_student"), where)
    if tensors:
        return checked(Portable(backbone, facts, heads, adapters=read_adapters(tensors, backbone, said, where)), where)
    if not (path.is_dir() and (path / TRUNK).exists()):
        raise ValueError(f"{where} is a bank alone; needed is the folder with its {TRUNK}")
    weights, _ = read_file(path / TRUNK)
    return checked(
        Portable(backbone, facts, heads, trunk=read_trunk(weights, backbone, str(path / TRUNK))), str(path / TRUNK)
    )


def read_bank(tensors, backbone: Backbone, steps: int, said, options: Options, where: str) -> dict[str, Tensor]:
    """Take the banks out of a file's tensors, as absolute heads."""
    layout = options.layout or said.get(LAYOUT)
    if layout not in (OFFSETS, HEAD_MAJOR) or said.get(LAYOUT, layout) != layout:
        raise ValueError(
            f"{where}: {LAYOUT} is {said.get(LAYOUT)!r} and layout is {options.layout!r}; its rows may be heads or offsets, "
            f"needed is one of {OFFSETS}, {HEAD_MAJOR}"
        )
    dtype = said.get("pdd_head_dtype")
    if dtype is not None and dtype not in list(DTYPES):
        raise ValueError(f"{where}: pdd_head_dtype is {dtype!r}; allowed are {', '.join(DTYPES)}")
    heads = {}
    for name, (n, out, *rest) in head_shapes(backbone, steps).items():
        module, _, kind = name.rpartition(".")
        key = f"{theirs(module)}.set_{kind}"
        if key not in tensors:
            raise ValueError(f"{where}: tensor {PREFIX}{key} is missing; {ALONE}")
        rows = tensors.pop(key)
        if tuple(rows.shape) != (n * out, *rest):
            raise ValueError(
                f"{where}: tensor {PREFIX}{key} has shape {list(rows.shape)}; needed is {[n * out, *rest]}"
            )
        bank = unflatten(rows, HEAD_MAJOR, steps)
        bank = absolute(bank) if layout == OFFSETS else bank
        heads[name] = bank if dtype is None else bank.to(DTYPES[dtype])
    return heads


def read_adapters(tensors: dict[str, Tensor], backbone: Backbone, said, where: str) -> Adapters:
    """Adapters under Diffusers' names, from those under ComfyUI's."""
    for name in ("lora_rank", "lora_alpha", "lora_targets"):
        if name not in said:
            raise ValueError(f"{where}: {name} is missing in its header")
    rank, alpha = integer(said["lora_rank"], "lora_rank", where), number(said["lora_alpha"], "lora_alpha", where)
    if alpha < 1 or alpha != int(alpha):
        raise ValueError(f"{where}: lora_alpha is {alpha}; allowed is a whole number of at least 1")
    groups: dict[str, list[str]] = {}
    try:
        for module in targeted(skeleton(backbone), backbone, str(said["lora_targets"])):
            groups.setdefault(theirs(module), []).append(module)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    pairs = {}
    for key, modules in groups.items():
        parts = {}
        for half in ("lora_A.weight", "lora_B.weight", "alpha"):
            if f"{key}.{half}" not in tensors:
                raise ValueError(f"{where}: tensor {PREFIX}{key}.{half} is missing")
            parts[half] = tensors.pop(f"{key}.{half}")
        down, up, scale = parts.values()
        if down.ndim != 2 or up.ndim != 2 or len(down) != rank * len(modules) or up.shape[1] != len(down):
            raise ValueError(
                f"{where}: adapters of {PREFIX}{key} have shapes {list(down.shape)} and {list(up.shape)}; needed is rank "
                f"{rank * len(modules)}"
            )
        if scale.numel() != 1 or float(scale) != alpha * len(modules):
            raise ValueError(
                f"{where}: tensor {PREFIX}{key}.alpha is {scale.flatten().tolist()}; needed is {alpha * len(modules)}"
            )
        if not key.endswith(FUSED):
            pairs[modules[0]] = (down, exchanged(up) if key.endswith(SWAPPED) else up)
            continue
        left, rows = up.clone(), up.shape[0] // 3
        for column, module in enumerate(modules):
            i = QKV.index(module.rpartition(".")[2])
            block = (slice(i * rows, (i + 1) * rows), slice(column * rank, (column + 1) * rank))
            pairs[module] = (down[block[1]].contiguous(), up[block].contiguous())
            left[block] = 0
        if bool(left.any()):
            raise ValueError(
                f"{where}: tensor {PREFIX}{key}.lora_B.weight is not block-diagonal; needed are adapters of {', '.join(QKV)}"
            )
    if tensors:
        raise ValueError(f"{where}: tensor {PREFIX}{next(iter(tensors))} is none of this student's")
    return Adapters(dict(sorted(pairs.items())), rank, int(alpha), str(said["lora_targets"]))


def read_trunk(weights: dict[str, Tensor], backbone: Backbone, where: str) -> dict[str, Tensor]:
    """A transformer's weights but for its heads under Diffusers' names, from those under ComfyUI's."""
    heads, found, used = head_shapes(backbone, 1), {}, {"rope.inv_freq"}
    for name in skeleton(backbone).state_dict():
        module, _, kind = name.rpartition(".")
        key, last = f"{theirs(module)}.{kind}", module.rpartition(".")[2]
        if key not in weights:
            raise ValueError(f"{where}: tensor {key} is missing")
        used.add(key)
        if name in heads:
            continue
        whole = weights[key]
        if last in QKV:
            found[name] = whole.chunk(3)[QKV.index(last)].contiguous()
        else:
            found[name] = exchanged(whole) if theirs(module).endswith(SWAPPED) else whole
    for key in weights:
        if key not in used:
            raise ValueError(f"{where}: tensor {key} is none of this student's")
    return found
