"""Distil a flow-matching transformer into a few-step student by Parallel Decoding Distillation.

    deepspeed train_pdd.py --ds_config ds_configs/zero3.json                      # all GPUs of this machine
    deepspeed --num_gpus 1 train_pdd.py --ds_config ds_configs/zero2.json         # one GPU
    deepspeed --hostfile hosts train_pdd.py --ds_config ds_configs/zero3.json     # many nodes; hosts: "node1 slots=8" lines
    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 train_pdd.py --ds_config ds_configs/zero3.json     # CPU, two ranks
    python train_pdd.py --ds_config ds_configs/zero3.json                         # one process, no launcher

    ... --recipe recipes/digits.yaml --pdd_steps 64 --run runs/mine               # a recipe, then knobs as flags
    ... --dry_run 8                                                               # memory per rank on 8 ranks, no weights
    ... --resume [--run runs/mine]                                                # go on after an interruption

Without --recipe it distils the digits teacher that ships with the repository, in minutes on a CPU. --help lists every
knob. Ctrl-C and SIGTERM save a checkpoint and end the run; --resume continues it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pdd import run as runs
from pdd.config import Config, ConfigError, parse_training


def main(argv: list[str]) -> int:
    try:
        return train(argv)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"train_pdd.py: error: {error}", file=sys.stderr, flush=True)
        return 2


def train(argv: list[str]) -> int:
    args, flags = parse_training(__doc__, argv)
    # everything that can be wrong is found before any process waits for another and before weights are read
    config, folder = runs.resolve_training(args.recipe, flags)

    import torch
    from tqdm import tqdm

    from pdd.backbones import read_backbone
    from pdd.data import Rows
    from pdd.engine import Engine, Processes, SharedTeacher, StopSignal, fill_ds_config, freeze, read_ds_config
    from pdd.formats import contract, empty_transformer, load_transformer, save_adapters, save_student
    from pdd.grid import Grid
    from pdd.lora import add_adapters, targeted, trained_parts
    from pdd.objective import Objective
    from pdd.pictures import grid as picture_grid
    from pdd.student import Student, Velocity, head_parameters, widen
    from pdd.teacher import Teacher, guidance, unconditional_condition
    from pdd.validation import Validator, validation_rows

    ds_config = read_ds_config(args.ds_config)
    fill_ds_config(ds_config, config, world=1, on_accelerator=False)
    try:
        backbone = read_backbone(config.teacher_dir, config.size)
        scales = config.teacher_guidance_scale
        for scale in scales.values() if isinstance(scales, dict) else [scales]:
            backbone.check_guidance(scale)
        backbone.check_skip(config.uncond_skip_layer)
        if config.lora_rank:
            targeted(empty_transformer(backbone.config), backbone, config.lora_targets)
        grid = Grid(config.pdd_steps, shifts(config, backbone), config.grid_max_t)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rows = Rows(config, backbone)
    if config.validation_every:
        validation_rows(config, rows)
    unconditional = unconditional_condition(config, backbone, rows)
    processes = Processes()
    check_coverage(config, processes.world)

    if config.dry_run:
        from pdd.memory import estimate, report

        filled = fill_ds_config(ds_config, config, config.dry_run, on_accelerator=True)
        if processes.rank == 0:
            print(report(estimate(config, filled, backbone, grid, rows, config.dry_run), config.dry_run))
        return 0

    with processes:
        stop = StopSignal()
        ds_config = fill_ds_config(ds_config, config, processes.world, processes.on_accelerator)
        dtype = torch.bfloat16 if ds_config.get("bf16", {}).get("enabled") else torch.float32

        try:
            transformer = load_transformer(config.teacher_dir, dtype)
            base = None if config.lora_rank else load_transformer(config.teacher_dir, dtype)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        transformer = widen(transformer, backbone, config.pdd_steps, keep_base=bool(config.lora_rank))
        if config.lora_rank:
            add_adapters(transformer, backbone, config.lora_targets, config.lora_rank, config.alpha, config.seed)
        if config.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        model = Velocity(transformer, backbone)
        if config.lora_rank:  # one copy of the weights for both roles
            teacher_model = SharedTeacher(model)
        else:
            teacher_model = freeze(Velocity(base, backbone), ds_config, processes.device)
        engine = Engine(model, head_parameters(transformer), ds_config, config.ema_decay, config.ema_start_step)
        student = Student(model, grid)
        teacher = Teacher(teacher_model, backbone, grid, *guidance(config, unconditional))
        objective = Objective(config, grid, student, teacher, rows, processes.rank, processes.world, processes.device)
        validator = Validator(config, grid, backbone, rows, processes) if config.validation_every else None

        folder = Path(processes.from_first(str(folder or runs.new_run_name(args.recipe))))
        step = 0
        if config.resume:
            saved, mine = engine.load(folder)
            step, teacher.uncond_forwards = saved["step"], saved["uncond_forwards"]
            if objective.carry is not None:
                objective.carry.load_state_dict(mine, processes.device)
        first = processes.rank == 0
        if first:
            runs.start(folder, config, ds_config, processes.world)
            log = runs.Log(folder, step)
            print(f"{'resuming' if config.resume else 'run'} {folder} at step {step}", flush=True)

        def save() -> None:
            mine = objective.carry.state_dict() if objective.carry is not None else {}
            engine.save(folder, step, mine, {"uncond_forwards": teacher.uncond_forwards}, config.keep_last)

        meter = Meter(grid.pdd_steps, config.block_size_max)
        bar = tqdm(total=config.max_train_steps, initial=step, disable=not first, unit="step", dynamic_ncols=True)
        while step < config.max_train_steps:
            began = time.perf_counter()
            engine.set_learning_rates(*config.learning_rates(step))
            for round in range(config.gradient_accumulation_steps):
                losses, facts = engine(objective, step, round)
                engine.backward_and_step(losses.total)
                meter.add(losses, facts)
            step += 1
            bar.update()
            meter.updated(time.perf_counter() - began)

            if step % config.log_every == 0 or step == config.max_train_steps:
                line = meter.line(processes)
                lr, head_lr = config.learning_rates(step - 1)
                line |= {"grad_norm": engine.grad_norm, "lr": lr, "head_lr": head_lr}
                line |= {"teacher_uncond_forwards": teacher.uncond_forwards}
                if first:
                    log.write(step=step, **line)
                    bar.set_postfix(loss=f"{line['loss']:.4f}")
                monitor(engine, line, step)
            if validator and (step % config.validation_every == 0 or step == config.max_train_steps):
                with engine.averaged():
                    errors = engine(validator, student, teacher, folder, step)
                line = {f"validation_endpoint_error_{nfe}": error for nfe, error in errors.items()}
                if first:
                    log.write(step=step, **line)
                    bar.write(f"step {step}: " + "  ".join(f"{n} forwards {e:.3f}" for n, e in errors.items()))
                    preview = picture_grid(backbone.to_images(losses.x0), 8)
                    preview.save(folder / "samples" / f"step-{step:06d}-x0.png")
                monitor(engine, line, step)

            interrupted = processes.agree(stop.received)
            stopping = interrupted or (config.stop_after and step >= config.stop_after)
            if step == config.max_train_steps or stopping or (config.save_every and step % config.save_every == 0):
                save()
            if stopping and step < config.max_train_steps:
                bar.close()
                if first:
                    print(f"stopped and saved at step {step}; continue with --resume --run {folder}", flush=True)
                return 128 + interrupted if interrupted else 0

        bar.close()
        stored = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
            config.export_dtype
        ]
        weights = engine.whole_weights(stored, trained_only=bool(config.lora_rank))
        if first:
            weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
            facts = contract(config, grid, backbone, step, engine.has_average)
            if not config.lora_rank:
                save_student(folder / "student", backbone, weights, facts)
            else:
                adapters, heads = trained_parts(transformer, backbone, weights, config.lora_targets)
                if config.export_merged:
                    base = load_transformer(config.teacher_dir, stored or dtype)
                    save_student(folder / "student", backbone, adapters.merged(base) | heads, facts)
                else:
                    save_adapters(folder / "student", backbone, adapters, heads, facts)
            print(f"student written to {folder / 'student'}", flush=True)
    return 0


def shifts(config: Config, backbone) -> dict[str, float]:
    """Modality -> shift: the knob where it says one, the checkpoint's scheduler elsewhere."""
    own = backbone.shifts()
    given = config.shift or {}
    if not isinstance(given, dict):
        given = dict.fromkeys(own, given)
    scales = config.teacher_guidance_scale if isinstance(config.teacher_guidance_scale, dict) else {}
    tables = {"shift": given, "loss_weights": config.loss_weights, "teacher_guidance_scale": scales}
    for name, table in tables.items():
        for modality in table:
            if modality not in own:
                raise ConfigError(f"{name} names modality {modality!r}; allowed are {', '.join(own)}")
    return {**own, **given}


