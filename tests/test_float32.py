"""What Diffusers keeps in float32 stays so under an engine that makes every parameter less, in both roles."""

import shutil

import family_minimax_h3
import family_wan
import pytest
import torch
from conftest import ds_config, equal, lines, student_weights
from datasets import Dataset

from pdd.backbones import read_backbone
from pdd.float32 import Float32, kept_in_float32
from pdd.formats import load_transformer, read_student
from pdd.grid import Grid
from pdd.student import Velocity

N = 4
# at the run's end: what both roles predict, what their kept modules read and gave, and masters beside what modules read
RECORD = """
import pdd.engine
from pdd.float32 import kept_in_float32
case, frozen = torch.load({folder!r} + "/case.pt", weights_only=False), []
def watch(model, seen):
    for name, module, own, whole in kept_in_float32(model):
        if whole:
            module.register_forward_hook(lambda m, args, out, name=name: seen.update({{name: (args[0], out)}}))
        else:
            first = next(iter(module.children()))
            look = lambda m, args, name=name, module=module, own=own: seen.update({{name: getattr(module, own).clone()}})
            first.register_forward_pre_hook(look)
def freeze(*args, made=pdd.engine.freeze):
    frozen.append(made(*args))
    return frozen[0]
def whole_weights(self, *args, weigh=pdd.engine.Engine.whole_weights, **kwargs):
    teacher, found = frozen[0] if frozen else pdd.engine.SharedTeacher(self.module), {{}}
    for role, model, plans in (("teacher", teacher, ()), ("student", self.module, [case["plans"]])):
        seen = {{}}
        watch(getattr(model, "module", model) if role == "teacher" and frozen else self.module, seen)
        with torch.no_grad(), self.averaged():
            out = self(model, *case["inputs"], *plans)
        found[role] = (out, dict(seen))
    kept = self._float32
    trained = [(p, kept.exact[name]) for name, p in kept.parameters.items() if p.requires_grad]
    found["masters"] = [(self._full(p, None).view_as(exact), exact) for p, exact in trained]
    if torch.distributed.get_rank() == 1:
        torch.save(found, {folder!r} + "/found.pt")
    return weigh(self, *args, **kwargs)
pdd.engine.freeze, pdd.engine.Engine.whole_weights = freeze, whole_weights
"""


def trained(warm, folder, family, engine, *flags):
    """A run of two ranks: its family, the forwards made at its end, and what was found in them."""
    family.build(folder / "teacher")
    backbone = read_backbone(folder / "teacher", family.SIZE)
    cond, g = family.conditioning(1, 1), torch.Generator().manual_seed(3)
    Dataset.from_dict({"prompt": ["a thing"], **{c: v.tolist() for c, v in cond.items()}}).save_to_disk(folder / "data")
    grid = Grid(N, {m: 3.0 for m in backbone.modalities})
    state = {m: torch.randn(1, *shape, generator=g) for m, shape in backbone.latent_shapes().items()}
    sigma = {m: s[1].float().view(1) for m, s in grid.sigma.items()}
    case = {"inputs": (state, sigma, cond), "plans": grid.fused_plan(1, 3)}
    torch.save(case, folder / "case.pt")
    code, output = warm(
        "train", "--ds_config", engine, "--teacher", folder / "teacher", "--data", folder / "data", "--run", folder / "run",
        *(f"--{name}={value}" for name, value in vars(family.SIZE).items()), "--pdd_steps", N, "--block_size_min", 2,
        "--block_size_max", N, "--max_train_steps", 3, "--learning_rate", 2e-3, "--ema_decay", 0, "--log_every", 1,
        "--validation_every", 0, "--shift", 3, "--stagger", "sample", "--warmup_steps", 0, "--prompt_repeats", "{}",
        "--gradient_checkpointing", "true", "--train_micro_batch_size_per_gpu", 1, *flags,
        prelude=RECORD.format(folder=str(folder)), ranks=2,
    )  # fmt: skip
    assert code == 0, output
    losses = lines(folder / "run", "loss")
    assert len(losses) == 3 and all(0 <= loss < 1e6 for loss in losses)
    found = torch.load(folder / "found.pt")
    assert found["masters"] and all(torch.equal(master, exact) for master, exact in found["masters"])
    return backbone, case, found


def kept_by_diffusers(transformer):
    """Names of the parameters that it holds in float32 when it is loaded in bfloat16."""
    return {name for name, p in transformer.named_parameters() if p.dtype == torch.float32}


