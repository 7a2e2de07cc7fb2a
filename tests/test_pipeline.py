"""A trained student in plain Diffusers: the stock pipeline samples what our own walk samples."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ENVIRONMENT, REPO, SMALL, TEACHER, TRAIN
from datasets import load_from_disk
from safetensors.torch import load_file, save_file

from pdd.formats import read_student
from pdd.pipeline import load_student
from pdd.sampling import endpoint, initial
from pdd.student import FusedStudent


@pytest.fixture()  # sampling swaps its heads, so each test reads its own
def loaded(baseline):
    return read_student(baseline / "student")


def condition(prompt, batch):
    rows = load_from_disk(str(TEACHER / "conditioning")).with_format("torch")
    row = rows[list(rows["prompt"]).index(prompt)]
    return {c: row[c].expand(batch, *row[c].shape) for c in ("prompt_embeds", "pooled_prompt_embeds")}


@pytest.mark.parametrize("steps", [1, 3, 4, 16])
def test_the_stock_pipeline_samples_as_our_walk(steps, loaded, baseline):
    noise = {"image": torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))}
    cond, start = condition("any digit", 5), initial(noise, loaded.grid)
    student = FusedStudent(loaded.transformer, loaded.backbone, loaded.grid)
    ours = endpoint(student.block(cond), start, loaded.grid, loaded.nodes(steps))["image"]
    pipe = load_student(baseline / "student")
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        **cond, latents=start["image"], num_inference_steps=steps, guidance_scale=1, output_type="latent"
    ).images
    torch.testing.assert_close(made, ours, rtol=1e-4, atol=1e-4)
    again = pipe(
        **cond, latents=start["image"], num_inference_steps=steps, guidance_scale=1, output_type="latent"
    ).images
    assert torch.equal(made, again)  # a second call starts from the first block again


def test_noise_that_the_pipeline_draws_starts_at_the_grid_s_first_level(loaded, baseline):
    pipe = load_student(baseline / "student")
    pipe.set_progress_bar_config(disable=True)
    cond = condition("three", 2)
    arguments = dict(num_inference_steps=2, guidance_scale=1, output_type="latent", height=64, width=64)
    drawn = pipe(**cond, generator=torch.Generator().manual_seed(3), **arguments).images
    noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    given = pipe(**cond, latents=0.999 * noise, **arguments).images
    torch.testing.assert_close(drawn, given, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(drawn, pipe(**cond, latents=noise, **arguments).images, rtol=1e-5, atol=1e-5)


def test_the_pipeline_refuses_blocks_wider_than_trained(baseline, tmp_path):
    narrow = tmp_path / "student"
    shutil.copytree(baseline / "student", narrow)
    contract = narrow / "pdd_config.json"
    contract.write_text(json.dumps({**json.loads(contract.read_text()), "block_size_max": 8, "fewest_steps": 2}))
    arguments = dict(num_inference_steps=1, guidance_scale=1, output_type="latent", **condition("one", 1))
    with pytest.raises(ValueError, match="needs a block of 16 intervals but block_size_max was 8"):
        load_student(narrow)(**arguments, latents=torch.zeros(1, 1, 8, 8))
    load_student(narrow, force=True)(**arguments, latents=torch.zeros(1, 1, 8, 8))


@pytest.mark.parametrize("damage, message", [
    ("missing weights", "cannot be read"),
    ("another grid", "pdd_steps"),
    ("a lost tensor", "proj_out.weight"),
    ("no contract", "pdd_config.json"),
])  # fmt: skip
def test_a_damaged_student_is_refused_by_name(damage, message, baseline, tmp_path):
    folder = tmp_path / "student"
    shutil.copytree(baseline / "student", folder)
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    if damage == "missing weights":
        weights.unlink()
    elif damage == "another grid":
        contract = folder / "pdd_config.json"
        contract.write_text(json.dumps({**json.loads(contract.read_text()), "pdd_steps": 8}))
    elif damage == "a lost tensor":
        save_file({k: v for k, v in load_file(weights).items() if k != "proj_out.weight"}, weights)
    else:
        (folder / "pdd_config.json").unlink()
    with pytest.raises(ValueError, match=message) as error:
        load_student(folder)
    assert "\n" not in str(error.value)


def as_on_a_hub(folder, cache, name="lab/digits"):
    """The hub's cache as it is once ``folder`` has been fetched."""
    repository = cache / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))


def test_a_teacher_by_its_hub_name(tmp_path):
    as_on_a_hub(TEACHER, tmp_path / "cache")
    environment = {**ENVIRONMENT, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    def script(*words):
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=REPO, env=environment, text=True, capture_output=True, timeout=300)

    run = tmp_path / "run"
    done = script(*TRAIN, *SMALL, "--teacher", "lab/digits", "--run", run)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "student" / "pdd_config.json").read_text())["base_model"] == "lab/digits"
    done = script("sample_pdd.py", "--run", run, "--steps", "2", "--num", "2")
    assert done.returncode == 0 and (run / "sample-nfe2-seed0.png").exists(), done.stderr
    done = script(*TRAIN, *SMALL, "--teacher", "lab/letters", "--run", tmp_path / "other")
    assert done.returncode == 2 and done.stderr.count("error: teacher 'lab/letters' is not a folder") == 1, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "other").exists()
