"""Exports against loaders that we did not write, and readers against files of the released layouts, built here from the facts."""

import json
import re
import shutil

import family_minimax_h3
import family_qwen_image21
import family_wan
import pytest
import torch
from conftest import TEACHER
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline, WanTransformer3DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_minimax_h3_lora_to_diffusers as from_comfyui
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import export_pdd
from pdd.backbones import Size, read_backbone
from pdd.config import Config
from pdd.exchange.base import head_shapes, load_portable
from pdd.formats import contract, load_transformer, read_student, save_adapters, save_student, student_config
from pdd.grid import Grid
from pdd.lora import Adapters, targeted
from pdd.pipeline import load_student
from pdd.sampling import endpoint
from pdd.student import FusedStudent

N = 8


def export(*words, code=0):
    assert export_pdd.main([str(word) for word in words]) == code


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    families = {"minimax_h3": family_minimax_h3, "qwen_image21": family_qwen_image21, "wan": family_wan}
    for name, family in families.items():
        family.build(folder / name)
    return {"digits": TEACHER, **{name: folder / name for name in families}}


def random_student(folder, teacher, rank=0, dtype=torch.float32, targets="", size=Size(), **knobs):
    """A student that nobody trained: every tensor of its own."""
    backbone, g = read_backbone(teacher, size), torch.Generator().manual_seed(3)
    knobs = {"pdd_steps": N, "block_size_min": 2, "block_size_max": N, "grid_max_t": 1.0, **knobs}
    config = Config(teacher=str(teacher), **knobs, **vars(size))
    facts = contract(config, Grid(N, backbone.shifts(), config.grid_max_t), backbone, 7, bool(config.ema_decay))
    base = load_transformer(teacher, dtype)

    def noise(shape, scale=0.1):
        return (scale * torch.randn(shape, generator=g)).to(dtype)

    start = base.state_dict()
    heads = {name: start[name].to(dtype) + noise(shape) for name, shape in head_shapes(backbone, N).items()}
    if not rank:
        save_student(folder, backbone, start | heads, facts)
        return folder
    pairs = {}
    for module in targeted(base, backbone, targets):
        linear = base.get_submodule(module)
        pairs[module] = noise((rank, linear.in_features)), noise((linear.out_features, rank))
    save_adapters(folder, backbone, Adapters(pairs, rank, 2 * rank, targets or backbone.lora_targets), heads, facts)
    return folder


@pytest.fixture(scope="module")
def students(teachers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("students")
    h3 = {"teacher": teachers["minimax_h3"], "size": family_minimax_h3.SIZE}
    return {
        "h3": random_student(folder / "h3", **h3, rank=3, dtype=torch.bfloat16),
        "h3_float": random_student(
            folder / "h3_float", **h3, rank=3, targets="to_q,to_v,ff.net.0.proj,adaln_proj.linear"
        ),
        "h3_whole": random_student(folder / "h3_whole", **h3, dtype=torch.bfloat16, ema_decay=0.9),
        "digits": random_student(folder / "digits", TEACHER, rank=4),
        "digits_whole": random_student(folder / "digits_whole", TEACHER),
        "wan": random_student(folder / "wan", teachers["wan"], size=family_wan.SIZE, grid_max_t=0.999),
        "wan_adapted": random_student(
            folder / "wan_adapted", teachers["wan"], 2, size=family_wan.SIZE, grid_max_t=0.999
        ),
    }


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def same_student(a, b, merged=False):
    """Two folders hold the same student, bit for bit."""
    a, b = load_portable(a, None), load_portable(b, None)
    same(a.heads, b.heads)
    if a.adapters is not None and not merged:
        same(a.adapters.named(), b.adapters.named())
        assert (a.adapters.rank, a.adapters.alpha, a.adapters.targets) == (
            b.adapters.rank,
            b.adapters.alpha,
            b.adapters.targets,
        )
    else:
        same(a.whole(), b.whole())
    assert json.loads(json.dumps(a.facts)) == json.loads(json.dumps(b.facts))


def header(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


# ---------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("name, form", [
    ("h3", "videox_fun"), ("h3_float", "videox_fun"), ("digits", "videox_fun"),
    ("h3", "comfyui"), ("h3_float", "comfyui"), ("h3_whole", "comfyui"),
    ("wan", "fastvideo"), ("wan_adapted", "fastvideo"),
    ("digits_whole", "modelopt"), ("wan", "modelopt"),
])  # fmt: skip
def test_round_trips_are_exact(name, form, students, tmp_path):
    student = students[name]
    facts = json.loads((student / "pdd_config.json").read_text())
    words = ["--base_name", "lab/base", "--revision", "abc"] if form == "fastvideo" else []
    words += ["--force"] if form == "modelopt" else []  # no grid of a shift is cut at the start
    export("--to", form, "--student", student, "--out", tmp_path / "there", *words)
    export("--from", form, tmp_path / "there", "--base_model", facts["base_model"], "--out", tmp_path / "back")
    same_student(student, tmp_path / "back", merged=form == "fastvideo")
    loaded = read_student(tmp_path / "back")
    same(loaded.transformer.state_dict(), read_student(student).transformer.state_dict())


def test_from_one_foreign_format_to_another(students, tmp_path):
    teacher = json.loads((students["h3"] / "pdd_config.json").read_text())["base_model"]
    export("--to", "videox_fun", "--student", students["h3"], "--out", tmp_path / "a")
    export("--from", "videox_fun", tmp_path / "a", "--base_model", teacher, "--to", "comfyui", "--out", tmp_path / "b")
    export("--from", "comfyui", tmp_path / "b", "--base_model", teacher, "--out", tmp_path / "c")
    same_student(students["h3"], tmp_path / "c")


# ---------------------------------------------------------------------------------------------- VideoX-Fun


