"""Prompts through a checkpoint's own text encoders: the stock pipeline's embeddings, resumable, and refused elsewhere."""

import importlib
import json
import string

import pytest
import torch
from conftest import run_script
from datasets import Dataset, load_from_disk
from diffusers import FluxPipeline, StableDiffusion3Pipeline, WanPipeline
from family_sd3 import build
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

LETTERS = [*string.ascii_lowercase, " ", ",", "."]
TOKENS = [*LETTERS, *(c + "</w>" for c in LETTERS), "<|startoftext|>", "<|endoftext|>"]
VOCAB = {token: i for i, token in enumerate(TOKENS)}
PIECES = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0), *((c, -2.0) for c in LETTERS if c != " ")]
PROMPTS = ["a red house", "two birds, one stone", "the sea at night", "a cat", "snow"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The tiny SD3 checkpoint with three tiny text encoders, whose widths fit its transformer."""
    folder = tmp_path_factory.mktemp("sd3") / "teacher"
    build(folder)
    clip = CLIPTokenizer(vocab=VOCAB, merges=[], model_max_length=16)
    t5 = T5TokenizerFast(vocab=PIECES, extra_ids=0, model_max_length=16)
    torch.manual_seed(1)

    def clip_encoder(width, projection):
        return CLIPTextModelWithProjection(CLIPTextConfig(
            vocab_size=len(VOCAB), hidden_size=width, intermediate_size=8, projection_dim=projection, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=16, bos_token_id=VOCAB["<|startoftext|>"],
            eos_token_id=VOCAB["<|endoftext|>"], pad_token_id=1,
        ))  # fmt: skip

    bare = StableDiffusion3Pipeline.from_pretrained(
        folder,
        **dict.fromkeys(
            ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"]
        ),
    )
    StableDiffusion3Pipeline(
        transformer=bare.transformer, scheduler=bare.scheduler, vae=bare.vae, text_encoder=clip_encoder(4, 4), tokenizer=clip,
        text_encoder_2=clip_encoder(6, 6), tokenizer_2=clip, tokenizer_3=t5,
        text_encoder_3=t5_encoder(T5EncoderModel, T5Config),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def write_prompts(folder, kind):
    path = folder / f"prompts.{kind}"
    if kind == "txt":
        path.write_text("\n".join(PROMPTS) + "\n\n")
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    else:
        getattr(Dataset.from_dict({"prompt": PROMPTS}), f"to_{kind}")(str(path))
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
def test_embeddings_are_the_stock_pipeline_s(kind, teacher, warm, tmp_path):
    flags = ["--negative_prompt", "blurry", "--batch", "2", "--part", "3", "--max_sequence_length", "16"]
    source = write_prompts(tmp_path, kind)
    code, output = warm("encode", "--teacher", teacher, "--prompts", source, "--out", tmp_path / "data", *flags)
    assert code == 0, output
    rows = load_from_disk(str(tmp_path / "data")).with_format("torch")
    assert list(rows["prompt"]) == ["", "blurry", *PROMPTS]
    pipe = StableDiffusion3Pipeline.from_pretrained(teacher)
    embeds, negative, pooled, negative_pooled = pipe.encode_prompt(
        PROMPTS, None, None, negative_prompt="blurry", max_sequence_length=16
    )
    torch.testing.assert_close(rows[2:7]["prompt_embeds"], embeds, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows[2:7]["pooled_prompt_embeds"], pooled, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows[1]["prompt_embeds"], negative[0], rtol=1e-4, atol=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", source.name]


def test_it_goes_on_where_it_was_interrupted_and_starts_over_for_other_prompts(teacher, warm, tmp_path):
    source, out = write_prompts(tmp_path, "txt"), tmp_path / "data"
    command = ["encode", "--teacher", teacher, "--prompts", source, "--out", out, "--part", "3"]
    fail = """
from pdd.backbones.sd3 import SD3
encode, calls = SD3.encode_prompts, []
def counted(self, pipe, prompts, length):
    calls.append(prompts)
    print("encoding", len(prompts), "prompts")
    if len(calls) > LIMIT: raise KeyboardInterrupt
    return encode(self, pipe, prompts, length)
SD3.encode_prompts = counted
"""
    code, output = warm(*command, prelude=fail.replace("LIMIT", "1"))
    assert code != 0 and not out.exists() and output.count("encoding") == 2
    code, output = warm(*command, prelude=fail.replace("LIMIT", "9"))
    assert code == 0 and output.count("encoding") == 1, output  # 6 rows in parts of 3, the first of which was there
    assert list(load_from_disk(str(out))["prompt"]) == ["", *PROMPTS]
    code, output = warm(*command)
    assert code == 2 and "exists" in output


def test_two_ranks_write_what_one_writes(teacher, warm, tmp_path):
    import subprocess
    import sys

    from conftest import ENVIRONMENT, REPO, free_port

    source = write_prompts(tmp_path, "txt")
    flags = ["--teacher", str(teacher), "--prompts", str(source), "--part", "2"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    command = [*launch, "encode_prompts.py", *flags, "--out", str(tmp_path / "two")]
    done = subprocess.run(command, cwd=REPO, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert warm("encode", *flags, "--out", tmp_path / "one")[0] == 0
    one, two = (load_from_disk(str(tmp_path / name)).with_format("torch") for name in ("one", "two"))
    assert list(one["prompt"]) == list(two["prompt"])
    torch.testing.assert_close(two[:]["prompt_embeds"], one[:]["prompt_embeds"], rtol=1e-5, atol=1e-6)


def test_training_takes_the_dataset_and_refuses_one_of_other_encoders(teacher, warm, tmp_path):
    out = tmp_path / "data"
    assert warm("encode", "--teacher", teacher, "--prompts", write_prompts(tmp_path, "txt"), "--out", out)[0] == 0
    warm.train(tmp_path / "run", "--teacher", teacher, "--data", out)
    record = out / "pdd_encoding.json"
    facts = json.loads(record.read_text())
    facts["text_encoders"]["text_encoder"] = "0" * 16
    record.write_text(json.dumps(facts))
    warm.train(tmp_path / "other", "--teacher", teacher, "--data", out, code=2)
    assert not (tmp_path / "other").exists()


def with_text_encoders(name, folder):
    """A family's tiny checkpoint with tiny text encoders: (its pipeline class)."""
    module = importlib.import_module(f"family_{name}")
    module.build(folder)
    t5 = T5TokenizerFast(vocab=PIECES, extra_ids=0, model_max_length=16)
    torch.manual_seed(1)
    if name == "flux":
        clip = CLIPTextModel(CLIPTextConfig(
            vocab_size=len(VOCAB), hidden_size=10, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, bos_token_id=VOCAB["<|startoftext|>"], eos_token_id=VOCAB["<|endoftext|>"],
        ))  # fmt: skip
        parts = {"text_encoder": clip, "tokenizer": CLIPTokenizer(vocab=VOCAB, merges=[], model_max_length=16),
                 "text_encoder_2": t5_encoder(T5EncoderModel, T5Config), "tokenizer_2": t5}  # fmt: skip
        kind = FluxPipeline
    else:
        parts, kind = {"text_encoder": t5_encoder(UMT5EncoderModel, UMT5Config), "tokenizer": t5}, WanPipeline
    bare = kind.from_pretrained(folder, **dict.fromkeys(module.ABSENT))
    rest = {n: c for n, c in bare.components.items() if n not in parts}
    kind(**rest, **parts).save_pretrained(folder)
    return kind


def t5_encoder(cls, config):
    return cls(
        config(vocab_size=len(PIECES), d_model=12, d_kv=4, d_ff=8, num_layers=1, num_heads=2, is_encoder_decoder=False)
    )


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_other_families_embeddings_are_the_stock_pipeline_s(name, warm, tmp_path):
    kind = with_text_encoders(name, tmp_path / "teacher")
    source, flags = write_prompts(tmp_path, "txt"), ["--max_sequence_length", "16"]
    code, output = warm(
        "encode", "--teacher", tmp_path / "teacher", "--prompts", source, "--out", tmp_path / "data", *flags
    )
    assert code == 0, output
    rows = load_from_disk(str(tmp_path / "data")).with_format("torch")[1:]
    pipe = kind.from_pretrained(tmp_path / "teacher")
    more = {"do_classifier_free_guidance": False} if name == "wan" else {"prompt_2": None}
    embeds, *rest = pipe.encode_prompt(PROMPTS, max_sequence_length=16, device="cpu", **more)
    torch.testing.assert_close(rows["prompt_embeds"], embeds, rtol=1e-4, atol=1e-5)
    if name == "flux":
        torch.testing.assert_close(rows["pooled_prompt_embeds"], rest[0], rtol=1e-4, atol=1e-5)


def test_a_family_whose_prompts_cannot_be_encoded_says_what_its_dataset_needs(warm, tmp_path):
    import family_qwen_image

    family_qwen_image.build(tmp_path / "teacher")
    (tmp_path / "teacher" / "text_encoder").mkdir(exist_ok=True)
    (tmp_path / "teacher" / "text_encoder" / "config.json").write_text("{}")
    source = write_prompts(tmp_path, "txt")
    code, output = warm("encode", "--teacher", tmp_path / "teacher", "--prompts", source, "--out", tmp_path / "data")
    assert code == 2 and "cannot be encoded here yet" in output and "prompt_embeds_mask" in output, output


BAD = {
    "--prompts nowhere.txt": ["prompts 'nowhere.txt'", "cannot be read"],
    "--prompts {file} --column caption": ["no column 'caption'", "prompt"],
    "--prompts {empty}": ["no prompt in it"],
    "--prompts {file} --teacher assets/digits": ["'assets/digits'", "no text encoders"],
    "--prompts {file} --batch 0": ["batch is 0"],
    "--prompts {file} --negativ x": ["--negativ", "--negative_prompt"],
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input(flags, teacher, warm, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    file = write_prompts(tmp_path, "jsonl")
    words = flags.format(file=file, empty=tmp_path / "empty.txt").split()
    code, output = warm("encode", "--teacher", teacher, "--out", tmp_path / "out", *words)
    assert code == 2 and "Traceback" not in output and not (tmp_path / "out").exists(), output
    for part in BAD[flags]:
        assert part in output


def test_the_real_command_line(teacher, tmp_path):
    source = write_prompts(tmp_path, "txt")
    done = run_script("encode_prompts.py", "--teacher", teacher, "--prompts", source, "--out", tmp_path / "data")
    assert done.returncode == 0 and "6 prompts encoded" in done.stdout, done.stderr
