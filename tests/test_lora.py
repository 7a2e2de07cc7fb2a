"""LoRA mode: one backbone for both roles, under DeepSpeed and on disk."""

import json
import shutil

import pytest
import torch
from conftest import SMALL, TEACHER, ds_config, equal, lines
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pdd.config import Config, Guidance, read_yaml
from pdd.formats import ADAPTERS, HEADS, load_transformer, read_student
from pdd.pipeline import load_student
from pdd.student import Velocity

LORA = ["--lora_rank", "4", "--lora_alpha", "6"]  # not PEFT's default
BASE = TEACHER / "transformer" / "diffusion_pytorch_model.safetensors"
BACKBONE = 432_132 - 260  # the digits teacher's parameters, its last linear left out


def train(warm, run, *flags, ranks=1, prelude=""):
    code, output = warm("train", *SMALL, "--run", run, *LORA, *flags, ranks=ranks, prelude=prelude)
    assert code == 0, output
    return output


def trained(run):
    return load_file(run / "student" / ADAPTERS) | load_file(run / "student" / HEADS)


# asks the shared teacher once more after training, and the stock transformer in the same dtype
ASK_AGAIN = """
import pdd.engine
from pdd.backbones import read_backbone
from pdd.student import Velocity
asked = []
call = pdd.engine.SharedTeacher.__call__
def first(self, *args):
    out = call(self, *args)
    if not asked: asked.append((self, args, {m: v.clone() for m, v in out.items()}))
    return out
pdd.engine.SharedTeacher.__call__ = first
whole = pdd.engine.Engine.whole_weights
def ask(self, dtype, trained_only):
    teacher, args, before = asked[0]
    after = self(call, teacher, *args)
    dtype = self.module.transformer.proj_out.weight.dtype
    stock = Velocity(pdd.formats.load_transformer(train_pdd.Path("assets/digits"), dtype), teacher.model.backbone)
    stock.requires_grad_(False)  # torch multiplies by a weight that wants a gradient in another order
    with torch.no_grad():
        plain = stock(*args)
    same = [all(torch.equal(a[m], before[m]) for m in a) for a in (after, plain)]
    print("teacher unmoved and stock:", *same, before["image"].std() > 0, dtype)
    return whole(self, dtype, trained_only)
pdd.engine.Engine.whole_weights = ask
"""


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_teacher_is_the_stock_transformer_before_and_after_training(stage, bf16, warm, tmp_path):
    """Bit for bit; with a guided target, whose unconditional half runs on the shared backbone, too."""
    flags = ["--teacher_guidance_scale", "3", "--cfg_uncond", "empty_prompt", "--learning_rate", "1e-2"]
    config = ds_config(tmp_path, stage, bf16)
    ranks = 2 if stage else 1
    output = train(warm, tmp_path / "run", *flags, "--ds_config", config, prelude=ASK_AGAIN, ranks=ranks)
    expected = f"teacher unmoved and stock: True True tensor(True) {torch.bfloat16 if bf16 else torch.float32}"
    assert output.count(expected) == ranks, output
    assert lines(tmp_path / "run", "teacher_uncond_forwards") == [1, 2, 3, 4, 5, 6]
    for name, tensor in trained(tmp_path / "run").items():
        if "lora_B" in name and "layers.2.attn.add_q" not in name and "blocks.2.attn.add_q" not in name:
            assert tensor.abs().max() > 0, name  # the student has moved