def assert_same(found, reference, backbone, inputs, names):
    """A role predicts what the reference does, but for bfloat16's last digits, and its kept modules do to float32's.

    Each of these gave what the reference's gives in float32 on what it read; tables are the reference's.
    """
    velocities, seen = found
    with torch.no_grad():
        for m, velocity in Velocity(reference, backbone)(*inputs).items():
            assert (velocities[m] - velocity).norm() < 0.02 * velocity.norm(), m
    seen = {name.replace(".base.", ".").replace(".bank.", "."): value for name, value in seen.items()}
    assert set(seen) == {f"transformer.{name}" for name in names}
    for name in names:
        path, _, own = name.rpartition(".")
        module, value = reference.get_submodule(path), seen[f"transformer.{name}"]
        if torch.is_tensor(value):
            assert torch.equal(value, module.get_parameter(own)), name
            continue
        read, given = value
        if "proj_out" not in name:  # which is fed a block's bfloat16
            assert read.dtype == torch.float32, name
        with torch.no_grad():
            torch.testing.assert_close(given, module(read.float()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family, stage, flags", [
    (family_wan, 3, ()), (family_wan, 1, ("--ema_decay", 0.5)), (family_minimax_h3, 3, ("--lora_rank", 2)),
], ids=["wan", "wan-stage-1", "minimax-lora"])  # fmt: skip
def test_both_roles_in_bf16_compute_what_stock_models_in_bf16_do(family, stage, flags, warm, tmp_path):
    """The stock class, loaded in bfloat16 by Diffusers, is the teacher; the exported student, the average, is the student."""
    engine = ds_config(tmp_path, stage, bf16=True)
    backbone, case, found = trained(warm, tmp_path, family, engine, "--export_dtype", "bf16", *flags)
    cls = type(load_transformer(tmp_path / "teacher", torch.float32))
    stock = cls.from_pretrained(tmp_path / "teacher" / "transformer", torch_dtype=torch.bfloat16).eval()
    kept = kept_by_diffusers(stock)
    assert kept and len(kept) < len(list(stock.named_parameters()))
    assert_same(found["teacher"], stock, backbone, case["inputs"], kept)
    student = read_student(tmp_path / "run" / "student", torch.bfloat16).transformer
    assert kept_by_diffusers(student) == kept
    assert_same(found["student"], student, backbone, (*case["inputs"], case["plans"]), kept)


def test_autocast_leaves_them_alone(warm, tmp_path):
    """Under ZeRO-3 it would gather their weights in bfloat16, too. Two samples a rank have a forward each."""
    engine = ds_config(tmp_path, 3, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    more = ("--train_micro_batch_size_per_gpu", 2)
    backbone, case, found = trained(warm, tmp_path, family_minimax_h3, engine, *more)
    stock = load_transformer(tmp_path / "teacher", torch.float32).eval()
    kept = {name for name, *_ in kept_in_float32(stock)}
    assert_same(found["teacher"], stock, backbone, case["inputs"], kept)
    student = read_student(tmp_path / "run" / "student").transformer
    assert_same(found["student"], student, backbone, (*case["inputs"], case["plans"]), kept)


@pytest.mark.parametrize("family", [family_wan, family_minimax_h3])
def test_gradients_are_those_of_the_plain_model(family, tmp_path):
    family.build(tmp_path)
    backbone = read_backbone(tmp_path, family.SIZE)
    g, cond, grads = torch.Generator().manual_seed(3), family.conditioning(1, 1), []
    state = {m: torch.randn(1, *shape, generator=g) for m, shape in backbone.latent_shapes().items()}
    for attached in (False, True):
        model = Velocity(load_transformer(tmp_path, torch.float32), backbone)
        if attached:
            Float32(model).attach(torch.device("cpu"))
        out = model(state, {m: torch.tensor([0.7]) for m in state}, cond)
        sum(v.square().mean() for v in out.values()).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert sum(bool(grad.any()) for grad in grads[0].values()) > 0.8 * len(grads[0])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-7)


def test_a_resumed_run_computes_with_the_saved_ones(warm, tmp_path):
    """In the first update after it, too."""
    engine = ds_config(tmp_path, 3, bf16=True)
    trained(warm, tmp_path, family_wan, engine, "--save_every", 2)
    first = tmp_path / "first"
    shutil.copytree(tmp_path / "run", first)
    shutil.rmtree(first / "student")
    shutil.rmtree(first / "checkpoints" / "step-000003")
    (first / "latest").write_text("step-000002")
    code, output = warm("train", "--ds_config", engine, "--resume", "--run", first, ranks=2)
    assert code == 0 and "at step 2" in output, output
    assert equal(student_weights(first), student_weights(tmp_path / "run"))


def test_masters_start_exact(warm, tmp_path):
    """They are not made of what DeepSpeed has rounded."""
    rates = ("--learning_rate", 1e-30, "--head_learning_rate", 1e-30)
    trained(warm, tmp_path, family_wan, ds_config(tmp_path, 3, bf16=True), *rates)
    weights, base = student_weights(tmp_path / "run"), load_transformer(tmp_path / "teacher", torch.bfloat16)
    for name in kept_by_diffusers(base):
        torch.testing.assert_close(weights[name], base.state_dict()[name], rtol=0, atol=1e-28)