def test_videox_fun_files_are_as_its_trainer_writes_them(students, teachers, tmp_path):
    """Names, shapes and fields; its adapters, through PEFT in a stock transformer, make the student's backbone."""
    export("--to", "videox_fun", "--student", students["digits"], "--out", tmp_path / "x")
    assert {p.name for p in (tmp_path / "x").iterdir()} == {"pdd.safetensors", "pdd_config.json", "README.md"}
    tensors, facts = load_file(tmp_path / "x" / "pdd.safetensors"), header(tmp_path / "x" / "pdd.safetensors")
    assert tensors["proj_out.weight"].shape == (N, 4, 64) and tensors["proj_out.bias"].shape == (N, 4)
    assert tensors["transformer_blocks.0.attn.to_q.lora_down"].shape == (4, 64)
    wanted = {"pdd_num_steps": "8", "pdd_block_size": "2", "lora_rank": "4", "lora_alpha": "8.0", "sigma_shift_image": "1.0",
              "grid_max_t": "1.0", "pdd_block_size_max": "8", "pdd_allowed_steps": "[1, 2, 3, 4]"}  # fmt: skip
    assert {name: facts[name] for name in wanted} == wanted and facts["lora_targets"].startswith("to_q,to_k")
    beside = json.loads((tmp_path / "x" / "pdd_config.json").read_text())
    assert (beside["pdd_num_steps"], beside["lora_alpha"], beside["lora_targets"]) == (8, 8.0, facts["lora_targets"])
    renamed = {
        k.replace("lora_down", "lora_A.weight").replace("lora_up", "lora_B.weight"): v for k, v in tensors.items()
    }
    renamed = {f"transformer.{k}": v for k, v in renamed.items() if ".lora_" in k}
    transformer = SD3Transformer2DModel.from_pretrained(TEACHER / "transformer")
    alphas = {k.replace("lora_B.weight", "alpha"): float(facts["lora_alpha"]) for k in renamed if "lora_B" in k}
    transformer.load_lora_adapter(renamed, network_alphas=alphas, prefix="transformer")
    transformer.fuse_lora()
    transformer.unload_lora()
    ours = read_student(students["digits"]).transformer.state_dict()
    for name, weight in transformer.state_dict().items():
        if not name.startswith("proj_out"):
            torch.testing.assert_close(weight, ours[name], rtol=1e-5, atol=1e-6)


def test_an_average_is_named_so(teachers, tmp_path):
    student = random_student(tmp_path / "s", TEACHER, rank=2, ema_decay=0.99)
    export("--to", "videox_fun", "--student", student, "--out", tmp_path / "x")
    assert (tmp_path / "x" / "pdd_ema.safetensors").exists() and not (tmp_path / "x" / "pdd.safetensors").exists()


RELEASED = "to_q,to_k,to_v,to_out.0,ff.net.0.proj,ff.net.2,adaln_proj.linear"


def released_h3(file, teacher, steps=32, rank=4):
    """The published acceleration file, scaled down: BF16, bank [32, out, in], the configuration in the header alone."""
    g = torch.Generator().manual_seed(4)
    tensors = {}
    for name, weight in load_transformer(teacher, torch.bfloat16).state_dict().items():
        if name.endswith(".weight") and re.search(r"to_[qkv]\.|to_out|ff\.net|blocks.*adaln_proj", name):
            out, width = weight.shape
            module = name.removesuffix(".weight")
            tensors[f"{module}.lora_down"] = torch.randn(rank, width, generator=g).bfloat16() / 10
            tensors[f"{module}.lora_up"] = torch.randn(out, rank, generator=g).bfloat16() / 10
        if name.startswith(("proj_out", "audio_proj_out")):
            tensors[name] = weight.bfloat16() + torch.randn(steps, *weight.shape, generator=g).bfloat16() / 10
    facts = {"lora_rank": str(rank), "lora_alpha": f"{rank}.0", "pdd_num_steps": "32", "pdd_block_size": "4",
             "lora_targets": RELEASED}  # fmt: skip
    save_file(tensors, file, facts)
    return tensors


def test_the_published_h3_layout_is_read(teachers, tmp_path):
    tensors = released_h3(tmp_path / "MiniMax-H3-FL2VA-Acc-8Step.safetensors", teachers["minimax_h3"])
    assert len(tensors) == 2 * (2 * 7 + 6) + 4  # as 2 (50 * 7 + 2 * 6) + 4 = 728 published ones
    export("--from", "videox_fun", tmp_path / "MiniMax-H3-FL2VA-Acc-8Step.safetensors", "--base_model", teachers["minimax_h3"],
           "--out", tmp_path / "student", "--block_size_max", 8)  # fmt: skip
    student, base = read_student(tmp_path / "student"), load_transformer(teachers["minimax_h3"], torch.bfloat16)
    assert student.facts["shift"] == {"video": 12.0, "audio": 3.0} and student.facts["fewest_steps"] == 4
    u = torch.linspace(1, 0, 33, dtype=torch.float64)
    for m, s in {"video": 12.0, "audio": 3.0}.items():  # the grid of its trainer
        torch.testing.assert_close(student.grid.sigma[m], s * u / (1 + (s - 1) * u), rtol=0, atol=1e-12)
    assert torch.equal(student.transformer.audio_proj_out.weight, tensors["audio_proj_out.weight"].float())
    name = "transformer_blocks.1.adaln_proj.linear"
    moved = (
        base.state_dict()[f"{name}.weight"].float()
        + tensors[f"{name}.lora_up"].float() @ tensors[f"{name}.lora_down"].float()
    )
    assert torch.equal(student.transformer.state_dict()[f"{name}.weight"], moved.bfloat16())
    pipe = load_student(student, teachers["minimax_h3"], text_encoders=False)
    cond = family_minimax_h3.conditioning(1, 1)
    made = pipe(**cond, num_inference_steps=4, output_type="latent", **vars(family_minimax_h3.SIZE))
    assert made.frames.isfinite().all()
    with pytest.raises(ValueError, match="block_size_max was 8"):
        pipe(**cond, num_inference_steps=2, output_type="latent", **vars(family_minimax_h3.SIZE))


