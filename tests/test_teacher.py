"""The teacher's Runge-Kutta targets on ODEs with a known answer, and its guidance against its formula."""

import math
from pathlib import Path

import pytest
import torch

from pdd.backbones import read_backbone
from pdd.backbones.base import Backbone, Head, Size
from pdd.backbones.sd3 import SD3
from pdd.config import Config, ConfigError, Guidance
from pdd.data import Rows
from pdd.grid import Grid
from pdd.teacher import RK_RULES, Teacher, Unconditional, rk_target, unconditional_condition

F64 = torch.float64
DIGITS = Path(__file__).resolve().parent.parent / "assets" / "digits"
ORDERS = {"euler": 1, "midpoint": 2, "heun": 2, "rk4": 4}


# ---------------------------------------------------------------------------------------------------- targets


def clock_rate(shift: float, max_t: float, u: float) -> tuple[float, float]:
    """Noise level and its derivative by the clock."""
    below = u * (shift - 1) + max_t
    return shift * u * max_t / below, shift * max_t**2 / below**2


def one(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return torch.cos(4 * sigma) - x + 0.5 * torch.sin(3 * x * sigma)


def coupled(state: dict, sigma: dict) -> dict:
    """Two velocities that need each other's state at the right moment; the sizes of the two states differ."""
    x, y = state["image"], state["sound"]  # [B, 2], [B, 1]
    return {
        "image": torch.sin(3 * sigma["image"]) + torch.tanh(x * y) + 0.3 * x.flip(1),
        "sound": torch.cos(2 * sigma["sound"]) + torch.sin(x.sum(1, keepdim=True)) + 0.5 * y,
    }


def field_of(shifts: dict, max_t: float):
    """Velocities as a function of state and clock, and nothing of the grid under test in it."""

    def field(state, u):
        levels = {m: [[clock_rate(s, max_t, float(t))[0]] for t in u] for m, s in shifts.items()}
        sigma = {m: torch.tensor(s, dtype=F64) for m, s in levels.items()}  # [B, 1]
        return coupled(state, sigma) if len(state) == 2 else {"image": one(state["image"], sigma["image"])}

    return field


def start_of(shifts: dict) -> dict:
    state = {"image": [[0.7, -1.1], [1.5, 0.2]], "sound": [[0.4], [-0.3]]}
    return {m: torch.tensor(state[m], dtype=F64) for m in shifts}


def reference(shifts: dict, max_t: float, steps: int = 1500) -> dict:
    """The end of the ODE ``dx/du = v dsigma/du`` by the classical Runge-Kutta rule in the clock itself."""
    field = field_of(shifts, max_t)

    def rate(state, u):
        v = field(state, torch.full((2,), u, dtype=F64))
        return {m: x * clock_rate(shifts[m], max_t, u)[1] for m, x in v.items()}

    def move(state, slope, by):
        return {m: x + by * slope[m] for m, x in state.items()}

    state, du = start_of(shifts), -max_t / steps
    for i in range(steps):
        u = max_t * (steps - i) / steps
        a = rate(state, u)
        b = rate(move(state, a, du / 2), u + du / 2)
        c = rate(move(state, b, du / 2), u + du / 2)
        d = rate(move(state, c, du), max(u + du, 0.0))
        state = {m: x + du / 6 * (a[m] + 2 * b[m] + 2 * c[m] + d[m]) for m, x in state.items()}
    return state


def walk(rule: str, shifts: dict, max_t: float, steps: int) -> dict:
    grid, field, state = Grid(steps, shifts, max_t), field_of(shifts, max_t), start_of(shifts)
    for k in range(steps):
        v = rk_target(field, state, torch.tensor([k, k]), grid, rule)
        state = {m: x + grid.h[m][k] * v[m] for m, x in state.items()}
    return state


@pytest.fixture(scope="module")
def references():
    made = {}

    def get(shifts, max_t):
        key = (tuple(shifts.items()), max_t)
        if key not in made:
            made[key] = reference(shifts, max_t)
        return made[key]

    return get


@pytest.mark.parametrize("rule", ORDERS)
@pytest.mark.parametrize(
    "shifts, max_t",
    [
        ({"image": 1.0}, 1.0),
        ({"image": 3.0}, 0.999),
        ({"image": 3.0, "sound": 1.0}, 0.999),
        ({"image": 0.5, "sound": 2.0}, 0.999),
    ],
)
def test_a_rule_has_its_order(references, rule, shifts, max_t):
    """Halving the intervals divides the error of every modality by ``2^order``."""
    assert set(ORDERS) == set(RK_RULES)
    exact = references(shifts, max_t)
    coarse, fine = walk(rule, shifts, max_t, 40), walk(rule, shifts, max_t, 80)
    for m in shifts:
        errors = [float((end[m] - exact[m]).norm()) for end in (coarse, fine)]
        assert errors[0] < 0.2, "the solution itself"
        assert math.log2(errors[0] / errors[1]) == pytest.approx(ORDERS[rule], abs=0.12), errors


@pytest.mark.parametrize("rule", ORDERS)
def test_each_sample_has_an_interval_of_its_own(rule):
    shifts = {"image": 3.0, "sound": 1.0}
    grid, field, state = Grid(10, shifts), field_of(shifts, 0.999), start_of(shifts)
    both = rk_target(field, state, torch.tensor([9, 2]), grid, rule)
    for row, k in enumerate([9, 2]):
        alone = rk_target(field, {m: x[row : row + 1] for m, x in state.items()}, torch.tensor([k]), grid, rule)
        for m in shifts:
            torch.testing.assert_close(both[m][row : row + 1], alone[m], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("rule", ORDERS)
def test_straight_lines_are_exact_in_every_modality(rule):
    grid = Grid(6, {"image": 12.0, "sound": 1.0, "depth": 0.3})
    velocity = {m: torch.randn(4, 3, dtype=F64) for m in grid.modalities}
    state = {m: torch.randn(4, 3, dtype=F64) for m in grid.modalities}
    target = rk_target(lambda x, u: velocity, state, torch.tensor([0, 1, 3, 5]), grid, rule)
    for m in grid.modalities:
        torch.testing.assert_close(target[m], velocity[m], rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("rule, evaluations", [("euler", 1), ("midpoint", 2), ("heun", 2), ("rk4", 4)])
def test_a_rule_costs_its_evaluations_within_its_interval(rule, evaluations):
    grid, clocks = Grid(6, {"image": 3.0}), []

    def field(state, u):
        clocks.append(float(u))
        return state

    rk_target(field, {"image": torch.ones(1, 2, dtype=F64)}, torch.tensor([2]), grid, rule)
    assert len(clocks) == evaluations
    assert all(grid.u[3] <= u <= grid.u[2] for u in clocks)
    middle = float(grid.sigma["image"][2:4].mean())
    inner = [u for u in clocks if u not in (float(grid.u[2]), float(grid.u[3]))]
    assert [clock_rate(3.0, 0.999, u)[0] for u in inner] == pytest.approx([middle] * len(inner), rel=1e-13)


# ---------------------------------------------------------------------------------------------------- guidance


class Two(Backbone):
    """Two modalities of plain channels; the condition may have any length."""

    heads = {"image": Head("image"), "sound": Head("sound")}
    columns = ("tokens", "pooled")

    def token_norm(self, velocity):
        return {m: v.norm(dim=1, keepdim=True) for m, v in velocity.items()}


class Model:
    """A nonlinear stand-in for a transformer that remembers what it was asked."""

    def __init__(self):
        self.calls = []

    def __call__(self, state, sigma, cond, plans=None):
        self.calls.append((state, sigma, cond))
        text = cond["tokens"].mean((1, 2)) + 2 * cond["pooled"].sum(1)  # [B]
        return {m: torch.sin(x + text[:, None] + sigma[m][:, None])[:, None] for m, x in state.items()}


GRID = Grid(8, {"image": 3.0, "sound": 1.0})


def backbone(batched: bool = True) -> Two:
    made = Two({"transformer": {}}, Size())
    made.batched_guidance = batched
    return made


def question(batch: int = 3, seed: int = 0) -> tuple[dict, torch.Tensor, dict]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    state = {"image": draw(batch, 4), "sound": draw(batch, 2)}
    return state, torch.linspace(0.9, 0.1, batch, dtype=F64), {"tokens": draw(batch, 5, 3), "pooled": draw(batch, 2)}


def unconditional(length: int = 5) -> Unconditional:
    g = torch.Generator().manual_seed(9)
    row = {"tokens": torch.randn(1, length, 3, generator=g), "pooled": torch.randn(1, 2, generator=g)}
    return Unconditional({"tokens": "empty_prompt", "pooled": "zeros"}, {"empty_prompt": row})


def naive_guidance(state, u, cond, uncond, scale):
    sigma = {m: f(u).float() for m, f in GRID.schedules.items()}
    v_c, v_u = ({m: v[:, 0] for m, v in Model()(state, sigma, c).items()} for c in (cond, uncond))
    return {m: v_u[m] + scale * (v_c[m] - v_u[m]) for m in v_c}, v_c


@pytest.mark.parametrize("scale", [0.5, 3.0, 7.5])
@pytest.mark.parametrize("batched, length, forwards", [(True, 5, 1), (False, 5, 2), (True, 2, 2)])
def test_guided_velocity_is_the_formula(scale, batched, length, forwards):
    """One forward of both halves where the family allows it and the two conditions are equally long, else two."""
    model, (state, u, cond) = Model(), question()
    teacher = Teacher(model, backbone(batched), GRID, Guidance(scale), unconditional(length))
    guided = teacher.velocity(state, u, cond)
    assert [len(call[0]["image"]) for call in model.calls] == ([6] if forwards == 1 else [3, 3])
    row = unconditional(length).rows["empty_prompt"]["tokens"]
    uncond = {"tokens": row.expand(3, -1, -1), "pooled": torch.zeros(3, 2)}
    expected, _ = naive_guidance(state, u, cond, uncond, scale)
    for m in expected:
        torch.testing.assert_close(guided[m], expected[m], rtol=1e-6, atol=1e-6)
    assert teacher.uncond_forwards == 1
    teacher.field(cond)(state, u)
    assert teacher.uncond_forwards == 2


def test_without_guidance_there_is_no_unconditional_forward():
    model, (state, u, cond) = Model(), question()
    teacher = Teacher(model, backbone(), GRID, Guidance(1.0), unconditional())
    v = teacher.velocity(state, u, cond)
    assert teacher.uncond_forwards == 0 and len(model.calls) == 1 and len(model.calls[0][0]["image"]) == 3
    for m in v:
        assert torch.equal(v[m], Model()(*model.calls[0])[m][:, 0])


def test_the_teacher_sees_each_modality_at_its_own_noise_level_and_builds_no_graph():
    model, (state, u, cond) = Model(), question()
    state = {m: x.requires_grad_() for m, x in state.items()}
    v = Teacher(model, backbone(), GRID).velocity(state, u, cond)
    assert not v["image"].requires_grad
    (_, sigma, _) = model.calls[0]
    for m, shift in {"image": 3.0, "sound": 1.0}.items():
        expected = [clock_rate(shift, 0.999, float(t))[0] for t in u]
        assert sigma[m].dtype == torch.float32 and sigma[m].tolist() == pytest.approx(expected, rel=1e-7)


def test_guidance_needs_an_unconditional_condition():
    with pytest.raises(ValueError, match="teacher_guidance_scale 3.0 needs cfg_uncond"):
        Teacher(Model(), backbone(), GRID, Guidance(3.0))


def test_a_block_is_one_guided_velocity_at_its_start():
    state, _, cond = question()
    teacher = Teacher(Model(), backbone(), GRID, Guidance(3.0), unconditional())
    block = teacher.block(cond)(state, 5, 8)
    expected = teacher.velocity(state, torch.full((3,), float(GRID.u[5]), dtype=F64), cond)
    for m in expected:
        assert torch.equal(block[m], expected[m])


def naive_rescale(conditional, guided, patch):
    """Token by token, over its channels and positions."""
    out = guided.clone()
    for b in range(guided.shape[0]):
        for i in range(0, guided.shape[2], patch):
            for j in range(0, guided.shape[3], patch):
                token = (b, slice(None), slice(i, i + patch), slice(j, j + patch))
                norm = max(float(guided[token].square().sum().sqrt()), 1e-5)
                out[token] = guided[token] * float(conditional[token].square().sum().sqrt()) / norm
    return out


def test_rescale_gives_each_patch_the_conditional_norm():
    g = torch.Generator().manual_seed(3)
    halves = torch.randn(4, 3, 4, 6, generator=g, dtype=F64)  # two conditional samples, then their unconditional ones
    halves[0, :, :2, :2], halves[2, :, :2, :2] = 1e-7, 1e-7  # a token whose guided norm is below the floor
    family = SD3({"transformer": {"patch_size": 2, "in_channels": 3, "out_channels": 3, "sample_size": 6}}, Size())
    cond = {c: torch.zeros(2, 1) for c in family.columns}
    uncond = Unconditional(dict.fromkeys(family.columns, "zeros"), {})
    model = lambda state, sigma, cond: {"image": halves[:, None]}  # noqa: E731
    grid = Grid(8, {"image": 1.0})
    question = {"image": torch.zeros(2, 3, 4, 6)}, torch.tensor([0.5, 0.5], dtype=F64), cond
    guided = Teacher(model, family, grid, Guidance(4.0), uncond).velocity(*question)["image"]
    rescaled = Teacher(model, family, grid, Guidance(4.0, guidance_rescale=True), uncond).velocity(*question)["image"]
    torch.testing.assert_close(rescaled, naive_rescale(halves[:2], guided, 2), rtol=1e-12, atol=0)
    norm = lambda x: x[0, :, 2:, 2:4].norm()  # noqa: E731
    assert norm(rescaled) == pytest.approx(float(norm(halves)), rel=1e-12)
    assert norm(guided) > 1.5 * norm(halves)


# ---------------------------------------------------------------------------------------------------- cfg_uncond


def knobs(**values) -> Config:
    return Config(teacher=str(DIGITS), pdd_steps=8, block_size_min=2, block_size_max=8, **values)


def made_from(**values) -> Unconditional | None:
    config, family = knobs(**values), read_backbone(DIGITS)
    return unconditional_condition(config, family, Rows(config, family))


@pytest.fixture(scope="module")
def rows():
    return Rows(knobs(), read_backbone(DIGITS))


def test_no_guidance_no_condition():
    assert made_from() is None
    assert made_from(cfg_uncond="zeros") is None


@pytest.mark.parametrize("policy", ["zeros", "empty_prompt", "negative_prompt"])
@pytest.mark.parametrize("column", [None, "prompt_embeds", "pooled_prompt_embeds"])
def test_each_policy_column_by_column(rows, policy, column):
    """One policy for all columns, or one for a column; columns that are not named keep the condition."""
    uncond = made_from(
        teacher_guidance_scale=3, cfg_uncond=policy if column is None else {column: policy}, negative_prompt="seven"
    )
    cond = rows.cond(torch.tensor([rows.find("two"), rows.find("any digit")]), "cpu")
    cond = {c: v.double() for c, v in cond.items()}
    seen = uncond(cond)
    prompt = {"empty_prompt": "", "negative_prompt": "seven"}.get(policy)
    for c, v in cond.items():
        if column not in (None, c):
            expected = v
        elif policy == "zeros":
            expected = torch.zeros_like(v)
        else:
            expected = torch.stack([rows.cond(rows.row_of(prompt), "cpu")[c][0]] * 2).double()
        assert torch.equal(seen[c], expected) and seen[c].dtype == F64
    assert not any(torch.equal(seen[c], v) for c, v in cond.items() if column in (None, c))


def test_policies_of_columns_are_independent(rows):
    policies = {"prompt_embeds": "negative_prompt", "pooled_prompt_embeds": "empty_prompt"}
    uncond = made_from(teacher_guidance_scale=3, cfg_uncond=policies, negative_prompt="seven")
    seen = uncond(rows.cond(rows.row_of("two"), "cpu"))
    assert torch.equal(seen["prompt_embeds"], rows.cond(rows.row_of("seven"), "cpu")["prompt_embeds"])
    assert torch.equal(seen["pooled_prompt_embeds"], rows.cond(rows.row_of(""), "cpu")["pooled_prompt_embeds"])


def test_a_column_may_be_kept_by_name(rows):
    uncond = made_from(teacher_guidance_scale=3, cfg_uncond={"prompt_embeds": "keep", "pooled_prompt_embeds": "zeros"})
    cond = rows.cond(rows.row_of("two"), "cpu")
    assert torch.equal(uncond(cond)["prompt_embeds"], cond["prompt_embeds"])
    assert not uncond(cond)["pooled_prompt_embeds"].any()


def test_guidance_of_each_modality():
    """Its own scale for each modality, from the same two forwards; a modality that is not named has none."""
    family = Two({"transformer": {}}, Size())
    grid = Grid(4, {"image": 1.0, "sound": 2.0})
    state = {"image": torch.randn(2, 3, 4, dtype=F64), "sound": torch.randn(2, 5, dtype=F64)}

    def model(state, sigma, cond, plans=None):
        scale = cond["tokens"].sum((1, 2))
        return {m: (x * scale.view(-1, *[1] * (x.ndim - 1)))[:, None] for m, x in state.items()}

    cond = {"tokens": torch.ones(2, 1, 1, dtype=F64), "pooled": torch.zeros(2, 1, dtype=F64)}
    uncond = Unconditional({"tokens": "zeros", "pooled": "keep"}, {})
    u = torch.tensor([0.5, 0.7], dtype=F64)
    for guidance, expected in [({"image": 3.0, "sound": 7.0}, (3, 7)), ({"sound": 2.0}, (1, 2)), (4.0, (4, 4))]:
        guided = Teacher(model, family, grid, Guidance(guidance), uncond).velocity(state, u, cond)
        for m, factor in zip(state, expected):  # the unconditional velocity is zero
            torch.testing.assert_close(guided[m], factor * state[m])


def test_a_column_without_a_policy_is_kept_or_refused(rows):
    """YAML's null is a value that a recipe can hold; it must not surface as a KeyError in the first forward."""
    cond = rows.cond(rows.row_of("two"), "cpu")
    try:
        policies = {"prompt_embeds": None, "pooled_prompt_embeds": "zeros"}
        uncond = made_from(teacher_guidance_scale=3, cfg_uncond=policies)
    except ConfigError:
        return
    assert torch.equal(uncond(cond)["prompt_embeds"], cond["prompt_embeds"])


def test_a_column_that_the_family_lacks_is_refused():
    with pytest.raises(ConfigError, match="'negative_embeds'; allowed are prompt_embeds, pooled_prompt_embeds"):
        made_from(teacher_guidance_scale=3, cfg_uncond={"negative_embeds": "zeros"})


def test_a_prompt_that_the_data_lacks_is_refused():
    with pytest.raises(ConfigError, match="cfg_uncond is 'negative_prompt' .* no row whose prompt is 'ugly'; .* zeros"):
        made_from(teacher_guidance_scale=3, cfg_uncond="negative_prompt", negative_prompt="ugly")
