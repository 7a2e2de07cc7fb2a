"""The fused sampler against the stock Diffusers pipeline and against one head at a time."""

import copy
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import nn

from pdd.backbones import read_backbone
from pdd.backbones.base import Backbone, Head, Size
from pdd.backbones.sd3 import SD3
from pdd.config import Config
from pdd.data import Rows
from pdd.grid import Grid, partition
from pdd.heads import ParallelHead
from pdd.sampling import endpoint, initial, walk
from pdd.student import FusedStudent, Student, Velocity, head_parameters, widen
from pdd.teacher import Teacher, unconditional_condition

DIGITS = Path(__file__).resolve().parent.parent / "assets" / "digits"
F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------------- stock pipeline

N, PROMPTS = 16, ["any digit", "three", "an odd digit", "any digit"]


@pytest.fixture(scope="module")
def pipeline():
    absent = ["vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3"]
    made = StableDiffusion3Pipeline.from_pretrained(DIGITS, **dict.fromkeys(absent))
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def rows():
    return Rows(Config(teacher=str(DIGITS)), read_backbone(DIGITS))


def stock(pipeline, grid: Grid, state: dict, cond: dict, **guidance) -> torch.Tensor:
    """The pipeline's own loop. The digits' scheduler has shift 1, so it leaves shifted noise levels as they are."""
    assert pipeline.scheduler.config.shift == 1
    return pipeline(
        **cond,
        latents=state["image"],
        sigmas=grid.sigma["image"][:-1].tolist(),
        output_type="latent",
        **guidance,
    ).images


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def batch_of(rows, grid) -> tuple[dict, dict]:
    cond = rows.cond(torch.tensor([rows.find(p) for p in PROMPTS]), "cpu")
    return initial({"image": torch.randn(len(PROMPTS), 1, 8, 8, generator=generator(1))}, grid), cond


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_at_initialisation_n_blocks_are_the_stock_pipeline(pipeline, rows, shift):
    grid, backbone = Grid(N, {"image": shift}), read_backbone(DIGITS)
    state, cond = batch_of(rows, grid)
    student = FusedStudent(widen(copy.deepcopy(pipeline.transformer), backbone, N), backbone, grid)
    ours = endpoint(student.block(cond), state, grid, partition(N, N))["image"]
    theirs = stock(pipeline, grid, state, cond, guidance_scale=1)
    assert relative(ours, theirs) < 1e-4
    other = Grid(N, {"image": 4.0 - shift})
    assert relative(theirs, stock(pipeline, other, state, cond, guidance_scale=1)) > 1e-2, "the shift matters"


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_guided_teacher_walks_as_the_stock_pipeline_does(pipeline, rows, shift):
    config = Config(teacher=str(DIGITS), teacher_guidance_scale=3, cfg_uncond="empty_prompt")
    grid, backbone = Grid(N, {"image": shift}), read_backbone(DIGITS)
    state, cond = batch_of(rows, grid)
    teacher = Teacher(
        Velocity(pipeline.transformer, backbone),
        backbone,
        grid,
        config,
        unconditional_condition(config, backbone, rows),
    )
    ours = endpoint(teacher.block(cond), state, grid, range(N + 1))["image"]
    empty = {
        f"negative_{c}": v.expand(len(PROMPTS), *v.shape[1:]) for c, v in rows.cond(rows.row_of(""), "cpu").items()
    }
    theirs = stock(pipeline, grid, state, cond, guidance_scale=3, **empty)
    assert relative(ours, theirs) < 1e-4 and teacher.uncond_forwards == N
    assert relative(theirs, stock(pipeline, grid, state, cond, guidance_scale=1)) > 1e-2, "guidance matters"


# ---------------------------------------------------------------------------------------------------- head by head


class Pair(nn.Module):
    """Two token sequences ``[B, T, C]`` that see each other, the clock and the prompt; one linear each at the end."""

    def __init__(self):
        super().__init__()
        self.image_in, self.sound_in = nn.Linear(3, 8), nn.Linear(2, 8)
        self.clock, self.text = nn.Linear(2, 8), nn.Linear(4, 8)
        self.image_out, self.sound_out = nn.Linear(8, 3), nn.Linear(8, 2, bias=False)

    def forward(self, image, sound, sigma, text):
        tokens = torch.cat([self.image_in(image), self.sound_in(sound)], 1)
        tokens = tokens + (self.clock(sigma) + self.text(text))[:, None]
        tokens = torch.tanh(tokens + torch.tanh(tokens).mean(1, keepdim=True))
        return self.image_out(tokens[:, : image.shape[1]]), self.sound_out(tokens[:, image.shape[1] :])


