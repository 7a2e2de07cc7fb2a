"""Wan 2.2's two experts: each distilled over its own part of the clock, both sampled in the stock pipeline."""

import json
import math
import re
import shutil

import family_wan
import pytest
import torch
from conftest import REPO, ds_config, equal, lines, student_weights
from datasets import Dataset, load_from_disk
from diffusers import WanPipeline
from safetensors.torch import load_file

import export_pdd
from pdd.backbones import EXPERTS, read_backbone
from pdd.config import Config, Guidance
from pdd.data import Rows
from pdd.draws import noise
from pdd.formats import LoadedStudent, contract, empty_transformer, load_transformer, read_student, save_student
from pdd.high_noise import high_noise_rollout
from pdd.pipeline import Course, PDDScheduler, load_student
from pdd.sampling import endpoint, initial
from pdd.student import FusedStudent, Velocity, head_parameters, widen
from pdd.teacher import Teacher, Unconditional

N, BOUNDARY = {"high": 6, "low": 8}, 0.875
SHIFT = {"high": {"video": 3.0}, "low": {"video": 5.0}}  # each expert's run has its own
SIZE = [f"--{name}={value}" for name, value in vars(family_wan.SIZE).items()]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan22") / "teacher"
    family_wan.build(folder, boundary=BOUNDARY)
    return folder


def chosen(folder, expert):
    backbone = read_backbone(folder, family_wan.SIZE)
    backbone.choose(expert)
    return backbone, backbone.grid(N[expert], SHIFT[expert], 0.999)


def start(backbone, grid):
    g = torch.Generator().manual_seed(5)
    return initial({m: torch.randn(2, *s, generator=g) for m, s in backbone.latent_shapes().items()}, grid)


def expert_student(folder, expert, noise=0.0):
    """A student of one expert whose heads differ, as one read from disk."""
    backbone, grid = chosen(folder, expert)
    transformer = widen(load_transformer(folder, torch.float32, backbone.component), backbone, N[expert]).eval()
    g = torch.Generator().manual_seed(len(expert))
    with torch.no_grad():
        for p in head_parameters(transformer):
            p.add_(torch.randn(p.shape, generator=g) * p.std() * noise)
    config = Config(teacher=str(folder), pdd_steps=N[expert], block_size_min=N[expert], block_size_max=N[expert], expert=expert,
                    rollout_mode="data_latent")  # fmt: skip
    return LoadedStudent(transformer.requires_grad_(False), backbone, grid, contract(config, grid, backbone, 1, False))


def walk_both(students, state, cond, nodes):
    """Our own walk: the high expert's to the boundary, the low one's from there."""
    for student, own in zip(students, nodes):
        fused = FusedStudent(student.transformer, student.backbone, student.grid)
        state = endpoint(fused.block(cond), state, student.grid, own)
    return state


def stock_levels(grids, nodes):
    """Noise levels of the stock pipeline's steps; what is exactly at the boundary it would give to the first expert."""
    high, low = (grid.sigma["video"][own[:-1]].tolist() for grid, own in zip(grids, nodes))
    low[0] = float(torch.nextafter(torch.tensor(low[0]), torch.zeros(())))
    return {"video": high + low}


def assert_close(ours, stock):
    for m in ours:
        assert (ours[m] - stock[m]).norm() <= 1e-4 * stock[m].norm(), m


# -------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("nodes", [([0, 3, 6], [0, 8]), (list(range(7)), list(range(9)))])
def test_new_students_sample_as_the_stock_pipeline_with_both_experts(nodes, teacher):
    students = [expert_student(teacher, expert) for expert in N]
    state, cond = start(students[0].backbone, students[0].grid), family_wan.conditioning(2, 1)
    ours = walk_both(students, state, cond, nodes)
    stock = family_wan.stock(teacher, state, stock_levels([s.grid for s in students], nodes), cond)
    assert_close(ours, stock)