LEVELS = [1.0, 0.9169867038726807, 0.7861579060554504, 0.5494909882545471, 0.0]


def released_qwen(folder, teacher):
    """The published pre-fused file, scaled down: a head a step, noise levels of its own, norms replaced."""
    g = torch.Generator().manual_seed(5)
    folder.mkdir()
    base, tensors, targets, norms = load_transformer(teacher, torch.float32), {}, [], []
    for name, weight in base.state_dict().items():
        module = name.removesuffix(".weight")
        if re.search(r"attn\.(to_[qkv]|to_out\.0)\.weight", name):
            targets.append(module)
            tensors[f"{module}.lora_down"] = torch.randn(2, weight.shape[1], generator=g) / 10
            tensors[f"{module}.lora_up"] = torch.randn(weight.shape[0], 2, generator=g) / 10
        if re.search(r"attn\.norm_[qk]\.weight|txt_in\.text_norm", name):
            norms.append(name)
            tensors[name] = weight + torch.rand(weight.shape, generator=g)
        if name == "proj_out.weight":
            tensors[name] = weight + torch.randn(4, *weight.shape, generator=g) / 10
    assert targets and norms
    save_file(tensors, folder / "acc.safetensors", {"format": "qwenimage21_extracted_prefused_v1"})
    config = {"pdd_num_steps": 4, "pdd_block_size": 1, "lora_rank": 2, "lora_alpha": 2, "lora_targets": ",".join(targets),
              "pdd_sigmas": LEVELS, "pdd_inference_only": True, "pdd_full_parameters": norms,
              "pdd_export_format": "qwenimage21_extracted_prefused_v1"}  # fmt: skip
    (folder / "pdd_config.json").write_text(json.dumps(config))
    return tensors


@torch.no_grad()
def test_the_published_prefused_layout_is_read_and_sampled_at_its_own_levels(teachers, tmp_path):
    teacher = teachers["qwen_image21"]
    tensors = released_qwen(tmp_path / "released", teacher)
    words = ["--base_model", teacher, "--out", tmp_path / "student"]
    export("--from", "videox_fun", tmp_path / "released" / "acc.safetensors", *words)
    student = read_student(tmp_path / "student")
    backbone = student.backbone
    torch.testing.assert_close(student.grid.sigma["image"], torch.tensor(LEVELS, dtype=torch.float64))
    assert student.facts["fewest_steps"] == 4
    # four plain Euler steps of the base transformer with everything in place
    weights = load_transformer(teacher, torch.float32)
    state = weights.state_dict()
    for name, tensor in tensors.items():
        if name.endswith("lora_up"):
            module = name.removesuffix(".lora_up")
            state[f"{module}.weight"] += tensor @ tensors[f"{module}.lora_down"]
        elif ".lora_" not in name and name != "proj_out.weight":
            state[name].copy_(tensor)
    cond = family_qwen_image21.conditioning(1, 1)
    x = first = torch.randn(1, *backbone.latent_shapes()["image"], generator=torch.Generator().manual_seed(1))
    for k, (high, low) in enumerate(zip(LEVELS, LEVELS[1:])):
        weights.proj_out.weight.copy_(tensors["proj_out.weight"][k])
        v = backbone.forward(weights.eval(), {"image": x}, {"image": torch.tensor([high])}, cond, {"image": 1})[
            "image"
        ][:, 0]
        x = x + (low - high) * v
    fused = FusedStudent(student.transformer, backbone, student.grid)
    ours = endpoint(fused.block(cond), {"image": first}, student.grid, student.nodes(4))["image"]
    torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-4)
    pipe = load_student(tmp_path / "student", teacher, text_encoders=False)
    given = {
        **backbone.pipeline_condition(cond),
        **backbone.to_pipeline({"image": first}),
        **backbone.pipeline_arguments(),
    }
    made = pipe(**given, num_inference_steps=4, output_type="latent")[0]
    torch.testing.assert_close(backbone.from_pipeline(made)["image"], x, rtol=1e-4, atol=1e-4)
    export("--to", "videox_fun", "--student", tmp_path / "student", "--out", tmp_path / "again", code=2)


# ---------------------------------------------------------------------------------------------- ComfyUI


def deltas(tensors, scale):
    pairs = {k.removesuffix(".lora_A.weight"): v for k, v in tensors.items() if k.endswith(".lora_A.weight")}
    return {m: scale * tensors[f"{m}.lora_B.weight"].float() @ down.float() for m, down in pairs.items()}


@pytest.mark.parametrize("name", ["h3", "h3_float"])
def test_comfyui_adapters_are_what_diffusers_takes_them_for(name, students, tmp_path):
    """Diffusers converts ComfyUI's names and layouts by itself: the weights must move alike."""
    export("--to", "comfyui", "--student", students[name], "--out", tmp_path / "x")
    tensors = load_file(tmp_path / "x" / "comfyui_pdd.safetensors")
    assert all(k.startswith("diffusion_model.") for k in tensors)
    converted = from_comfyui({k: v for k, v in tensors.items() if ".set_" not in k})
    theirs = deltas({k.removeprefix("transformer."): v for k, v in converted.items()}, 1.0)
    adapters = load_portable(students[name], None).adapters
    ours = deltas(adapters.named(), adapters.alpha / adapters.rank)
    for module, moved in theirs.items():  # with a zero for a query, key or value without an adapter
        expected = ours.pop(module, torch.zeros_like(moved))
        torch.testing.assert_close(moved, expected, rtol=2e-2, atol=2e-3 * float(expected.abs().max() + 1e-9))
    assert not ours