class PairFamily(Backbone):
    heads = {"image": Head("image_out"), "sound": Head("sound_out")}
    columns = ("text",)

    def forward(self, transformer, state, sigma, cond, directions):
        dtype = cond["text"].dtype
        clock = torch.stack([sigma["image"], sigma["sound"]], 1).to(dtype)
        out = transformer(state["image"].to(dtype), state["sound"].to(dtype), clock, cond["text"])
        return {m: v.unflatten(2, (directions[m], -1)).transpose(1, 2) for m, v in zip(self.heads, out)}


def pair():
    state = {"image": torch.randn(3, 4, 3, dtype=F64), "sound": torch.randn(3, 5, 2, dtype=F64)}
    return Pair().double(), PairFamily({"transformer": {}}, Size()), state, {"text": torch.randn(3, 4, dtype=F64)}


def tiny_sd3():
    """Three channels and two by two patches: rows in which positions, directions and channels can be mixed up."""
    config = dict(
        sample_size=4, patch_size=2, in_channels=3, out_channels=3, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=6, caption_projection_dim=16, pooled_projection_dim=5,
        pos_embed_max_size=2,
    )  # fmt: skip
    cond = {"prompt_embeds": torch.randn(3, 1, 6, dtype=F64), "pooled_prompt_embeds": torch.randn(3, 5, dtype=F64)}
    state = {"image": torch.randn(3, 3, 4, 4, dtype=F64)}
    return SD3Transformer2DModel(**config).double(), SD3({"transformer": config}, Size()), state, cond


def perturbed_student(make, pdd_steps: int):
    """Base, widened copy with heads that all differ, family, state at the grid's start, condition."""
    torch.manual_seed(2)
    base, backbone, state, cond = make()
    student = widen(copy.deepcopy(base), backbone, pdd_steps)
    with torch.no_grad():
        for parameter in head_parameters(student):
            parameter += 0.3 * torch.randn_like(parameter)
    return base, student, backbone, state, cond


@torch.no_grad()
def one_head_at_a_time(base, student, backbone, grid, state, cond, start, end):
    """``x_end`` of a block by ``end - start`` ordinary forwards, each of the base with other last linears."""
    model, moved = Velocity(copy.deepcopy(base), backbone), dict(state)
    sigma = {m: s[start].float().expand(3) for m, s in grid.sigma.items()}
    for k in range(start, end):
        for head in backbone.heads.values():
            linear, bank = model.transformer.get_submodule(head.module), student.get_submodule(head.module)
            linear.load_state_dict({name: parameter[k] for name, parameter in bank.state_dict().items()})
        v = model(state, sigma, cond)
        moved = {m: x + (grid.sigma[m][k + 1] - grid.sigma[m][k]) * v[m][:, 0] for m, x in moved.items()}
    return moved


