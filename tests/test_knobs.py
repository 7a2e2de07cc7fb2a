"""Every knob changes something that a user can see: a table, complete by construction."""

import json
import shutil

import pytest
import torch
from conftest import TEACHER, equal, lines, student_weights
from datasets import load_from_disk
from PIL import Image
from safetensors.torch import load_file

from pdd.config import KNOBS

GUIDED = ["--teacher_guidance_scale", "3", "--cfg_uncond", "empty_prompt"]
NEGATIVE = ["--teacher_guidance_scale", "3", "--cfg_uncond", "negative_prompt", "--negative_prompt"]
LORA = ["--lora_rank", "2"]
VALID = ["--validation_every", "3", "--validation_steps", "2", "--validation_num", "2", "--validation_prompts", "one"]
COUNT_BLOCKS = """
import atexit
from diffusers.models.attention import JointTransformerBlock
calls, forward = [0], JointTransformerBlock.forward
def counted(self, *args, **kwargs):
    calls[0] += 1
    return forward(self, *args, **kwargs)
JointTransformerBlock.forward = counted
main = train_pdd.main
def counting(argv):
    code = main(argv)
    open(argv[argv.index("--run") + 1] + "/calls", "w").write(str(calls[0]))
    return code
train_pdd.main = counting
"""


def loss(run):
    return lines(run, "loss")


def weights(run):
    return student_weights(run)


def carried_dtype(run):
    tensors = load_file(run / "checkpoints" / "step-000006" / "trajectories-00000.safetensors")
    return str(tensors["0.state.image"].dtype)


def checkpoints(run):
    return sorted(p.name for p in (run / "checkpoints").glob("step-*"))


def pictures(run):
    return sorted(p.name for p in (run / "samples").iterdir())


def picture_size(run):
    return Image.open(run / "samples" / "step-000006-nfe2.png").size


def picture(run):
    return Image.open(run / "samples" / "teacher.png").tobytes()


def block_calls(run):
    return (run / "calls").read_text()


def adapter_shape(run):
    return next(t.shape for t in adapters(run).values())


def adapted(run):
    return sorted(adapters(run))


def adapters(run):
    return load_file(run / "student" / "pytorch_lora_weights.safetensors")


def student_files(run):
    return sorted(p.name for p in (run / "student").iterdir())


# knob -> (flags of both runs, flags that change it, what must differ)
TABLE = {
    "pdd_steps": ([], ["--pdd_steps", "24"], weights),
    "shift": ([], ["--shift", "3"], loss),
    "grid_max_t": ([], ["--grid_max_t", "1.0"], loss),
    "rollout_mode": ([], ["--rollout_mode", "data_latent"], loss),
    "block_size_min": ([], ["--block_size_min", "8"], loss),
    "block_size_max": ([], ["--block_size_max", "8"], loss),
    "student_grid_indices": (
        [],
        ["--student_grid_indices", "{4: [0, 2, 8, 12, 16]}"],
        lambda r: lines(r, "block_start"),
    ),
    "stagger": ([], ["--stagger", "sample"], lambda r: lines(r, "rung")),
    "type_rk": ([], ["--type_rk", "midpoint"], loss),
    "num_targets": ([], ["--num_targets", "2"], loss),
    "loss_weights": ([], ["--loss_weights", "{image: 2}"], loss),
    "precision_decoding": ([], ["--precision_decoding", "fp64"], carried_dtype),
    "teacher_guidance_scale": (
        GUIDED,
        ["--teacher_guidance_scale", "1"],
        lambda r: lines(r, "teacher_uncond_forwards"),
    ),
    "cfg_uncond": (GUIDED, ["--cfg_uncond", "zeros"], loss),
    "negative_prompt": ([*NEGATIVE, "three"], ["--negative_prompt", "four"], loss),
    "guidance_rescale_x0": (GUIDED, ["--guidance_rescale_x0", "0.5"], loss),
    "guidance_rescale": (GUIDED, ["--guidance_rescale", "true"], loss),
    "prompt_repeats": ([], ["--prompt_repeats", "{any digit: 50}"], loss),
    "seed": ([], ["--seed", "1"], loss),
    "train_micro_batch_size_per_gpu": ([], ["--train_micro_batch_size_per_gpu", "8"], loss),
    "gradient_accumulation_steps": ([], ["--gradient_accumulation_steps", "2"], loss),
    "max_train_steps": ([], ["--max_train_steps", "7"], lambda r: len(loss(r))),
    "learning_rate": ([], ["--learning_rate", "1e-4"], weights),
    "head_learning_rate": ([], ["--head_learning_rate", "1e-4"], lambda r: weights(r)["proj_out.weight"].sum().item()),
    "lr_scheduler": ([], ["--lr_scheduler", "cosine"], lambda r: lines(r, "lr")),
    "warmup_steps": ([], ["--warmup_steps", "3"], lambda r: lines(r, "lr")),
    "betas": ([], ["--betas", "[0.5, 0.9]"], weights),
    "weight_decay": ([], ["--weight_decay", "0.5"], weights),
    "gradient_clipping": ([], ["--gradient_clipping", "1e-6"], weights),
    "ema_decay": ([], ["--ema_decay", "0.9"], weights),
    "ema_start_step": (["--ema_decay", "0.9"], ["--ema_start_step", "6"], weights),
    "gradient_checkpointing": ([], ["--gradient_checkpointing", "true"], block_calls),
    "stop_after": ([], ["--stop_after", "4"], lambda r: (len(loss(r)), (r / "student").exists())),
    "save_every": ([], ["--save_every", "5"], checkpoints),
    "keep_last": (["--save_every", "2"], ["--keep_last", "1"], checkpoints),
    "log_every": ([], ["--log_every", "3"], lambda r: len(loss(r))),
    "validation_every": ([], VALID, pictures),
    "validation_steps": (VALID, ["--validation_steps", "1", "2", "4"], pictures),
    "validation_prompts": (VALID, ["--validation_prompts", "two"], picture),
    "validation_num": (VALID, ["--validation_num", "3"], picture_size),
    "lora_rank": (LORA, ["--lora_rank", "3"], adapter_shape),
    "lora_alpha": (LORA, ["--lora_alpha", "1"], loss),
    "lora_targets": (LORA, ["--lora_targets", "to_q,ff.net.2"], adapted),
    "export_merged": (LORA, ["--export_merged"], student_files),
    "export_dtype": ([], ["--export_dtype", "bf16"], lambda r: str(weights(r)["proj_out.weight"].dtype)),
}
# these need more than a flag, and have a test each below or elsewhere
SPECIAL = {
    "teacher",
    "expert",
    "data",
    "run",
    "resume",
    "height",
    "width",
    "num_frames",
    "dry_run",
    "uncond_skip_layer",
}
SPECIAL |= {"on_damage", "max_bad_steps"}  # in test_resume.py
SPECIAL |= {"high_steps", "high_guidance_scale", "high_student"}  # in test_wan22.py
SPECIAL |= {"stg_scale", "spatio_temporal_guidance_blocks", "modality_scale"}  # in test_ltx2_guidance.py