def test_guided_teachers_walk_as_the_stock_pipeline_with_a_guidance_each(teacher):
    uncond, cond = family_wan.conditioning(1, 9), family_wan.conditioning(2, 1)
    policy = Unconditional({"prompt_embeds": "empty_prompt"}, {"empty_prompt": uncond})
    state = first = start(*chosen(teacher, "high"))
    grids, nodes = [], [list(range(n + 1)) for n in N.values()]
    for expert, scale, own in zip(N, (4.0, 2.5), nodes):
        backbone, grid = chosen(teacher, expert)
        model = Velocity(load_transformer(teacher, torch.float32, backbone.component), backbone).eval()
        walker = Teacher(model, backbone, grid, Guidance(scale), policy)
        state = endpoint(walker.block(cond), state, grid, own)
        grids.append(grid)
    both = {"prompt_embeds": uncond["prompt_embeds"].expand(2, -1, -1)}
    levels = stock_levels(grids, nodes)
    assert_close(state, family_wan.stock(teacher, first, levels, cond, both, 4.0, 2.5))
    other = family_wan.stock(teacher, first, levels, cond, both, 4.0, 4.0)
    assert (other["video"] - state["video"]).norm() > 1e-3 * state["video"].norm()


# -------------------------------------------------------------------------------------------- both in one pipeline


@pytest.fixture(scope="module")
def saved(teacher, tmp_path_factory):
    """Folders of students of both experts."""
    folder = tmp_path_factory.mktemp("students")
    for expert in N:
        student = expert_student(teacher, expert, 0.3)
        save_student(folder / expert, student.backbone, student.transformer.state_dict(), student.facts)
    return folder


def call(pipe, state, cond, steps, **more):
    pipe.set_progress_bar_config(disable=True)
    return {"video": pipe(
        **cond, latents=state["video"], **{"guidance_scale": 1.0, **more}, num_inference_steps=steps, output_type="latent",
        **vars(family_wan.SIZE),
    ).frames}  # fmt: skip


@pytest.mark.parametrize("first, second, steps, second_steps, nodes", [
    ("high", "low", 5, None, ([0, 2, 4, 6], [0, 4, 8])),  # the second one's half is rounded down
    ("low", "high", 5, 2, ([0, 3, 6], [0, 2, 5, 8])),
])  # fmt: skip
def test_both_students_sample_in_the_stock_pipeline_as_our_walk(first, second, steps, second_steps, nodes, saved):
    students = [read_student(saved / expert) for expert in N]
    state, cond = start(students[0].backbone, students[0].grid), family_wan.conditioning(2, 1)
    pipe = load_student(saved / first, text_encoders=False, second=str(saved / second), second_steps=second_steps)
    made = call(pipe, state, cond, steps)
    assert_close(made, walk_both(students, state, cond, nodes))
    assert torch.equal(made["video"], call(pipe, state, cond, steps)["video"])


@pytest.mark.parametrize("distilled", N)
def test_the_checkpoint_s_own_expert_beside_a_student(distilled, saved, teacher):
    """The other one in 7 plain Euler steps, guided, on the student's shift."""
    uncond = family_wan.conditioning(1, 9)
    student = read_student(saved / distilled)
    other = next(expert for expert in N if expert != distilled)
    backbone = chosen(teacher, other)[0]
    grid, cond = backbone.grid(7, SHIFT[distilled], 0.999), family_wan.conditioning(2, 1)
    state = first = start(backbone, student.grid if distilled == "high" else grid)
    model = Velocity(load_transformer(teacher, torch.float32, backbone.component), backbone).eval()
    policy = Unconditional({"prompt_embeds": "empty_prompt"}, {"empty_prompt": uncond})
    for expert in N:
        if expert == distilled:
            state = walk_both([student], state, cond, [student.nodes(2)])
        else:
            state = endpoint(
                Teacher(model, backbone, grid, Guidance(3.0), policy).block(cond), state, grid, list(range(8))
            )
    pipe = load_student(saved / distilled, text_encoders=False, second="teacher", second_steps=7)
    assert_close(call(pipe, first, cond, 9, **student.backbone.guide_other(3.0, policy(cond))), state)
    plain = call(pipe, first, cond, 9)
    assert (plain["video"] - state["video"]).norm() > 1e-3 * state["video"].norm()


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
@pytest.mark.parametrize("boundary", [0.875, 0.9, 0.417, 1 / 3])
def test_every_step_is_its_own_expert_s(boundary, shift, teacher):
    """The stock pipeline gives timesteps from the boundary up to the first expert; the second one begins just there."""
    students = []
    for expert in N:
        backbone = read_backbone(teacher, family_wan.SIZE)
        backbone.boundary = boundary
        backbone.choose(expert)
        facts = {"student_grid_indices": None, "block_size_max": 9}
        transformer = empty_transformer(backbone.config)
        students.append(LoadedStudent(transformer, backbone, backbone.grid(9, {"video": shift}, 0.999), facts))
    scheduler = PDDScheduler.of(Course(students[1], students[0], 4))
    scheduler.set_timesteps(7)
    asked = [bool(t >= boundary * scheduler.config.num_train_timesteps) for t in scheduler.timesteps]
    assert asked == [True] * 4 + [False] * 3
    torch.testing.assert_close(scheduler.timesteps, scheduler.sigmas[:-1] * 1000, rtol=2e-7, atol=0)
    levels = [s.grid.sigma["video"][nodes] for s, nodes in zip(students, scheduler.course.nodes(7))]
    torch.testing.assert_close(scheduler.sigmas[:4], levels[0][:-1].float())
    torch.testing.assert_close(scheduler.sigmas[4:], levels[1].float())


