"""The grid against exact rational arithmetic, Diffusers' own shift, autograd and naive loops."""

from fractions import Fraction

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from pdd.grid import Grid, Ladder, Shift, carried_step_count, fewest_blocks, partition, widest_block

F64 = torch.float64


def exact_sigma(shift: float, max_t: float, pdd_steps: int) -> list[Fraction]:
    """Noise levels at the N + 1 nodes with no rounding at all."""
    s, m = Fraction(shift), Fraction(max_t)
    clock = [m * (pdd_steps - k) / pdd_steps for k in range(pdd_steps + 1)]
    return [s * u * m / (u * (s - 1) + m) for u in clock]


def worst(values: torch.Tensor, exact: list[Fraction]) -> float:
    """Largest relative error; infinite where a value that should be zero is not."""
    assert len(values) == len(exact)
    pairs = [(Fraction(v), e) for v, e in zip(values.tolist(), exact)]
    return float(max(abs(v / e - 1) if e else (Fraction(0) if v == 0 else Fraction(10**9)) for v, e in pairs))


# ---------------------------------------------------------------------------------------------------- noise levels


@pytest.mark.parametrize("max_t", [0.999, 1.0])
@pytest.mark.parametrize("pdd_steps", [1, 7, 64])
def test_nodes_and_noise_levels_are_the_closed_form(pdd_steps, max_t):
    shifts = {"image": 1.0, "video": 6.0, "sound": 1 / 3, "depth": 1e-3}
    grid = Grid(pdd_steps, shifts, max_t)
    assert grid.modalities == ("image", "video", "sound", "depth")
    assert grid.u.dtype == F64 and grid.u[0] == max_t and grid.u[-1] == 0
    assert worst(grid.u, [Fraction(max_t) * (pdd_steps - k) / pdd_steps for k in range(pdd_steps + 1)]) < 3e-16
    for name, shift in shifts.items():
        assert worst(grid.sigma[name], exact_sigma(shift, max_t, pdd_steps)) < 1e-15
        assert float(grid.sigma[name][0]) == pytest.approx(max_t, rel=1e-15), "every shift keeps the start in place"


def test_the_clock_starts_where_the_seed_does():
    assert Grid(4, {"image": 1.0}).u.tolist() == [0.999, 0.74925, 0.4995, 0.24975, 0.0]


@pytest.mark.parametrize("max_t", [0.999, 1.0])
@pytest.mark.parametrize("pdd_steps", [1, 7, 1024])
@pytest.mark.parametrize("shift", [1e-6, 1e-3, 1 / 3, 1.0, 3.0, 12.0, 1e3, 1e6, 1e12])
def test_weights_are_exact_to_rounding(shift, pdd_steps, max_t):
    """Nothing cancels: neither the noise levels' difference at a large shift nor their denominator at a small one."""
    sigma = exact_sigma(shift, max_t, pdd_steps)
    weights = [b - a for a, b in zip(sigma, sigma[1:])]
    grid = Grid(pdd_steps, {"image": shift}, max_t)
    assert worst(grid.h["image"], weights) < 1e-15
    if shift >= 1e3 and pdd_steps == 1024:
        # what a difference of rounded noise levels would lose; without it this test could not fail
        assert worst(grid.sigma["image"].diff(), weights) > 1e-11


@pytest.mark.parametrize("start, end", [(0, 1), (3, 17), (17, 64), (0, 64)])
def test_block_weight_is_the_difference_of_noise_levels(start, end):
    grid, sigma = Grid(64, {"image": 5.0, "sound": 1.0}), exact_sigma(5.0, 0.999, 64)
    assert grid.block_weight("image", start, end) == pytest.approx(float(sigma[end] - sigma[start]), rel=1e-14)
    assert grid.block_weight("sound", start, end) == pytest.approx(0.999 * (start - end) / 64, rel=1e-14)


@pytest.mark.parametrize("shift", [0.0, 1e-310, 1e200, 1e308, float("inf"), float("nan")])
def test_a_weight_that_is_zero_or_not_finite_is_refused(shift):
    with pytest.raises(ValueError, match=r"shift \S+ of modality 'sound' with pdd_steps 16 .* zero or not finite"):
        Grid(16, {"image": 1.0, "sound": shift})


