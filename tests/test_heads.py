"""The head bank read through plans against the naive bank that materialises all N heads."""

import pytest
import torch
from torch import nn

from pdd.grid import Grid, Plan, partition
from pdd.heads import ParallelHead

N, IN, C, B, T = 12, 5, 3, 4, 6
LAYOUTS = pytest.mark.parametrize("patch, bias", [(1, True), (1, False), (4, True), (4, False)])


def bank(patch: int = 1, bias: bool = True, dtype=torch.float64, perturbed: bool = True) -> ParallelHead:
    torch.manual_seed(0)
    head = ParallelHead(nn.Linear(IN, patch * C, bias=bias, dtype=dtype), N, patch)
    if perturbed:
        for parameter in head.parameters():
            nn.init.normal_(parameter)
    return head


def hidden(dtype=torch.float64, batch: int = B) -> torch.Tensor:
    return torch.randn(batch, T, IN, dtype=dtype, generator=torch.Generator().manual_seed(1))


def mixed_plan(shift: float = 3.0) -> Plan:
    """Every sample with its own start, ends and heads; one starts next to the grid's end, two share a start."""
    starts, heads = [0, 11, 5, 5], [[2, 7], [11, 11], [6, 5], [9, 11]]
    ends = [[2, 7, 4], [11, 11, 12], [6, 5, 9], [9, 11, 12]]
    return Grid(N, {"image": shift}).plan(starts, ends, heads)["image"]


