"""ParallelHead: the bank of N output heads, read only through plans."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from einops import rearrange
from torch import Tensor, nn

from pdd.grid import Plan


class ParallelHead(nn.Module):
    """A linear layer repeated N times, ``u_n(k | x_n) = W_k H(x_n, t_n)`` (the paper's parallel decoder).

    It takes the place of the transformer's last linear and keeps its parameter names, so a widened transformer's
    state dict is the base one with ``weight [N, out, in]`` and ``bias [N, out]``. The heads are one parameter
    because ZeRO-3 gathers by module: every direction of a forward is made while the bank is whole.

    Args:
        linear: the base head; all N copies start as exactly this one.
        pdd_steps: N.
        patch: P, how many patch positions one output row spans, position-major ``(P, C)``; 1 when the transformer
            passes tokens through. The D directions come out as ``(P, D, C)`` rows, so that the transformer's own
            unpatchify yields channels ``(D C)``.
    """

    def __init__(self, linear: nn.Linear, pdd_steps: int, patch: int = 1):
        super().__init__()
        self.pdd_steps, self.patch = pdd_steps, patch
        weight = linear.weight.detach()
        self.weight = nn.Parameter(weight.expand(pdd_steps, *weight.shape).clone())  # [N, out, in]
        self.register_parameter("bias", None)
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().expand(pdd_steps, -1).clone())  # [N, out]
        self.plan: Plan | None = None

    @property
    def out_features(self) -> int:
        """Output rows of one head."""
        return self.weight.shape[1]

    def extra_repr(self) -> str:
        return f"pdd_steps={self.pdd_steps}, shape={tuple(self.weight.shape)}, patch={self.patch}"

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[B, T, in]`` -> the plan's directions, ``[B, T, P * (D + S) * C]`` rows ``(P, D + S, C)``."""
        if self.plan is None:
            raise RuntimeError("a ParallelHead is only read through a plan: set head.plan before the forward")
        plan = self.plan
        directions = []
        if plan.combine.shape[1]:
            with torch.no_grad():  # trajectories carry no gradient; only supervised heads do
                directions.append(self._combined(hidden, plan))
        if plan.supervised is not None:
            directions.append(self._supervised(hidden, plan.supervised))
        out = torch.cat(directions, 2)  # [B, T, D + S, out]
        return rearrange(out, "b t d (p c) -> b t (p d c)", p=self.patch)

    def _combined(self, hidden: Tensor, plan: Plan) -> Tensor:
        """Fuse each sample's band of heads first, then apply: the cost is D linears, not N. ``[B, T, D, out]``."""
        weight, bias = self._fuse(plan.lo, plan.combine)
        return _apply(hidden, weight, bias)

    def _supervised(self, hidden: Tensor, k: Tensor) -> Tensor:
        """The heads k, int64 ``[B, S]``, with gradient: ``[B, T, S, out]``.

        Backward scatters into the bank's gradient once; rows that no sample asked for get exactly zero.
        """
        flat = k.to(self.weight.device, non_blocking=True).flatten()
        weight = self.weight.index_select(0, flat).unflatten(0, k.shape)  # [B, S, out, in]
        bias = None if self.bias is None else self.bias.index_select(0, flat).unflatten(0, k.shape)
        return _apply(hidden, weight, bias)

    def _fuse(self, lo: Tensor, combine: Tensor) -> tuple[Tensor, Tensor | None]:
        """Band ``[B, D, W]`` from heads ``lo`` -> fused ``[B, D, out, in]`` and ``[B, D, out]``, float32 or better.

        Samples that start at the same head share one read of the bank's window; nothing outside it is touched. Plans come
        from the CPU and are copied without waiting: a GPU still has the whole transformer before it when this is called.
        """
        width = combine.shape[2]
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        combine = combine.to(self.weight.device, dtype, non_blocking=True)
        weight = combine.new_empty(*combine.shape[:2], *self.weight.shape[1:])
        bias = None if self.bias is None else combine.new_empty(*combine.shape[:2], self.bias.shape[1])
        with without_autocast(combine.device.type):  # sums over many heads stay in float32
            for start in lo.unique().tolist():
                rows = torch.nonzero(lo == start)[:, 0].to(self.weight.device, non_blocking=True)
                band = combine[rows]  # [b, D, W]
                window = slice(start, start + width)
                weight[rows] = torch.einsum("bdw,woi->bdoi", band, self.weight[window].to(dtype))
                if bias is not None:
                    bias[rows] = torch.einsum("bdw,wo->bdo", band, self.bias[window].to(dtype))
        return weight, bias

    @torch.no_grad()
    def fuse(self, plan: Plan) -> nn.Linear:
        """One sampling block as a plain ``nn.Linear`` (the paper's layer fusion), in the bank's dtype.

        Args:
            plan: a batch-1 plan with one direction, as :meth:`pdd.grid.Grid.fused_plan` makes it.
        """
        weight, bias = self._fuse(plan.lo, plan.combine)
        linear = nn.Linear(*reversed(weight.shape[2:]), bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight[0, 0].to(self.weight.dtype), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias[0, 0].to(self.weight.dtype), requires_grad=False)
        return linear


def without_autocast(kind: str) -> AbstractContextManager:
    """No autocast inside, on a kind of device; meta, in a dry run, knows none."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class SharedHead(nn.Module):
    """The last linear of a backbone that is teacher and student at once: the base head, or its bank where a plan is set.

    Two modules, since ZeRO-3 gathers by module: a teacher's forward does not wait for a bank that it does not read.

    Args:
        base: the base head, which stays as it is.
        bank: its bank.
    """

    def __init__(self, base: nn.Linear, bank: ParallelHead):
        super().__init__()
        self.base, self.bank = base, bank

    @property
    def plan(self) -> Plan | None:
        return self.bank.plan

    @plan.setter
    def plan(self, plan: Plan | None) -> None:
        self.bank.plan = plan

    @property
    def weight(self) -> nn.Parameter:
        """The bank's; families and transformers read their dtype from it."""
        return self.bank.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[B, T, in]`` -> the base head's rows, or the plan's directions as :class:`ParallelHead` gives them."""
        return self.base(hidden) if self.plan is None else self.bank(hidden)


def _apply(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[B, T, in]`` through per-sample linears ``[B or 1, D, out, in]``: ``[B, T, D, out]`` in hidden's dtype."""
    b, t, _ = hidden.shape
    flat = weight.to(hidden.dtype).flatten(1, 2)  # [B or 1, D * out, in]
    out = nn.functional.linear(hidden, flat[0]) if len(flat) == 1 else torch.bmm(hidden, flat.transpose(1, 2))
    out = out.view(b, t, *weight.shape[1:3])
    return out if bias is None else out + bias.to(hidden.dtype)[:, None]