# ---------------------------------------------------------------------------------------------------- a part of the clock


def exact_part(shift: float, max_t: float, pdd_steps: int, part: tuple[float, float]) -> list[Fraction]:
    """Noise levels at the nodes of a part of the clock, with no rounding at all."""
    s, m, (a, b) = Fraction(shift), Fraction(max_t), map(Fraction, part)
    clock = [m * (a * (pdd_steps - k) + b * k) / pdd_steps for k in range(pdd_steps + 1)]
    return [s * u * m / (u * (s - 1) + m) for u in clock]


@pytest.mark.parametrize("max_t", [0.999, 1.0])
@pytest.mark.parametrize("pdd_steps", [1, 7, 256])
@pytest.mark.parametrize("shift", [1e-3, 1.0, 12.0, 1e6])
@pytest.mark.parametrize("part", [(1.0, 0.36), (0.36, 0.0), (1.0, 1 - 1e-6), (1e-6, 0.0), (0.7, 0.3)])
def test_a_part_of_the_clock_is_exact_to_rounding(part, shift, pdd_steps, max_t):
    sigma = exact_part(shift, max_t, pdd_steps, part)
    grid = Grid(pdd_steps, {"image": shift}, max_t, part)
    assert worst(grid.u, [Fraction(max_t) * (Fraction(part[0]) * (pdd_steps - k) + Fraction(part[1]) * k) / pdd_steps
                          for k in range(pdd_steps + 1)]) < 5e-16  # fmt: skip
    assert worst(grid.sigma["image"], sigma) < 2e-15
    assert worst(grid.h["image"], [b - a for a, b in zip(sigma, sigma[1:])]) < 2e-15
    assert grid.starts_from_noise == (part[0] == 1)
    if part[1] == 0:
        assert grid.sigma["image"][-1] == 0


@pytest.mark.parametrize("shift", [1e-3, 1.0, 3.0, 12.0])
@pytest.mark.parametrize("boundary", [0.875, 0.9, 0.1])
def test_two_parts_meet_at_their_boundary(boundary, shift):
    between = Shift(shift).fraction(boundary)
    first, second = Grid(7, {"image": shift}, part=(1, between)), Grid(4, {"image": shift}, part=(between, 0))
    assert float(first.sigma["image"][-1]) == pytest.approx(boundary, rel=1e-15)
    assert float(second.sigma["image"][0]) == pytest.approx(boundary, rel=1e-15)
    assert float(first.sigma["image"][0]) == pytest.approx(0.999, rel=1e-15) and second.sigma["image"][-1] == 0
    whole = first.block_weight("image", 0, 7) + second.block_weight("image", 0, 4)
    assert whole == pytest.approx(-0.999, rel=1e-14)


# ---------------------------------------------------------------------------------------------------- the shift