# -------------------------------------------------------------------------------------------- training


def dataset(folder, latents=True):
    prompts = ["a thing", "another", ""]
    rows = {"prompt": prompts, "prompt_embeds": family_wan.conditioning(3, 1)["prompt_embeds"].tolist()}
    if latents:
        g = torch.Generator().manual_seed(2)
        rows["latents"] = torch.randn(3, 4, 4, 6, 8, generator=g).tolist()
    Dataset.from_dict(rows).save_to_disk(str(folder))
    return folder


TRAINED = {"pdd_steps": 4, "block_size_min": 4, "block_size_max": 4, "validation_num": 2, "max_train_steps": 3, "shift": 5.0,
           "validation_every": 3, "validation_steps": [2], "learning_rate": 2e-3, "log_every": 1,
           "export_dtype": "fp32", "teacher_guidance_scale": 2.0, "cfg_uncond": "empty_prompt"}  # fmt: skip


@pytest.fixture(scope="module")
def runs(warm, teacher, tmp_path_factory):
    """A run of each expert on two ranks in bf16 under ZeRO-3; the high one's data has no latents."""
    folder = tmp_path_factory.mktemp("runs")
    ds_config = json.loads((REPO / "ds_configs" / "zero3.json").read_text()) | {"bf16": {"enabled": True}}
    (folder / "ds.json").write_text(json.dumps(ds_config))
    for expert in N:
        recipe = {**TRAINED, "teacher": str(teacher), "data": str(dataset(folder / f"data-{expert}", expert == "low"))}
        (folder / "recipe.yaml").write_text(json.dumps({**recipe, "expert": expert}))
        code, output = warm(
            "train", "--ds_config", folder / "ds.json", "--recipe", folder / "recipe.yaml", "--run", folder / expert,
            *SIZE, ranks=2,
        )  # fmt: skip
        assert code == 0, output
    return folder


@pytest.mark.parametrize("expert, component", [("high", "transformer"), ("low", "transformer_2")])
def test_an_expert_is_trained_on_its_own_part(expert, component, runs, teacher):
    run = runs / expert
    losses = lines(run, "loss")
    assert len(losses) == 3 and all(v == v for v in losses)
    facts = json.loads((run / "student" / "pdd_config.json").read_text())
    between = 0.875 / (5 * (0.999 - 0.875) + 0.875)
    expected = [1, between] if expert == "high" else [between, 0]
    assert facts["expert"] == expert and facts["clock_part"] == pytest.approx(expected, rel=1e-12)
    # a few updates move the weights, but not to those of the other expert, whose feed-forward has another width
    base = load_transformer(teacher, torch.float32, component).state_dict()
    for name, weight in student_weights(run).items():
        if "proj_out" not in name:
            assert (weight - base[name]).norm() <= 0.2 * base[name].norm() + 0.1, name


