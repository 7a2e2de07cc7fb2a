"""Peak memory of a training run with adapters against a full one, each in a process of its own.

    python benchmarks/lora_memory.py                # a tiny model and one of 200 M parameters; --json prints one JSON object

A random Stable Diffusion 3 transformer is saved and distilled for two steps by train_pdd.py itself, one CPU rank, ZeRO-3,
float32. Counted is what a process has resident at most, beyond what it has once everything is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIZES = {"tiny": (2, 128), "large": (8, 832)}  # layers, width
RANK = 16


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_argument("--run", nargs=2, metavar=("TEACHER", "LORA_RANK"), help=argparse.SUPPRESS)  # one measurement
    args = flags.parse_args()
    if args.run:
        return measure(*args.run)
    figures = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            call = [sys.executable, "-c", f"import lora_memory; lora_memory.build({folder!r}, *{SIZES[size]!r})"]
            count = int(subprocess.run(call, cwd=ROOT / "benchmarks", check=True, stdout=subprocess.PIPE).stdout)
            peaks = {}
            for mode, rank in (("full", 0), ("lora", RANK)):
                command = [sys.executable, __file__, "--run", folder, str(rank)]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                peaks[mode] = json.loads(done.stdout.splitlines()[-1])
        figures[size] = {
            "parameters": count, "full_bytes": peaks["full"], "lora_bytes": peaks["lora"],
            "ratio": peaks["full"] / peaks["lora"],
        }  # fmt: skip
    if args.json:
        print(json.dumps(figures))
        return
    print(f"{'':<8}{'parameters':>14}{'full':>12}{'LoRA':>12}{'ratio':>8}")
    for size, f in figures.items():
        peaks = "".join(f"{f[k] / 2**20:>8.0f} MiB" for k in ("full_bytes", "lora_bytes"))
        print(f"{size:<8}{f['parameters']:>14,}{peaks}{f['ratio']:>8.2f}")


def build(folder: str, layers: int, width: int) -> None:
    """Save a random teacher and one prompt's conditioning; prints the number of parameters."""
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
    print(sum(p.numel() for p in transformer.parameters()))


def measure(teacher: str, rank: str) -> None:
    """Train in this process and print, last, the bytes that were resident at most beyond those at the start."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    os.chdir(ROOT)
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
        flags = ["--lora_rank", rank, "--run", f"{folder}/run", "--stop_after", "2", "--max_train_steps", "3"]
        pdd.engine.Engine.save = lambda self, *args: None
        code = train_pdd.main(["--ds_config", "ds_configs/zero3.json", "--recipe", str(recipe), *flags])
    if code:
        sys.exit(code)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


if __name__ == "__main__":
    main()