def test_shift_of_max_1_is_the_one_of_diffusers():
    """At its stock precision: the scheduler works in float32."""
    clock = torch.linspace(1, 0.01, 50)
    for shift in (0.5, 1.0, 3.0, 12.0):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(sigmas=clock.tolist())
        torch.testing.assert_close(Shift(shift, 1.0)(clock), scheduler.sigmas[:-1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_t", [0.999, 1.0])
def test_shifts_compose_and_invert(max_t):
    u = torch.linspace(0, max_t, 101, dtype=F64)
    f, g = Shift(3.0, max_t), Shift(0.4, max_t)
    torch.testing.assert_close(f(g(u)), Shift(1.2, max_t)(u), rtol=1e-14, atol=0)
    torch.testing.assert_close(f.inverse(f(u)), u, rtol=1e-14, atol=0)
    torch.testing.assert_close(g.inverse(g(u)), u, rtol=1e-14, atol=0)
    assert not torch.allclose(f(u), u, atol=0.1)


@pytest.mark.parametrize("shift", [0.25, 1.0, 7.0])
def test_slope_is_the_derivative(shift):
    f = Shift(shift)
    u = torch.linspace(0, 0.999, 33, dtype=F64, requires_grad=True)
    (derivative,) = torch.autograd.grad(f(u).sum(), u)
    torch.testing.assert_close(f.slope(u.detach()), derivative, rtol=1e-13, atol=0)


# ---------------------------------------------------------------------------------------------------- partitions


@pytest.mark.parametrize("pdd_steps", [1, 2, 7, 32, 100])
def test_balanced_partition_is_the_formula(pdd_steps):
    for blocks in range(1, pdd_steps + 1):
        nodes = partition(pdd_steps, blocks)
        assert nodes == (torch.arange(blocks + 1) * pdd_steps // blocks).tolist()
        widths = {b - a for a, b in zip(nodes, nodes[1:])}
        assert max(widths) - min(widths) <= 1, "balanced"
        assert widest_block(nodes) == max(widths)


def test_explicit_nodes_are_used_for_their_own_number_of_blocks_only():
    configured = {2: [0, 3, 16], 3: (0, 1, 2, 16)}
    assert partition(16, 2, configured) == [0, 3, 16]
    assert partition(16, 3, configured) == [0, 1, 2, 16]
    assert partition(16, 4, configured) == [0, 4, 8, 12, 16]
    assert widest_block([0, 3, 16]) == 13 and widest_block([0, 9, 16]) == 9


@pytest.mark.parametrize("blocks", [0, -1, 17])
def test_number_of_blocks_outside_the_grid_is_refused(blocks):
    with pytest.raises(ValueError, match=f"pdd_steps 16 has 1 to 16 blocks, not {blocks}$"):
        partition(16, blocks)


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([0, 16], id="too few"),
        pytest.param([0, 4, 8, 16], id="too many"),
        pytest.param([1, 8, 16], id="starts late"),
        pytest.param([0, 8, 15], id="stops early"),
        pytest.param([0, 16, 16], id="an empty block"),
        pytest.param([0, 17, 16], id="falls"),
    ],
)
def test_invalid_nodes_are_refused(nodes):
    with pytest.raises(ValueError) as error:
        partition(16, 2, {2: nodes})
    message = str(error.value)
    assert message.startswith(f"student_grid_indices[2] is {nodes}; allowed are 3 strictly increasing nodes")
    assert message.endswith("from 0 to pdd_steps 16")


@pytest.mark.parametrize("pdd_steps", [1, 7, 32, 100])
def test_fewest_blocks_by_trial(pdd_steps):
    for limit in range(1, pdd_steps + 1):
        trial = next(k for k in range(1, pdd_steps + 1) if widest_block(partition(pdd_steps, k)) <= limit)
        assert fewest_blocks(pdd_steps, limit) == trial


def test_carried_step_count():
    assert carried_step_count(32, 4) == 8 and carried_step_count(32, 32) == 1
    with pytest.raises(ValueError, match="pdd_steps 32 must be a multiple of block_size_min 5"):
        carried_step_count(32, 5)


# ---------------------------------------------------------------------------------------------------- plans


def naive_matrix(h, starts, ends, supervised):
    """The design's ``[B, D + S, N]`` by loops."""
    rows = []
    for b, start in enumerate(starts):
        for end in ends[b]:
            rows.append([float(h[k]) if start <= k < end else 0.0 for k in range(len(h))])
        for head in supervised[b] if supervised else []:
            rows.append([1.0 if k == head else 0.0 for k in range(len(h))])
    return torch.tensor(rows, dtype=F64).view(len(starts), -1, len(h))


@pytest.mark.parametrize("seed", range(12))
def test_plan_is_the_naive_matrix(seed):
    g = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high, (), generator=g))  # noqa: E731
    steps, batch = pick(1, 20), pick(1, 6)
    num_ends, num_heads = pick(1, 4), pick(0, 3)
    grid = Grid(steps, {"image": 3.0, "sound": 0.5})
    starts = [pick(0, steps) for _ in range(batch)]
    ends = [[pick(n, steps + 1) for _ in range(num_ends)] for n in starts]
    heads = [[pick(0, steps) for _ in range(num_heads)] for _ in starts] if num_heads else None
    plans = grid.plan(starts, ends, heads)
    assert tuple(plans) == grid.modalities
    for name, plan in plans.items():
        expected = naive_matrix(grid.h[name], starts, ends, heads)
        assert torch.equal(plan.dense(steps), expected)
        assert plan.num_directions == expected.shape[1]
        width = plan.combine.shape[2]
        assert (plan.lo >= 0).all() and (plan.lo + width <= steps).all(), "a band never leaves the grid"
        assert width == max(1, max(e - n for n, row in zip(starts, ends) for e in row)), "and is no wider than needed"


