"""Bad input: one line that names the knob, its value and what is allowed; exit status 2; nothing on disk."""

import json
import shlex
import shutil

import pytest
from conftest import REPO, SMALL, TEACHER, TRAIN, run_script
from datasets import Dataset, load_from_disk

# flags -> what the line must say, beside the error itself
FLAGS = {
    "--pdd_stepz 3": ["--pdd_stepz", "--pdd_steps"],
    "--block_size_mim=3": ["--block_size_mim", "--block_size_min"],
    "stray": ["'stray'", "--help"],
    "--pdd_steps": ["--pdd_steps", "needs a value"],
    "--pdd_steps many": ["pdd_steps is 'many'", "an integer"],
    "--pdd_steps 2.5": ["pdd_steps is 2.5", "an integer"],
    "--pdd_steps 0": ["pdd_steps is 0", ">= 1"],
    "--learning_rate fast": ["learning_rate is 'fast'", "finite number"],
    "--learning_rate nan": ["learning_rate is 'nan'", "finite number"],
    "--learning_rate=-1e-4": ["learning_rate is -0.0001", "more than 0"],
    "--head_learning_rate 0": ["head_learning_rate is 0.0", "more than 0"],
    "--resume maybe": ["resume is 'maybe'", "true or false"],
    "--rollout_mode real": ["rollout_mode is 'real'", "simulate, data_latent"],
    "--type_rk rk3": ["type_rk is 'rk3'", "euler, midpoint, heun, rk4"],
    "--stagger rank": ["stagger is 'rank'", "stream, sample"],
    "--precision_decoding fp8": ["precision_decoding is 'fp8'", "fp32, fp64, bf16"],
    "--lr_scheduler step": ["lr_scheduler is 'step'", "constant, linear, cosine"],
    "--export_dtype int8": ["export_dtype is 'int8'", "auto, fp32, bf16, fp16"],
    "--block_size_min 32": ["block_size_min is 32", "block_size_max 16"],
    "--block_size_max 17": ["block_size_max is 17", "pdd_steps 16"],
    "--block_size_min 5": ["pdd_steps 16", "block_size_min 5", "multiple"],
    "--block_size_max 4 --student_grid_indices '{4: [0,3,8,12,16]}'": [
        "student_grid_indices",
        "5 intervals",
        "block_size_max 4",
    ],
    "--student_grid_indices '{4: [0,4,4,12,16]}'": ["student_grid_indices[4]", "strictly increasing"],
    "--student_grid_indices '{4: [0,4,8,12]}'": ["student_grid_indices[4]", "5 strictly increasing nodes from 0"],
    "--student_grid_indices [0,16]": ["student_grid_indices is [0, 16]", "mapping"],
    "--student_grid_indices '{four: [0,16]}'": ["student_grid_indices is 'four'", "an integer"],
    "--num_targets 5": ["num_targets is 5", "at most 4"],
    "--validation_every 1 --validation_steps 1 --block_size_max 8": [
        "validation_steps",
        "16 intervals",
        "2 blocks or more",
    ],
    "--validation_every 1 --validation_steps 17": ["1 to 16 blocks", "17"],
    "--validation_every 1 --validation_steps": ["validation_steps is []", "at least one"],
    "--validation_every 1 --validation_steps two": ["validation_steps is 'two'", "integers"],
    "--validation_every 1 --validation_prompts eleven": [
        "validation_prompts",
        "'eleven'",
        "assets/digits/conditioning",
    ],
    "--shift 0": ["shift is 0", "more than 0"],
    "--shift '{image: -1}'": ["shift", "more than 0"],
    "--shift '{sound: 2}'": ["shift", "'sound'", "image"],
    "--shift 1e320": ["shift is '1e320'", "finite number"],
    "--shift 1e-323": ["integration weight", "pdd_steps 16"],
    "--grid_max_t 1.5": ["grid_max_t is 1.5", "at most 1"],
    "--loss_weights '{image: -1}'": ["loss_weights[image] is -1", "0 or more"],
    "--loss_weights '{sound: 1}'": ["loss_weights", "'sound'", "image"],
    "--prompt_repeats '{any digit: 0}'": ["prompt_repeats[any digit] is 0", ">= 1"],
    "--prompt_repeats '{any digits: 2}'": ["prompt_repeats", "'any digits'", "'any digit'"],
    "--betas 0.9": ["betas is [0.9]", "two numbers"],
    "--betas 0.9 1.0": ["betas is [0.9, 1.0]", "less than 1"],
    "--ema_decay 1": ["ema_decay is 1.0", "less than 1"],
    "--teacher_guidance_scale 0": ["teacher_guidance_scale is 0.0", "more than 0"],
    "--teacher_guidance_scale 3": ["cfg_uncond is None", "teacher_guidance_scale is not 1"],
    "--teacher_guidance_scale 3 --cfg_uncond keep": ["cfg_uncond is 'keep'", "for at least one column"],
    "--teacher_guidance_scale '{image: 0}' --cfg_uncond zeros": ["teacher_guidance_scale[image] is 0", "more than 0"],
    "--teacher_guidance_scale '{sound: 2}' --cfg_uncond zeros": ["teacher_guidance_scale", "'sound'", "image"],
    "--teacher_guidance_scale '{image: 3}'": ["cfg_uncond is None"],
    "--uncond_skip_layer 1": ["uncond_skip_layer is 1", "SD3 has no such guidance"],
    "--stg_scale 1": ["spatio_temporal_guidance_blocks is []", "at least one block"],
    "--stg_scale 1 --spatio_temporal_guidance_blocks 1": ["stg_scale is 1.0", "SD3 has no such guidance"],
    "--stg_scale -1": ["stg_scale is -1.0", "0 or more"],
    "--spatio_temporal_guidance_blocks a": ["spatio_temporal_guidance_blocks is ['a']", "integers"],
    "--modality_scale 2": ["modality_scale is 2.0", "SD3 has no such guidance"],
    "--modality_scale '{sound: 2}'": ["modality_scale names modality 'sound'"],
    "--guidance_rescale_x0 2": ["guidance_rescale_x0 is 2.0", "0 to 1"],
    "--guidance_rescale_x0 0.5 --guidance_rescale true": ["guidance_rescale is True", "false when guidance_rescale_x0"],
    "--height 3": ["height is 3", "multiples of 2 up to 8"],
    "--width 10": ["width is 10", "multiples of 2 up to 8"],
    "--cfg_uncond nothing": ["cfg_uncond is 'nothing'", "negative_prompt, empty_prompt, zeros, keep"],
    "--teacher_guidance_scale 3 --cfg_uncond '{text: zeros}'": ["cfg_uncond", "'text'", "prompt_embeds"],
    "--teacher_guidance_scale 3 --cfg_uncond negative_prompt --negative_prompt ugly": [
        "cfg_uncond",
        "'ugly'",
        "no row",
    ],
    "--lora_rank=-1": ["lora_rank is -1", "0 or more"],
    "--lora_rank 2 --lora_alpha 4.5": ["lora_alpha is 4.5", "an integer"],
    "--lora_rank 2 --lora_alpha 0": ["lora_alpha is 0", "an integer >= 1"],
    "--lora_alpha 4": ["lora_alpha is 4", "lora_rank is 0"],
    "--lora_targets to_q": ["lora_targets is 'to_q'", "lora_rank is 0"],
    "--export_merged": ["export_merged is True", "lora_rank is 0"],
    "--lora_rank 2 --lora_targets to_q,to_kk": ["lora_targets names 'to_kk'", "to_k"],
    "--lora_rank 2 --lora_targets to_q,": ["lora_targets names ''"],
    "--lora_rank 2 --lora_targets proj_out": ["lora_targets names 'proj_out'", "no linear but the heads"],
    "--max_train_steps 3": ["max_train_steps is 3", "rungs [3]", "at least 4"],
    "--teacher nowhere": ["teacher 'nowhere'", "not a folder"],
    "--teacher pdd": ["pdd/transformer/config.json", "cannot be read"],
    "--data nowhere": ["data 'nowhere'", "not a folder"],
    "--data pdd": ["data 'pdd'", "cannot be read as a dataset"],
    "--rollout_mode data_latent --data assets/digits/conditioning": ["rollout_mode is 'data_latent'", "latents"],
    "--recipe nowhere.yaml": ["recipe 'nowhere.yaml'", "No such file"],
    "--ds_config nowhere.json": ["ds_config 'nowhere.json'", "No such file"],
    "--resume --run nowhere": ["'nowhere'", "no config.yaml"],
}


