"""DeepSpeed wiring: the processes, the two roles' placement, parameter groups, weight average, save and resume.

Nothing here knows what the loss is.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from pdd import checkpoint
from pdd.checkpoint import MASTER, Fragment
from pdd.config import Config, ConfigError, resolve
from pdd.float32 import Float32, kept_in_float32

# what a recipe owns; a ds_config says "auto" here
OWNED = {
    "train_batch_size": "train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "betas",
    "optimizer.params.weight_decay": "weight_decay",
}


# ---------------------------------------------------------------------------------------------- ds_config


def read_ds_config(path: str | None) -> dict[str, Any]:
    """A DeepSpeed configuration file.

    Raises:
        ConfigError: none given, unreadable, or not a JSON object.
    """
    if not path:
        raise ConfigError("ds_config is not given; allowed is a DeepSpeed JSON file such as ds_configs/zero3.json")
    try:
        value = json.loads(resolve(path).read_text())
    except OSError as error:
        raise ConfigError(f"ds_config {path!r} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"ds_config {path!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"ds_config {path!r} is {type(value).__name__}; allowed is a JSON object")
    return value


def fill_ds_config(ds_config: dict[str, Any], config: Config, world: int, on_accelerator: bool) -> dict[str, Any]:
    """The ds_config with every ``"auto"`` filled: the recipe's numbers, and bf16 where an accelerator is.

    Raises:
        ConfigError: a number that the recipe owns is set to something else, or an ``"auto"`` that nothing fills.
    """
    micro, rounds = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    values = {
        "train_batch_size": micro * rounds * world,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": rounds,
        "gradient_clipping": config.gradient_clipping,
        "optimizer.params.lr": config.peak_learning_rates[0],
        "optimizer.params.betas": config.betas,
        "optimizer.params.weight_decay": config.weight_decay,
    }
    filled = json.loads(json.dumps(ds_config))
    for key, value in values.items():
        *path, last = key.split(".")
        node = filled
        for part in path:
            node = node.setdefault(part, {})
        if node.get(last, "auto") not in ("auto", value):
            raise ConfigError(
                f'ds_config {key} is {node[last]!r} but the recipe\'s {OWNED[key]} is {value!r}; allowed is "auto" in ds_config'
            )
        node[last] = value
    filled["optimizer"].setdefault("type", "AdamW")
    if filled.get("bf16", {}).get("enabled") == "auto":
        filled["bf16"]["enabled"] = on_accelerator
    stage = zero_stage(filled)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"ds_config zero_optimization.stage is {stage!r}; allowed are 0, 1, 2, 3")
    if filled.get("fp16", {}).get("enabled"):
        raise ConfigError("ds_config fp16.enabled is true; allowed is bf16 or float32, flow models overflow in fp16")
    left = _autos(filled)
    if left:
        raise ConfigError(f'ds_config {left[0]} is "auto", which nothing fills; allowed is a value')
    return filled


def zero_stage(ds_config: dict[str, Any]) -> int:
    return ds_config.get("zero_optimization", {}).get("stage", 0)


def model_dtype(ds_config: dict[str, Any]) -> torch.dtype:
    """Of the parameters that an engine of a filled ds_config has."""
    return torch.bfloat16 if ds_config.get("bf16", {}).get("enabled") else torch.float32


def lowers_precision(ds_config: dict[str, Any]) -> bool:
    """Does a filled ds_config compute in less than float32?"""
    return any(ds_config.get(mode, {}).get("enabled") for mode in ("bf16", "torch_autocast"))


def _autos(node: Any, path: str = "") -> list[str]:
    if isinstance(node, dict):
        return [hit for key, value in node.items() for hit in _autos(value, f"{path}.{key}".lstrip("."))]
    return [path] if node == "auto" else []


# ---------------------------------------------------------------------------------------------- processes


class Processes:
    """This process among the ranks; use as a context, which ends the process group in order."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))

    def start(self) -> Processes:
        """Meet the other ranks; what :meth:`__enter__` does if it has not been done before."""
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        # DeepSpeed still calls collectives by their old names, and torch says so once a step
        warnings.filterwarnings("ignore", ".* is deprecated", FutureWarning, "torch.distributed")
        # without the launcher DeepSpeed would look for MPI
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        if "RANK" not in os.environ:
            os.environ.update({k: v for k, v in alone.items() if k not in os.environ})
        self.on_accelerator = get_accelerator()._name != "cpu"
        if not self.on_accelerator:
            # an optional compiled operation for CPU ranks: it would need a C++ compiler and a minute
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed()
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device(get_accelerator().device_name(local) if self.on_accelerator else "cpu")
        return self

    __enter__ = start

    def __exit__(self, kind: type | None, *_: Any) -> None:
        if kind is None:
            dist.barrier()  # without it a rank that ends early may abort the others
            dist.destroy_process_group()

    def agree(self, flag: int) -> int:
        """The largest of all ranks' flags."""
        flags = torch.tensor(flag, device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return int(flags)

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def sum(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device)
        dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors of equal shape, concatenated in rank order."""
        parts = [torch.empty_like(tensor, device=self.device) for _ in range(self.world)]
        dist.all_gather(parts, tensor.to(self.device).contiguous())
        return torch.cat(parts)


class StopSignal:
    """Remembers Ctrl-C, SIGTERM and SIGUSR1 (what schedulers send ahead of a time limit), so that the loop can save and end.

    One Ctrl-C reaches a rank twice, as SIGINT from the terminal and as SIGTERM from the launcher, so a second signal is
    no sign of impatience; a third Ctrl-C is.
    """

    def __init__(self) -> None:
        self.received = 0
        self.interrupts = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._catch)

    def _catch(self, number: int, frame: Any) -> None:
        self.received = self.received or number
        self.interrupts += number == signal.SIGINT
        if self.interrupts >= 3:
            raise KeyboardInterrupt


# ---------------------------------------------------------------------------------------------- the two roles


class Root(nn.Module):
    """What DeepSpeed takes for the model: its forward is whatever is to happen in one round of training.

    ZeRO-3 prefetches along a trace of the modules that run between two forwards of the root. A round calls the model
    more than once (in LoRA mode the teacher is the same model); as forwards of their own they would be traces of their
    own and throw each other away, inside one they are one.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.call: Callable[[], Any]  # there during a forward

    def forward(self) -> tuple[Any]:
        return (self.call(),)  # DeepSpeed's hooks know what to do with a tuple


class Engine:
    """The student under DeepSpeed: updates, weight average, checkpoints, whole weights.

    Args:
        model: the student, widened; what is frozen in it is in no checkpoint.
        heads: its parameters that have the heads' learning rate.
        ds_config: filled, see :func:`fill_ds_config`.
        ema_decay, ema_start_step: the knobs; decay 0 keeps no average.
    """

    def __init__(
        self,
        model: nn.Module,
        heads: list[nn.Parameter],
        ds_config: dict[str, Any],
        ema_decay: float,
        ema_start_step: int,
    ):
        import deepspeed

        self.ema_decay, self.ema_start_step = ema_decay, ema_start_step
        bank = {id(p) for p in heads}
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if id(p) not in bank], "name": "backbone"},
            {"params": [p for p in trained if id(p) in bank], "name": "heads"},
        ]
        self.group_names = [g["name"] for g in groups if g["params"]]
        self._kept = {name for name, *_ in kept_in_float32(model)}
        self._float32 = Float32(model) if self._kept and lowers_precision(ds_config) else None
        shard(model, ds_config)
        self.deepspeed, *_ = deepspeed.initialize(
            model=Root(model), model_parameters=[g for g in groups if g["params"]], config=ds_config
        )
        self.module = model
        self.updates = 0
        for counts in (*self.optimizer.state.values(), *self.optimizer.param_groups):
            # bf16 without ZeRO: DeepSpeed makes an empty first update, which would count in Adam's bias correction
            if "step" in counts:
                counts["step"] = counts["step"] * 0
        if self.stage in (1, 2):
            self.deepspeed.optimizer.check_grad_overflow = True  # off in float32, where gradients may be infinite, too
        self._plain_norm = float("nan")
        self._own_exact: list[tuple[str, nn.Parameter, int, int]] = []
        if self._float32:
            self._float32.attach(self.deepspeed.device)
            self._own_exact = [piece for piece in self._pieces() if piece[0] in self._kept]
            for name, parameter, start, end in self._own_exact:  # masters were made of rounded parameters
                self._write(parameter, MASTER, self._float32.exact[name].flatten()[start:end])

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The base optimizer below ZeRO's; its state is this rank's shard."""
        return getattr(self.deepspeed.optimizer, "optimizer", self.deepspeed.optimizer)

    @property
    def stage(self) -> int:
        return self.deepspeed.zero_optimization_stage()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, in which the model may be called as often as needed; the model runs nowhere else.

        A loss with gradient must be in the (nested) tuple or dict that it returns, and be taken from there.
        """
        root = self.deepspeed.module
        root.call = partial(function, *args)
        try:
            return self.deepspeed()[0]
        finally:
            del root.call

    def set_learning_rates(self, backbone: float, heads: float) -> None:
        rates = {"backbone": backbone, "heads": heads}
        for group, name in zip(self.optimizer.param_groups, self.group_names):
            group["lr"] = rates[name]

    def backward_and_step(self, loss: Tensor) -> bool:
        """One micro-step; DeepSpeed divides by the accumulation rounds and updates at their boundary.

        Returns:
            False at a boundary where no rank made the update, since a loss or gradient of some rank was not finite.
        """
        boundary = self.deepspeed.is_gradient_accumulation_boundary()
        # an infinite loss may have a finite gradient; this way every rank finds it in the reduced ones
        self.deepspeed.backward(loss * torch.where(loss.detach().isfinite(), 1.0, float("nan")))
        if boundary and self.deepspeed.optimizer is self.optimizer:
            # float32 without ZeRO: DeepSpeed clips, but neither keeps the norm nor looks at it
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            self._plain_norm = float(nn.utils.get_total_norm(grads))
            if not math.isfinite(self._plain_norm):
                self.deepspeed.zero_grad()
                self.deepspeed.micro_steps += 1
                return False
        self.deepspeed.step()
        if not boundary:
            return True
        if not self.deepspeed.was_step_applied():
            return False
        self.updates += 1
        if self.ema_decay:
            self._update_average()
        self._refresh_exact()
        return True

    @property
    def grad_norm(self) -> float:
        """Global gradient norm of the last update, before clipping."""
        norm = self.deepspeed.get_global_grad_norm()
        return self._plain_norm if norm is None else float(norm)

    @torch.no_grad()
    def _refresh_exact(self, state: str = MASTER) -> None:
        """What is kept in float32 follows its masters, or another state of the optimizer; collective."""
        if self._float32 is None or not self._float32.trained.numel():
            return
        self._float32.trained.zero_()
        for name, parameter, start, end in self._own_exact:
            piece = self._piece(parameter, state)
            if piece is None:  # the average of what no gradient ever reached
                piece = self._piece(parameter, MASTER)
            self._float32.exact[name].view(-1)[start:end].copy_(piece[: end - start])
        if self.stage > 0:
            dist.all_reduce(self._float32.trained)

    # -- weight average -------------------------------------------------------------------------------

    @torch.no_grad()
    def _update_average(self) -> None:
        """The average lives in the base optimizer's state, sharded and saved as Adam's own averages are."""
        decay = self.ema_decay if self.updates > self.ema_start_step else 0.0
        for master, state in self.optimizer.state.items():
            if "exp_avg" not in state:
                continue
            if "ema" not in state:  # not before the first update: an early entry breaks AdamW's lazy state
                state["ema"] = master.detach().clone()
            else:
                state["ema"].lerp_(master.detach(), 1 - decay)

    def _full(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """A whole float32 master, or its optimizer state ``key``, on every rank; collective."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            if key is None:
                return safe_get_full_fp32_param(parameter)
            return safe_get_full_optimizer_state(parameter, key)
        master = self._plain_master(parameter)
        return master.detach() if key is None else self.optimizer.state[master][key]

    def _plain_master(self, parameter: nn.Parameter) -> Tensor:
        """Master of a parameter without ZeRO: the float32 copy that DeepSpeed keeps of a bf16 one, or itself."""
        wrapper = self.deepspeed.optimizer
        for low, masters in zip(getattr(wrapper, "fp16_groups", []), getattr(wrapper, "fp32_groups", [])):
            for candidate, master in zip(low, masters):
                if candidate is parameter:
                    return master
        return parameter

    def _link_state(self) -> None:
        """Stages 1 and 2 look states up in a table made before the average was there."""
        from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

        zero = self.deepspeed.optimizer
        masters = getattr(zero, "single_partition_of_fp32_groups", None)
        groups = getattr(zero, "bit16_groups", None)
        if masters is None:
            masters, groups = getattr(zero, "fp32_groups_flat_partition", []), getattr(zero, "bf16_groups", [])
        for parameters, master in zip(groups, masters):
            if master in zero.optimizer.state:
                lazy_init_hp_params_optimizer_state(parameters, master, zero.optimizer.state)

    @property
    def has_average(self) -> bool:
        return bool(self.ema_decay) and self.updates > 0

    def _source(self) -> str | None:
        """The optimizer state that validation and the student are made of; None for the masters."""
        if not self.has_average:
            return None
        if self.stage != 3:
            self._link_state()
        return "ema"

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model holds the weight average inside this context, if there is one."""
        source = self._source()
        if source is None:
            yield
            return
        kept = self._copy_into_model(source)
        self._refresh_exact(source)
        try:
            yield
        finally:
            self._copy_into_model(None, kept)
            self._refresh_exact()

    @torch.no_grad()
    def _copy_into_model(self, key: str | None, kept: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Copy masters or average into the model's own weights, parameter by parameter, never whole at once."""
        from deepspeed.runtime.zero import GatheredParameters

        saved = {}
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            sharded = hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")
            if not sharded and key is not None and self._plain_master(parameter) is parameter:
                saved[name] = parameter.detach().clone()  # no master elsewhere to restore it from
            full = kept[name] if kept and name in kept else self._full(parameter, key)
            with GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")):
                if not hasattr(parameter, "ds_id") or dist.get_rank() == 0:
                    parameter.data.copy_(full)
        return saved

    # -- whole weights --------------------------------------------------------------------------------

    def whole_weights(self, dtype: torch.dtype | None, trained_only: bool = False) -> dict[str, Tensor]:
        """The trained model as one state dict on rank 0, empty elsewhere; the average if there is one. Collective.

        Args:
            dtype: of floating weights, but for those that Diffusers keeps in float32; None keeps each parameter's own.
            trained_only: leave out frozen parameters and buffers.
        """
        source, out = self._source(), {}
        persistent = set() if trained_only else set(self.module.state_dict())
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                full = self._full(parameter, source)
            elif trained_only:
                continue
            elif self._float32 and name in self._kept:
                full = self._float32.exact[name]
            elif hasattr(parameter, "ds_id"):
                from deepspeed.runtime.zero import GatheredParameters

                with GatheredParameters([parameter]):
                    full = parameter.detach().clone()
            else:
                full = parameter.detach()
            if dist.get_rank() == 0:
                stored = torch.float32 if name in self._kept else dtype or parameter.dtype
                out[name] = full.to("cpu", stored, copy=True)
        if dist.get_rank() == 0:
            for name, buffer in self.module.named_buffers():
                if name in persistent:
                    out[name] = buffer.detach().to("cpu", copy=True)
        return out

    # -- checkpoints ----------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[tuple[str, nn.Parameter, int, int]]:
        """This rank's part of every trained parameter: (name, parameter, start, end), flattened.

        Without ZeRO every rank owns all of them.
        """
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            start, length, numel = 0, parameter.numel(), parameter.numel()
            if hasattr(parameter, "ds_id"):
                numel, share = parameter.ds_numel, parameter.ds_tensor.numel()
                start, length = dist.get_rank() * share, share  # the last shares may be padding, in part or all
            elif hasattr(parameter, "_hp_mapping"):
                if parameter._hp_mapping is None:
                    continue
                address = parameter._hp_mapping.lp_fragment_address
                start, length = address.start, address.numel
            if start < numel:
                yield name, parameter, start, min(start + length, numel)

    def _piece(self, parameter: nn.Parameter, state: str) -> Tensor | None:
        """This rank's part of a state, flat, padding included; None where the optimizer never saw a gradient."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        if hasattr(parameter, "ds_id"):
            if state == MASTER:
                return safe_get_local_fp32_param(parameter)
            return safe_get_local_optimizer_state(parameter, state)
        if hasattr(parameter, "_hp_mapping"):
            return parameter._hp_mapping.get_hp_fragment(None if state == MASTER else state)
        master = self._plain_master(parameter)
        tensor = master if state == MASTER else self.optimizer.state.get(master, {}).get(state)
        return None if tensor is None else tensor.detach().view(-1)

    @torch.no_grad()
    def _write(self, parameter: nn.Parameter, state: str, value: Tensor) -> None:
        """Set this rank's part of a state, flat, without its padding."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        if self.stage != 3:
            self._piece(parameter, state)[: value.numel()].copy_(value)
            return
        padded = value.new_zeros(parameter.ds_tensor.numel())
        padded[: value.numel()] = value
        if state == MASTER:
            safe_set_local_fp32_param(parameter, padded)
            parameter.ds_tensor.data[: value.numel()].copy_(value)
        else:
            safe_set_local_optimizer_state(parameter, padded, state)

    def _masters(self) -> list[Tensor]:
        """The tensors that the base optimizer updates: flat shards, or without ZeRO the parameters."""
        zero = self.deepspeed.optimizer
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(zero, name):
                return list(getattr(zero, name))
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _states(self) -> list[str]:
        """Names of the optimizer's states that are as large as the weights."""
        if self.stage != 3:
            self._link_state()
        return sorted({
            key
            for master in self._masters()
            for key, value in self.optimizer.state.get(master, {}).items()
            if torch.is_tensor(value) and value.shape == master.shape and value.ndim
        })  # fmt: skip

    def _fragments(self) -> Iterator[Fragment]:
        """What this rank saves. Without ZeRO all ranks have the same, and rank 0 saves it."""
        states = [MASTER, *self._states()]
        if self.stage == 0 and dist.get_rank() > 0:
            return
        for name, parameter, start, end in self._pieces():
            numel = getattr(parameter, "ds_numel", parameter.numel())
            for state in states:
                piece = self._piece(parameter, state)
                if piece is not None:
                    yield Fragment(name, state, piece[: end - start], start, numel)

    def save(self, run: Path, step: int, mine: dict[str, Tensor], facts: dict[str, Any], keep_last: int) -> str | None:
        """Save everything under a temporary name, check it, give it its own, move ``latest``, drop old ones. Collective.

        Args:
            run: the run folder.
            step: updates done.
            mine: this rank's own tensors (its trajectories).
            facts: small facts for ``state.json``.
            keep_last: how many checkpoints remain.

        Returns:
            None, or why nothing was saved: an earlier checkpoint is then still there and complete.
        """
        folder, rank = run / "checkpoints", dist.get_rank()
        temporary = folder / f"saving-{checkpoint.step_name(step)}"
        facts = {
            "step": step,
            "world_size": dist.get_world_size(),
            "updates": self.updates,
            "optimizer": self._scalars(),
            **facts,
        }

        def prepare() -> None:
            checkpoint.clear(folder)
            temporary.mkdir(parents=True)

        def finish() -> None:
            checkpoint.complete(temporary, {name: f for _, part in written for name, f in part.items()}, facts)
            checkpoint.publish(run, temporary, step, keep_last)

        problem = self._failed(_together(prepare if rank == 0 else None))
        if problem is None:
            written = _together(lambda: checkpoint.write_shard(temporary, rank, self._fragments(), mine))
            problem = self._failed(written)
        if problem is None:
            problem = self._failed(_together(finish if rank == 0 else None))
        if problem is not None and rank == 0:
            checkpoint.clear(folder)
        return problem

    @staticmethod
    def _failed(outcomes: list[tuple[str | None, Any]]) -> str | None:
        return next((error for error, _ in outcomes if error), None)

    def load(self, run: Path, on_damage: str) -> tuple[dict[str, Any], Sequence[dict[str, Tensor]]]:
        """Load the newest checkpoint that is whole: the facts of its ``state.json``, and every rank's own tensors. Collective.

        It may have been saved by any number of ranks, under any ZeRO stage.

        Args:
            on_damage: ``previous`` takes the one before a damaged one, with a warning; ``stop`` does not.

        Raises:
            ConfigError: there is none, or it does not belong to this model.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        for folder in checkpoint.candidates(run):
            problem = self._failed(_together(lambda: checkpoint.verify(folder, rank, world)))
            if problem is None:
                break
            if on_damage == "stop":
                raise ConfigError(f"{problem}; allowed with on_damage stop is a whole checkpoint")
            if rank == 0:
                print(f"warning: {problem}; trying the checkpoint before it", file=sys.stderr, flush=True)
                checkpoint.set_aside(folder)
        else:
            raise ConfigError(f"run {str(run)!r} has no checkpoint that is whole; start a new run")
        facts = checkpoint.read_facts(folder)
        problem = self._failed(_together(lambda: self._restore(checkpoint.Shards(folder), facts)))
        if problem is not None:
            raise ConfigError(problem)
        return facts, checkpoint.Own(folder, facts["world_size"])

    @torch.no_grad()
    def _restore(self, shards: checkpoint.Shards, facts: dict[str, Any]) -> None:
        """Masters, optimizer states and the model's own weights from a checkpoint's fragments."""
        self._check_fit(shards)
        self.updates = facts["updates"]
        for master in self._masters() if shards.states else []:
            state = self.optimizer.state[master]
            for key in shards.states:
                state[key] = torch.zeros_like(master)
            if "step" in facts["optimizer"]:
                state["step"] = self._step_of(master, facts["optimizer"]["step"])
        for group, saved in zip(self.optimizer.param_groups, facts["optimizer"].get("group_steps", [])):
            group["step"] = saved
        self._states()  # links what was made

        zero = self.deepspeed.optimizer
        if self.stage == 3:
            zero.checkpoint_event_prologue()
        for name, parameter, start, end in self._pieces():
            for state in (MASTER, *shards.states):
                # a state that an unused parameter never had; its average is the weight itself
                key = state if f"{name}|{state}" in shards.numel else MASTER
                value = shards.read(name, key, start, end)
                if key != state and state != "ema":
                    value.zero_()
                self._write(parameter, state, value)
        if self.stage == 3:
            zero.checkpoint_event_epilogue()
        else:
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad:
                    whole = shards.read(name, MASTER, 0, parameter.numel())
                    parameter.data.copy_(whole.view(parameter.shape))
        self._refresh_exact()

    def _check_fit(self, shards: checkpoint.Shards) -> None:
        numel = {
            f"{n}|{MASTER}": getattr(p, "ds_numel", p.numel())
            for n, p in self.module.named_parameters()
            if p.requires_grad
        }
        saved = {key: size for key, size in shards.numel.items() if key.endswith(f"|{MASTER}")}
        for key in sorted(numel.keys() ^ saved.keys()) or [k for k in sorted(numel) if numel[k] != saved[k]]:
            raise checkpoint.Damage(
                f"checkpoint {shards.folder} is of another model: {key.rsplit('|', 1)[0]} has {saved.get(key, 0)} elements "
                f"there and {numel.get(key, 0)} here"
            )

    def _scalars(self) -> dict[str, Any]:
        """How many updates the optimizer has counted, wherever it keeps that."""
        out: dict[str, Any] = {}
        for master in self._masters():
            if "step" in (state := self.optimizer.state.get(master, {})):
                out["step"] = int(state["step"])
                break
        if all("step" in group for group in self.optimizer.param_groups):
            out["group_steps"] = [int(group["step"]) for group in self.optimizer.param_groups]
        return out

    def _step_of(self, master: Tensor, step: int) -> Tensor | int:
        """``step`` as this optimizer keeps it: torch's own as a float tensor each, DeepSpeed's as a number."""
        if not isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            return step
        group = self.optimizer.param_groups[0]
        device = master.device if group.get("fused") or group.get("capturable") else "cpu"
        return torch.tensor(float(step), dtype=torch.float32, device=device)


def _together(action: Callable[[], Any] | None) -> list[tuple[str | None, Any]]:
    """Do a rank's part, and learn how every rank fared: ``(error, result)`` each. No rank leaves the others waiting."""
    error = result = None
    try:
        result = action() if action else None
    except (OSError, SafetensorError, checkpoint.Damage) as problem:
        error = str(problem)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (error, result))
    return outcomes


def freeze(model: nn.Module, ds_config: dict[str, Any], device: torch.device) -> Any:
    """The teacher as a callable: partitioned by an engine without optimizer under ZeRO-3, whole on the device otherwise."""
    model.requires_grad_(False).eval()
    float32 = Float32(model) if lowers_precision(ds_config) else None
    if zero_stage(ds_config) != 3:
        engine = model.to(device)
    else:
        engine = _sharded(model, ds_config)
    if float32:
        float32.attach(device)
    return engine


def _sharded(model: nn.Module, ds_config: dict[str, Any]) -> Any:
    import deepspeed

    quiet = ("optimizer", "tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "gradient_clipping")
    frozen = {k: v for k, v in ds_config.items() if k not in quiet}
    frozen["zero_optimization"] = {k: v for k, v in frozen["zero_optimization"].items() if k != "offload_optimizer"}
    shard(model, frozen)
    engine, *_ = deepspeed.initialize(model=model, config=frozen)
    return engine


def shard(model: nn.Module, ds_config: dict[str, Any]) -> None:
    """Under ZeRO-3, leave each rank its share of a model on the CPU, one parameter after the other.

    ``deepspeed.initialize`` would do so, too, but only after it has put the whole model on the device. Buffers go there.
    """
    import deepspeed

    if zero_stage(ds_config) != 3:
        return
    for parameter in model.parameters():  # DeepSpeed does not touch the dtype of what is sharded already
        parameter.data = parameter.data.to(model_dtype(ds_config))
    device = deepspeed.zero.Init(module=model, config_dict_or_path=ds_config).local_device
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


class SharedTeacher:
    """The teacher inside a student with adapters: the same weights, the adapters off, the base heads.

    Args:
        model: the student; its forwards, and these, belong inside one call of its engine.
    """

    def __init__(self, model: nn.Module):
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.model = model
        self.adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]

    def __call__(self, *args: Any) -> Any:
        """A forward without gradient. The student's own, whose backward is still to come, is left as it was."""
        # ZeRO-3 counts in every module the inputs whose gradient it waits for before it lets the weights go in backward,
        # and starts to count anew at each forward: the backbone would stay whole until the end of backward
        counted = [(m, m.ds_grads_remaining) for m in self.model.modules() if hasattr(m, "ds_grads_remaining")]
        for module in self.adapted:
            module.enable_adapters(False)
        try:
            with torch.no_grad():
                return self.model(*args)
        finally:
            for module in self.adapted:
                module.enable_adapters(True)
            for module, count in counted:
                module.ds_grads_remaining = count