def check_coverage(config: Config, world: int) -> None:
    """Every rung of carried trajectories must get updates within the run (the seed's validate_carry_coverage)."""
    from pdd.carry import TrajectoryCarry, uncovered_rungs

    if config.rollout_mode != "simulate":
        return
    rounds, batch = config.gradient_accumulation_steps, config.train_micro_batch_size_per_gpu
    carry = TrajectoryCarry(len(config.starts), rounds, batch, 0, world, config.stagger)
    if missed := uncovered_rungs(carry, config.max_train_steps):
        raise ConfigError(
            f"max_train_steps is {config.max_train_steps}, in which no trajectory reaches rungs {missed}; allowed is at least "
            f"{carry.num_rungs} = pdd_steps / block_size_min, or more ranks, accumulation rounds or stagger sample"
        )


class Meter:
    """Averages between two log lines: losses, loss by distance k - n, and where the forwards started."""

    BINS = 4

    def __init__(self, pdd_steps: int, block_size_max: int):
        self.width = block_size_max
        self.reset()

    def reset(self) -> None:
        import torch

        self.sums: dict[str, object] = {}
        self.count, self.updates, self.seconds = 0, 0, 0.0
        self.by_distance = torch.zeros(2, self.BINS, dtype=torch.float64)
        self.latest: dict[str, float] = {}

    def add(self, losses, facts) -> None:
        named = {"loss": losses.total, **{f"loss_{m}": loss for m, loss in losses.per_modality.items()}}
        for name, value in named.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach()
        self.count += 1
        bins = (facts["distance"] * self.BINS // self.width).flatten()
        sample = losses.per_sample.double().cpu().flatten()
        self.by_distance[0].index_add_(0, bins, sample)
        self.by_distance[1].index_add_(0, bins, sample.new_ones(len(sample)))
        self.latest = {"block_start": float(facts["n"].double().mean())}
        if "rung" in facts:
            self.latest["rung"] = float(facts["rung"].double().mean())

    def updated(self, seconds: float) -> None:
        self.updates += 1
        self.seconds += seconds

    def line(self, processes) -> dict[str, float | None]:
        """The averages over all ranks, and a fresh start; collective."""
        import torch

        names = list(self.sums)
        packed = torch.cat([
            torch.stack([torch.as_tensor(self.sums[n]).double().cpu() for n in names]) / self.count,
            torch.tensor([self.seconds / self.updates], dtype=torch.float64),
            torch.tensor(list(self.latest.values()), dtype=torch.float64),
        ])  # fmt: skip
        packed = (processes.sum(packed) / processes.world).tolist()
        total, count = processes.sum(self.by_distance).tolist()
        out: dict[str, float | None] = dict(zip([*names, "seconds_per_step", *self.latest], packed))
        for i, (a, b) in enumerate(zip(total, count)):
            lower, upper = i * self.width // self.BINS, (i + 1) * self.width // self.BINS
            out[f"loss_distance_{lower}_{upper}"] = a / b if b else None
        self.reset()
        return out


def monitor(engine, line: dict[str, float | None], step: int) -> None:
    """The same numbers through DeepSpeed's own monitor: tensorboard, wandb or csv, as the ds_config says."""
    if engine.deepspeed.monitor.enabled:
        engine.deepspeed.monitor.write_events([(f"pdd/{k}", v, step) for k, v in line.items() if v is not None])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