def naive(head: ParallelHead, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """All N velocities first, then the plan's matrix; directions that are not supervised are detached."""
    velocities = torch.einsum("bti,noi->btno", x, head.weight)  # [B, T, N, P * C]
    if head.bias is not None:
        velocities = velocities + head.bias
    out = torch.einsum("bdn,btno->btdo", plan.dense(N).to(x.dtype).expand(len(x), -1, -1), velocities)
    moves = plan.combine.shape[1]
    out = torch.cat([out[:, :, :moves].detach(), out[:, :, moves:]], 2)
    rows = [out[..., p * C : (p + 1) * C].flatten(2) for p in range(head.patch)]  # each position: (D, C)
    return torch.cat(rows, 2)


def read(head: ParallelHead, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    head.plan = plan
    return head(x)


@LAYOUTS
def test_at_initialisation_every_head_is_the_base_linear(patch, bias):
    linear = nn.Linear(IN, patch * C, bias=bias, dtype=torch.float64)
    head, x = ParallelHead(linear, N, patch), hidden()
    assert head.weight.shape == (N, patch * C, IN) and head.out_features == patch * C
    assert set(head.state_dict()) == set(linear.state_dict()), "names of the base"
    expected = linear(x)
    for k in range(N):
        supervised = torch.full((B, 1), k)
        out = read(head, x, Plan(torch.zeros(B, dtype=torch.int64), torch.zeros(B, 0, 1), supervised))
        torch.testing.assert_close(out, expected, rtol=1e-14, atol=1e-14)
    head.weight.data[0] += 1
    assert not torch.equal(head.weight[1], head.weight[0]), "copies, not views of one storage"
    assert not torch.equal(linear.weight, head.weight[0])


@LAYOUTS
def test_a_plan_gives_what_the_naive_bank_gives(patch, bias):
    plan, cotangent = mixed_plan(), None
    results = []
    for form in (read, naive):
        head, x = bank(patch, bias), hidden().requires_grad_()
        out = form(head, x, plan)
        cotangent = torch.randn_like(out) if cotangent is None else cotangent
        out.backward(cotangent)
        results.append((out.detach(), x.grad, *(p.grad for p in head.parameters())))
    assert results[0][0].shape == (B, T, patch * 5 * C)
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@LAYOUTS
def test_a_batch_of_one_plan_serves_every_sample(patch, bias):
    head, x, plan = bank(patch, bias), hidden(), Grid(N, {"image": 2.0}).fused_plan(3, 9)["image"]
    torch.testing.assert_close(read(head, x, plan), naive(head, x, plan), rtol=1e-12, atol=1e-12)


@LAYOUTS
def test_heads_that_are_not_supervised_get_exactly_zero_gradient(patch, bias):
    head, x = bank(patch, bias), hidden()
    read(head, x, mixed_plan()).square().sum().backward()
    asked = {2, 5, 6, 7, 9, 11}
    for parameter in head.parameters():
        for k in range(N):
            assert bool((parameter.grad[k] != 0).any()) == (k in asked), k
            if k not in asked:
                assert torch.equal(parameter.grad[k], torch.zeros_like(parameter.grad[k]))


def test_displacements_carry_no_gradient():
    head, x, grid = bank(), hidden().requires_grad_(), Grid(N, {"image": 2.0})
    assert not read(head, x, grid.plan([0, 3, 2, 11], [[4], [5], [2], [12]])["image"]).requires_grad
    out = read(head, x, mixed_plan()).unflatten(2, (5, C))
    (gradient,) = torch.autograd.grad(out[:, :, :3].sum(), x, retain_graph=True)
    assert torch.equal(gradient, torch.zeros_like(gradient))
    (gradient,) = torch.autograd.grad(out[:, :, 3:].sum(), x)
    assert (gradient != 0).all()


def test_only_the_window_of_a_start_is_read():
    """A bank of hundreds of heads is mostly not read: heads outside of the windows may even be undefined."""
    head, x = bank(), hidden()
    with torch.no_grad():
        head.weight[:2], head.weight[7:], head.bias[:2], head.bias[7:] = (float("nan"),) * 4
    plan = Grid(N, {"image": 1.0}).plan([2, 3, 2, 3], [[6], [7], [5], [3]], [[2], [6], [3], [4]])["image"]
    assert read(head, x, plan).isfinite().all()


@pytest.mark.parametrize("blocks", [1, 2, 5, N])
@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_linear_is_materialise_then_integrate(blocks, shift, bias):
    """To float32 rounding, against float64 arithmetic on the same heads."""
    head, x, grid = bank(4, bias, torch.float32), hidden(torch.float32), Grid(N, {"image": shift})
    sigma = grid.sigma["image"]
    with torch.no_grad():
        velocities = torch.einsum("bti,noi->btno", x.double(), head.weight.double())
        velocities = velocities if head.bias is None else velocities + head.bias.double()
        nodes = partition(N, blocks)
        for start, end in zip(nodes, nodes[1:]):
            moved = sum((sigma[k + 1] - sigma[k]) * velocities[:, :, k] for k in range(start, end))
            linear = head.fuse(grid.fused_plan(start, end)["image"])
            assert type(linear) is nn.Linear and linear.weight.dtype == torch.float32
            assert (linear.bias is not None) == bias and not linear.weight.requires_grad
            assert (linear.in_features, linear.out_features) == (IN, 4 * C)
            expected = moved / (sigma[end] - sigma[start])
            torch.testing.assert_close(linear(x).double(), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_a_bfloat16_bank_is_fused_in_float32():
    """Rounded once at the end: half a unit in the last place of bfloat16, whatever the width of the block."""
    head, grid = bank(1, True, torch.bfloat16), Grid(N, {"image": 3.0})
    linear = head.fuse(grid.fused_plan(0, N)["image"])
    weights = grid.fusion_weights("image", 0, N)
    for fused, heads in ((linear.weight, head.weight), (linear.bias, head.bias)):
        exact = torch.tensordot(weights, heads.detach().double(), 1)
        assert fused.dtype == torch.bfloat16
        assert torch.equal(fused, exact.float().to(torch.bfloat16))


def test_reading_without_a_plan_is_an_error():
    with pytest.raises(RuntimeError, match="only read through a plan: set head.plan"):
        bank()(hidden())
