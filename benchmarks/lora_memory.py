"""Peak memory of a training run with adapters against a full one, each in a process of its own.

    python benchmarks/lora_memory.py                # a tiny model and one of 200 M parameters; --json prints one JSON object

A random Stable Diffusion 3 transformer is saved and distilled for two steps by train_pdd.py itself, one CPU rank, ZeRO-3,
float32. Counted is what a process has resident at most, beyond what it has once everything is imported.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path

from common import on_ranks, parser, show

SIZES = {"tiny": (2, 128), "large": (8, 832)}  # layers, width
RANK = 16


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="default: all")
    args = flags.parse_args(argv)
    figures = {}
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            count = on_ranks(build, 1, folder, *SIZES[size])
            peaks = {mode: on_ranks(measure, 1, folder, rank) for mode, rank in (("full", 0), ("lora", RANK))}
        figures[size] = {
            "parameters": count, "full_bytes": peaks["full"], "lora_bytes": peaks["lora"],
            "ratio": peaks["full"] / peaks["lora"],
        }  # fmt: skip
    if args.json:
        print(json.dumps(figures))
        return
    rows = [[size, *(f[k] / 2**20 for k in ("full_bytes", "lora_bytes")), f["ratio"]] for size, f in figures.items()]
    show("most resident memory of a rank", ["", "full, MiB", "adapters, MiB", "ratio"], rows)


def build(folder: str, layers: int, width: int) -> int:
    """Save a random teacher and one prompt's conditioning; the number of its parameters."""
    import torch
    from datasets import Dataset, disable_progress_bars
    from diffusers import SD3Transformer2DModel

    disable_progress_bars()
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=layers, attention_head_dim=64,
        num_attention_heads=width // 64, joint_attention_dim=64, caption_projection_dim=width,
        pooled_projection_dim=64, pos_embed_max_size=8,
    )  # fmt: skip
    transformer.save_pretrained(f"{folder}/transformer")
    row = {"prompt": ["a thing"], "prompt_embeds": torch.randn(1, 7, 64).tolist()}
    row |= {"pooled_prompt_embeds": torch.randn(1, 64).tolist()}
    row["prompt_embeds"] = [row["prompt_embeds"][0]]
    Dataset.from_dict(row).save_to_disk(f"{folder}/conditioning")
    return sum(p.numel() for p in transformer.parameters())


def measure(teacher: str, rank: int) -> int:
    """Train in this process: bytes that were resident at most beyond those at the start."""
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import diffusers  # noqa: F401

    import pdd.objective
    import pdd.validation  # noqa: F401
    import train_pdd

    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        recipe.write_text(
            f"teacher: {teacher}\npdd_steps: 8\nblock_size_min: 8\nblock_size_max: 8\nmax_train_steps: 2\n"
        )
        # the export is left out: it is rank 0's alone, and at its end
        flags = ["--lora_rank", str(rank), "--run", f"{folder}/run", "--stop_after", "2", "--max_train_steps", "3"]
        pdd.engine.Engine.save = lambda self, *args: None
        code = train_pdd.main(["--ds_config", "ds_configs/zero3.json", "--recipe", str(recipe), *flags])
    if code:
        sys.exit(code)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


if __name__ == "__main__":
    main()