def refused(warm, tmp_path, *flags, script="train", small=True):
    run = tmp_path / "refused"
    base = (
        ["--ds_config", "ds_configs/zero3.json", *(SMALL if small else []), "--run", run] if script == "train" else []
    )
    code, output = warm(script, *base, *flags)
    errors = [line for line in output.splitlines() if "error:" in line]
    assert code == 2, output
    assert len(errors) == 1 and "Traceback" not in output, output
    assert not run.exists()
    return errors[0]


@pytest.mark.parametrize("flags", FLAGS)
def test_bad_flags(flags, warm, tmp_path):
    message = refused(warm, tmp_path, *shlex.split(flags))
    for part in FLAGS[flags]:
        assert part in message


RECIPES = {
    "pdd_stepz: 3": ["'pdd_stepz'", "'pdd_steps'"],
    "- 1": ["list", "mapping"],
    "a: [": ["not YAML"],
    "pdd_steps: [1]": ["pdd_steps is [1]", "an integer"],
    "loss_weights: 3": ["loss_weights is 3", "mapping"],
    "teacher: [a]": ["teacher is ['a']", "text"],
    "teacher: ''": ["teacher is not given"],
    "gradient_checkpointing: 1": ["gradient_checkpointing is 1", "true or false"],
}


@pytest.mark.parametrize("text", RECIPES)
def test_bad_recipes(text, warm, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    message = refused(warm, tmp_path, "--recipe", tmp_path / "recipe.yaml", small=False)
    for part in RECIPES[text]:
        assert part in message


DS_CONFIGS = {
    "{": ["not JSON"],
    "[]": ["list", "JSON object"],
    '{"train_micro_batch_size_per_gpu": 3}': ["train_micro_batch_size_per_gpu is 3", "4", "auto"],
    '{"optimizer": {"params": {"lr": 1}}}': ["optimizer.params.lr is 1", "learning_rate", "auto"],
    '{"zero_optimization": {"stage": 4}}': ["zero_optimization.stage is 4", "0, 1, 2, 3"],
    '{"fp16": {"enabled": true}}': ["fp16.enabled", "bf16"],
    '{"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}': [
        "zero_optimization.reduce_bucket_size",
        "auto",
    ],
}


@pytest.mark.parametrize("text", DS_CONFIGS)
def test_bad_ds_configs(text, warm, tmp_path):
    (tmp_path / "ds.json").write_text(text)
    message = refused(warm, tmp_path, "--ds_config", tmp_path / "ds.json")
    for part in DS_CONFIGS[text]:
        assert part in message


def test_a_teacher_of_an_unknown_family(warm, tmp_path):
    shutil.copytree(TEACHER, tmp_path / "teacher")
    config = tmp_path / "teacher" / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": "NovelTransformer"}))
    assert "'NovelTransformer' is not supported" in refused(warm, tmp_path, "--teacher", tmp_path / "teacher")


@pytest.mark.parametrize("damage", ["truncated", "missing", "another shape"])
def test_damaged_teacher_weights(damage, warm, tmp_path):
    """Found when they are read, and nothing is written then either."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(TEACHER, tmp_path / "teacher")
    weights = tmp_path / "teacher" / "transformer" / "diffusion_pytorch_model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "missing":
        weights.unlink()
    else:
        save_file({**load_file(weights), "proj_out.bias": load_file(weights)["proj_out.bias"][:2].clone()}, weights)
    message = refused(warm, tmp_path, "--teacher", tmp_path / "teacher")
    assert ("proj_out.bias" if damage == "another shape" else "diffusion_pytorch_model.safetensors") in message


def test_a_dataset_without_the_family_s_columns(warm, tmp_path):
    rows = load_from_disk(str(TEACHER / "conditioning"))
    rows.remove_columns("pooled_prompt_embeds").save_to_disk(str(tmp_path / "data"))
    message = refused(warm, tmp_path, "--data", tmp_path / "data")
    assert "lacks the columns ['pooled_prompt_embeds']" in message and "prompt_embeds" in message


COLUMNS = {
    "ragged": (lambda i: [[0.0] * 32] * (1 + i % 2), "lengths [1, 2]; allowed is one shape"),
    "ragged inside": (lambda i: [[0.0] * (31 + i % 2)], "lengths [31, 32]; allowed is one shape"),
    "text": (lambda i: "three", "allowed are numbers of one shape"),
    "not a number": (lambda i: [[float("nan") if i == 5 else 0.0] * 32], "of row 5 has a number that is not finite"),
    "infinite": (
        lambda i: [[0.0] * 31 + [float("inf") if i == 3 else 0.0]],
        "of row 3 has a number that is not finite",
    ),
}


@pytest.mark.parametrize("damage", COLUMNS)
def test_a_dataset_of_bad_columns(damage, warm, tmp_path):
    value, expected = COLUMNS[damage]
    rows = load_from_disk(str(TEACHER / "conditioning"))
    columns = {c: rows[c] for c in rows.column_names} | {"prompt_embeds": [value(i) for i in range(len(rows))]}
    Dataset.from_dict(columns).save_to_disk(str(tmp_path / "data"))
    message = refused(warm, tmp_path, "--data", tmp_path / "data")
    assert "'prompt_embeds'" in message and expected in message


LATENTS = {
    "channels": (lambda i: [[[0.0] * 8] * 8] * 3, "shape [3, 8, 8]; allowed are such as [1, 8, 8], with 1 channels"),
    "no picture": (lambda i: [[0.0] * 8], "allowed are such as [1, 8, 8]"),
    "not a number": (lambda i: [[[float("nan")] * 8] * 8], "has a number that is not finite"),
}


@pytest.mark.parametrize("damage", LATENTS)
def test_bad_latents(damage, warm, tmp_path):
    value, expected = LATENTS[damage]
    rows = load_from_disk(str(TEACHER / "latents")).select(range(8))
    columns = {c: rows[c] for c in rows.column_names} | {"latents": [value(i) for i in range(8)]}
    Dataset.from_dict(columns).save_to_disk(str(tmp_path / "data"))
    message = refused(warm, tmp_path, "--rollout_mode", "data_latent", "--data", tmp_path / "data")
    assert "'latents'" in message and expected in message


def test_a_row_that_is_not_finite_is_named_by_the_rank_that_reads_it(warm, tmp_path):
    """Later than the first rows, which are looked at before any weights are read."""
    rows = load_from_disk(str(TEACHER / "latents")).select(range(60))
    columns = {c: rows[c] for c in rows.column_names}
    bad = [[[[float("inf") if i >= 16 else 0.0] * 8] * 8] for i in range(60)]
    Dataset.from_dict(columns | {"latents": bad}).save_to_disk(str(tmp_path / "data"))
    code, output = warm(
        "train", *TRAIN[1:], *SMALL, "--rollout_mode", "data_latent", "--data", tmp_path / "data", "--run", tmp_path / "run",
        ranks=2,
    )  # fmt: skip
    assert code == 2 and "'latents' of row" in output, output


def test_a_folder_that_cannot_be_written(warm, tmp_path):
    (tmp_path / "file").write_text("")
    code, output = warm("train", *TRAIN[1:], *SMALL, "--run", tmp_path / "file" / "run")
    assert code == 2 and "cannot be created: Not a directory" in output and "Traceback" not in output, output


def test_a_dataset_with_nothing_to_train_on(warm, tmp_path):
    rows = load_from_disk(str(TEACHER / "conditioning"))
    rows.select([rows["prompt"].index("")]).save_to_disk(str(tmp_path / "data"))
    assert "no prompt to train on" in refused(warm, tmp_path, "--data", tmp_path / "data")


def test_a_run_folder_in_use(warm, baseline, tmp_path):
    before = sorted(baseline.rglob("*"))
    code, output = warm("train", "--ds_config", "ds_configs/zero3.json", *SMALL, "--run", baseline)
    assert code == 2 and "is not empty" in output and "--resume" in output
    code, output = warm("train", "--ds_config", "ds_configs/zero3.json", "--resume", "--run", baseline)
    assert code == 2 and "is complete" in output
    assert sorted(baseline.rglob("*")) == before


@pytest.mark.parametrize(
    "knob, value",
    [("pdd_steps", "32"), ("seed", "1"), ("shift", "2"), ("block_size_min", "8"), ("rollout_mode", "data_latent")],
)
def test_fixed_knobs_may_not_change_on_resume(knob, value, warm, tmp_path_factory):
    run = tmp_path_factory.getbasetemp() / "interrupted"
    if not run.exists():
        warm.train(run, "--stop_after", "2")
    code, output = warm("train", "--ds_config", "ds_configs/zero3.json", "--resume", "--run", run, f"--{knob}", value)
    assert code == 2 and f"{knob} is" in output and "may not change" in output, output


def test_sampling_refuses_blocks_wider_than_trained_and_force_does_not(warm, tmp_path):
    run = warm.train(tmp_path / "run", "--block_size_max", "8")
    code, output = warm("sample", "--run", run, "--steps", "1", "--num", "2")
    assert (
        code == 2
        and "16 intervals" in output
        and "block_size_max was 8" in output
        and "smallest allowed is 2" in output
    )
    code, output = warm("sample", "--run", run, "--steps", "1", "--num", "2", "--force")
    assert code == 0 and "wider than trained" in output and (run / "sample-nfe1-seed0.png").exists(), output


SAMPLING = {
    "--steps 17": ["1 to 16 blocks", "17"],
    "--steps x": ["--steps", "'x'"],
    "--num 0": ["num is 0", "1 or more"],
    "--prompt thre": ["'thre'", "'three'"],
    "--prompts nowhere.txt": ["prompts 'nowhere.txt'", "cannot be read"],
    "--second teacher --second_steps 2": ["second is given", "whole clock"],
    "--second_steps 2": ["second_steps is given", "whole clock"],
    "--second_guidance 2": ["second_guidance is 2.0", "--second teacher"],
    "--sead 1": ["--sead", "--seed"],
}


@pytest.mark.parametrize("flags", SAMPLING)
def test_bad_sampling_flags(flags, warm, baseline):
    code, output = warm("sample", "--run", baseline, *shlex.split(flags))
    assert code == 2 and "Traceback" not in output, output
    for part in SAMPLING[flags]:
        assert part in output


def test_sampling_without_a_complete_run(warm, tmp_path):
    code, output = warm("sample", "--run", tmp_path, "--steps", "2")
    assert code == 2 and "no finished student" in output


def test_the_real_command_lines_end_with_status_2():
    done = run_script("train_pdd.py", "--ds_config", "ds_configs/zero3.json", "--block_size_min", "64")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "train_pdd.py: error: block_size_min is 64; allowed is at most block_size_max 32\n"
    done = run_script("sample_pdd.py", "--run", "nowhere")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "'nowhere'" in done.stderr


def test_the_launcher_hands_status_2_on_and_one_rank_speaks():
    done = run_script("train_pdd.py", "--ds_config", "ds_configs/zero3.json", "--block_size_min", "64", launcher=2)
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("error: block_size_min is 64") == 1


def test_help_shows_every_knob_with_default_and_unit():
    from pdd.config import KNOBS

    text = run_script("train_pdd.py", "--help").stdout
    for name in KNOBS:
        assert f"--{name}" in text
    assert "(32; intervals)" in " ".join(text.split())


def test_the_repository_s_recipes_and_engine_configurations_are_valid():
    from pdd.config import Config, read_yaml
    from pdd.engine import fill_ds_config, read_ds_config

    for recipe in (REPO / "recipes").glob("*.yaml"):
        config = Config(**{"teacher": "assets/digits", **read_yaml(recipe)})
        for path in (REPO / "ds_configs").glob("*.json"):
            filled = fill_ds_config(read_ds_config(str(path)), config, 2, False)
            assert (
                filled["train_batch_size"]
                == config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * 2
            )
