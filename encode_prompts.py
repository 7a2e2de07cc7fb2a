"""Encode prompts once, so that training needs no text encoder: prompts in, a conditioning dataset out.

    python encode_prompts.py --teacher PATH --prompts prompts.txt --out data/prompts
    python encode_prompts.py --teacher PATH --prompts captions.parquet --column caption --out data/prompts
    torchrun --nproc_per_node 8 encode_prompts.py --teacher PATH --prompts prompts.jsonl --out data/prompts   # shared among ranks

--prompts is a .txt (a line each), .jsonl, .csv or .parquet file, or a folder or name that ``datasets`` loads. The negative
and the empty prompt are added as rows of their own. An interrupted run goes on where it stopped; the dataset appears whole
or not at all. Beside it, pdd_encoding.json records the encoders, their revision, the padding and the precision: training
refuses a dataset made by other encoders.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from pdd.config import ConfigError, Parser, model_folder


def parser() -> Parser:
    flags = Parser(description=__doc__)
    flags.add_argument("--teacher", required=True, help="folder of the teacher, as Diffusers saves a pipeline")
    flags.add_argument("--prompts", required=True, help="file, folder or dataset name")
    flags.add_argument("--column", default="prompt", help="column of the prompts (default prompt)")
    flags.add_argument("--out", required=True, help="dataset folder to write")
    flags.add_argument("--negative_prompt", default="", help="negative prompt, for cfg_uncond negative_prompt")
    flags.add_argument("--max_sequence_length", type=int, help="tokens; the pipeline's default if not given")
    flags.add_argument("--batch", type=int, default=16, help="prompts per encoder call (default 16)")
    flags.add_argument("--part", type=int, default=512, help="prompts per resumable part (default 512)")
    flags.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="encoders' precision (default fp32)"
    )
    flags.add_argument("--device", help="torch device; the first accelerator, else the CPU")
    return flags


def main(argv: list[str]) -> int:
    try:
        encode(parser().parse_args(argv))
        return 0
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"encode_prompts.py: error: {error}", file=sys.stderr, flush=True)
        return 2


def read_prompts(source: str, column: str) -> list[str]:
    """Prompts of a file, folder or dataset name, in order.

    Raises:
        ConfigError: unreadable, no such column, or no prompt in it.
    """
    import datasets

    path, kinds = Path(source), {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    try:
        if path.suffix == ".txt":
            prompts = [line.strip() for line in path.read_text().splitlines()]
        else:
            if path.suffix in kinds:
                rows = datasets.load_dataset(kinds[path.suffix], data_files=str(path), split="train")
            elif path.is_dir():
                rows = datasets.load_from_disk(str(path))
            else:
                rows = datasets.load_dataset(source, split="train")
            if column not in rows.column_names:
                raise ConfigError(f"prompts {source!r} has no column {column!r}; it has {rows.column_names}")
            prompts = list(rows[column])
    except ConfigError:
        raise
    except Exception as error:  # each reader of datasets has its own
        raise ConfigError(f"prompts {source!r} cannot be read: {str(error).splitlines()[0]}") from None
    if bad := [i for i, prompt in enumerate(prompts) if not isinstance(prompt, str)]:
        raise ConfigError(
            f"prompts {source!r} row {bad[0]} of column {column!r} is {prompts[bad[0]]!r}; allowed is text"
        )
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise ConfigError(f"prompts {source!r} has no prompt in it")
    return prompts


def encode(args) -> None:
    import torch
    import torch.distributed as dist
    from datasets import Array2D, Dataset, Features, List, Value, concatenate_datasets
    from tqdm import tqdm

    from pdd.backbones import Backbone, read_backbone
    from pdd.data import ENCODING, encoder_fingerprint
    from pdd.formats import text_pipeline
    from pdd.run import write_json

    out = Path(args.out)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for name in ("batch", "part"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} is {getattr(args, name)}; allowed is 1 or more")
    if out.exists():
        raise ConfigError(f"out {args.out!r} exists; allowed is a new folder")
    try:
        backbone = read_backbone(model_folder(args.teacher))
        length = backbone.max_sequence_length if args.max_sequence_length is None else args.max_sequence_length
        backbone.check_prompt_length(length)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if type(backbone).encode_prompts is Backbone.encode_prompts:
        raise ConfigError(
            f"teacher {args.teacher!r} is {type(backbone).__name__}, whose prompts cannot be encoded here yet; its dataset "
            f"needs the columns prompt, {', '.join(backbone.columns)}"
        )
    prompts = list(dict.fromkeys(["", args.negative_prompt])) + read_prompts(args.prompts, args.column)
    teacher = model_folder(args.teacher, *(f"{name}*/*" for name in backbone.encoders))
    facts = {
        "teacher": args.teacher,
        "revision": teacher.name if teacher.parent.name == "snapshots" else None,  # a hub's commit
        "encoders": encoder_fingerprint(teacher, backbone.encoders),
        "padding": {"max_sequence_length": length, "side": backbone.padding_side},
        "dtype": args.dtype,
        "negative_prompt": args.negative_prompt,
    }
    if not facts["encoders"]:
        raise ConfigError(f"teacher {args.teacher!r} has no text encoders; allowed is a folder with text_encoder/")
    if world > 1:
        dist.init_process_group("gloo")

    # parts of an earlier try go on only if they are of the same prompts by the same encoders
    parts = out.with_name(out.name + ".parts")
    address = {**facts, "prompts": prompts, "part": args.part}
    if rank == 0:
        same = (parts / "of.json").exists() and (parts / "of.json").read_text() == _text(address)
        if parts.exists() and not same:
            shutil.rmtree(parts)
        parts.mkdir(parents=True, exist_ok=True)
        (parts / "of.json").write_text(_text(address))
    if world > 1:
        dist.barrier()

    starts = range(0, len(prompts), args.part)
    mine = [start for start in starts[rank::world] if not (parts / f"{start:09d}.parquet").exists()]
    if mine:
        device = args.device or (
            str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
        )
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
        pipe = text_pipeline(teacher, backbone.encoders, dtype, device)
        for start in tqdm(mine, disable=rank != 0, unit="part"):
            chunk, columns = prompts[start : start + args.part], []
            for i in range(0, len(chunk), args.batch):
                try:
                    with torch.no_grad():
                        columns.append(backbone.encode_prompts(pipe, chunk[i : i + args.batch], length))
                except ValueError as error:
                    raise ConfigError(" ".join(str(error).split())) from None
            tensors = {c: torch.cat([part[c] for part in columns]).cpu() for c in backbone.columns}
            # masks stay integers: transformers want them so, and families read lengths from them
            tensors = {c: t.float() if t.is_floating_point() else t.long() for c, t in tensors.items()}
            kinds = {1: lambda s, d: List(Value(d)), 2: Array2D}
            features = {c: kinds[t.ndim - 1](tuple(t.shape[1:]), str(t.numpy().dtype)) for c, t in tensors.items()}
            rows = {"prompt": chunk, **{c: list(t.numpy()) for c, t in tensors.items()}}
            dataset = Dataset.from_dict(rows, features=Features({"prompt": Value("string"), **features}))
            unfinished = parts / f"{start:09d}.tmp"
            dataset.to_parquet(unfinished)
            os.replace(unfinished, parts / f"{start:09d}.parquet")
    if world > 1:
        dist.barrier()
    if rank == 0:
        saving = out.with_name(out.name + ".saving")
        shutil.rmtree(saving, ignore_errors=True)
        whole = concatenate_datasets([Dataset.from_parquet(str(parts / f"{start:09d}.parquet")) for start in starts])
        whole.save_to_disk(str(saving))
        write_json(saving / ENCODING, facts)
        os.rename(saving, out)
        shutil.rmtree(parts)
        print(f"{len(whole)} prompts encoded into {out}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _text(value: object) -> str:
    import json

    return json.dumps(value, sort_keys=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
