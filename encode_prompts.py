"""Encode prompts once, so that training needs no text encoder: prompts in, a conditioning dataset out.

    python encode_prompts.py --teacher PATH --prompts prompts.txt --out data/prompts
    python encode_prompts.py --teacher PATH --prompts captions.parquet --column caption --out data/prompts
    torchrun --nproc_per_node 8 encode_prompts.py --teacher PATH --prompts prompts.jsonl --out data/prompts   # shared among ranks
    python encode_prompts.py --teacher PATH --prompts clips.jsonl --media --height 480 --width 832 --num_frames 81 --out data/x

--prompts is a .txt (a line each), .jsonl, .csv or .parquet file, or a folder or name that ``datasets`` loads. The negative
and the empty prompt are added as rows of their own. An interrupted run goes on where it stopped; the dataset appears whole
or not at all. Beside it, pdd_encoding.json records the encoders, their revision, the padding and the precision: training
refuses a dataset made by other encoders.

With --media the files that the columns image, or video and audio, name (relative to the table) go through the checkpoint's
own autoencoders, for rollout_mode data_latent: resized and cut to the nearest of several aspect ratios of about
height x width pixels. What is unreadable, too short or too small is left out, and said.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import sys
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

from pdd.config import ConfigError, Parser, model_folder, status_of
from pdd.prompts import encoded_folder, read_rows


def parser() -> Parser:
    flags = Parser(description=__doc__)
    flags.add_argument("--teacher", required=True, help="folder of the teacher, as Diffusers saves a pipeline")
    flags.add_argument("--prompts", required=True, help="file, folder or dataset name")
    flags.add_argument("--column", default="prompt", help="column of the prompts (default prompt)")
    flags.add_argument("--out", required=True, help="dataset folder to write")
    flags.add_argument("--negative_prompt", default="", help="negative prompt, for cfg_uncond negative_prompt")
    flags.add_argument("--max_sequence_length", type=int, help="tokens; the pipeline's default if not given")
    media = flags.add_argument_group("media")
    media.add_argument("--media", action="store_true", help="encode images, or videos and their sound, too")
    media.add_argument("--height", type=int, help="pixels; with width, the area of what media are resized to")
    media.add_argument("--width", type=int, help="pixels")
    media.add_argument("--num_frames", type=int, help="frames of the longest videos, at the family's frame rate")
    media.add_argument("--min_frames", type=int, help="frames of the shortest videos; num_frames if not given")
    media.add_argument(
        "--buckets", type=int, default=7, help="aspect ratios from 1:2 to 2:1 beside height x width (default 7)"
    )
    media.add_argument(
        "--max_enlarge", type=float, default=1.0, help="drop what must be enlarged by more than this (default 1)"
    )
    flags.add_argument("--batch", type=int, default=16, help="prompts per encoder call (default 16)")
    flags.add_argument("--part", type=int, default=512, help="prompts per resumable part (default 512)")
    flags.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="encoders' precision (default fp32)"
    )
    flags.add_argument("--device", help="torch device; the first accelerator, else the CPU")
    return flags


def main(argv: list[str]) -> int:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return status_of("encode_prompts.py", lambda: encode(parser().parse_args(argv), rank, world))


def encoded(
    parent: Path, teacher: str, prompts: list[str], negative_prompt: str, length: int | None, *flags: str
) -> Path:
    """A dataset of a few prompts, encoded now unless it was before: a folder in ``parent`` named after what is in it.

    Args:
        length: tokens; None is the pipeline's default.
        flags: more of this script's.

    Raises:
        ConfigError: the teacher cannot encode them.
    """
    import torch

    out = encoded_folder(parent, teacher, prompts, negative_prompt, length)
    if not out.is_dir():
        words = ["--teacher", teacher, "--prompts", "", "--out", str(out), "--negative_prompt", negative_prompt, *flags]
        words += [] if length is None else ["--max_sequence_length", str(length)]
        print(f"encoding {len(prompts)} prompts into {out}", flush=True)
        encode(parser().parse_args(words), rows=[(prompt, {}) for prompt in prompts])
        gc.collect()  # the text encoders
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
    return out


def media_buckets(args, backbone) -> list:
    """Sizes that the flags let media be resized to.

    Raises:
        ConfigError: a flag that is missing or does not fit, or a teacher without autoencoder.
    """
    from pdd.backbones import Size
    from pdd.buckets import aspect_buckets

    for name in ("vae", "audio_vae") if "audio" in backbone.modalities else ("vae",):
        if name not in backbone.configs:
            raise ConfigError(f"media is given but teacher {args.teacher!r} has no {name}/; allowed is one that has")
    videos = backbone.frame_rate > 0
    for name in ("height", "width", "num_frames") if videos else ("height", "width"):
        if getattr(args, name) is None:
            raise ConfigError(f"{name} is not given; with --media allowed is what will be trained at")
    shortest = args.num_frames if args.min_frames is None else args.min_frames
    for name, fine, allowed in (
        ("buckets", args.buckets >= 0, "0 or more"),
        ("max_enlarge", args.max_enlarge > 0, "more than 0"),
        ("min_frames", not videos or 0 < shortest <= args.num_frames, f"1 to num_frames {args.num_frames}"),
    ):
        if not fine:
            raise ConfigError(f"{name} is {getattr(args, name)}; allowed is {allowed}")
    try:
        return aspect_buckets(
            backbone, Size(args.height, args.width, args.num_frames if videos else None), args.buckets
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def encode_files(encoder, files: list[dict[str, Any]], latent_columns: dict[str, str]) -> dict[str, list]:
    """Latents of rows as columns: flat, beside their shapes, since these differ; ``bucket``, and why a row is ``dropped``."""
    from pdd.buckets import Dropped

    columns: dict[str, list] = {"bucket": [], "dropped": []}
    for row in files:
        bucket, latents, why = "", {}, ""
        if row:  # the empty and the negative prompt have no media
            try:
                bucket, latents = encoder(row)
            except Dropped as reason:
                why = str(reason)
        columns["bucket"].append(bucket)
        columns["dropped"].append(why)
        for modality, column in latent_columns.items():
            made = latents.get(modality)
            columns.setdefault(column, []).append([] if made is None else made.flatten().numpy())
            columns.setdefault(f"{column}_shape", []).append([] if made is None else list(made.shape))
    return columns


def bucket_report(backbone, buckets: list[str], dropped: list[tuple[str, str]]) -> str:
    """Rows and transformer tokens of every bucket, and what was left out."""
    from pdd.buckets import size_of

    count, lines = Counter(bucket for bucket in buckets if bucket), []
    for name, rows in sorted(count.items(), key=lambda item: sum(backbone.at(size_of(item[0])).tokens().values())):
        tokens = backbone.at(size_of(name)).tokens()
        lines.append(f"{name:>14} {rows:>8} rows  " + "  ".join(f"{n} {m} tokens" for m, n in tokens.items()))
    for kind, rows in Counter(why.split(":")[0] for _, why in dropped).items():
        row, why = next(pair for pair in dropped if pair[1].startswith(kind))
        lines.append(f"{'dropped':>14} {rows:>8} {kind}, the first {row}: {why.partition(': ')[2]}")
    return "\n".join(lines)


def encode(args, rank: int = 0, world: int = 1, rows: list | None = None) -> None:
    """Write the dataset that the flags describe, this rank's share of it.

    Args:
        rows: prompts and their files, in the place of those that ``prompts`` names.

    Raises:
        ConfigError: bad flags, unreadable prompts, a teacher that cannot encode.
    """
    import torch
    import torch.distributed as dist
    from datasets import Array2D, Dataset, Features, List, Value, concatenate_datasets
    from tqdm import tqdm

    from pdd.backbones import Backbone, read_backbone
    from pdd.buckets import MediaEncoder, name_of
    from pdd.data import ENCODING, encoder_fingerprint
    from pdd.formats import PRECISIONS, load_autoencoders, text_pipeline
    from pdd.run import own_device, write_json

    out = Path(args.out)
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
    buckets = media_buckets(args, backbone) if args.media else []
    aside = list(dict.fromkeys(["", args.negative_prompt]))  # unconditional rows, without media
    found = rows or read_rows(args.prompts, args.column, backbone.modalities if args.media else ())
    prompts, files = aside + [prompt for prompt, _ in found], [{} for _ in aside] + [named for _, named in found]
    wanted = [f"{name}*/*" for name in backbone.encoders] + ["*vae/*"] * args.media
    teacher = model_folder(args.teacher, *wanted)
    facts = {
        "teacher": args.teacher,
        "revision": teacher.name if teacher.parent.name == "snapshots" else None,  # a hub's commit
        "encoders": encoder_fingerprint(teacher, backbone.encoders),
        "padding": {"max_sequence_length": length, "side": backbone.padding_side},
        "dtype": args.dtype,
        "negative_prompt": args.negative_prompt,
    }
    if args.media:
        limits = {name: getattr(args, name) for name in ("min_frames", "max_enlarge")}
        facts["media"] = {"buckets": [name_of(size) for size in buckets], **limits}
    if not facts["encoders"]:
        raise ConfigError(f"teacher {args.teacher!r} has no text encoders; allowed is a folder with text_encoder/")
    if world > 1:
        dist.init_process_group("gloo")

    # parts of an earlier try go on only if they are of the same prompts by the same encoders
    parts = out.with_name(out.name + ".parts")
    address = {
        **facts,
        "prompts": prompts,
        "files": [sorted(map(_address, row.items())) for row in files],
        "part": args.part,
    }
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
        device, dtype = args.device or own_device(), PRECISIONS[args.dtype]
        try:
            pipe = text_pipeline(teacher, backbone.encoders, dtype, device)
            autoencoders = load_autoencoders(teacher, dtype, device) if args.media else {}
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if args.media:
            shortest = args.min_frames or args.num_frames or 0
            encoder = MediaEncoder(backbone, buckets, shortest, args.max_enlarge, autoencoders)
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
            if args.media:
                rows |= encode_files(encoder, files[start : start + args.part], backbone.latent_columns)
                features |= {"bucket": Value("string"), "dropped": Value("string")}
                for column in backbone.latent_columns.values():
                    features |= {column: List(Value("float32")), f"{column}_shape": List(Value("int32"))}
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
        if args.media:
            reasons = list(whole["dropped"])
            dropped = [(_named(files[i], prompts[i]), why) for i, why in enumerate(reasons) if why]
            whole = whole.select([i for i, why in enumerate(reasons) if not why]).remove_columns("dropped")
            print(bucket_report(backbone, list(whole["bucket"]), dropped))
            if not any(whole["bucket"]):
                raise ConfigError(f"prompts {args.prompts!r} has no media that could be encoded")
            facts["media"]["dropped"] = dropped
        whole.save_to_disk(str(saving))
        write_json(saving / ENCODING, facts)
        os.rename(saving, out)
        shutil.rmtree(parts)
        print(f"{len(whole)} prompts encoded into {out}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _address(item: tuple[str, Any]) -> str:
    """What a media cell is, for the record: its path, or a hash of its contents."""
    name, file = item
    return f"{name} {hashlib.sha256(file.getvalue()).hexdigest() if isinstance(file, BytesIO) else file}"


def _named(files: dict[str, Any], prompt: str) -> str:
    paths = [file for file in files.values() if isinstance(file, str)]
    return paths[0] if paths else prompt


def _text(value: object) -> str:
    import json

    return json.dumps(value, sort_keys=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