def test_a_comfyui_bank_gives_the_fused_heads_by_its_rule(students, tmp_path):
    """Head 0, plus weighted offsets of the interval's other heads; the weights of each modality's own shift."""
    export("--to", "comfyui", "--student", students["h3"], "--out", tmp_path / "x")
    tensors, facts = (
        load_file(tmp_path / "x" / "comfyui_pdd.safetensors"),
        header(tmp_path / "x" / "comfyui_pdd.safetensors"),
    )
    assert facts["pdd_bank_layout"] == "base_plus_offsets" and facts["sigma_shift_video"] == "12.0"
    student = read_student(students["h3"])
    for m, key in {"video": "video_out", "audio": "audio_out"}.items():
        rows = tensors[f"diffusion_model.final_layer.{key}.set_weight"]
        assert rows.ndim == 2
        bank, shift = rows.view(N, -1, rows.shape[1]).double(), student.facts["shift"][m]
        u = torch.linspace(1, 0, N + 1, dtype=torch.float64)
        h = (shift * u / (1 + (shift - 1) * u)).diff()
        for start, stop in ((0, 4), (2, 6), (4, 8)):
            w = h[start:stop] / h[start:stop].sum()
            offsets = bank.clone()
            offsets[0] = 0
            fused = bank[0] + torch.einsum("n,noi->oi", w, offsets[start:stop])
            plan = student.grid.fused_plan(start, stop)[m]
            ours = student.transformer.get_submodule(student.backbone.heads[m].module)._fuse(plan.lo, plan.combine)[0][
                0, 0
            ]
            torch.testing.assert_close(fused.float(), ours.float(), rtol=1e-4, atol=1e-5)


def test_a_whole_comfyui_trunk_is_what_diffusers_takes_it_for(students, tmp_path):
    """Every linear as an adapter with an identity: Diffusers' conversion must give the transformer's own weight."""
    export("--to", "comfyui", "--student", students["h3_whole"], "--out", tmp_path / "x")
    trunk = load_file(tmp_path / "x" / "comfyui_diffusion_model.safetensors")
    whole, as_adapters = load_portable(students["h3_whole"], None), {}
    for name, weight in trunk.items():
        if name.endswith(".weight") and weight.ndim == 2:
            module = name.removesuffix(".weight")
            as_adapters[f"{module}.lora_A.weight"] = torch.eye(weight.shape[1])
            as_adapters[f"{module}.lora_B.weight"] = weight
    plain = whole.trunk | {name: head[0] for name, head in whole.heads.items()}
    converted = {k.removeprefix("transformer."): v for k, v in from_comfyui(as_adapters).items()}
    linears = [name.removesuffix(".weight") for name, w in plain.items() if name.endswith(".weight") and w.ndim == 2]
    assert {f"{m}.lora_B.weight" for m in linears} == {k for k in converted if "lora_B" in k}
    for module in linears:
        assert torch.equal(converted[f"{module}.lora_B.weight"], plain[f"{module}.weight"]), module
    assert torch.equal(trunk["blocks.1.attn.q_norm.weight"], plain["transformer_blocks.1.attn.norm_q.weight"])
    assert trunk["rope.inv_freq"].dtype == torch.float32


# ---------------------------------------------------------------------------------------------- FastVideo, Model-Optimizer


def test_fastvideo_states_one_partition(students, tmp_path):
    words = ["--base_name", "lab/wan", "--revision", "abc"]
    export("--to", "fastvideo", "--student", students["wan"], "--steps", 2, "--out", tmp_path / "x", *words)
    facts = json.loads((tmp_path / "x" / "fastvideo_inference.json").read_text())
    assert facts == {
        "schema_version": "fasth3-inference-contract-v1", "model_type": "t2v", "transformer_component": "transformer",
        "base_model_revision": "hf://lab/wan@abc", "pdd_steps": N, "pdd_step_indices": [0, 4, 8], "num_inference_steps": 2,
        "transformer_forwards": 2, "grid_max_t": 0.999, "guidance_scale": 1.0,
        "video_scheduler_shift": json.loads((tmp_path / "x" / "scheduler" / "scheduler_config.json").read_text())["shift"],
    }  # fmt: skip
    config = json.loads((tmp_path / "x" / "transformer" / "config.json").read_text())
    bank = load_file(tmp_path / "x" / "transformer" / "diffusion_pytorch_model.safetensors")["proj_out.weight"]
    heads = load_portable(students["wan"], None).heads["proj_out.weight"]
    assert config["pdd_steps"] == N and torch.equal(bank, torch.cat(list(heads)))


def test_a_foreign_fastvideo_folder_is_read(students, teachers, tmp_path):
    """Without our own entry in its header; the partition is all that is known of training."""
    words = ["--base_name", "lab/wan", "--revision", "abc"]
    export("--to", "fastvideo", "--student", students["wan"], "--steps", 2, "--out", tmp_path / "x", *words)
    weights = tmp_path / "x" / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(weights), weights, {"format": "pt"})
    export("--from", "fastvideo", tmp_path / "x", "--base_model", teachers["wan"], "--out", tmp_path / "back")
    student = read_student(tmp_path / "back")
    same(student.transformer.state_dict(), read_student(students["wan"]).transformer.state_dict())
    assert student.nodes(2) == [0, 4, 8] and student.facts["block_size_max"] == 4 and "read_from" in student.facts
    with pytest.raises(ValueError, match="block_size_max was 4"):
        student.nodes(1)