def test_the_table_has_every_knob():
    assert set(TABLE) | SPECIAL == set(KNOBS)


@pytest.fixture(scope="module")
def references(warm, baseline):
    runs = {(): baseline}

    def reference(flags, prelude, folder):
        key = (*flags, prelude) if flags or prelude else ()
        if key not in runs:
            runs[key] = warm.train(folder / "reference", *flags, prelude=prelude)
        return runs[key]

    return reference


def differs(a, b):
    return not equal(a, b) if isinstance(a, dict) else a != b


@pytest.mark.parametrize("knob", TABLE)
def test_a_knob_changes_something_observable(knob, warm, references, tmp_path):
    flags, change, observe = TABLE[knob]
    prelude = COUNT_BLOCKS if observe is block_calls else ""
    before = observe(references(flags, prelude, tmp_path))
    after = observe(warm.train(tmp_path / "run", *flags, *change, prelude=prelude))
    assert differs(before, after)


def test_the_same_knobs_change_nothing(warm, baseline, tmp_path):
    """Or else the table above would prove nothing."""
    again = warm.train(tmp_path / "run")
    assert loss(again) == loss(baseline) and equal(weights(again), weights(baseline))


def test_teacher_and_its_scheduler_s_shift(warm, baseline, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(TEACHER, teacher)
    scheduler = teacher / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps({**json.loads(scheduler.read_text()), "shift": 3.0}))
    run = warm.train(tmp_path / "run", "--teacher", teacher, "--shift", "null")
    assert json.loads((run / "student" / "pdd_config.json").read_text())["shift"] == {"image": 3.0}
    assert loss(run) != loss(baseline)


def test_data(warm, baseline, tmp_path):
    rows = load_from_disk(str(TEACHER / "conditioning"))
    rows.select([rows["prompt"].index("zero")]).save_to_disk(str(tmp_path / "zeros"))
    assert loss(warm.train(tmp_path / "run", "--data", tmp_path / "zeros")) != loss(baseline)


def test_run_names_the_folder_and_resume_goes_on_in_it(warm, tmp_path):
    run = warm.train(tmp_path / "run", "--stop_after", "2")
    code, output = warm("train", "--ds_config", "ds_configs/zero3.json", "--resume", "--run", run)
    assert code == 0 and f"resuming {run} at step 2" in output, output
    assert len(loss(run)) == 6


def test_unconditional_forwards_are_counted_across_a_resume(warm, tmp_path):
    run = warm.train(tmp_path / "run", *GUIDED, "--stop_after", "2")
    assert warm("train", "--ds_config", "ds_configs/zero3.json", "--resume", "--run", run)[0] == 0
    assert lines(run, "teacher_uncond_forwards") == [1, 2, 3, 4, 5, 6]


def test_learning_rates_of_the_recipe_are_applied_again_on_resume(warm, tmp_path):
    run = warm.train(tmp_path / "run", "--stop_after", "2")
    resume = ["--ds_config", "ds_configs/zero3.json", "--resume", "--run", run, "--learning_rate", "5e-4"]
    code, output = warm("train", *resume)
    assert code == 0, output
    assert lines(run, "lr") == pytest.approx([1e-3] * 2 + [5e-4] * 4)


def test_loss_weights_scale_the_total_alone(warm, tmp_path):
    run = warm.train(tmp_path / "run", "--loss_weights", "{image: 2}", "--max_train_steps", "4")
    assert lines(run, "loss") == pytest.approx([2 * v for v in lines(run, "loss_image")], rel=1e-6)


def test_warm_up_and_schedules_are_what_they_say(warm, tmp_path):
    from pdd.config import lr_factor

    assert [lr_factor(i, 2, 6, "linear") for i in range(6)] == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    expected = [0.5, 1] + [torch.tensor(torch.pi * i / 4).cos().item() / 2 + 0.5 for i in range(4)]
    assert [lr_factor(i, 2, 6, "cosine") for i in range(6)] == pytest.approx(expected)
    flags = ["--warmup_steps", "2", "--lr_scheduler", "linear"]
    run = warm.train(tmp_path / "run", *flags)
    assert lines(run, "lr") == pytest.approx([1e-3 * f for f in (0.5, 1, 1, 0.75, 0.5, 0.25)])
    assert lines(run, "head_lr") == pytest.approx([3e-3 * f for f in (0.5, 1, 1, 0.75, 0.5, 0.25)])
