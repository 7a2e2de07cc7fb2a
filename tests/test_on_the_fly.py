"""Prompts that are encoded when they are needed: by training before its weights, by sampling where a dataset lacks them."""

import json

import pytest
import torch
import yaml
from accelerate import cpu_offload
from conftest import SMALL, TRAIN, lines
from datasets import load_from_disk
from diffusers import DiffusionPipeline
from PIL import Image
from test_encode import with_text_encoders

from pdd.formats import read_student
from pdd.grid import Grid
from pdd.pipeline import load_student
from pdd.sampling import initial

PROMPTS = ["a red house", "snow", "the sea at night"]
SIZE = ["--height", "16", "--width", "24", "--validation_prompts", "snow"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A tiny Flux with tiny text encoders."""
    folder = tmp_path_factory.mktemp("flux") / "teacher"
    with_text_encoders("flux", folder)
    return folder


def write(path, prompts):
    path.write_text("\n".join(prompts) + "\n")
    return path


# no text encoder may be alive when weights are read for training
ORDER = """
import gc, pdd.formats
load = pdd.formats.load_transformer
def watched(*args):
    kinds = {type(x).__name__ for x in gc.get_objects() if isinstance(x, torch.nn.Module)}
    print("alive", sorted(k for k in kinds if k in ("T5EncoderModel", "CLIPTextModel")), flush=True)
    return load(*args)
pdd.formats.load_transformer = watched
"""


def test_training_encodes_a_table_of_prompts_once_and_then_goes_on_as_with_the_dataset(teacher, warm, tmp_path):
    table, runs = write(tmp_path / "prompts.txt", PROMPTS), tmp_path / "runs"
    flags = [*TRAIN[1:], *SMALL, "--teacher", teacher, *SIZE]
    code, output = warm("train", *flags, "--data", table, "--run", runs / "one", prelude=ORDER, ranks=2)
    assert code == 0 and output.count("encoding 3 prompts") == 1 and output.count("alive []") == 4, output
    data = yaml.safe_load((runs / "one" / "config.yaml").read_text())["data"]
    assert list(load_from_disk(data)["prompt"]) == ["", *PROMPTS]

    code, output = warm("encode", "--teacher", teacher, "--prompts", table, "--out", tmp_path / "data")
    assert code == 0, output
    code, output = warm("train", *flags, "--data", tmp_path / "data", "--run", runs / "two", ranks=2)
    assert code == 0 and lines(runs / "two", "loss") == lines(runs / "one", "loss"), output

    code, output = warm("train", *flags, "--data", table, "--run", runs / "three", "--stop_after", "2")
    assert code == 0 and "encoding" not in output, output
    resume = [*TRAIN[1:], "--resume", "--run", runs / "three", "--data", table]
    assert warm("train", *resume, "--stop_after", "4")[0] == 0
    write(table, PROMPTS[:2])
    code, output = warm("train", *resume)
    assert code == 2 and "may not change when a run is resumed" in output, output


REFUSED = {
    "--data {table}": "no text encoders",  # the digits
    "--data {table} --teacher {flux} --rollout_mode data_latent": "has prompts alone",
    "--data nowhere.jsonl --teacher {flux}": "prompts 'nowhere.jsonl' cannot be read",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_table_that_cannot_be_encoded_ends_every_rank(flags, teacher, warm, tmp_path):
    words = flags.format(table=write(tmp_path / "prompts.txt", PROMPTS), flux=teacher).split()
    code, output = warm("train", *TRAIN[1:], *SMALL, *words, "--run", tmp_path / "run", ranks=2)
    assert code == 2 and output.count(REFUSED[flags]) == 1 and not (tmp_path / "run").exists(), output


@pytest.fixture(scope="module")
def run(teacher, warm, tmp_path_factory):
    """A run whose dataset has one prompt, and another dataset with one more."""
    folder = tmp_path_factory.mktemp("run")
    for name, prompts in (("one", ["snow"]), ("two", ["snow", "a red house"])):
        table = write(folder / f"{name}.txt", prompts)
        code, output = warm(
            "encode", "--teacher", teacher, "--prompts", table, "--out", folder / name, "--max_sequence_length", "16"
        )
        assert code == 0, output
    return warm.train(folder / "run", "--teacher", teacher, "--data", folder / "one", *SIZE), folder / "two"


def test_a_prompt_that_the_dataset_lacks_is_encoded_as_the_dataset_was(run, warm, tmp_path):
    trained, other = run
    sample = ["sample", "--run", trained, "--steps", "2", "--num", "2", "--prompt", "a red house", "--prompt", "snow"]
    code, output = warm(*sample, "--out", tmp_path / "now")
    assert code == 0 and "encoding 2 prompts" in output, output
    assert "forward 2/2" in output and "decoder call 1" in output  # the bar
    code, output = warm(*sample, "--out", tmp_path / "again")
    assert code == 0 and "encoding" not in output, output
    config = trained / "config.yaml"
    kept = config.read_text()
    config.write_text(yaml.safe_dump({**yaml.safe_load(kept), "data": str(other)}))
    code, output = warm(*sample, "--out", tmp_path / "known")
    config.write_text(kept)
    assert code == 0 and "encoding" not in output, output
    now, known = (Image.open(tmp_path / name / "sample-nfe2-seed0.png").tobytes() for name in ("now", "known"))
    assert now == known


def test_tiles_and_offloading_are_the_pipeline_s_own(run, warm, baseline, tmp_path):
    trained, _ = run
    tell = """
import diffusers
decode = diffusers.AutoencoderKL.decode
def told(self, *args, **kwargs):
    print("tiling", self.use_tiling, flush=True)
    return decode(self, *args, **kwargs)
diffusers.AutoencoderKL.decode = told
"""
    sample = ["sample", "--steps", "2", "--num", "1", "--prompt", "snow", "--out", tmp_path, "--run"]
    assert "tiling False" in warm(*sample, trained, prelude=tell)[1]
    assert "tiling True" in warm(*sample, trained, "--tiling", prelude=tell)[1]
    code, output = warm("sample", "--run", baseline, "--num", "1", "--prompt", "one", "--out", tmp_path, "--tiling")
    assert code == 0 and "--tiling changes nothing" in output  # the digits have no autoencoder
    for kind in ("model", "sequential"):
        code, output = warm(*sample, trained, "--offload", kind, "--device", "cpu")
        assert code == 2 and f"offload is '{kind}' and the device is the CPU" in output, output


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_an_offloaded_student_samples_the_same(offload, run, monkeypatch):
    """Accelerate's hooks work on any device; here the CPU's memory stands for the accelerator's."""

    def sequential(pipe, device):  # as Diffusers does, but for its "cpu:0", to which weights would be copied each time
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                cpu_offload(part, torch.device(device), offload_buffers=len(part._parameters) > 0)

    monkeypatch.setattr(DiffusionPipeline, "enable_sequential_cpu_offload", sequential)
    folder = run[0] / "student"
    facts = json.loads((folder / "pdd_config.json").read_text())
    grid, made = Grid(facts["pdd_steps"], facts["shift"]), {}
    g = torch.Generator().manual_seed(0)
    noise = {"image": torch.randn(2, 4, 8, 12, generator=g)}
    cond = {
        "prompt_embeds": torch.randn(2, 7, 12, generator=g),
        "pooled_prompt_embeds": torch.randn(2, 10, generator=g),
    }
    for kind in ("none", offload):
        pipe = load_student(folder, text_encoders=False, offload=kind)
        pipe.set_progress_bar_config(disable=True)
        backbone = read_student(folder).backbone
        for steps in (4, 2):  # heads of other blocks, after the first call has put everything away
            made[kind] = pipe(
                **cond, **backbone.to_pipeline(initial(noise, grid)), **backbone.pipeline_arguments(),
                num_inference_steps=steps, output_type="pt",
            ).images  # fmt: skip
    assert any(p.device.type == "meta" for p in pipe.transformer.parameters()) == (offload == "sequential")
    torch.testing.assert_close(made[offload], made["none"])