@torch.no_grad()
@pytest.mark.parametrize("name, cls", [("digits_whole", SD3Transformer2DModel), ("wan", WanTransformer3DModel)])
def test_modelopt_folders_are_ordinary_diffusers_transformers(name, cls, students, tmp_path):
    """The stock class loads them, and gives every head's velocity in channels of its own."""
    export("--to", "modelopt", "--student", students[name], "--out", tmp_path / "x", "--force")
    loaded, report = cls.from_pretrained(tmp_path / "x" / "transformer", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    student = read_student(students[name])
    backbone, (m,) = student.backbone, student.backbone.modalities
    state = {m: torch.randn(1, *backbone.latent_shapes()[m], generator=torch.Generator().manual_seed(0))}
    if name == "wan":
        cond = family_wan.conditioning(1, 1)
        out = loaded.eval()(state[m], torch.tensor([500.0]), cond["prompt_embeds"], return_dict=False)[0]
    else:
        cond = {"prompt_embeds": torch.randn(1, 1, 32), "pooled_prompt_embeds": torch.randn(1, 32)}
        cond = {c: torch.randn(1, *shape) for c, shape in digits_shapes().items()}
        out = loaded.eval()(
            state[m], cond["prompt_embeds"], cond["pooled_prompt_embeds"], torch.tensor([500.0]), return_dict=False
        )[0]
    fused = FusedStudent(student.transformer, backbone, student.grid)
    for k, velocity in enumerate(out.chunk(N, 1)):
        fused.place(k, k + 1)
        ours = backbone.forward(student.transformer, state, {m: torch.tensor([0.5])}, cond, {m: 1})[m][:, 0]
        torch.testing.assert_close(velocity, ours, rtol=1e-4, atol=1e-5)


def digits_shapes():
    from datasets import load_from_disk

    row = load_from_disk(str(TEACHER / "conditioning")).with_format("torch")[0]
    return {c: row[c].shape for c in ("prompt_embeds", "pooled_prompt_embeds")}


def test_a_foreign_modelopt_folder_is_read_at_its_cut_grid(teachers, tmp_path):
    """Tokens pass through Qwen-Image 2.1, so nothing has to say how its bank is laid out; its grid is cut at 0.999."""
    student = random_student(tmp_path / "s", teachers["qwen_image21"])
    export("--to", "modelopt", "--student", student, "--out", tmp_path / "x", "--force")
    weights = tmp_path / "x" / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(weights), weights, {"format": "pt"})
    sidecar = tmp_path / "x" / "pdd_metadata.json"
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "grid_max_t": 0.999}))
    words = ["--from", "modelopt", tmp_path / "x", "--base_model", teachers["qwen_image21"]]
    export(*words, "--out", tmp_path / "back")
    made, (shift,) = read_student(tmp_path / "back"), read_backbone(teachers["qwen_image21"]).shifts().values()
    same(made.transformer.state_dict(), read_student(student).transformer.state_dict())
    u = torch.linspace(1, 0, N + 1, dtype=torch.float64)
    torch.testing.assert_close(made.grid.sigma["image"], (shift * u / (1 + (shift - 1) * u)).clamp(max=0.999))
    export(
        "--to", "modelopt", "--student", tmp_path / "back", "--out", tmp_path / "again"
    )  # the grid is the format's own
    words[2] = tmp_path / "again"
    export(*words, "--out", tmp_path / "twice")
    same_student(tmp_path / "back", tmp_path / "twice")


def test_a_bank_whose_layout_nobody_says_is_refused_and_a_flag_says_it(students, teachers, tmp_path, capsys):
    """Wan unpatchifies inside, so an undeclared bank may be in either order."""
    export("--to", "modelopt", "--student", students["wan"], "--out", tmp_path / "x", "--force")
    weights, sidecar = tmp_path / "x" / WAN, tmp_path / "x" / "pdd_metadata.json"
    save_file(load_file(weights), weights, {k: v for k, v in header(weights).items() if k != "pdd_bank_layout"})
    json_of(sidecar, pdd_bank_layout=...)
    words = ["--from", "modelopt", tmp_path / "x", "--base_model", teachers["wan"]]
    export(*words, "--out", tmp_path / "back", code=2)
    assert "pdd_bank_layout is None; a bank of two axes needs one of" in capsys.readouterr().err
    export(*words, "--layout", "absolute_patch_major", "--out", tmp_path / "back")
    same_student(students["wan"], tmp_path / "back")


# ---------------------------------------------------------------------------------------------- Diffusers


def test_a_merged_student_is_the_adapted_one(students, tmp_path):
    export("--to", "diffusers", "--student", students["digits"], "--out", tmp_path / "x")
    a, b = read_student(students["digits"]), read_student(tmp_path / "x")
    same(a.transformer.state_dict(), b.transformer.state_dict())
    assert a.adapters is not None and b.adapters is None and b.facts["shift"] == a.facts["shift"]
    load_student(tmp_path / "x")