@pytest.mark.parametrize("expert", N)
def test_trajectories_start_where_the_expert_s_part_does(expert, runs):
    """With one rung, every update leaves fresh trajectories: noise, or real latents noised to the boundary."""
    saved = load_from_disk(str(runs / f"data-{expert}")).with_format("torch")
    for rank in range(2):
        checkpoint = runs / expert / "checkpoints" / "step-000003"
        state = load_file(checkpoint / f"trajectories-{rank:05d}.safetensors")
        serial = 3 * 2 + rank
        eps = noise((4, 4, 6, 8), 0, "noise", "video", serial)
        expected = 0.999 * eps
        if expert == "low":
            student = read_student(runs / expert / "student")
            config = Config(**{**TRAINED, "teacher": str(runs), "expert": "low", "data": str(runs / "data-low")})
            row = int(Rows(config, student.backbone).shuffled(torch.tensor([serial]), 1))
            expected = 0.125 * saved[row]["latents"] + 0.875 * eps
        torch.testing.assert_close(state["0.state.video"][0], expected)


def test_validation_of_the_low_expert_starts_from_noised_latents(warm, teacher, tmp_path):
    """Before it has learnt anything, so that the teacher alone gives the same figure."""
    data = dataset(tmp_path / "data")
    recipe = {**TRAINED, "teacher": str(teacher), "expert": "low", "data": str(data), "max_train_steps": 1,
              "validation_every": 1, "learning_rate": 1e-30, "teacher_guidance_scale": 1}  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    code, output = warm(
        "train", "--ds_config", "ds_configs/zero3.json", "--recipe", tmp_path / "recipe.yaml", "--run", tmp_path / "run", *SIZE
    )  # fmt: skip
    assert code == 0, output
    backbone = chosen(teacher, "low")[0]
    grid, rows = backbone.grid(4, {"video": 5.0}, 0.999), load_from_disk(str(data)).with_format("torch")
    model = Velocity(load_transformer(teacher, torch.float32, "transformer_2"), backbone).eval()
    eps = torch.stack([noise((4, 4, 6, 8), 0, "validation", "video", i) for i in range(4)])
    x0 = rows[:2]["latents"].repeat_interleave(2, 0)
    cond = {"prompt_embeds": rows[:2]["prompt_embeds"].repeat_interleave(2, 0)}
    walker = Teacher(model, backbone, grid).block(cond)
    coarse, fine = (endpoint(walker, {"video": 0.125 * x0 + 0.875 * eps}, grid, nodes)["video"]
                    for nodes in ([0, 2, 4], [0, 1, 2, 3, 4]))  # fmt: skip
    expected = float((coarse - fine).norm() / fine.norm())
    assert lines(tmp_path / "run", "validation_endpoint_error_2") == pytest.approx([expected], rel=1e-4)


def test_the_script_samples_both_runs_and_either_beside_its_teacher(runs, warm, tmp_path):
    def sample(name, run, *flags):
        code, output = warm("sample", "--run", runs / run, "--num", "1", "--out", tmp_path / name, *flags)
        assert code == 0, output
        assert len(list((tmp_path / name).glob("sample-nfe*-seed0/a-thing-0.mp4"))) == 1
        (middle_frames,) = (tmp_path / name).glob("*.png")
        return middle_frames.read_bytes()

    both = sample("both", "high", "--second", runs / "low", "--steps", "3")
    assert sample("turned", "low", "--second", runs / "high", "--steps", "3", "--second_steps", "2") == both
    assert sample("other", "high", "--second", runs / "low", "--steps", "3", "--second_steps", "2") != both
    for run in N:
        beside = ["--second", "teacher", "--steps", "4", "--second_steps", "3"]
        guided = sample(f"{run}-guided", run, *beside)  # as the run's teacher was
        assert sample(f"{run}-same", run, *beside, "--second_guidance", "2") == guided
        assert sample(f"{run}-plain", run, *beside, "--second_guidance", "1") != guided


# -------------------------------------------------------------------------------------------- prompts alone


