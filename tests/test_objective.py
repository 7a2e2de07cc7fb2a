"""The loss against a naive float64 form with all heads materialised, the regimes, and the paper's Proposition 1."""

import copy

import pytest
import torch
from datasets import Dataset
from einops import rearrange
from torch import nn
from torch.func import functional_call

from pdd.backbones.base import Backbone, Head, Size
from pdd.config import Config, Guidance
from pdd.data import Rows
from pdd.grid import Grid, partition
from pdd.objective import Objective, pd_loss, sample_supervision, supervision_window
from pdd.sampling import endpoint, initial
from pdd.student import Student, Velocity, head_parameters, widen
from pdd.teacher import Teacher, Unconditional, rk_target

F64 = torch.float64
SHIFTS = {"image": 3.0, "sound": 0.5}


class Duet(nn.Module):
    """Pictures ``[B, 2, 4, 4]`` in patches of two by two and sound ``[B, 3, 5]``, one trunk; gives its heads' rows."""

    def __init__(self):
        super().__init__()
        self.image_in, self.sound_in = nn.Linear(8, 6), nn.Linear(3, 6)
        self.clock, self.text, self.trunk = nn.Linear(2, 6), nn.Linear(4, 6), nn.Linear(6, 6)
        self.image_out, self.sound_out = nn.Linear(6, 8), nn.Linear(6, 3, bias=False)

    def forward(self, image, sound, sigma, text):
        a = self.image_in(rearrange(image, "b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2))
        b = self.sound_in(rearrange(sound, "b c t -> b t c"))
        tokens = torch.tanh(torch.cat([a, b], 1) + (self.clock(sigma) + self.text(text))[:, None])
        tokens = torch.tanh(tokens + self.trunk(tokens.mean(1, keepdim=True)))
        return self.image_out(tokens[:, :4]), self.sound_out(tokens[:, 4:])


class DuetFamily(Backbone):
    heads = {"image": Head("image_out", 4), "sound": Head("sound_out")}
    columns = ("text",)

    def latent_shapes(self):
        return {"image": (2, 4, 4), "sound": (3, 5)}

    def forward(self, transformer, state, sigma, cond, directions):
        dtype = transformer.trunk.weight.dtype
        clock = torch.stack([sigma["image"], sigma["sound"]], 1).to(dtype)
        image, sound = transformer(state["image"].to(dtype), state["sound"].to(dtype), clock, cond["text"].to(dtype))
        layout = dict(h=2, p=2, q=2, d=directions["image"])
        return {
            "image": rearrange(image, "b (h w) (p q d c) -> b d c (h p) (w q)", **layout),
            "sound": rearrange(sound, "b t (d c) -> b d c t", d=directions["sound"]),
        }


FAMILY = DuetFamily({"transformer": {}}, Size())


def roles(grid: Grid, dtype=F64, guidance: float = 2.0):
    """A base transformer, a student whose heads all differ, and a guided teacher with weights of its own."""
    torch.manual_seed(0)
    base, other = Duet().to(dtype), Duet().to(dtype)
    student = widen(copy.deepcopy(base), FAMILY, grid.pdd_steps)
    with torch.no_grad():
        for parameter in head_parameters(student):
            parameter += 0.3 * torch.randn_like(parameter)
    uncond = Unconditional({"text": "zeros"}, {})
    return base, student, Teacher(Velocity(other, FAMILY), FAMILY, grid, Guidance(guidance), uncond)


# ---------------------------------------------------------------------------------------------------- supervised heads


def test_window_ends_at_the_widest_block_the_grid_or_the_segment():
    n = torch.tensor([0, 3, 9, 11])
    assert supervision_window(n, 5, 12).tolist() == [5, 8, 12, 12]
    assert supervision_window(n, 5, 12, torch.tensor([4, 4, 12, 12])).tolist() == [4, 4, 12, 12]
    assert supervision_window(n, 5, 12, torch.tensor([9, 9, 10, 12])).tolist() == [5, 8, 10, 12]


@pytest.mark.parametrize("width, targets", [(1, 1), (7, 1), (8, 2), (6, 6), (9, 3)])
def test_heads_are_uniform_over_the_window(width, targets):
    """Over evenly spaced uniforms every head of the window is drawn equally often, with no exception."""
    size = width // targets
    uniforms = ((torch.arange(10 * size, dtype=F64) + 0.5) / (10 * size))[:, None].expand(-1, targets)
    n = torch.full((len(uniforms),), 4)
    k = sample_supervision(n, n + width, uniforms)
    assert k.dtype == torch.int64
    assert torch.bincount(k.flatten(), minlength=4 + width).tolist() == [0] * 4 + [10] * width


@pytest.mark.parametrize("targets", [1, 2, 3, 5])
def test_heads_are_distinct_and_rising_one_in_each_stratum(targets):
    """Also where the window does not divide evenly, with a window of its own for every sample."""
    g = torch.Generator().manual_seed(0)
    n = torch.randint(0, 20, (4000,), generator=g)
    end = n + torch.randint(targets, 12, (4000,), generator=g)
    uniforms = torch.rand(4000, targets, generator=g, dtype=F64)
    uniforms[0], uniforms[1] = 0.0, torch.nextafter(torch.tensor(1.0, dtype=F64), torch.tensor(0.0, dtype=F64))
    k = sample_supervision(n, end, uniforms)
    assert (k >= n[:, None]).all() and (k < end[:, None]).all() and (k.diff(dim=1) > 0).all()
    strata = [[b * int(w) // targets for b in range(targets + 1)] for w in end - n]
    for row, start, edges in zip(k.tolist(), n.tolist(), strata):
        assert all(a <= head - start < b for head, a, b in zip(row, edges, edges[1:]))
    for s in range(targets):
        # within a stratum of three or more heads the first and the last are both drawn, about equally often
        wide = torch.tensor([e[s + 1] - e[s] == 2 for e in strata])
        if wide.sum() > 200:
            first = (k[:, s] - n == torch.tensor([e[s] for e in strata]))[wide].double().mean()
            assert 0.4 < float(first) < 0.6


# ---------------------------------------------------------------------------------------------------- the loss


def naive_loss(base, student, teacher, grid, state, n, k, cond, rule, next_nodes, weights, mask):
    """Sample by sample; all N heads, as N ordinary forwards of the base transformer with the k-th linears in it."""
    model, banks = Velocity(base, FAMILY), {id(p) for p in head_parameters(student)}
    squares = {m: [] for m in state}
    counted = {m: [] for m in state}
    x_next = {m: torch.empty_like(x) for m, x in state.items()}
    previews = {m: torch.empty_like(x) for m, x in state.items()}
    for b, start in enumerate(n.tolist()):
        x, text = {m: v[b : b + 1] for m, v in state.items()}, {"text": cond["text"][b : b + 1]}
        sigma = {m: s[start : start + 1].float() for m, s in grid.sigma.items()}
        heads = []
        for j in range(grid.pdd_steps):
            weights_j = {f"transformer.{name}": p[j] if id(p) in banks else p for name, p in student.named_parameters()}
            heads.append({m: v[:, 0] for m, v in functional_call(model, weights_j, (x, sigma, text)).items()})

        def at(node, m):
            moved = x[m].clone()
            for j in range(start, node):
                moved += (grid.sigma[m][j + 1] - grid.sigma[m][j]) * heads[j][m].detach()
            return moved

        for head in k[b].tolist():
            x_k = {m: at(head, m) for m in state}
            target = rk_target(teacher.field(text), x_k, torch.tensor([head]), grid, rule)
            for m in state:
                valid = torch.ones_like(x[m]) if m not in (mask or {}) else mask[m][b : b + 1].expand_as(x[m]).to(F64)
                squares[m].append((heads[head][m] - target[m]) ** 2 * valid)
                counted[m].append(valid)
        for m in state:
            s = grid.sigma[m]
            if next_nodes is None:
                previews[m][b] = (at(head, m) - s[head] * heads[head][m].detach())[0]
            else:
                after = int(next_nodes[b])
                x_next[m][b] = at(after, m)[0]
                # the straight line through both points, at noise level 0
                previews[m][b] = x[m][0] + (x_next[m][b] - x[m][0]) * (0 - s[start]) / (s[after] - s[start])
    per_modality = {m: sum(v.sum() for v in squares[m]) / sum(v.sum() for v in counted[m]) for m in state}
    per_sample = sum(
        torch.stack([(v.sum() / c.sum().clamp(min=1)).detach() for v, c in zip(squares[m], counted[m])]).view(k.shape)
        for m in state
    )
    return sum(weights.get(m, 1.0) * v for m, v in per_modality.items()), per_modality, per_sample, x_next, previews


def problem(grid: Grid):
    g = torch.Generator().manual_seed(5)
    state = {
        "image": torch.randn(4, 2, 4, 4, generator=g, dtype=F64),
        "sound": torch.randn(4, 3, 5, generator=g, dtype=F64),
    }
    # starts from the first to the last node, distances from none to the whole grid
    n, k = torch.tensor([0, 2, 7, 4]), torch.tensor([[0, 7], [2, 3], [7, 7], [5, 7]])
    return state, n, k, torch.tensor([3, 4, 8, 8]), {"text": torch.randn(4, 4, generator=g, dtype=F64)}


def masks():
    """Part of the samples' sound is padding, of one sample all; half of every picture is."""
    sound = torch.ones(4, 1, 5, dtype=torch.bool)
    sound[0, :, 3:], sound[2] = False, False
    image = torch.ones(4, 2, 4, 4, dtype=torch.bool)
    image[:, :, 2:] = False
    return {"image": image, "sound": sound}


@pytest.mark.parametrize("rule", ["euler", "rk4"])
@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("masked", [(), ("sound",), ("image", "sound")])
def test_the_loss_is_the_naive_loss(rule, advance, masked):
    """Same losses, states and previews, and the same gradient on every parameter of the student."""
    grid = Grid(8, SHIFTS)
    base, student, teacher = roles(grid)
    state, n, k, following, cond = problem(grid)
    following = following if advance else None
    weights, mask = {"sound": 0.25}, {m: v for m, v in masks().items() if m in masked} or None
    ours = pd_loss(
        Student(Velocity(student, FAMILY), grid), teacher, state, n, k, cond,
        rule=rule, next_nodes=following, weights=weights, mask=mask,
    )  # fmt: skip
    gradients = torch.autograd.grad(ours.total, list(student.parameters()))
    total, per_modality, per_sample, x_next, previews = naive_loss(
        base, student, teacher, grid, state, n, k, cond, rule, following, weights, mask
    )
    expected = torch.autograd.grad(total, list(student.parameters()))

    exact = dict(rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(ours.total, total, **exact)
    torch.testing.assert_close(ours.per_modality, per_modality, **exact)
    torch.testing.assert_close(ours.per_sample, per_sample, **exact)
    torch.testing.assert_close(ours.x0, previews, **exact)
    for (name, _), a, b in zip(student.named_parameters(), gradients, expected):
        assert b.abs().max() > 1e-6, f"{name} has no gradient to compare"
        torch.testing.assert_close(a, b, **exact)
    assert not ours.per_sample.requires_grad and not any(x.requires_grad for x in ours.x0.values())
    if advance:
        torch.testing.assert_close(ours.x_next, x_next, **exact)
        assert not any(x.requires_grad for x in ours.x_next.values())
    else:
        assert ours.x_next is None


def test_heads_that_no_sample_is_supervised_on_get_exactly_zero_gradient():
    grid = Grid(8, SHIFTS)
    _, student, teacher = roles(grid)
    state, n, k, following, cond = problem(grid)
    pd_loss(
        Student(Velocity(student, FAMILY), grid), teacher, state, n, k, cond, rule="euler", next_nodes=following
    ).total.backward()
    for parameter in head_parameters(student):
        touched = parameter.grad.flatten(1).ne(0).any(1)
        assert touched.nonzero().flatten().tolist() == sorted(set(k.flatten().tolist()))


def test_the_teacher_gets_no_gradient_and_weights_default_to_one():
    grid = Grid(8, SHIFTS)
    _, student, teacher = roles(grid)
    state, n, k, _, cond = problem(grid)
    losses = pd_loss(Student(Velocity(student, FAMILY), grid), teacher, state, n, k, cond, rule="heun")
    losses.total.backward()
    assert all(p.grad is None for p in teacher.model.parameters())
    torch.testing.assert_close(losses.total, losses.per_modality["image"] + losses.per_modality["sound"])


def test_trajectories_keep_the_precision_of_their_states():
    grid = Grid(8, SHIFTS)
    _, student, teacher = roles(grid, torch.float32)
    state, n, k, following, cond = problem(grid)
    model = Student(Velocity(student, FAMILY), grid)
    losses = pd_loss(model, teacher, state, n, k, cond, rule="euler", next_nodes=following)
    assert losses.total.dtype == torch.float32
    for m, x in losses.x_next.items():
        assert x.dtype == F64
        # what is added has the rounding of a float32 model, the state itself is not rounded
        moved = x - state[m]
        torch.testing.assert_close(moved, moved.float().double(), rtol=0, atol=1e-15)


# ---------------------------------------------------------------------------------------------------- Proposition 1


class Affine(nn.Module):
    """Heads that are affine in the state, with weights of their own at every training start: they can be exact."""

    def __init__(self, size: int, starts: int):
        super().__init__()
        self.starts = starts
        self.out = nn.Linear(starts * (size + 1), size, bias=False, dtype=F64)

    def forward(self, x, start):
        ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)  # [B, size + 1]
        place = nn.functional.one_hot(start, self.starts).to(x)  # [B, starts]
        return self.out(torch.einsum("bs,bi->bsi", place, ones).flatten(1)[:, None])  # [B, 1, D * size]


class AffineFamily(Backbone):
    heads = {"state": Head("out")}
    columns = ("text",)

    def __init__(self, grid: Grid, starts: list[int]):
        super().__init__({"transformer": {}}, Size())
        self.levels = grid.sigma["state"][starts].float()  # by which the transformer knows where it starts

    def latent_shapes(self):
        return {"state": (3,)}

    def forward(self, transformer, state, sigma, cond, directions):
        start = (sigma["state"][:, None] - self.levels).abs().argmin(1)
        return {"state": transformer(state["state"], start).unflatten(2, (directions["state"], -1))[:, 0]}


A = torch.tensor([[1.0, -2.5, 0.0], [2.0, 0.5, 1.0], [0.5, 0.0, -1.5]], dtype=F64)
OFFSET = torch.tensor([0.5, -0.5, 0.5], dtype=F64)


def fine_trajectory(x: torch.Tensor, sigma: torch.Tensor, rule: str, nodes: range) -> torch.Tensor:
    """The solver's own N steps on ``dx/dsigma = A x + b`` in closed form: a product of affine maps."""
    eye = torch.eye(3, dtype=F64)
    for k in nodes:
        h = sigma[k + 1] - sigma[k]
        step, inhomogeneous = {
            "euler": (eye + h * A, h * OFFSET),
            "midpoint": (eye + h * A + h * h / 2 * A @ A, h * OFFSET + h * h / 2 * A @ OFFSET),
        }[rule]
        x = x @ step.T + inhomogeneous
    return x


def prompts_only(tmp_path, prompts: list[str]) -> str:
    Dataset.from_dict({"prompt": prompts, "text": [[0.0]] * len(prompts)}).save_to_disk(str(tmp_path / "data"))
    return str(tmp_path / "data")


@pytest.mark.parametrize("rule, other", [("euler", "midpoint"), ("midpoint", "euler")])
def test_training_drives_the_student_onto_the_teachers_fine_trajectory(tmp_path, rule, other):
    """The paper's Proposition 1, by the data-free regime itself: the minimiser is the teacher's solver, not the ODE."""
    config = Config(
        teacher="none", data=prompts_only(tmp_path, ["a"]), pdd_steps=8, block_size_min=4, block_size_max=8,
        stagger="sample", type_rk=rule, num_targets=4, train_micro_batch_size_per_gpu=32, precision_decoding="fp64",
    )  # fmt: skip
    grid = Grid(8, {"state": 3.0})
    sigma, family = grid.sigma["state"], AffineFamily(grid, config.starts)
    torch.manual_seed(1)
    transformer = widen(Affine(3, len(config.starts)), family, 8)
    student = Student(Velocity(transformer, family), grid)
    field = lambda state, sigma, cond: {"state": (state["state"] @ A.T + OFFSET)[:, None]}  # noqa: E731
    objective = Objective(
        config, grid, student, Teacher(field, family, grid), Rows(config, family), rank=0, world=1, device="cpu"
    )
    noise = torch.randn(64, 3, generator=torch.Generator().manual_seed(2), dtype=F64)
    start = initial({"state": noise}, grid)
    expected = {k: fine_trajectory(start["state"], sigma, rule, range(k)) for k in (4, 8)}
    apart = (fine_trajectory(start["state"], sigma, other, range(8)) - expected[8]).norm() / expected[8].norm()
    assert apart > 0.05, "the two solvers' trajectories must differ for this test to tell them apart"

    def errors():
        ends = [endpoint(student.block({}), start, grid, partition(8, blocks))["state"] for blocks in (1, 2)]
        half = endpoint(student.block({}), start, grid, [0, 4])["state"]
        pairs = [(half, expected[4])] + [(end, expected[8]) for end in ends]
        return [float((x - y).norm() / y.norm()) for x, y in pairs]

    assert min(errors()) > 0.1
    # the loss can reach zero, so constant steps of plain gradient descent converge to rounding
    optimizer = torch.optim.SGD(transformer.parameters(), lr=4.0)
    for step in range(400):
        losses, _ = objective(step, 0)
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
    assert max(errors()) < 1e-12


# ---------------------------------------------------------------------------------------------------- the regimes


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A dozen rows and the empty prompt, which is not trained on; every row is known by its text."""
    g = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(13, *shape, generator=g).tolist()  # noqa: E731
    columns = {
        "prompt": ["", *(f"prompt {i}" for i in range(12))],
        "text": draw(4),
        "image_latents": draw(2, 4, 4),
        "sound_latents": draw(3, 5),
    }
    folder = tmp_path_factory.mktemp("data")
    Dataset.from_dict(columns).save_to_disk(str(folder / "latents"))
    Dataset.from_dict(columns | {"sound_latents_mask": [[[0.0] * 5]] * 13}).save_to_disk(str(folder / "silent"))
    return folder


class Spy(Velocity):
    """A transformer that remembers its forwards as ``(state, sigma, text)``."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = []

    def forward(self, state, sigma, cond, plans=None):
        self.calls.append((state, sigma, cond["text"]))
        return super().forward(state, sigma, cond, plans)


def regime(data, rank: int = 0, world: int = 1, name: str = "latents", **knobs):
    """An objective whose two models are spies."""
    values = dict(
        teacher="none", data=str(data / name), pdd_steps=8, block_size_min=2, block_size_max=4, seed=7,
        train_micro_batch_size_per_gpu=4, precision_decoding="fp64",
    )  # fmt: skip
    config = Config(**values | knobs)
    grid = Grid(config.pdd_steps, SHIFTS, config.grid_max_t)
    base, student, teacher = roles(grid, guidance=1.0)
    teacher.model = Spy(teacher.model.transformer, FAMILY)
    rows = Rows(config, FAMILY)
    return Objective(config, grid, Student(Spy(student, FAMILY), grid), teacher, rows, rank, world, "cpu")


def rows_by_text(objective, text: torch.Tensor) -> list[int]:
    table = objective.rows.cond(torch.arange(13), "cpu")["text"]
    found = (text[:, None] == table[None]).all(2)
    assert (found.sum(1) == 1).all()
    return found.int().argmax(1).tolist()


def same(a, b) -> bool:
    return all(torch.equal(x, b[m]) for m, x in a.items())


def test_data_latent_noises_real_latents_at_block_starts(data):
    """``x_n = (1 - sigma_n) x0 + sigma_n eps`` with the latents of the row whose prompt the model is given."""
    # 8 is no multiple of 3
    objective = regime(data, rollout_mode="data_latent", block_size_min=3, num_targets=2, gradient_accumulation_steps=2)
    starts, seen, epoch, noise = [], [], [], {"image": [], "sound": []}
    for call in range(60):
        losses, facts = objective(*divmod(call, 2))
        (state, sigma, text) = objective.student.model.calls[-1]
        n, index = facts["n"], rows_by_text(objective, text)
        x0 = objective.rows.latents(torch.tensor(index), "cpu")
        for m, x in state.items():
            assert x.dtype == F64
            level = objective.grid.sigma[m][n]
            assert torch.equal(sigma[m], level.float())
            level = level.view(-1, *[1] * (x.ndim - 1))
            noise[m].append((x - (1 - level) * x0[m].double()) / level)
        assert (facts["distance"] >= 0).all() and (facts["distance"] < torch.clamp(8 - n, max=4)[:, None]).all()
        assert losses.x_next is None and "rung" not in facts
        starts += n.tolist()
        seen += index
        epoch += [sorted(seen[-12:])] if len(seen) % 12 == 0 else []
    assert len(objective.student.model.calls) == 60, "one student forward a call"
    counts = torch.bincount(torch.tensor(starts), minlength=8)
    assert counts.nonzero().flatten().tolist() == [0, 3, 6] and counts[[0, 3, 6]].min() > 50
    assert epoch == [list(range(1, 13))] * 20, "every epoch has every trained row once"
    assert seen[:12] != seen[12:24], "in a new order"
    for m, draws in noise.items():
        draws = torch.cat(draws).flatten(1)  # [240, elements]
        assert float(draws.mean()) == pytest.approx(0, abs=0.05) and float(draws.std()) == pytest.approx(1, abs=0.05)
        assert torch.pdist(draws).min() > 0.1, "no noise is used twice"


@pytest.mark.parametrize("mode", ["data_latent", "simulate"])
def test_states_and_heads_follow_from_seed_and_step_alone(data, mode):
    knobs = dict(rollout_mode=mode, gradient_accumulation_steps=2)

    def asked(objective, step, round):
        _, facts = objective(step, round)
        return objective.student.model.calls[-1][0], facts["distance"] + 10 * facts["n"][:, None]

    first = {(step, round): asked(regime(data, **knobs), step, round) for step in (0, 3) for round in (0, 1)}
    for address, (state, heads) in first.items():
        again = asked(regime(data, **knobs), *address)
        assert same(state, again[0]) and torch.equal(heads, again[1])
        assert not same(state, asked(regime(data, **knobs | {"seed": 8}), *address)[0])
    for a in first:
        for b in first:
            # a carried slot starts from its own noise, at whichever step that is
            if a != b and (mode == "data_latent" or a[1] != b[1]):
                assert not same(first[a][0], first[b][0])
    wide = regime(data, **knobs, train_micro_batch_size_per_gpu=64)
    facts = [wide(*address)[1] for address in first]
    assert len({tuple(fact["distance"].flatten().tolist()) for fact in facts}) == 4
    if mode == "data_latent":
        assert len({tuple(fact["n"].tolist()) for fact in facts}) == 4


@pytest.mark.parametrize("stagger", ["stream", "sample"])
def test_simulate_is_one_student_forward_that_moves_one_rung(data, stagger):
    objective = regime(data, stagger=stagger, train_micro_batch_size_per_gpu=6, num_targets=2)
    model, nodes = objective.student.model, torch.tensor([0, 2, 4, 6, 8])
    expected, prompts = None, []
    for step in range(12):
        before = len(model.calls)
        losses, facts = objective(step, 0)
        first_walk = 3 if stagger == "sample" and step == 0 else 0
        assert len(model.calls) == before + 1 + first_walk
        state, sigma, text = model.calls[-1]
        n, rung = facts["n"], facts["rung"]
        if first_walk:  # what the pre-walk has to arrive at, sample by sample from the noise that it set out with
            noise = model.calls[0][0]
            for row in range(6):
                alone, cond = {m: x[row : row + 1] for m, x in noise.items()}, {"text": text[row : row + 1]}
                walked = endpoint(objective.student.block(cond), alone, objective.grid, nodes[: rung[row] + 1].tolist())
                for m, x in walked.items():
                    torch.testing.assert_close(state[m][row], x[0], rtol=1e-12, atol=1e-12)
        assert torch.equal(n, nodes[rung])
        assert (facts["distance"] >= 0).all() and (facts["distance"] < torch.clamp(8 - n, max=4)[:, None]).all()
        for m in state:
            assert torch.equal(sigma[m], objective.grid.sigma[m][n].float())
        if expected is not None:
            for row, (state_b, rung_b, text_b) in enumerate(zip(*expected)):
                moved = {m: x[row] for m, x in state.items()}
                if rung_b == 3:  # the end: fresh noise and the next prompt
                    assert rung[row] == 0
                    prompts[row] += rows_by_text(objective, text[row : row + 1])
                    assert not any(torch.allclose(x, state_b[m]) for m, x in moved.items())
                    continue
                assert rung[row] == rung_b + 1 and torch.equal(text[row], text_b), "the prompt is kept"
                for m, x in moved.items():
                    torch.testing.assert_close(x, state_b[m], rtol=1e-12, atol=1e-12)
        # what the sampler makes of every sample by itself is where the next call has to find it
        ends = []
        for row in range(6):
            alone, cond = {m: x[row : row + 1] for m, x in state.items()}, {"text": text[row : row + 1]}
            block = [int(nodes[rung[row]]), int(nodes[rung[row] + 1])]
            moved = endpoint(objective.student.block(cond), alone, objective.grid, block)
            ends.append({m: x[0] for m, x in moved.items()})
        for m, x in losses.x_next.items():
            torch.testing.assert_close(x, torch.stack([e[m] for e in ends]), rtol=1e-12, atol=1e-12)
        expected = ends, rung.tolist(), text
        if step == 0:
            prompts = [[index] for index in rows_by_text(objective, text)]
    first_two = [index for laps in prompts for index in laps[:2]]
    assert sorted(first_two) == list(range(1, 13)), "an epoch has every prompt once"


def test_trajectories_start_from_noise_at_the_first_noise_level(data):
    objective = regime(data, stagger="stream", grid_max_t=0.5, train_micro_batch_size_per_gpu=64)
    fresh = []
    for step in range(5):
        objective(step, 0)
        fresh.append(objective.student.model.calls[-1][0])
    for m in SHIFTS:
        for state in (fresh[0][m], fresh[4][m]):
            assert float(state.std()) == pytest.approx(0.5, rel=0.06)
        assert not torch.equal(fresh[0][m], fresh[4][m])


def test_an_explicit_carried_partition_is_walked(data):
    objective = regime(data, student_grid_indices={4: [0, 1, 3, 4, 8]})
    assert [objective(step, 0)[1]["n"].tolist() for step in range(5)] == [[n] * 4 for n in (0, 1, 3, 4, 0)]


@pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("fp64", F64), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("mode", ["simulate", "data_latent"])
def test_trajectories_have_the_precision_asked_for(data, mode, precision, dtype):
    objective = regime(data, rollout_mode=mode, precision_decoding=precision)
    losses, _ = objective(0, 0)
    assert objective.student.model.calls[0][0]["image"].dtype == dtype
    assert losses.x0["sound"].dtype == dtype


@pytest.mark.parametrize("mode", ["simulate", "data_latent"])
def test_the_knobs_of_the_loss_reach_it(data, mode):
    objective = regime(data, name="silent", rollout_mode=mode)
    losses, _ = objective(0, 0)
    assert losses.per_modality["sound"] == 0 and losses.per_modality["image"] > 0, "masked everywhere"
    weighted, _ = regime(data, rollout_mode=mode, loss_weights={"image": 3.0, "sound": 0.5})(0, 0)
    expected = 3 * weighted.per_modality["image"] + 0.5 * weighted.per_modality["sound"]
    torch.testing.assert_close(weighted.total, expected)
    for rule, evaluations in {"euler": 1, "midpoint": 2, "rk4": 4}.items():
        objective = regime(data, rollout_mode=mode, type_rk=rule, num_targets=2)
        objective(0, 0)
        assert len(objective.teacher.model.calls) == 2 * evaluations


@pytest.mark.parametrize("mode", ["simulate", "data_latent"])
def test_two_ranks_draw_what_one_rank_draws_for_their_global_batch(data, mode):
    """States, prompts and heads of the whole batch, and so the mean loss; for some steps, as trajectories go on."""
    knobs = dict(rollout_mode=mode, stagger="sample", gradient_accumulation_steps=2, num_targets=2)
    whole = regime(data, **knobs, train_micro_batch_size_per_gpu=8)
    halves = [regime(data, rank, 2, **knobs) for rank in range(2)]
    for step in range(6):
        for round in range(2):
            losses, facts = whole(step, round)
            parts = [half(step, round) for half in halves]
            for fact, value in facts.items():
                assert torch.equal(value, torch.cat([f[fact] for _, f in parts])), fact
            calls = [half.student.model.calls[-1] for half in halves]
            state, _, text = whole.student.model.calls[-1]
            assert torch.equal(text, torch.cat([c[2] for c in calls]))
            for m, x in state.items():
                torch.testing.assert_close(x, torch.cat([c[0][m] for c in calls]), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(losses.total, sum(part.total for part, _ in parts) / 2, rtol=1e-10, atol=0)