@pytest.mark.parametrize("name, steps", [("digits", 1), ("digits_whole", 1), ("digits", 3)])
def test_a_stock_pipeline_samples_as_our_sampler(name, steps, students, tmp_path, monkeypatch):
    """The folder alone: for one forward as it is, for several with what its card says."""
    export("--to", "diffusers", "--student", students[name], "--steps", steps, "--out", tmp_path / "x")
    card = (tmp_path / "x" / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.S)[1]
    before, call = code.rsplit("pipe(", 1)
    monkeypatch.chdir(tmp_path / "x")
    namespace = {}
    exec(before, namespace)
    pipe = namespace["pipe"]
    assert type(pipe) is StableDiffusion3Pipeline and type(pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    assert pipe.transformer.state_dict()["proj_out.weight"].shape == (4, 64)
    pipe.set_progress_bar_config(disable=True)
    g = torch.Generator().manual_seed(2)
    namespace["cond"] = cond = {c: torch.randn(3, *shape, generator=g) for c, shape in digits_shapes().items()}
    namespace["noise"] = noise = torch.randn(3, 1, 8, 8, generator=g)
    call = call.replace('"a prompt"', "**cond, latents=noise, output_type='latent'")
    call = "pipe(" + re.sub(
        r"(\*\*cond), (latents=noise, output_type='latent'), (.*)\)", r"\2, \3, \1)", call.strip(), flags=re.S
    )
    student = read_student(students[name])
    fused = FusedStudent(student.transformer, student.backbone, student.grid)
    ours = endpoint(fused.block(cond), {"image": noise}, student.grid, student.nodes(steps))["image"]
    for _ in range(2):  # a second call begins with the first block again
        made = eval(call, namespace).images
        torch.testing.assert_close(made, ours, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------- cards, folders


@pytest.mark.parametrize("name, form, words", [
    ("h3", "videox_fun", []), ("h3_whole", "comfyui", []), ("wan", "fastvideo", []), ("digits", "diffusers", ["--steps", 2]),
])  # fmt: skip
def test_every_export_has_a_card(name, form, words, students, tmp_path):
    words = ["--base_name", "lab/base", "--revision", "abc", *words]
    export("--to", form, "--student", students[name], "--out", tmp_path / "x", *words)
    card = ModelCard.load(tmp_path / "x" / "README.md")
    assert card.data.base_model == "lab/base" and card.data.library_name == "diffusers" and card.data.license is None
    assert card.data.pipeline_tag == ("text-to-image" if name == "digits" else "text-to-video")
    for text in ("license", "| forwards | nodes", "revision abc", "## How it was trained", "| updates | 7 |"):
        assert text in card.content, text
    expected = {"videox_fun": "| 4 | 0, 2, 4, 6, 8 |", "diffusers": "| 2 | 0, 4, 8 |"}
    assert expected.get(form, "| 4 |") in card.content
    assert ("scheduler simple, CFG 1" in card.content) == (form == "comfyui")


def test_the_average_is_read_where_there_are_two(students, teachers, tmp_path):
    export("--to", "videox_fun", "--student", students["digits"], "--out", tmp_path / "x")
    tensors = load_file(tmp_path / "x" / LIVE)
    tensors["proj_out.bias"] = tensors["proj_out.bias"] + 1
    save_file(tensors, tmp_path / "x" / "pdd_ema.safetensors", header(tmp_path / "x" / LIVE))
    export("--from", "videox_fun", tmp_path / "x", "--base_model", TEACHER, "--out", tmp_path / "back")
    assert torch.equal(load_portable(tmp_path / "back", None).heads["proj_out.bias"], tensors["proj_out.bias"])
    export("--to", "videox_fun", "--student", tmp_path / "back", "--out", tmp_path / "again")
    assert (tmp_path / "again" / "pdd_ema.safetensors").exists()


def test_a_run_s_student_is_exported(students, tmp_path):
    shutil.copytree(students["digits"], tmp_path / "run" / "student")
    export("--to", "videox_fun", "--run", tmp_path / "run", "--out", tmp_path / "run" / "x")
    export("--to", "videox_fun", "--student", students["digits"], "--out", tmp_path / "y")
    same(load_file(tmp_path / "run" / "x" / LIVE), load_file(tmp_path / "y" / LIVE))
    assert header(tmp_path / "run" / "x" / LIVE)["base_model"] == "digits"  # no path of this machine


def test_a_student_from_elsewhere_is_sampled_by_the_script(students, warm, tmp_path):
    export("--to", "videox_fun", "--student", students["digits"], "--out", tmp_path / "x")
    export("--from", "videox_fun", tmp_path / "x", "--base_model", TEACHER, "--out", tmp_path / "student")
    code, output = warm(
        "sample", "--student", tmp_path / "student", "--steps", 2, "--num", 2, "--out", tmp_path / "made"
    )
    assert code == 0 and (tmp_path / "made" / "sample-nfe2-seed0.png").exists(), output
    assert student_config(tmp_path / "student").pdd_steps == N


def test_nothing_is_left_of_an_export_that_fails(students, tmp_path, monkeypatch, capsys):
    import pdd.exchange.card as card

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(card, "write_card", full)
    export("--to", "videox_fun", "--student", students["digits"], "--out", tmp_path / "x", code=2)
    assert list(tmp_path.iterdir()) == [] and "No space left" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- what is refused


def tensors_of(path, change):
    tensors, facts = load_file(path), header(path)
    out = change(tensors, facts)
    tensors, facts = out if isinstance(out, tuple) else (out if out is not None else tensors, facts)
    save_file({k: v.clone() for k, v in tensors.items()}, path, facts)


def json_of(path, **changes):
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))


LIVE, BANK, WAN = "pdd.safetensors", "comfyui_pdd.safetensors", "transformer/diffusion_pytorch_model.safetensors"
Q = "transformer_blocks.0.attn.to_q"


def ours(**changes):
    """Entries of the file's own contract, changed."""
    return lambda t, f: (t, {**f, "pdd_student": json.dumps({**json.loads(f["pdd_student"]), **changes})})


def without(name):
    return lambda t, f: {k: v for k, v in t.items() if k != name}


def changed(name, how):
    return lambda t, f: {**t, name: how(t[name])}