def rollout_of(folder, data, dtype=torch.float32, **knobs):
    """The rollout of a low expert's run, its weights read."""
    config = Config(
        **{**TRAINED, "teacher": str(folder), "expert": "low", "data": str(data), **vars(family_wan.SIZE), **knobs}
    )
    backbone = read_backbone(folder, family_wan.SIZE)
    backbone.choose("low")
    grid = backbone.grid(config.pdd_steps, {"video": config.shift}, config.grid_max_t)
    rollout = high_noise_rollout(config, backbone, grid, Rows(config, backbone))
    rollout.use(rollout.load(dtype).eval())
    return rollout, grid


@pytest.mark.parametrize("guidance, given", [(1.0, None), (4.0, None), (2.0, 4.0)])
def test_low_trajectories_start_where_the_stock_pipeline_is_at_the_boundary(guidance, given, teacher, tmp_path):
    data = dataset(tmp_path / "data", latents=False)
    rollout, low = rollout_of(
        teacher, data, teacher_guidance_scale=guidance, high_steps=5, high_guidance_scale=given, shift=3.0
    )
    eps, cond = torch.randn(2, 4, 4, 6, 8, generator=torch.Generator().manual_seed(3)), family_wan.conditioning(2, 1)
    made = rollout({"video": eps}, cond)
    uncond = load_from_disk(str(data)).with_format("torch")[2]["prompt_embeds"].expand(2, -1, -1)
    # five even steps of the clock down to the boundary, where the other expert is to go on
    left = torch.linspace(1, 0.875 / (3 * 0.124 + 0.875), 6, dtype=torch.float64)
    high = 3 * left * 0.999 / (1 + 2 * left)
    levels, first = {"video": [*high[:-1].tolist(), 0.875 - 1e-6]}, {"video": 0.999 * eps}
    negative, scale = {"prompt_embeds": uncond} if guidance > 1 else None, given or guidance
    assert_close(made, family_wan.stock(teacher, first, levels, cond, negative, scale, 7.0, after=5))
    assert float(high[-1]) == pytest.approx(0.875, rel=1e-12) == float(low.sigma["video"][0])


def test_a_student_of_the_high_expert_walks_as_in_its_pipeline(saved, teacher, tmp_path):
    data = dataset(tmp_path / "data", latents=False)
    rollout, _ = rollout_of(teacher, data, high_student=str(saved / "high"), high_steps=2)
    eps, cond = torch.randn(2, 4, 4, 6, 8, generator=torch.Generator().manual_seed(3)), family_wan.conditioning(2, 1)
    pipe, seen = load_student(saved / "high", text_encoders=False, second=saved / "low"), []
    call(pipe, {"video": 0.999 * eps}, cond, 4,
         callback_on_step_end=lambda pipe, step, time, there: seen.append(there["latents"]) or {})  # fmt: skip
    assert_close(rollout({"video": eps}, cond), {"video": seen[1]})
    assert sum(p.numel() for p in rollout.empty().parameters()) == sum(
        p.numel() for p in read_student(saved / "high").transformer.parameters()
    )