@pytest.mark.parametrize("make", [pair, tiny_sd3])
@pytest.mark.parametrize("nodes", [[0, 6], [0, 1, 5, 6], [0, 2, 4, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_fused_sampling_is_materialise_then_integrate(make, nodes):
    """Any partition, any shift of a modality; the sampler's own student and the one in training alike."""
    base, student, backbone, state, cond = perturbed_student(make, 6)
    grid = Grid(6, dict(zip(backbone.modalities, (3.0, 0.5))))
    in_training = Student(Velocity(student, backbone), grid).block(cond)
    expected, states = state, [state]
    for start, end in zip(nodes, nodes[1:]):
        expected = one_head_at_a_time(base, student, backbone, grid, expected, cond, start, end)
        states.append(expected)
    trained = [x for _, x in walk(in_training, state, grid, nodes)]
    fused = [x for _, x in walk(FusedStudent(student, backbone, grid).block(cond), state, grid, nodes)]
    for ours in (trained, fused):
        for x, y in zip(ours, states):
            for m in backbone.modalities:
                torch.testing.assert_close(x[m], y[m], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [pair, tiny_sd3])
def test_one_forward_gives_every_direction_of_a_plan(make):
    """Displacements to several ends and single heads, from a node of its own for every sample."""
    base, student, backbone, state, cond = perturbed_student(make, 6)
    grid = Grid(6, dict(zip(backbone.modalities, (3.0, 0.5))))
    starts, ends, heads = [0, 4, 2], [[6, 1], [5, 4], [3, 6]], [[5, 0], [4, 5], [2, 3]]
    plans = grid.plan(starts, ends, heads)
    out = Student(Velocity(student, backbone), grid).directions(state, torch.tensor(starts), cond, plans)
    for b, start in enumerate(starts):
        moves = [one_head_at_a_time(base, student, backbone, grid, state, cond, start, end) for end in ends[b]]
        for m, x in state.items():
            for d, moved in enumerate(moves):
                torch.testing.assert_close(x[b] + out[m][b, d], moved[m][b], rtol=1e-9, atol=1e-9)
            for s, head in enumerate(heads[b]):
                # a head's velocity by what its own interval adds to the displacement
                before, after = (
                    one_head_at_a_time(base, student, backbone, grid, state, cond, start, end)[m][b]
                    for end in (head, head + 1)
                )
                velocity = (after - before) / (grid.sigma[m][head + 1] - grid.sigma[m][head])
                torch.testing.assert_close(out[m][b, 2 + s], velocity, rtol=1e-9, atol=1e-9)


def test_a_fused_student_holds_plain_linears_and_fuses_each_block_once():
    _, student, backbone, state, cond = perturbed_student(pair, 6)
    fused = FusedStudent(student, backbone, Grid(6, {"image": 1.0, "sound": 1.0}))
    predict = fused.block(cond)
    predict(state, 0, 3)
    first = fused.model.transformer.image_out
    assert type(first) is nn.Linear
    predict(state, 3, 6)
    assert not torch.equal(fused.model.transformer.image_out.weight, first.weight)
    predict(state, 0, 3)
    assert fused.model.transformer.image_out is first
    for start, end in ((0, 6), (2, 6)):  # of other partitions, with a node in common
        predict(state, start, end)
        expected = fused.banks["image"].fuse(fused.grid.fused_plan(start, end)["image"])
        assert torch.equal(fused.model.transformer.image_out.weight, expected.weight)
    assert not any(isinstance(module, ParallelHead) for module in fused.model.modules())


def test_widening_keeps_everything_but_the_last_linears():
    torch.manual_seed(3)
    base, backbone, *_ = pair()
    student = widen(copy.deepcopy(base), backbone, 5)
    widened, original = student.state_dict(), base.state_dict()
    assert set(widened) == set(original)
    for name, weight in original.items():
        expected = weight.expand(5, *weight.shape) if "_out" in name else weight
        assert torch.equal(widened[name], expected), name
    banks = {name for name, p in student.named_parameters() if any(p is q for q in head_parameters(student))}
    assert banks == {"image_out.weight", "image_out.bias", "sound_out.weight"}


# ---------------------------------------------------------------------------------------------------- the walk


def test_a_walk_integrates_with_the_blocks_noise_levels():
    """A constant velocity moves by the difference of noise levels; every block is asked for once, with its state."""
    grid, asked = Grid(7, {"image": 3.0, "sound": 1.0}), []
    velocity = {"image": torch.randn(2, 3), "sound": torch.randn(2, 1)}  # float32, as a model's
    start = {m: torch.randn(v.shape, dtype=F64) for m, v in velocity.items()}

    def predict(state, a, b):
        asked.append((a, b, state))
        return velocity

    nodes = [1, 2, 5, 7]
    steps = list(walk(predict, start, grid, nodes))
    assert [node for node, _ in steps] == nodes and [(a, b) for a, b, _ in asked] == [(1, 2), (2, 5), (5, 7)]
    assert all(given is state for (_, _, given), (_, state) in zip(asked, steps))
    for node, state in steps:
        for m, s in grid.sigma.items():
            assert state[m].dtype == F64, "the state's own precision, whatever the model's"
            expected = start[m] + (s[node] - s[1]) * velocity[m].double()
            torch.testing.assert_close(state[m], expected, rtol=1e-14, atol=1e-14)
    end = endpoint(predict, start, grid, nodes)
    assert all(torch.equal(end[m], steps[-1][1][m]) for m in end)


def test_each_block_has_a_velocity_of_its_own():
    grid = Grid(4, {"image": 2.0})
    s = grid.sigma["image"]
    predict = lambda x, a, b: {"image": torch.full((1,), float(10**a))}  # noqa: E731
    end = endpoint(predict, {"image": torch.zeros(1, dtype=F64)}, grid, [0, 1, 4])
    assert float(end["image"]) == pytest.approx(float((s[1] - s[0]) + 10 * (s[4] - s[1])), rel=1e-13)


def test_the_initial_state_is_noise_at_the_first_noise_level():
    noise = {"image": torch.randn(2, 3), "sound": torch.randn(2, 2)}
    for max_t in (0.999, 0.5):
        state = initial(noise, Grid(4, {"image": 3.0, "sound": 1.0}, max_t))
        for m, x in noise.items():
            torch.testing.assert_close(state[m], max_t * x)
