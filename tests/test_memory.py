"""The dry run's estimate against what a real model allocates."""

import family_wan
import pytest
import torch
from conftest import SMALL, TEACHER
from datasets import Dataset

from pdd.backbones import read_backbone
from pdd.config import parse_training
from pdd.data import Rows
from pdd.formats import load_transformer
from pdd.grid import Grid
from pdd.memory import estimate
from pdd.run import resolve_training
from pdd.student import Student, Velocity, head_parameters, widen


def setting(*flags):
    config, _ = resolve_training(None, parse_training("", [*SMALL, *flags])[1])
    backbone = read_backbone(TEACHER)
    return config, backbone, Grid(config.pdd_steps, {"image": 1.0}), Rows(config, backbone)


def real_activations(config, backbone, grid, rows, transformer=None):
    if transformer is None:
        transformer = widen(load_transformer(TEACHER, torch.float32), backbone, config.pdd_steps).train()
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    batch, saved = config.train_micro_batch_size_per_gpu, {}
    weights = {p.untyped_storage().data_ptr() for p in transformer.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # kept, so that no address is used twice
        return tensor

    state = {"image": torch.randn(batch, 1, 8, 8)}
    cond = rows.cond(torch.tensor(rows.trained[:batch]), "cpu")
    plans = grid.plan([0] * batch, [[0, 4]] * batch, [[0]] * batch)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = Student(Velocity(transformer, backbone), grid).directions(state, torch.tensor([0] * batch), cond, plans)
        out["image"].sum()
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_activations_are_what_autograd_saves(checkpointing):
    parts = setting("--gradient_checkpointing", checkpointing)
    figures = estimate(parts[0], {}, *parts[1:], ranks=1)
    assert figures["activations"] == pytest.approx(real_activations(*parts), rel=0.05)


def test_checkpointing_saves_most_activations():
    plain, thrifty = setting(), setting("--gradient_checkpointing", "true")
    most = estimate(plain[0], {}, *plain[1:], ranks=1)["activations"]
    assert estimate(thrifty[0], {}, *thrifty[1:], ranks=1)["activations"] < most / 4


def test_counts_are_the_real_model_s():
    config, backbone, grid, rows = setting("--pdd_steps", "24")
    real = load_transformer(TEACHER, torch.float32)
    figures = estimate(config, {}, backbone, grid, rows, ranks=1)
    assert figures["parameters"] == sum(p.numel() for p in real.parameters())
    assert figures["head_parameters"] == sum(p.numel() for p in head_parameters(widen(real, backbone, 24)))


@pytest.mark.parametrize("stage, bf16, ema, expected", [
    # bytes per trained parameter on each of 4 ranks: weights, gradients, optimizer
    (0, False, 0, (4, 4, 8)), (0, True, 0, (2, 2, 12)), (1, True, 0, (2, 2, 3)), (2, True, 0.9, (2, 0.5, 4)),
    (3, True, 0, (0.5, 0.5, 3)), (3, False, 0, (1, 1, 3)),
])  # fmt: skip
def test_model_states_follow_from_the_stage(stage, bf16, ema, expected):
    config, backbone, grid, rows = setting("--ema_decay", str(ema))
    ds_config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}}
    figures = estimate(config, ds_config, backbone, grid, rows, ranks=4)
    trained = sum(p.numel() for p in widen(load_transformer(TEACHER, torch.float32), backbone, 16).parameters())
    for name, each in zip(("weights", "gradients", "optimizer"), expected):
        assert figures[name] == pytest.approx(each * trained, rel=1e-5), name
    teacher = (2 if bf16 else 4) * figures["parameters"] / (4 if stage == 3 else 1)
    assert figures["teacher"] == pytest.approx(teacher, rel=1e-5)
    states = ("weights", "gradients", "optimizer", "teacher", "high expert", "float32", "activations")
    assert figures["total"] == sum(figures[name] for name in states)


def test_what_is_kept_in_float32_is_counted_whole_for_every_role(tmp_path):
    family_wan.build(tmp_path / "teacher")
    g = {c: v.tolist() for c, v in family_wan.conditioning(1, 1).items()}
    Dataset.from_dict({"prompt": ["a thing"], **g}).save_to_disk(tmp_path / "data")
    size = [f"--{name}={value}" for name, value in vars(family_wan.SIZE).items()]
    flags = [*SMALL, "--teacher", str(tmp_path / "teacher"), "--data", str(tmp_path / "data"), *size]
    config, _ = resolve_training(None, parse_training("", flags)[1])
    backbone = read_backbone(tmp_path / "teacher", family_wan.SIZE)
    parts = (backbone, Grid(config.pdd_steps, {"video": 1.0}), Rows(config, backbone))
    kept = [p for p in load_transformer(tmp_path / "teacher", torch.bfloat16).parameters() if p.dtype == torch.float32]
    ds_config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    assert estimate(config, ds_config, *parts, ranks=4)["float32"] == 2 * 4 * sum(p.numel() for p in kept)
    assert estimate(config, {}, *parts, ranks=4)["float32"] == 0


def test_a_dry_run_prints_and_writes_nothing(warm, tmp_path):
    flags = ["--ds_config", "ds_configs/zero3.json", *SMALL, "--run", tmp_path / "run", "--dry_run", "8"]
    prelude = "import pdd.formats; pdd.formats.read_weights = None  # reading weights would fail"
    code, output = warm("train", *flags, prelude=prelude)
    assert code == 0 and "432,132 parameters" in output and "per rank of 8" in output, output
    assert not (tmp_path / "run").exists()