def test_prompts_alone_train_the_low_expert_and_a_resumed_run_is_the_same(warm, teacher, tmp_path):
    """Two ranks in bf16 under ZeRO-3, whose trajectories end at different steps; stopped between two times of the rollout."""
    data, run = dataset(tmp_path / "data", latents=False), tmp_path / "run"
    knobs = {
        "block_size_min": 2,
        "save_every": 1,
        "keep_last": 3,
        "validation_num": 1,
        "high_steps": 3,
        "high_guidance_scale": 4.0,
    }
    recipe = {**TRAINED, "teacher": str(teacher), "data": str(data), "expert": "low", **knobs}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    flags = ["--ds_config", ds_config(tmp_path, 3, True), "--recipe", tmp_path / "recipe.yaml"]
    code, output = warm("train", *flags, "--run", run, *SIZE, ranks=2)
    assert code == 0, output
    losses, end = lines(run, "loss"), run / "checkpoints" / "step-000003"
    assert len(losses) == 3 and all(map(math.isfinite, losses))

    # rank 1 began at the second rung: it restarted at the ends of updates 1 and 3, and rank 0 after 2
    rollout, _ = rollout_of(teacher, data, torch.bfloat16, high_steps=3, high_guidance_scale=4.0)
    state = load_file(end / "trajectories-00001.safetensors")
    assert state["0.rung"].tolist() == [0] and state["0.serial"].tolist() == [2 * 2 + 1]
    rows = Rows(rollout.config, rollout.backbone)
    cond = rows.cond(rows.shuffled(torch.tensor([5]), 2), "cpu")
    start = rollout({"video": noise((4, 4, 6, 8), 0, "noise", "video", 5)[None]}, cond)
    torch.testing.assert_close(state["0.state.video"], start["video"], rtol=0, atol=1e-2)

    straight = {path.name: path.read_bytes() for path in end.iterdir()}
    shutil.rmtree(end)
    shutil.rmtree(run / "student")
    (run / "latest").write_text("step-000001\n")
    code, output = warm("train", *flags[:2], "--resume", "--run", run, ranks=2)
    assert code == 0, output
    assert lines(run, "loss") == losses
    assert {path.name: path.read_bytes() for path in end.iterdir()} == straight


# -------------------------------------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def adapted(warm, teacher, tmp_path_factory):
    """Runs of each expert with adapters, on prompts alone; the low one starts where the high one's student gets to."""
    folder = tmp_path_factory.mktemp("adapted")
    data, more = dataset(folder / "data", latents=False), {}
    for expert in N:
        recipe = {**TRAINED, "teacher": str(teacher), "data": str(data), "expert": expert, "validation_every": 0, "lora_rank": 3,
                  "lora_alpha": 5, "learning_rate": 0.05, **more}  # fmt: skip
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        flags = ["--ds_config", ds_config(folder, 3), "--recipe", folder / "recipe.yaml", "--run", folder / expert]
        code, output = warm("train", *flags, *SIZE)
        assert code == 0, output
        more = {"high_student": str(folder / "high" / "student"), "high_steps": 2}
    return folder


def test_adapters_of_both_experts_load_in_the_stock_pipeline(adapted, teacher, warm, tmp_path):
    """By Diffusers' own loader, and the fused heads put in by hand: it samples as both students do together."""
    folders = [adapted / expert / "student" for expert in N]
    cond = family_wan.conditioning(2, 1)
    ours = load_student(folders[0], text_encoders=False, second=folders[1])
    state = start(*chosen(teacher, "high"))
    made = call(ours, state, cond, 2)

    pipe = WanPipeline.from_pretrained(teacher, **dict.fromkeys(family_wan.ABSENT))
    plain = {
        name: pipe.components[name].state_dict()["blocks.0.attn1.to_q.weight"].clone() for name in EXPERTS.values()
    }
    pipe.load_lora_weights(str(folders[0]), adapter_name="high")
    pipe.load_lora_weights(str(folders[1]), adapter_name="low", load_into_transformer_2=True)
    pipe.fuse_lora(components=list(EXPERTS.values()))
    levels = [0.999]
    for folder, (expert, name) in zip(folders, EXPERTS.items()):
        transformer = pipe.components[name]
        moved = transformer.state_dict()["blocks.0.attn1.to_q.base_layer.weight"] - plain[name]
        assert moved.norm() > 1e-3 * plain[name].norm()
        sigma = read_student(folder).grid.sigma["video"]
        share = sigma.diff() / sigma.diff().sum()  # the whole part of the clock as one block
        for entry, heads in load_file(folder / "pdd_heads.safetensors").items():
            fused = torch.einsum("n,n...->...", share, heads.double())
            transformer.get_parameter(entry).data.copy_(fused)
        levels.append(float(sigma[-1]) - 1e-7)
    pipe.scheduler = family_wan.Given(shift=1.0)
    pipe.scheduler.given = levels[:2]
    assert_close(made, call(pipe, state, cond, 2))

    flags = ["--student", folders[0], "--second", folders[1], "--steps", "2", "--num", "1", "--out", tmp_path]
    code, output = warm("sample", *flags)
    assert code == 0 and (tmp_path / "sample-nfe2-seed0" / "a-thing-0.mp4").exists(), output