@pytest.fixture(scope="module")
def stages(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    runs = {}
    for stage in range(4):
        runs[stage] = folder / f"run{stage}"
        flags = ["--ema_decay", "0.9", "--validation_every", "3", "--validation_steps", "2", "--ds_config"]
        train(warm, runs[stage], *flags, ds_config(folder, stage))
    return runs


def test_every_zero_stage_trains_the_same_adapters(stages):
    for stage in (0, 1, 2):
        for key in ("loss", "grad_norm", "validation_endpoint_error_2"):
            assert lines(stages[stage], key) == pytest.approx(lines(stages[3], key), rel=2e-5), (stage, key)
        ours, reference = trained(stages[stage]), trained(stages[3])
        assert ours.keys() == reference.keys()
        for name, tensor in ours.items():
            # AdamW turns rounding into noise where a gradient is about zero
            assert (tensor - reference[name]).norm() <= 2e-3 * reference[name].norm(), name


def test_full_and_adapted_training_start_from_the_same_loss(baseline, warm, tmp_path):
    """At once the student is its teacher, so its first loss is a full student's, and it samples as the teacher's Euler."""
    train(warm, tmp_path / "run", "--max_train_steps", "4", "--ds_config", "ds_configs/zero3.json")
    assert lines(tmp_path / "run", "loss")[0] == lines(baseline, "loss")[0]
    assert lines(tmp_path / "run", "loss")[3] != lines(baseline, "loss")[3]


@pytest.mark.parametrize("stage, bf16, ranks", [(3, True, 2), (2, False, 1), (1, True, 1), (0, False, 1)])
def test_a_resumed_run_continues_bit_for_bit(stage, bf16, ranks, warm, tmp_path):
    flags = [
        "--gradient_accumulation_steps",
        "2",
        "--ema_decay",
        "0.5",
        "--ds_config",
        ds_config(tmp_path, stage, bf16),
    ]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(warm, whole, *flags, ranks=ranks)
    train(warm, halves, *flags, "--stop_after", "3", ranks=ranks)
    assert lines(halves, "step") == [1, 2, 3] and not (halves / "student").exists()
    code, output = warm("train", *flags[-2:], "--resume", "--run", halves, ranks=ranks)
    assert code == 0, output
    for key in ("loss", "grad_norm"):
        assert lines(halves, key) == lines(whole, key)
    assert equal(trained(halves), trained(whole))


@pytest.mark.parametrize("stage, ranks", [(3, 2), (2, 1)])
def test_checkpoint_and_student_hold_what_was_trained_and_nothing_else(stage, ranks, warm, tmp_path):
    """A plain reader of its checkpoint finds the exported tensors, and no byte is left for the backbone."""
    run = tmp_path / "run"
    train(warm, run, "--ds_config", ds_config(tmp_path, stage), ranks=ranks)
    student = trained(run)
    count = sum(t.numel() for t in student.values())
    assert count < BACKBONE / 8
    on_disk = sum(p.stat().st_size for p in (run / "checkpoints" / "step-000006").rglob("*") if p.is_file())
    # float32 masters and Adam's two averages of what was trained, and lists of names
    assert 12 * count < on_disk < 12 * count + 4 * BACKBONE / 8
    size = sum(p.stat().st_size for p in (run / "student").rglob("*") if p.is_file())
    assert 4 * count < size < 4 * count + 40_000
    pieces = {}
    for path in (run / "checkpoints" / "step-000006").glob("state-*.safetensors"):
        with safe_open(path, "pt") as file:
            for key, (start, _) in json.loads(file.metadata()["places"]).items():
                pieces.setdefault(key, []).append((start, file.get_tensor(key)))
    renamed = {}
    for key, parts in pieces.items():
        name, state = key.split("|")
        name = name.replace(".default.", ".")
        name = name if ".lora_" in name else name.removeprefix("transformer.").replace(".bank.", ".")
        if state == "master":
            whole = torch.cat([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
            renamed[name] = whole.view(student[name].shape)
    assert renamed.keys() == student.keys()
    for name, tensor in student.items():
        assert tensor.numel() > 0 and torch.equal(renamed[name], tensor), name


def test_the_adapters_load_in_a_plain_pipeline(stages):
    """By Diffusers' and PEFT's own loaders, alpha included; the backbone then is the student's."""
    from diffusers import StableDiffusion3Pipeline

    student = stages[3] / "student"
    with safe_open(student / ADAPTERS, "pt") as file:
        facts = file.metadata()
    assert (facts["lora_rank"], facts["lora_alpha"]) == ("4", "6") and "to_q" in facts["lora_targets"]
    absent = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3", "vae"]
    pipe = StableDiffusion3Pipeline.from_pretrained(TEACHER, **dict.fromkeys(absent))
    pipe.load_lora_weights(str(student))
    loaded, base = read_student(student), load_transformer(TEACHER, torch.float32)
    assert loaded.adapters.rank == 4 and loaded.adapters.alpha == 6
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    fused, plain, moved = pipe.transformer.state_dict(), base.state_dict(), 0
    for name, weight in loaded.transformer.state_dict().items():
        if not name.startswith("proj_out."):
            torch.testing.assert_close(weight, fused[name], rtol=1e-5, atol=1e-7)
            moved += not torch.equal(weight, plain[name])
    assert moved >= len(loaded.adapters.tensors) - 1  # the last block's text stream is idle
    down, up = loaded.adapters.tensors["transformer_blocks.0.attn.to_q"]
    assert down.shape == (4, 64) and up.shape == (64, 4)
    assert loaded.transformer.proj_out.weight.shape == (16, 4, 64)


def test_a_merged_student_is_the_adapted_one(warm, stages, tmp_path):
    flags = ["--ema_decay", "0.9", "--validation_every", "3", "--validation_steps", "2", "--export_merged"]
    train(warm, tmp_path / "run", *flags, "--ds_config", ds_config(tmp_path, 3))
    merged, adapted = read_student(tmp_path / "run" / "student"), read_student(stages[3] / "student")
    assert (tmp_path / "run" / "student" / "transformer" / "config.json").exists() and merged.adapters is None
    assert "lora_rank" not in merged.facts and adapted.facts["lora_rank"] == 4
    assert equal(merged.transformer.state_dict(), adapted.transformer.state_dict())


def test_an_adapted_student_is_sampled_and_compared_as_any_other(warm, stages, tmp_path):
    code, output = warm("sample", "--run", stages[3], "--steps", "2", "--num", "2", "--out", tmp_path)
    assert code == 0 and (tmp_path / "sample-nfe2-seed0.png").exists(), output
    half = load_student(stages[3] / "student", dtype=torch.bfloat16)
    assert half.transformer.dtype == torch.bfloat16
    moved = tmp_path / "moved"  # the base model is somewhere else
    shutil.copytree(stages[3] / "student", moved)
    facts = json.loads((moved / "pdd_config.json").read_text())
    (moved / "pdd_config.json").write_text(json.dumps({**facts, "base_model": "nowhere"}))
    with pytest.raises(ValueError, match="nowhere"):
        read_student(moved)
    again = read_student(moved, base_model=TEACHER)
    assert equal(again.transformer.state_dict(), read_student(stages[3] / "student").transformer.state_dict())


@pytest.mark.parametrize("file, damage, message", [
    (ADAPTERS, lambda t: {k: v for k, v in t.items() if "0.attn.to_q.lora_B" not in k}, "to_q.lora_B.weight is missing"),
    (ADAPTERS, lambda t: {k: v[:0] if "0.attn.to_q.lora_A" in k else v for k, v in t.items()}, r"\(0, 64\)"),
    (ADAPTERS, lambda t: {k: v for k, v in t.items() if "0.attn.to_q" not in k}, "attn.to_q has none"),
    (ADAPTERS, lambda t: {}, "has none"),
    (HEADS, lambda t: {"proj_out.weight": t["proj_out.weight"]}, "heads"),
    (HEADS, lambda t: {**t, "proj_out.weight": t["proj_out.weight"][:3]}, r"\(3, 4, 64\)"),
])  # fmt: skip
def test_a_damaged_student_is_refused_by_name(file, damage, message, stages, tmp_path):
    shutil.copytree(stages[3] / "student", tmp_path / "student")
    path = tmp_path / "student" / file
    save_file({k: v.clone() for k, v in damage(load_file(path)).items()}, path)
    with pytest.raises(ValueError, match=message) as error:
        read_student(tmp_path / "student")
    assert "\n" not in str(error.value) and file in str(error.value)


# -- ZeRO-3's trace and its gathered weights ----------------------------------------------------------

# what two engine calls in a round would do
SEPARATE = """
import pdd.engine
call = pdd.engine.SharedTeacher.__call__
def separate(self, *args):
    engines[0].optimizer.parameter_offload.get_param_coordinator().reset_step()
    return call(self, *args)
pdd.engine.SharedTeacher.__call__ = separate
import deepspeed
initialize, engines = deepspeed.initialize, []
def remember(*args, **kwargs):
    out = initialize(*args, **kwargs)
    engines.append(out[0])
    return out
deepspeed.initialize = remember
"""


@pytest.mark.parametrize("flags, prelude, resets", [
    ([], "", [0]),
    (["--lora_rank", "0", "--lora_alpha", "null"], "", [0]),
    (["--gradient_accumulation_steps", "2", "--gradient_checkpointing"], "", [0, 1]),  # the pre-walk of the second slot
    (["--validation_every", "3", "--validation_steps", "2"], "", [2]),  # each validation is another trace
    ([], SEPARATE, range(3, 30)),
])  # fmt: skip
def test_the_trace_that_zero_3_prefetches_along_stays_valid(flags, prelude, resets, warm, tmp_path):
    config = ds_config(tmp_path, 3, zero={"log_trace_cache_warnings": True})
    output = train(warm, tmp_path / "run", *flags, "--ds_config", config, prelude=prelude)
    assert output.count("Invalidate trace cache") in resets, output


LEFTOVERS = """
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator
release = Coordinator.release_backward_leftovers
def count(self):
    left = self._PartitionedParameterCoordinator__active_backward_submodules.values()
    print("\\nleft", sum(p.ds_numel for m in left for p in m.parameters(recurse=False)), flush=True)
    release(self)
Coordinator.release_backward_leftovers = count
"""


def test_backward_lets_the_backbone_go_block_by_block(warm, tmp_path):
    """The teacher's forward lies between the student's forward and backward, and must not make ZeRO-3 lose count."""
    # nothing stays gathered for being small or soon needed again
    none = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    output = train(warm, tmp_path / "run", "--ds_config", ds_config(tmp_path, 3, zero=none), prelude=LEFTOVERS)
    left = [int(line.split()[1]) for line in output.splitlines() if line.startswith("left ")]
    assert len(left) == 6 and max(left) < BACKBONE / 100, left


# -- knobs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given, rates", [
    ({}, (1e-5, 1e-5)), ({"lora_rank": 8}, (1e-4, 1e-5)), ({"learning_rate": 3e-4}, (3e-4, 3e-4)),
    ({"lora_rank": 8, "learning_rate": 3e-4}, (3e-4, 1e-5)), ({"lora_rank": 8, "head_learning_rate": 2e-5}, (1e-4, 2e-5)),
])  # fmt: skip
def test_learning_rates_that_are_not_given(given, rates, warm, tmp_path):
    assert Config(teacher="t", **given).peak_learning_rates == pytest.approx(rates)


def test_config_says_what_was_trained(stages):
    config = Config(**read_yaml(stages[3] / "config.yaml"))
    assert (config.lora_rank, config.alpha, config.lora_targets) == (4, 6, "")
    facts = json.loads((stages[3] / "student" / "pdd_config.json").read_text())
    assert facts["lora_alpha"] == 6 and facts["lora_targets"].startswith("to_q,to_k")


def test_the_dry_run_knows_adapters(tmp_path):
    """Counts and activations against a real transformer with adapters; one copy of the backbone."""
    from test_memory import real_activations, setting

    from pdd.lora import add_adapters
    from pdd.memory import estimate
    from pdd.student import widen

    config, backbone, grid, rows = setting(*LORA)
    transformer = widen(load_transformer(TEACHER, torch.float32), backbone, 16, keep_base=True)
    add_adapters(transformer, backbone, "", 4, 6, 0)
    count = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    half = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    figures = estimate(config, half, backbone, grid, rows, ranks=2)
    assert figures["trained_parameters"] == count and figures["parameters"] == 432_132
    assert figures["weights"] == count and figures["teacher"] == 432_132 and figures["optimizer"] == 6 * count
    single = estimate(config, {}, backbone, grid, rows, ranks=1)["activations"]
    assert single == pytest.approx(real_activations(config, backbone, grid, rows, transformer), rel=0.05)


def test_guidance_with_a_skipped_block_on_the_shared_backbone(tmp_path):
    import family_wan

    from pdd.backbones import read_backbone
    from pdd.engine import SharedTeacher
    from pdd.grid import Grid
    from pdd.lora import add_adapters
    from pdd.student import head_parameters, widen
    from pdd.teacher import Teacher, Unconditional

    family_wan.build(tmp_path)
    backbone = read_backbone(tmp_path, family_wan.SIZE)
    grid, cond = Grid(4, {"video": 2.0}), family_wan.conditioning(2, 1)
    uncond = Unconditional({"prompt_embeds": "empty_prompt"}, {"empty_prompt": family_wan.conditioning(1, 9)})
    transformer = widen(load_transformer(tmp_path, torch.float32), backbone, 4, keep_base=True)
    add_adapters(transformer, backbone, "", 2, 2, 0)
    with torch.no_grad():
        for parameter in [p for n, p in transformer.named_parameters() if "lora_B" in n] + head_parameters(transformer):
            parameter.normal_()
    models = [
        Velocity(load_transformer(tmp_path, torch.float32), backbone).eval(),
        SharedTeacher(Velocity(transformer, backbone)),
    ]
    state = {"video": torch.randn(2, *backbone.latent_shapes()["video"], generator=torch.Generator().manual_seed(0))}
    knobs = Guidance(3.0, guidance_rescale=True, uncond_skip_layer=1)
    own, shared = (Teacher(m, backbone, grid, knobs, uncond).velocity(state, grid.u[:2], cond)["video"] for m in models)
    assert torch.equal(own, shared)
