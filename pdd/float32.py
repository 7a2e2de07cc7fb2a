"""The modules that Diffusers keeps in float32, under an engine that makes every parameter less.

DeepSpeed's ``bf16`` casts all parameters, and its ``torch_autocast`` gathers those of linears in bfloat16. The engine keeps the
parameters, but here their modules read exact float32 copies instead, one on every rank: they are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdd.heads import without_autocast


def kept_in_float32(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """The parameters that Diffusers would keep: (whole name, their module, its name for it, is all of the module kept)."""
    for prefix, part in model.named_modules():
        kept = set(getattr(part, "_keep_in_fp32_modules", None) or ())
        for path, module in part.named_modules() if kept else ():
            whole = not kept.isdisjoint(path.split("."))
            for name, _ in module.named_parameters(recurse=False):
                if whole or name in kept:
                    yield ".".join(filter(None, (prefix, path, name))), module, name, whole


class Float32:
    """Exact values of a model's kept parameters, and modules that compute with these.

    To be made before an engine casts the model; :meth:`attach` comes after it.

    Attributes:
        parameters: name -> the parameter, which the engine owns and trains.
        exact: name -> what its module reads in its place, of its shape; the caller updates it in place.
        trained: those of ``exact`` whose parameters are trained, flat, of which they are views; from :meth:`attach` on.
    """

    def __init__(self, model: nn.Module):
        self._found = list(kept_in_float32(model))
        self.parameters = {name: getattr(module, own) for name, module, own, _ in self._found}
        self.exact = {name: p.detach().to(torch.float32, copy=True) for name, p in self.parameters.items()}

    def attach(self, device: torch.device) -> None:
        """Let the modules read the exact values, on their device, from now on."""
        self.exact = {name: value.to(device) for name, value in self.exact.items()}
        trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        self.trained = torch.cat([torch.empty(0, device=device), *(self.exact[name].flatten() for name in trained)])
        for name, part in zip(trained, self.trained.split([self.exact[name].numel() for name in trained])):
            self.exact[name] = part.view_as(self.exact[name])
        modules: dict[nn.Module, tuple[list[tuple[str, str]], bool]] = {}
        for name, module, own, whole in self._found:
            modules.setdefault(module, ([], whole))[0].append((name, own))
        for module, (names, whole) in modules.items():
            module.forward = partial(self._forward, module, module.forward, names, whole)

    def _forward(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        names: list[tuple[str, str]],
        whole: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A module's forward with its kept parameters exact; of a module kept as a whole, all in float32."""
        for name, own in names:  # found before what nn.Module registers
            vars(module)[own] = _Exact.apply(self.parameters[name], self.exact[name])
        try:
            if not whole:
                return forward(*args, **kwargs)
            args = tuple(a.float() if torch.is_tensor(a) and a.is_floating_point() else a for a in args)
            with without_autocast(self.exact[names[0][0]].device.type):
                return forward(*args, **kwargs)
        finally:
            for _, own in names:
                del vars(module)[own]


class _Exact(torch.autograd.Function):
    """The exact value of a parameter, whose gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, exact: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return exact.view_as(exact)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None