# -------------------------------------------------------------------------------------------- export


def test_both_students_are_exported_together_with_their_adapters_merged(
    adapted, teacher, tmp_path, monkeypatch, capsys
):
    def export(*words):
        return export_pdd.main([str(w) for w in ("--to", "diffusers", *words)])

    folders = [adapted / expert / "student" for expert in N]
    assert export("--run", adapted / "low", "--second", adapted / "high", "--out", tmp_path / "both") == 0
    names = {str(path.relative_to(tmp_path / "both").parts[0]) for path in (tmp_path / "both").rglob("*")}
    assert names == {"high", "low", "README.md"}
    for folder, expert in zip(folders, N):
        ours, merged = read_student(folder), read_student(tmp_path / "both" / expert)
        assert merged.adapters is None and merged.backbone.expert == expert
        assert equal(ours.transformer.state_dict(), merged.transformer.state_dict())
    # the card's own lines sample, as the adapters themselves do
    card = (tmp_path / "both" / "README.md").read_text()
    (code,) = re.findall("```python\n(.*?)```", card, re.S)
    assert 'load_student("high", second="low", second_steps=1, base_model="BASE_MODEL")' in code
    state, cond, seen = start(*chosen(teacher, "high")), family_wan.conditioning(2, 1), {}
    made = call(load_student(folders[0], text_encoders=False, second=folders[1]), state, cond, 2)
    monkeypatch.chdir(tmp_path / "both")
    exec(code.replace("BASE_MODEL", str(teacher)).replace('pipe("a prompt", ', "arguments = dict("), seen)
    assert (seen["arguments"].pop("num_inference_steps"), seen["arguments"]) == (2, {"guidance_scale": 1})
    assert torch.equal(call(seen["pipe"], state, cond, 2)["video"], made["video"])

    assert export("--run", adapted / "high", "--out", tmp_path / "one") == 0  # to be sampled beside any other
    assert 'load_student(".", second="OTHER_EXPERT"' in (tmp_path / "one" / "README.md").read_text()
    capsys.readouterr()
    for words, message in [
        (["--steps", 1], "the student is of the high expert; a stock pipeline allows those of the whole clock"),
        (["--second", adapted / "low", "--steps", 2], "without --steps"),
        (["--second", adapted / "high"], "second is of expert high"),
        (["--second", adapted], "has no finished student"),
    ]:
        assert export("--run", adapted / "high", *words, "--out", tmp_path / "none") == 2
        assert message in capsys.readouterr().err and not (tmp_path / "none").exists()


# -------------------------------------------------------------------------------------------- refusals


def test_choosing_an_expert_is_checked_by_name(teacher, tmp_path):
    with pytest.raises(ValueError, match="^expert is None; allowed are high and low, .* 0.875"):
        read_backbone(teacher).choose(None)
    family_wan.build(tmp_path / "one")
    with pytest.raises(ValueError, match="^expert is 'low'; allowed is none, one transformer"):
        read_backbone(tmp_path / "one").choose("low")
    backbone = read_backbone(teacher)
    backbone.choose("high")
    with pytest.raises(ValueError, match="^grid_max_t is 0.8; allowed is more than 0.875"):
        backbone.grid(4, {"video": 3.0}, 0.8)
    shutil.copytree(teacher, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "transformer_2")
    read_backbone(tmp_path / "half").choose("high")
    with pytest.raises(ValueError, match="^expert is 'low' but the checkpoint has no transformer_2"):
        read_backbone(tmp_path / "half").choose("low")


BARE = ["--prompt_repeats", "{}", "--validation_every", "0"]  # the default recipe's prompts are not there
LOW, WALKED = ["--expert", "low"], ["--high_steps", "2", "--high_student"]