@pytest.mark.parametrize(
    "starts, ends",
    [
        pytest.param([7, 0], [[8], [5]], id="a wide window beside one at the grid's end"),
        pytest.param([8, 3], [[8], [4]], id="from the last node, nothing is left"),
        pytest.param([2, 5], [[2, 2], [5, 5]], id="only zero displacements"),
        pytest.param([0], [[8]], id="the whole grid"),
        pytest.param([0, 3], [[], []], id="no displacement at all"),
    ],
)
def test_plan_at_the_edges(starts, ends):
    grid = Grid(8, {"image": 2.0})
    heads = [[0]] * len(starts)
    plan = grid.plan(starts, ends, heads)["image"]
    assert torch.equal(plan.dense(8), naive_matrix(grid.h["image"], starts, ends, heads))


@pytest.mark.parametrize("start, end", [(0, 8), (5, 8), (2, 3)])
def test_fused_plan_is_the_mean_over_the_block(start, end):
    grid = Grid(8, {"image": 5.0, "sound": 1.0})
    for name, plan in grid.fused_plan(start, end).items():
        sigma = exact_sigma(grid.schedules[name].shift, 0.999, 8)
        block = sigma[end] - sigma[start]
        expected = [float((sigma[k + 1] - sigma[k]) / block) if start <= k < end else 0.0 for k in range(8)]
        torch.testing.assert_close(plan.dense(8)[0, 0], torch.tensor(expected, dtype=F64), rtol=1e-14, atol=0)
        assert plan.num_directions == 1 and len(plan.lo) == 1
        weights = grid.fusion_weights(name, start, end)
        assert len(weights) == end - start and float(weights.sum()) == pytest.approx(1, rel=1e-15)


def test_a_ladder_has_the_noise_levels_that_it_is_given():
    """What a shift describes, given node by node, is the same grid; its schedule runs through the nodes, straight between."""
    shifted = Grid(8, {"video": 5.0, "audio": 2.0}, 1.0)
    ladder = Ladder({m: s.tolist() for m, s in shifted.sigma.items()})
    assert ladder.pdd_steps == 8 and ladder.modalities == ("video", "audio")
    for m, schedule in ladder.schedules.items():
        torch.testing.assert_close(ladder.sigma[m], shifted.sigma[m], rtol=0, atol=1e-15)
        torch.testing.assert_close(ladder.h[m], shifted.h[m], rtol=0, atol=1e-15)
        torch.testing.assert_close(schedule(ladder.u), shifted.sigma[m], rtol=0, atol=1e-15)
        torch.testing.assert_close(schedule.inverse(ladder.sigma[m]), ladder.u, rtol=0, atol=1e-15)
        middle = (ladder.u[:-1] + ladder.u[1:]) / 2
        torch.testing.assert_close(
            schedule(middle), (ladder.sigma[m][:-1] + ladder.sigma[m][1:]) / 2, rtol=0, atol=1e-15
        )
        torch.testing.assert_close(schedule.slope(middle), ladder.h[m] / ladder.u.diff(), rtol=0, atol=1e-12)
    plan, other = (grid.fused_plan(2, 5)["video"] for grid in (ladder, shifted))
    torch.testing.assert_close(plan.combine, other.combine, rtol=0, atol=1e-15)


@pytest.mark.parametrize("levels", [[1.0, 0.5, 0.5, 0.0], [1.0, 0.5], [1.1, 0.0], [0.0], [1.0, float("nan"), 0.0]])
def test_levels_that_do_not_fall_to_zero_are_no_ladder(levels):
    with pytest.raises(ValueError, match="allowed are some that fall to 0"):
        Ladder({"image": levels})
    with pytest.raises(ValueError, match="allowed are some that fall to 0"):
        Ladder({"video": [1.0, 0.5, 0.0], "audio": [1.0, 0.0]})
