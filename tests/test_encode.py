"""Prompts through a checkpoint's own text encoders: the stock pipeline's embeddings, resumable, and refused elsewhere."""

import importlib
import inspect
import json
import shutil
import string

import family_qwen_image21
import pytest
import torch
from conftest import run_script
from datasets import Dataset, load_from_disk
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    LTX2Pipeline,
    QwenImage21Pipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
    WanPipeline,
)
from family_sd3 import build
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GemmaTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from pdd.backbones import read_backbone
from pdd.config import Config, ConfigError
from pdd.data import Rows, check_encoding, encoder_fingerprint

PIPELINES = {
    "sd3": StableDiffusion3Pipeline, "flux": FluxPipeline, "wan": WanPipeline, "qwen_image": QwenImagePipeline,
    "qwen_image21": QwenImage21Pipeline, "ltx2": LTX2Pipeline,
}  # fmt: skip
PROCESSOR = "sys.path.insert(0, 'tests'); import family_qwen_image21"  # where the stand-in for a processor is
# tokens that prompts are padded to: fewer than some prompts have, but more than any has with Qwen's templates
LENGTH = {"sd3": 16, "flux": 16, "wan": 16, "qwen_image": 300, "qwen_image21": 120, "ltx2": 32}

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
    facts["encoders"]["text_encoder"]["files"] = "0" * 16
    record.write_text(json.dumps(facts))
    warm.train(tmp_path / "other", "--teacher", teacher, "--data", out, code=2)
    assert not (tmp_path / "other").exists()


def with_text_encoders(name, folder):
    """A family's tiny checkpoint with tiny text encoders whose widths fit its transformer."""
    module = importlib.import_module(f"family_{name}")
    module.build(folder, **({"registers": 16} if name == "ltx2" else {}))
    t5 = T5TokenizerFast(vocab=PIECES, extra_ids=0, model_max_length=16)
    kind = PIPELINES[name]
    torch.manual_seed(1)
    small = {"intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    if name == "flux":
        clip = CLIPTextModel(CLIPTextConfig(
            vocab_size=len(VOCAB), hidden_size=10, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, bos_token_id=VOCAB["<|startoftext|>"], eos_token_id=VOCAB["<|endoftext|>"],
        ))  # fmt: skip
        parts = {"text_encoder": clip, "tokenizer": CLIPTokenizer(vocab=VOCAB, merges=[], model_max_length=16),
                 "text_encoder_2": t5_encoder(T5EncoderModel, T5Config), "tokenizer_2": t5}  # fmt: skip
    elif name == "wan":
        parts = {"text_encoder": t5_encoder(UMT5EncoderModel, UMT5Config), "tokenizer": t5}
    elif name == "ltx2":  # its connectors take the states before and after one layer of width 10
        tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *LETTERS[:26], ",", "."]
        text = {"vocab_size": len(tokens), "hidden_size": 10, "head_dim": 8, **small, "num_hidden_layers": 1}
        vision = {"hidden_size": 8, "image_size": 16, "patch_size": 8, **small}
        gemma = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=4)
        words = GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
        parts = {"text_encoder": Gemma3ForConditionalGeneration(gemma), "tokenizer": words}
    else:
        model, config = {
            "qwen_image": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig),
            "qwen_image21": (Qwen3VLForConditionalGeneration, Qwen3VLConfig),
        }[name]
        words = family_qwen_image21.tokenizer()
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]}
        text = {"vocab_size": len(words), "hidden_size": 12, "head_dim": 6, "rope_parameters": rope, **small}
        vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 12}
        encoder = model(config(text_config=text, vision_config=vision))
        parts = {"text_encoder": encoder, **({"tokenizer": words} if name == "qwen_image" else {})}
    bare = kind.from_pretrained(folder, **dict.fromkeys(module.ABSENT))
    rest = {n: c for n, c in bare.components.items() if n not in parts}
    kind(**rest, **parts).save_pretrained(folder)