@pytest.mark.parametrize("flags, latents, message", [
    ([], True, "expert is None; allowed are high and low"),
    (["--expert", "middle"], True, "expert is 'middle'; allowed is high, low"),
    ([*LOW, "--rollout_mode", "data_latent"], False, "rollout_mode is 'data_latent' but data"),
    (["--expert", "high", "--high_steps", "4"], False, "high_steps is 4; allowed is none but with expert low"),
    ([*LOW, "--high_guidance_scale", "4"], True, "high_guidance_scale is 4.0; allowed is none, trajectories start"),
    ([*LOW, "--high_guidance_scale", "4"], False, "cfg_uncond is None; allowed is"),
    ([*LOW, "--high_steps", "0"], False, "high_steps is 0; allowed is an integer >= 1"),
    ([*LOW, *WALKED, "HIGH", "--high_guidance_scale", "4"], False, "high_guidance_scale is 4.0; allowed is none, a high_s"),
    ([*LOW, "--high_student", "HIGH"], False, "high_steps is None; allowed is an integer >= 1 with high_student"),
    ([*LOW, *WALKED, "HIGH", "--high_steps", "7"], False, "high_steps is 7; allowed by high_student"),
    ([*LOW, *WALKED, "LOW"], False, "is of expert low and boundary 0.875; allowed is the high"),
    ([*LOW, *WALKED, "nowhere"], False, "high_student 'nowhere' has no pdd_config.json; allowed is a"),
])  # fmt: skip
def test_bad_experts_end_with_one_line(flags, latents, message, saved, teacher, warm, tmp_path):
    named = {"HIGH": saved / "high", "LOW": saved / "low"}
    code, output = warm(
        "train", "--ds_config", "ds_configs/zero3.json", "--teacher", teacher, "--data", dataset(tmp_path / "data", latents),
        "--run", tmp_path / "run", *BARE, *SIZE, *(named.get(f, f) for f in flags),
    )  # fmt: skip
    assert code == 2 and output.count("error:") == 1 and message in output and "Traceback" not in output, output
    assert not (tmp_path / "run").exists()


def test_a_dry_run_counts_the_high_expert(teacher, warm, tmp_path):
    data = dataset(tmp_path / "data", latents=False)
    flags = ["--teacher", teacher, "--data", data, *LOW, *BARE, *SIZE, "--dry_run", "2"]
    code, output = warm("train", "--ds_config", "ds_configs/zero3.json", *flags)
    units = {"KiB": 2**10, "MiB": 2**20}
    told = {k: float(v) * units[u] for k, v, u in re.findall(r"^ *(\w[\w ]*?) +([\d.]+) (.iB)$", output, re.M)}
    count = sum(p.numel() for p in load_transformer(teacher, torch.float32).parameters())
    assert code == 0 and told["high expert"] == pytest.approx(2 * count / 2, abs=6), output  # in bf16 on two ranks
    assert count > 12000  # or it would go unseen in the total
    assert told["total"] == pytest.approx(sum(size for name, size in told.items() if name != "total"), abs=6000)


@pytest.mark.parametrize("flags, message", [
    ([], "of the high expert alone; needed is second"),
    (["--second", "HIGH"], "second is of expert high"),
    (["--second", "nowhere"], "second 'nowhere' has no finished student"),
    (["--second", "teacher"], "second_steps is None; allowed is 1 or more"),
    (["--second", "LOW", "--second_steps", "2"], "second_steps is 2; allowed are 1 to 1 of steps 2"),
    (["--second", "LOW", "--second_guidance", "2"], "second_guidance is 2.0; allowed is none"),
    (["--second", "teacher", "--second_steps", "1", "--second_guidance", "0.5"], "second_guidance is 0.5; allowed is 1"),
    (["--second", "LOW", "--compare"], "compare is true"),
    (["--second", "LOW", "--steps", "12"], "high expert: a grid of pdd_steps 4 has 1 to 4 blocks, not 6"),
])  # fmt: skip
def test_bad_sampling_flags_end_with_one_line(flags, message, runs, warm):
    named = {"HIGH": runs / "high", "LOW": runs / "low"}
    code, output = warm("sample", "--run", runs / "high", "--steps", "2", *(named.get(f, f) for f in flags))
    assert code == 2 and f"error: {message}" in output.replace("the student is ", "") and "Traceback" not in output, (
        output
    )
