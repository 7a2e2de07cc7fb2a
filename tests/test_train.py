"""Real runs: the launcher, two ranks, ZeRO stages, precision, interruption, sampling."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    ENVIRONMENT,
    REPO,
    SMALL,
    TEACHER,
    TRAIN,
    ds_config,
    equal,
    free_port,
    lines,
    run_script,
    student_weights,
)
from safetensors.torch import load_file


def assert_same_training(one, two):
    """Weights that moved alike: AdamW turns rounding into noise where a gradient is about zero, so compare whole movements."""
    base = load_file(TEACHER / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, weight in one.items():
        moved = (weight - base[name].float()).norm()
        assert (two[name] - weight).norm() <= 1e-3 * moved, name


# a global batch of 8 either way; per-sample stagger, since stream stagger depends on the number of ranks
GLOBAL = [*SMALL, "--stagger", "sample", "--max_train_steps", "8", "--gradient_accumulation_steps", "2", "--ema_decay", "0.9",
          "--validation_every", "4", "--validation_num", "3", "--validation_steps", "2", "--save_every", "4"]  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The same run on one and on two ranks, through the launcher."""
    runs = {}
    for world in (1, 2):
        runs[world] = tmp_path_factory.mktemp("ranks") / f"run{world}"
        done = run_script(
            *TRAIN, *GLOBAL, "--run", runs[world], "--train_micro_batch_size_per_gpu", 8 // world, launcher=world
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return runs


def test_two_ranks_train_as_one_with_the_same_global_batch(ranks):
    for key in ("loss", "loss_image", "grad_norm", "validation_endpoint_error_2", "rung", "block_start"):
        one, two = lines(ranks[1], key), lines(ranks[2], key)
        # float32 sums in another order, grown over 8 updates; a wrong scale or a lost sample shows as percents
        assert len(one) in (2, 8) and two == pytest.approx(one, rel=2e-5), key
    assert len(set(lines(ranks[2], "loss"))) == 8
    assert_same_training(student_weights(ranks[1]), student_weights(ranks[2]))


def test_no_weight_of_size_0_is_on_disk(ranks):
    base = load_file(TEACHER / "transformer" / "diffusion_pytorch_model.safetensors")
    student = student_weights(ranks[2])
    assert student.keys() == base.keys()
    for name, weight in student.items():
        widened = (16, *base[name].shape) if name.startswith("proj_out.") else base[name].shape
        assert tuple(weight.shape) == tuple(widened), name
        # the position table is fixed, and the last block uses its text stream's keys and values only
        idle = name == "pos_embed.pos_embed" or name.startswith("transformer_blocks.2.attn.add_q_proj")
        assert torch.equal(weight, base[name].float().expand_as(weight)) == idle, name


def test_a_run_folder_holds_what_the_readme_says(ranks):
    run = ranks[2]
    assert {p.name for p in run.iterdir()} == {
        "config.yaml", "ds_config.json", "environment.json", "log.jsonl", "samples", "checkpoints", "latest", "student",
    }  # fmt: skip
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"].startswith("2.") and environment["world_size"] == 2
    assert json.loads((run / "ds_config.json").read_text())["train_batch_size"] == 16
    checkpoint = run / "checkpoints" / (run / "latest").read_text().strip()
    carried = [load_file(checkpoint / f"trajectories-{rank:05d}.safetensors") for rank in range(2)]
    for mine in carried:
        assert mine["1.state.image"].shape == (4, 1, 8, 8)
    assert not torch.equal(carried[0]["0.state.image"], carried[1]["0.state.image"])
    contract = json.loads((run / "student" / "pdd_config.json").read_text())
    assert contract["pdd_steps"] == 16 and contract["fewest_steps"] == 1 and contract["shift"] == {"image": 1.0}
    assert {"teacher.png", "step-000008-nfe2.png", "step-000008-x0.png"} <= {
        p.name for p in (run / "samples").iterdir()
    }


def test_losses_are_logged_by_distance_and_cover_the_window(ranks):
    bins = [[v for v in lines(ranks[1], f"loss_distance_{a}_{a + 4}") if v is not None] for a in (0, 4, 8, 12)]
    assert all(bins) and sum(bins[0]) / len(bins[0]) < sum(bins[2]) / len(bins[2])


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_resumes_as_if_nothing_had_happened(kind, ranks, warm, tmp_path):
    run, started = tmp_path / "run", time.monotonic()
    command = [
        str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2", "--master_port", str(free_port()),
        *TRAIN, *GLOBAL, "--train_micro_batch_size_per_gpu", "4", "--run", str(run), "--save_every", "0",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=REPO, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    while not (run / "log.jsonl").exists() and process.poll() is None and time.monotonic() - started < 200:
        time.sleep(0.05)
    # as a terminal or a scheduler does: to every process of the job
    subprocess.run(["kill", f"-{kind.name.removeprefix('SIG')}", "--", f"-{process.pid}"], check=True)
    output = process.communicate(timeout=120)[0].decode()
    assert process.returncode != 0
    assert "stopped and saved at step" in output, output
    stopped = json.loads((run / "checkpoints" / (run / "latest").read_text().strip() / "state.json").read_text())[
        "step"
    ]
    assert 0 < stopped < 8 and not (run / "student").exists()

    code, output = warm("train", *TRAIN[1:], "--resume", "--run", run, ranks=2)
    assert code == 0, output
    for key in ("loss", "grad_norm"):
        assert lines(run, key) == lines(ranks[2], key)
    assert equal(student_weights(run), student_weights(ranks[2]))


def test_a_crash_between_saves_leaves_no_line_twice_in_the_log(warm, tmp_path):
    crash = """
import pdd.objective
call = pdd.objective.Objective.__call__
def dying(self, step, round):
    if step == 5: os._exit(1)
    return call(self, step, round)
pdd.objective.Objective.__call__ = dying
"""
    run = warm.train(tmp_path / "run", "--save_every", "2", "--max_train_steps", "7", prelude=crash, code=1)
    assert lines(run, "step") == [1, 2, 3, 4, 5] and (run / "latest").read_text() == "step-000004\n"
    assert warm("train", *TRAIN[1:], "--resume", "--run", run)[0] == 0
    whole = warm.train(tmp_path / "whole", "--max_train_steps", "7")
    assert lines(run, "step") == [1, 2, 3, 4, 5, 6, 7] and lines(run, "loss") == lines(whole, "loss")


# -- validation ---------------------------------------------------------------------------------------


def test_validation_is_the_endpoint_error_from_fixed_noise_at_the_grid_s_start(warm, tmp_path):
    """A student that has not moved makes Euler steps; its error is computed here from its parts."""
    from pdd.backbones import read_backbone
    from pdd.data import Rows
    from pdd.draws import noise
    from pdd.formats import load_transformer
    from pdd.grid import Grid
    from pdd.metrics import endpoint_error
    from pdd.run import resolve_training
    from pdd.sampling import endpoint
    from pdd.student import Velocity
    from pdd.teacher import Teacher

    flags = ["--grid_max_t", "0.6", "--learning_rate", "1e-30", "--head_learning_rate", "1e-30", "--validation_every", "6",
             "--validation_steps", "2", "--validation_num", "3", "--validation_prompts", "one", "any digit"]  # fmt: skip
    run = warm.train(tmp_path / "run", *flags)
    config, _ = resolve_training(str(run / "config.yaml"), {"run": str(tmp_path / "other")})
    backbone, grid = read_backbone(TEACHER), Grid(16, {"image": 1.0}, 0.6)
    rows = Rows(config, backbone)
    start = 0.6 * torch.stack([noise((1, 8, 8), 0, "validation", "image", i) for i in range(6)])
    cond = rows.cond(torch.tensor([rows.find(p) for p in ("one",) * 3 + ("any digit",) * 3]), "cpu")
    teacher = Teacher(Velocity(load_transformer(TEACHER, torch.float32), backbone), backbone, grid)
    fine, coarse = (
        endpoint(teacher.block(cond), {"image": start}, grid, list(range(0, 17, stride)))["image"] for stride in (1, 8)
    )
    assert lines(run, "validation_endpoint_error_2") == pytest.approx([endpoint_error(coarse, fine)], rel=1e-4)


# -- stages and precisions ----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_zero_stage_trains_the_same_student(stage, warm, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    flags = ["--ema_decay", "0.9", "--validation_every", "3", "--validation_steps", "2"]
    reference = folder / "stage3"
    if not reference.exists():
        warm.train(reference, *flags)
    run = warm.train(folder / f"stage{stage}", *flags, "--ds_config", ds_config(folder, stage))
    for key in ("loss", "grad_norm", "validation_endpoint_error_2"):
        assert lines(run, key) == pytest.approx(lines(reference, key), rel=1e-5), key
    assert_same_training(student_weights(reference), student_weights(run))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_keeps_updates_below_half_an_ulp_in_float32_masters(stage, warm, tmp_path):
    """The updates of the heads are too small for bf16: only float32 masters can add them up."""
    flags = ["--learning_rate", "1e-6", "--head_learning_rate", "1e-6", "--export_dtype", "fp32", "--ds_config"]
    run = warm.train(tmp_path / "run", *flags, ds_config(tmp_path, stage, bf16=True))
    base = load_file(TEACHER / "transformer" / "diffusion_pytorch_model.safetensors")["proj_out.weight"].bfloat16()
    trained = student_weights(run)["proj_out.weight"]  # [16, 4, 64] float32 masters
    update = (trained - base.float()).abs()
    ulp = torch.finfo(torch.bfloat16).eps * base.float().abs()
    ordinary = base.float().abs().expand_as(trained) > 0.01
    assert (update[ordinary] > 0).float().mean() > 0.5
    assert (update < ulp / 2)[ordinary].all()
    assert torch.equal(
        trained.bfloat16()[ordinary], base.expand_as(trained)[ordinary]
    )  # bf16 alone would have lost them


FROZEN = """
import pdd.engine
freeze = pdd.engine.freeze
def watched(model, ds_config, device):
    teacher = freeze(model, ds_config, device)
    assert not any(p.requires_grad for p in model.parameters())
    print("partitioned", sum(hasattr(p, "ds_tensor") for p in model.parameters()), "of", len(list(model.parameters())))
    return teacher
pdd.engine.freeze = watched
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_the_frozen_teacher_is_partitioned_under_zero_3_only(stage, warm, tmp_path):
    flags = ["--ds_config", ds_config(tmp_path, stage), *SMALL, "--run", tmp_path / "run"]
    code, output = warm("train", *flags, prelude=FROZEN)
    assert code == 0, output
    count = len(load_file(TEACHER / "transformer" / "diffusion_pytorch_model.safetensors")) - 1  # one is a buffer
    assert f"partitioned {count if stage == 3 else 0} of {count}" in output, output


def test_no_device_ever_holds_a_whole_model_under_zero_3(warm, tmp_path):
    """DeepSpeed itself would put it there, to shard it."""
    watch = """
import torch
moved, to = [], torch.nn.Module.to
def watched(self, *args, **kwargs):
    moved.append(sum(p.numel() for p in self.parameters()))
    return to(self, *args, **kwargs)
torch.nn.Module.to = watched
import pdd.objective
call = pdd.objective.Objective.__call__
def told(self, step, round):
    print(f"largest move {max([0, *moved])}\\n", end="", flush=True)
    return call(self, step, round)
pdd.objective.Objective.__call__ = told
"""
    code, output = warm("train", *TRAIN[1:], *SMALL, "--run", tmp_path / "run", prelude=watch, ranks=2)
    assert code == 0 and "largest move 0\n" in output, output


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_validating_with_the_average_changes_nothing_in_training(stage, warm, tmp_path):
    config = ["--ema_decay", "0.5", "--ds_config", ds_config(tmp_path, stage)]
    plain = warm.train(tmp_path / "plain", *config)
    validated = warm.train(tmp_path / "validated", *config, "--validation_every", "1", "--validation_steps", "2")
    assert lines(validated, "loss") == lines(plain, "loss")
    assert equal(student_weights(validated), student_weights(plain))


def test_monitor_writes_what_the_log_has(warm, tmp_path):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}}
    run = warm.train(tmp_path / "run", "--ds_config", ds_config(tmp_path, 2, **monitor))
    rows = (tmp_path / "csv" / "job" / "pdd_loss.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[1]) for row in rows] == pytest.approx(lines(run, "loss"))


# -- sampling -----------------------------------------------------------------------------------------


def test_sampling_takes_the_newest_complete_run_and_says_which(warm, baseline, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "complete").symlink_to(baseline)
    warm.train(runs / "unfinished", "--stop_after", "2")
    prelude = f"import pdd.run; pdd.run.RUNS = __import__('pathlib').Path({str(runs)!r})"
    code, output = warm("sample", "--steps", "2", "4", "--num", "2", "--out", tmp_path / "out", prelude=prelude)
    assert code == 0 and f"run {runs / 'complete'}" in output, output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["sample-nfe2-seed0.png", "sample-nfe4-seed0.png"]


def test_samples_depend_on_seed_and_prompt_not_on_batch(warm, baseline, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")

    def picture(*flags, seed=0):
        out = tmp_path / "-".join(map(str, flags)).replace("/", "_")
        code, output = warm(
            "sample", "--run", baseline, "--steps", "2", "--num", "3", "--out", out, "--seed", seed, *flags
        )
        assert code == 0, output
        return (out / f"sample-nfe2-seed{seed}.png").read_bytes()

    both = picture("--prompts", tmp_path / "prompts.txt")
    assert picture("--prompt", "one", "--prompt", "two") == both
    assert picture("--prompt", "one", "--prompt", "two", "--batch", "2") == both
    assert picture("--prompt", "one", "--prompt", "two", seed=1) != both
    assert picture("--prompt", "two", "--prompt", "one") != both


def test_compare_measures_student_and_euler_against_the_teacher(warm, baseline, tmp_path):
    flags = ["--steps", "1", "16", "--compare", "--num", "40", "--prompt", "any digit", "--prompt", "one"]
    code, output = warm("sample", "--run", baseline, *flags, "--out", tmp_path)
    assert code == 0 and str(tmp_path / "compare.png") in output and str(tmp_path / "compare.json") in output, output
    table = json.loads((tmp_path / "compare.json").read_text())
    assert set(table["by_prompt"]) == {"any digit", "one"} and table["prompts"] == ["any digit"]
    assert table["steps"] == table["by_prompt"]["any digit"]["steps"]  # one vague prompt was asked for
    assert set(table["teacher"]) == {"frechet", "diversity"} and table["teacher"]["frechet"] > 0
    # in as many Euler steps as the fine grid has, the teacher is its own reference
    assert table["steps"]["16"]["euler_endpoint_error"] < 1e-5 < table["steps"]["16"]["endpoint_error"]
    assert table["steps"]["16"]["euler_frechet"] == pytest.approx(table["teacher"]["frechet"], rel=1e-4)
    assert table["steps"]["1"]["euler_endpoint_error"] > 0.3
    assert (tmp_path / "compare.png").stat().st_size > 5000


def test_euler_is_given_the_better_of_the_recipe_s_shift_and_shift_1(warm, baseline, tmp_path):
    """Its Frechet distance on shift 1 does not depend on the run, and is the better one at 4 forwards."""
    shifted = warm.train(tmp_path / "shifted", "--shift", "3")
    tables = {}
    for name, run in (("plain", baseline), ("shifted", shifted)):
        flags = ["--steps", "4", "--compare", "--num", "60", "--prompt", "any digit", "--out", tmp_path / name]
        assert warm("sample", "--run", run, *flags)[0] == 0
        tables[name] = json.loads((tmp_path / name / "compare.json").read_text())
    plain, other = (tables[name]["steps"]["4"]["euler_frechet"] for name in ("plain", "shifted"))
    assert other == pytest.approx(plain, rel=1e-5)
    assert tables["shifted"]["teacher"]["frechet"] != pytest.approx(tables["plain"]["teacher"]["frechet"], rel=1e-3)