def t5_encoder(cls, config):
    return cls(
        config(vocab_size=len(PIECES), d_model=12, d_kv=4, d_ff=8, num_layers=1, num_heads=2, is_encoder_decoder=False)
    )


@pytest.fixture(scope="module", params=PIPELINES)
def encoded(request, teacher, warm, tmp_path_factory):
    """(family, teacher folder, dataset folder): prompts of several lengths, in several encoder calls and parts."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    if name != "sd3":
        teacher = folder / "teacher"
        with_text_encoders(name, teacher)
    flags = ["--batch", "2", "--part", "3", "--max_sequence_length", LENGTH[name]]
    source = write_prompts(folder, "txt")
    code, output = warm(
        "encode", "--teacher", teacher, "--prompts", source, "--out", folder / "data", *flags, prelude=PROCESSOR
    )
    assert code == 0, output
    return name, teacher, folder / "data"


@pytest.mark.parametrize("prompts", [["snow"], ["two birds, one stone"], ["a cat", "the sea at night"]], ids=len)
def test_a_row_makes_what_the_stock_pipeline_makes_of_the_prompt(prompts, encoded):
    """From raw text to latents: nothing of the encoding, of its padding or of its types may change them."""
    name, teacher, data = encoded
    backbone = read_backbone(teacher, getattr(importlib.import_module(f"family_{name}"), "SIZE", None))
    pipe = PIPELINES[name].from_pretrained(teacher)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    pipe.set_progress_bar_config(disable=True)
    g = torch.Generator().manual_seed(4)
    shapes = backbone.latent_shapes()
    state = {m: torch.randn(len(prompts), *shape, generator=g) for m, shape in shapes.items()}
    more = {} if name == "qwen_image21" else {"max_sequence_length": LENGTH[name]}

    def stock(prompts):
        start = {**backbone.pipeline_arguments(), **backbone.to_pipeline(state)}
        made = pipe(prompt=prompts, **start, **more, num_inference_steps=3, output_type="latent")
        return backbone.from_pipeline(made if len(shapes) > 1 else made[0])

    expected = stock(prompts)
    config = Config(teacher=str(teacher), data=str(data))
    rows = Rows(config, backbone)
    cond = rows.cond(torch.tensor([rows.find(prompt) for prompt in prompts]), "cpu")
    assert {v.dtype for c, v in cond.items() if c.endswith("mask")} <= {torch.int64}
    x, sigmas, one = dict(state), pipe.scheduler.sigmas.tolist(), dict.fromkeys(shapes, 1)
    with torch.no_grad():
        for now, then in zip(sigmas, sigmas[1:]):
            sigma = dict.fromkeys(shapes, torch.full((len(prompts),), now))
            v = backbone.forward(pipe.transformer, x, sigma, cond, one)
            x = {m: x[m] + (then - now) * v[m][:, 0] for m in x}
    other = stock(["a red house"] * len(prompts))
    for m in x:
        error = (x[m] - expected[m]).norm()
        assert error <= 1e-4 * expected[m].norm(), m
        assert error <= 1e-2 * (other[m] - expected[m]).norm(), m  # and little beside what the prompt does


def test_the_record_says_encoders_revision_padding_and_precision(encoded):
    name, teacher, data = encoded
    facts = json.loads((data / "pdd_encoding.json").read_text())
    assert facts["dtype"] == "fp32" and facts["revision"] is None  # a folder of this machine has hashes alone
    assert facts["padding"] == {"max_sequence_length": LENGTH[name], "side": "left" if name == "ltx2" else "right"}
    index = json.loads((teacher / "model_index.json").read_text())
    classes = {n: v[1] for n, v in index.items() if n.startswith(("text", "tok", "connectors", "processor")) and v[0]}
    assert {n: e["class"] for n, e in facts["encoders"].items()} == classes
    weighty = {n for n, e in facts["encoders"].items() if e["weights"]}
    assert weighty == {n for n in classes if n.startswith(("text_encoder", "connectors"))}


def test_the_padding_is_the_stock_pipeline_s_unless_told(encoded):
    name, teacher, _ = encoded
    default = inspect.signature(PIPELINES[name].__call__).parameters.get("max_sequence_length")
    if default is not None:  # Qwen-Image 2.1 takes text of any length
        assert read_backbone(teacher).max_sequence_length == default.default


def test_a_dataset_of_other_weights_vocabulary_or_connectors_is_refused(encoded, tmp_path):
    name, teacher, data = encoded
    family = read_backbone(teacher)
    copy = tmp_path / "teacher"
    shutil.copytree(teacher, copy)
    check_encoding(data, copy, family.encoders)
    changed = [next(folder.glob("*.safetensors")) for folder in copy.iterdir() if folder.name.startswith(family.encoders)
               if any(folder.glob("*.safetensors"))]  # fmt: skip
    changed += [next(p for p in copy.glob("*/tokenizer.json"))]
    assert len(changed) == {"sd3": 4, "flux": 3, "ltx2": 3}.get(name, 2)
    for path in changed:
        kept = path.read_bytes()
        path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(ConfigError, match=f"encoded by another {path.parent.name} than"):
            check_encoding(data, copy, family.encoders)
        path.write_bytes(kept)
    for path in copy.glob("*/*.safetensors"):  # a teacher fetched from a hub for training
        if path.parent.name.startswith(family.encoders):
            path.unlink()
    check_encoding(data, copy, family.encoders)


def test_of_large_weights_both_ends_are_hashed(tmp_path):
    path = tmp_path / "text_encoder" / "model.safetensors"
    path.parent.mkdir()
    found = set()
    for content in (bytes(2**22), b"x" + bytes(2**22 - 1), bytes(2**22 - 1) + b"x", bytes(2**22 + 1)):
        path.write_bytes(content)
        found.add(encoder_fingerprint(tmp_path, ("text_encoder",))["text_encoder"]["weights"])
    assert len(found) == 4


@pytest.mark.parametrize("name, length, message", [
    ("ltx2", 24, "max_sequence_length is 24; allowed are multiples of 16"), ("wan", 0, "0; allowed is 1 or more"),
    ("qwen_image21", 30, "max_sequence_length is 30; allowed is at least"),
])  # fmt: skip
def test_padding_that_does_not_fit_is_refused(name, length, message, warm, tmp_path):
    with_text_encoders(name, tmp_path / "teacher")
    code, output = warm(
        "encode", "--teacher", tmp_path / "teacher", "--prompts", write_prompts(tmp_path, "txt"), "--out",
        tmp_path / "data", "--max_sequence_length", length, prelude=PROCESSOR,
    )  # fmt: skip
    assert code == 2 and message in output and "Traceback" not in output, output


def test_a_hub_s_revision_is_recorded(warm, tmp_path):
    """A snapshot of a hub lies in a folder named by its commit."""
    snapshot = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / "5e1f"
    with_text_encoders("wan", snapshot)
    code, output = warm(
        "encode", "--teacher", "someone/tiny", "--prompts", write_prompts(tmp_path, "txt"), "--out", tmp_path / "data",
        "--max_sequence_length", "16", prelude=f"import huggingface_hub; huggingface_hub.snapshot_download = "
        f"lambda name, allow_patterns: {str(snapshot)!r}",
    )  # fmt: skip
    assert code == 0, output
    facts = json.loads((tmp_path / "data" / "pdd_encoding.json").read_text())
    assert facts["revision"] == "5e1f" and facts["teacher"] == "someone/tiny"


def test_a_family_whose_prompts_cannot_be_encoded_says_what_its_dataset_needs(teacher, warm, tmp_path):
    source = write_prompts(tmp_path, "txt")
    prelude = "from pdd.backbones.sd3 import SD3; del SD3.encode_prompts"
    code, output = warm(
        "encode", "--teacher", teacher, "--prompts", source, "--out", tmp_path / "data", prelude=prelude
    )
    assert code == 2 and "cannot be encoded here yet" in output and "pooled_prompt_embeds" in output, output


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