def spoiled(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[0] = float("nan")
    return tensor


def fact(**changes):
    return lambda t, f: (t, {k: v for k, v in {**f, **changes}.items() if v is not None})


DAMAGED = [
    # VideoX-Fun
    ("videox_fun", LIVE, without("proj_out.weight"), "tensor proj_out.weight is missing; without its bank"),
    ("videox_fun", LIVE, without("audio_proj_out.bias"), "tensor audio_proj_out.bias is missing"),
    ("videox_fun", LIVE, without(f"{Q}.lora_up"), f"tensor {Q}.lora_up is missing"),
    ("videox_fun", LIVE, lambda t, f: {k: v for k, v in t.items() if Q not in k}, f"module {Q} has none"),
    ("videox_fun", LIVE, changed("proj_out.weight", lambda w: w.flatten(0, 1)), "proj_out.weight has shape .* heads or offsets"),
    ("videox_fun", LIVE, changed("proj_out.weight", lambda w: w[:4]), r"tensor proj_out.weight has shape \[4, "),
    ("videox_fun", LIVE, changed("proj_out.bias", spoiled), "tensor proj_out.bias has values that are not finite"),
    ("videox_fun", LIVE, changed(f"{Q}.lora_down", spoiled), f"tensor {Q}.lora_A.weight has values that are not finite"),
    ("videox_fun", LIVE, changed("proj_out.bias", lambda w: w.to(torch.int32)), "tensor proj_out.bias is torch.int32"),
    ("videox_fun", LIVE, lambda t, f: {**t, "stray.weight": torch.zeros(1)}, "tensor stray.weight is none of this"),
    ("videox_fun", LIVE, fact(lora_alpha="2.5"), "lora_alpha is 6.0 and the header of pdd.safetensors says 2.5"),
    ("videox_fun", LIVE, fact(grid_max_t="0.999"), "grid_max_t is 1.0 and the header"),
    ("videox_fun", "pdd_config.json", lambda p: json_of(p, pdd_num_steps=16), "pdd_num_steps is 16 and the header"),
    ("videox_fun", LIVE, lambda p: p.write_bytes(b"\x80\x04pickle"), "pdd.safetensors cannot be read"),
    ("videox_fun", LIVE, lambda p: p.write_bytes(p.read_bytes()[:-9]), "pdd.safetensors cannot be read"),
    ("videox_fun", LIVE, lambda p: p.unlink(), "pdd.safetensors cannot be read"),
    # ComfyUI
    ("comfyui", BANK, fact(pdd_bank_layout=None), "pdd_bank_layout is None .* may be heads or offsets"),
    ("comfyui", BANK, without("diffusion_model.final_layer.audio_out.set_weight"), "audio_out.set_weight is missing; without"),
    ("comfyui", BANK, changed("diffusion_model.blocks.0.attn.qkv_proj.lora_B.weight", torch.ones_like), "not block-diagonal"),
    ("comfyui", BANK, changed("diffusion_model.blocks.0.mlp.fc2.alpha", lambda a: a * 2), r"fc2.alpha is \[12.0\]; needed is 6"),
    ("comfyui", BANK, lambda t, f: {k: v for k, v in t.items() if ".set_" in k}, "bank alone"),
    ("comfyui", BANK, fact(sigma_shift_video="3.0"), "shift is .*3.0.* and pdd_student says"),
    # FastVideo
    ("fastvideo", WAN, without("proj_out.weight"), "tensor proj_out.weight is missing; without its bank"),
    ("fastvideo", WAN, without("blocks.0.ffn.net.2.bias"), "tensor blocks.0.ffn.net.2.bias is missing"),
    ("fastvideo", WAN, changed("proj_out.weight", lambda w: w[:-1]), "tensor proj_out.weight has shape"),
    ("fastvideo", "fastvideo_inference.json", lambda p: json_of(p, strength=1), "strength is not known"),
    ("fastvideo", "fastvideo_inference.json", lambda p: json_of(p, model_type="ref2va"), "model_type is 'ref2va'; allowed"),
    ("fastvideo", "fastvideo_inference.json", lambda p: json_of(p, vsa_sparsity=0.9), "vsa_sparsity is 0.9; allowed is none"),
    ("fastvideo", "fastvideo_inference.json", lambda p: json_of(p, pdd_steps=...), "pdd_steps is missing"),
    ("fastvideo", "fastvideo_inference.json", lambda p: json_of(p, guidance_scale=3.0), "guidance_scale is 3.0; allowed is 1.0"),
    ("fastvideo", "fastvideo_inference.json", lambda p: json_of(p, grid_max_t=1.0), "grid_max_t is 1.0; allowed is 0.999"),
    ("fastvideo", "fastvideo_inference.json", lambda p: json_of(p, pdd_step_indices=[0, 5, 4, 6, 8]), "strictly rising ones"),
    ("fastvideo", "fastvideo_inference.json", lambda p: json_of(p, num_inference_steps=5), "num_inference_steps is 5"),
    ("fastvideo", "fastvideo_inference.json", lambda p: json_of(p, video_scheduler_shift=9.0), "video_scheduler_shift is 9.0"),
    ("fastvideo", "fastvideo_inference.json", lambda p: json_of(p, transformer_component="../x"), "transformer_component is"),
    ("fastvideo", "fastvideo_inference.json", lambda p: p.write_text("[1"), "is not JSON"),
    ("fastvideo", "transformer/config.json", lambda p: json_of(p, pdd_steps=9), "pdd_steps is 9; needed is 8"),
    ("fastvideo", "transformer/config.json", lambda p: json_of(p, ffn_dim=99), "ffn_dim is 99; needed is"),
    ("fastvideo", "transformer/diffusion_pytorch_model.safetensors.index.json", lambda p: p.write_text(
        json.dumps({"weight_map": {"proj_out.weight": "../../other.safetensors"}})), "names '../../other.safetensors'"),
    # Model-Optimizer
    ("modelopt", "transformer/config.json", lambda p: json_of(p, out_channels=33), "out_channels is 33; allowed are multiples"),
    ("modelopt", WAN, fact(pdd_bank_layout="absolute_head_major"), "a bank of two axes needs one of"),
    ("fastvideo", WAN, fact(pdd_bank_layout="base_plus_offsets"), "pdd_bank_layout is 'base_plus_offsets'; allowed is"),
    ("comfyui", BANK, fact(pdd_head_dtype="[]"), "pdd_head_dtype is "),
    ("comfyui", BANK, fact(grid_max_t="2.0"), "grid_max_t is 2.0 and pdd_student says"),
    ("modelopt", WAN, fact(pdd_bank_layout="base_plus_offsets"), "a bank of two axes needs one of"),
    ("modelopt", "pdd_metadata.json", lambda p: json_of(p, inference_blocks=[4, 5]), "allowed are widths whose sum is 8"),
    ("modelopt", "pdd_metadata.json", lambda p: json_of(p, grid_size=4), "grid_size is 4; needed is 8"),
    ("modelopt", WAN, fact(pdd_student="[]"), "pdd_student is not a JSON object"),
    ("modelopt", WAN, ours(sigmas=3), "pdd_student has noise levels that"),
    ("fastvideo", WAN, ours(sigmas={"video": [1.0, 0.5, 0.0]}), "pdd_student has noise levels that"),
    ("fastvideo", WAN, ours(shift={"video": 0.5}), "shift is .* and pdd_student says"),
    ("fastvideo", WAN, ours(expert="high"), "expert is 'high'; allowed is none"),
    ("modelopt", WAN, ours(student_grid_indices={"2": [0, 9]}), "student_grid_indices"),
]  # fmt: skip
WHOSE = {"videox_fun": "h3", "comfyui": "h3", "fastvideo": "wan", "modelopt": "wan"}


@pytest.fixture(scope="module")
def exports(students, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    for form, name in WHOSE.items():
        words = ["--force"] if form == "modelopt" else []
        words += ["--base_name", "lab/base", "--revision", "abc"]
        export("--to", form, "--student", students[name], "--out", folder / form, *words)
    return folder


@pytest.mark.parametrize("form, file, damage, message", DAMAGED, ids=range(len(DAMAGED)))
def test_what_is_damaged_is_refused_in_a_line(form, file, damage, message, exports, students, tmp_path, capsys):
    shutil.copytree(exports / form, tmp_path / "x")
    if damage.__code__.co_argcount == 2:
        tensors_of(tmp_path / "x" / file, damage)
    else:
        damage(tmp_path / "x" / file)
    teacher = json.loads((students[WHOSE[form]] / "pdd_config.json").read_text())["base_model"]
    capsys.readouterr()
    export("--from", form, tmp_path / "x", "--base_model", teacher, "--out", tmp_path / "out", code=2)
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1 and error.startswith("export_pdd.py: error: "), error
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("words, message", [
    (["--to", "videox_fun", "--student", "digits_whole"], "videox_fun allows one of adapters"),
    (["--to", "videox_fun", "--student", "wan_adapted"], "noise levels are up to 0.001 off those that videox_fun"),
    (["--to", "comfyui", "--student", "digits"], "comfyui allows MiniMaxH3Transformer3DModel"),
    (["--to", "fastvideo", "--student", "digits"], "states shifts of video and audio alone"),
    (["--to", "fastvideo", "--student", "h3_whole", "--force"], "off those that fastvideo samples at"),
    (["--to", "fastvideo", "--student", "wan"], "revision is not given"),
    (["--to", "modelopt", "--student", "h3_whole"], "has no out_channels to be widened"),
    (["--to", "modelopt", "--student", "wan"], "off those that modelopt samples at"),
    (["--to", "diffusers", "--student", "digits", "--steps", "5"], "steps is 5; allowed are 1, 2, 3, 4"),
    (["--to", "diffusers", "--student", "wan", "--steps", "1"], "off those that a stock pipeline samples at"),
    (["--to", "diffusers", "--student", "h3", "--steps", "1"], "different shifts; with steps allowed are equal ones"),
    (["--to", "pytorch", "--student", "digits"], "to is 'pytorch'; allowed are diffusers, videox_fun"),
    (["--from", "diffusers", "x"], "from is 'diffusers'; allowed are videox_fun"),
    (["--from", "videox_fun", "x"], "base_model is not given"),
    (["--student", "digits"], "neither to nor from is given"),
    (["--to", "videox_fun", "--student", "nowhere"], "nowhere' has no pdd_config.json"),
    (["--from", "comfyui", "x", "--layout", "rows"], "layout is 'rows'; allowed are"),
    (["--from", "comfyui", "x", "--shift", "fast"], "shift is 'fast'; allowed is a number"),
    (["--to", "videox_fun", "--student", "digits", "--steps", "0"], "steps is 0; allowed is 1 or more"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused_in_a_line(words, message, students, tmp_path, capsys):
    words = [str(students.get(word, word)) for word in words]
    export(*words, "--out", tmp_path / "out", code=2)
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1, error
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(students, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    export("--to", "videox_fun", "--student", students["digits"], "--out", tmp_path / "out", code=2)
    assert "which exists; allowed is a new folder" in capsys.readouterr().err and not list((tmp_path / "out").iterdir())


def test_a_shift_that_contradicts_the_file_is_refused(students, teachers, tmp_path, capsys):
    released_h3(tmp_path / "a.safetensors", teachers["minimax_h3"])
    words = ["--from", "videox_fun", tmp_path / "a.safetensors", "--base_model", teachers["minimax_h3"]]
    export(*words, "--shift", "{video: 6, audio: 2}", "--out", tmp_path / "student")
    assert read_student(tmp_path / "student").facts["shift"] == {"video": 6.0, "audio": 2.0}
    export("--to", "videox_fun", "--student", tmp_path / "student", "--out", tmp_path / "x")
    words[2] = tmp_path / "x"
    export(*words, "--shift", "12", "--out", tmp_path / "other", code=2)
    assert "shift[video] is 12.0; allowed is 6.0, which" in capsys.readouterr().err


def test_a_forced_export_says_its_own_grid(students, teachers, tmp_path):
    export("--to", "videox_fun", "--student", students["wan_adapted"], "--out", tmp_path / "x", "--force")
    assert header(tmp_path / "x" / "pdd.safetensors")["grid_max_t"] == "0.999"
    export("--from", "videox_fun", tmp_path / "x", "--base_model", teachers["wan"], "--out", tmp_path / "back")
    same_student(students["wan_adapted"], tmp_path / "back")
