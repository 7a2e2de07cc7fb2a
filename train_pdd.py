"""Distil a flow-matching transformer into a few-step student by Parallel Decoding Distillation.

    deepspeed train_pdd.py --ds_config ds_configs/zero3.json                      # all GPUs of this machine
    deepspeed --num_gpus 1 train_pdd.py --ds_config ds_configs/zero2.json         # one GPU
    deepspeed --hostfile hosts train_pdd.py --ds_config ds_configs/zero3.json     # many nodes; hosts: "node1 slots=8" lines
    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 train_pdd.py --ds_config ds_configs/zero3.json     # CPU, two ranks
    python train_pdd.py --ds_config ds_configs/zero3.json                         # one process, no launcher

    ... --recipe recipes/digits.yaml --pdd_steps 64 --run runs/mine               # a recipe, then knobs as flags
    ... --data prompts.txt                                                        # encoded first, by the teacher's encoders
    ... --dry_run 8                                                               # memory per rank on 8 ranks, no weights
    ... --resume [--run runs/mine]                                                # go on after an interruption

Without --recipe it distils the digits teacher that ships with the repository, in minutes on a CPU. --help lists every
knob. Ctrl-C and SIGTERM save a checkpoint and end the run; --resume continues it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

from pdd import run as runs
from pdd.config import NUMBERS, Config, ConfigError, parse_training, status_of


def main(argv: list[str]) -> int:
    status = status_of("train_pdd.py", lambda: train(argv))
    if status == 2:
        runs.release()
    return status


def train(argv: list[str]) -> int:
    args, flags = parse_training(__doc__, argv)
    # everything that can be wrong is found before any process waits for another and before weights are read
    config, folder = runs.resolve_training(args.recipe, flags)

    from tqdm import tqdm

    from pdd.backbones import read_backbone
    from pdd.data import Rows
    from pdd.engine import (
        Engine,
        Processes,
        SharedTeacher,
        StopSignal,
        fill_ds_config,
        freeze,
        model_dtype,
        read_ds_config,
    )
    from pdd.formats import PRECISIONS, contract, empty_transformer, load_transformer, save_trained
    from pdd.high_noise import high_noise_rollout
    from pdd.lora import add_adapters, targeted
    from pdd.objective import Objective
    from pdd.pictures import grid as picture_grid
    from pdd.prompts import is_table
    from pdd.student import Student, Velocity, head_parameters, widen
    from pdd.teacher import Teacher, unconditional_condition
    from pdd.validation import Validator, validation_rows

    ds_config = read_ds_config(args.ds_config)
    fill_ds_config(ds_config, config, world=1, on_accelerator=False)
    try:
        backbone = read_backbone(config.teacher_dir, config.size)
        backbone.choose(config.expert)
        backbone.weaker(config)
        if config.lora_rank:
            targeted(empty_transformer(backbone.config), backbone, config.lora_targets)
        grid = backbone.grid(config.pdd_steps, shifts(config, backbone), config.grid_max_t)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    processes = Processes()
    if is_table(config.data):
        config = encode_data(config, folder, processes)
    rows = Rows(config, backbone)
    if config.validation_every:
        validation_rows(config, rows)
    unconditional = unconditional_condition(config, backbone, rows)
    rollout = high_noise_rollout(config, backbone, grid, rows)
    check_coverage(config, processes.world)

    if config.dry_run:
        from pdd.memory import estimate, report

        filled = fill_ds_config(ds_config, config, config.dry_run, on_accelerator=True)
        if processes.rank == 0:
            print(report(estimate(config, filled, backbone, grid, rows, config.dry_run, rollout), config.dry_run))
        return 0

    with processes:
        stop, first = StopSignal(), processes.rank == 0
        folder = Path(processes.from_first(str(folder or runs.new_run_name(args.recipe))))
        if problem := processes.from_first(runs.claim(folder) if first else None):
            raise ConfigError(problem)
        ds_config = fill_ds_config(ds_config, config, processes.world, processes.on_accelerator)
        dtype = model_dtype(ds_config)

        def read(load, *where):
            try:
                return load(*where)
            except ValueError as error:
                raise ConfigError(str(error)) from None

        # one model after the other, so that a rank's CPU memory never holds two whole ones under ZeRO-3
        weights = (load_transformer, config.teacher_dir, dtype, backbone.component)
        if rollout is not None:
            rollout.use(freeze(read(rollout.load, dtype), ds_config, processes.device))
        if not config.lora_rank:
            teacher_model = freeze(Velocity(read(*weights), backbone), ds_config, processes.device)
        transformer = widen(read(*weights), backbone, config.pdd_steps, keep_base=bool(config.lora_rank))
        if config.lora_rank:
            add_adapters(transformer, backbone, config.lora_targets, config.lora_rank, config.alpha, config.seed)
        if config.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        model = Velocity(transformer, backbone)
        if config.lora_rank:  # one copy of the weights for both roles
            teacher_model = SharedTeacher(model)
        engine = Engine(model, head_parameters(transformer), ds_config, config.ema_decay, config.ema_start_step)
        student = Student(model, grid)
        teacher = Teacher(teacher_model, backbone, grid, config, unconditional)
        objective = Objective(
            config, grid, student, teacher, rows, processes.rank, processes.world, processes.device, rollout, processes.agree
        )  # fmt: skip
        validator = Validator(config, grid, backbone, rows, processes, rollout) if config.validation_every else None

        step = skipped = bad = 0
        if config.resume:
            saved, trajectories = engine.load(folder, config.on_damage)
            step, teacher.uncond_forwards, skipped = (
                saved[name] for name in ("step", "uncond_forwards", "skipped_steps")
            )
            dealt = objective.load_state_dict(trajectories, step, saved["samples_seen"])
            if first and (saved["world_size"] != processes.world or dealt):
                print(f"saved by {saved['world_size']} ranks, resumed by {processes.world}", end="")
                print("; {} of now {} trajectories go on, dealt again".format(*dealt) if dealt else "")
        if first:
            runs.start(folder, config, ds_config, processes.world)
            log = runs.Log(folder, step)
            print(f"{'resuming' if config.resume else 'run'} {folder} at step {step}", flush=True)

        def save() -> str | None:
            facts = {
                "uncond_forwards": teacher.uncond_forwards,
                "samples_seen": objective.samples_seen(step),
                "skipped_steps": skipped,
            }
            problem = engine.save(folder, step, objective.state_dict(), facts, config.keep_last)
            if problem and first:
                bar.write(f"WARNING: no checkpoint was saved at step {step}: {problem}. The one before it stands.")
            return problem

        meter = Meter(grid.pdd_steps, config.block_size_max)
        bar = tqdm(total=config.max_train_steps, initial=step, disable=not first, unit="step", dynamic_ncols=True)
        while step < config.max_train_steps:
            began = time.perf_counter()
            engine.set_learning_rates(*config.learning_rates(step))
            before = objective.carry and list(objective.carry.slots)
            for round in range(config.gradient_accumulation_steps):
                losses, facts = engine(objective, step, round)
                meter.add(losses, facts)
                applied = engine.backward_and_step(losses.total)
            step += 1
            bad = 0 if applied else bad + 1
            if not applied:
                skipped += 1
                if objective.carry:
                    objective.carry.slots = before  # no trajectory has moved
                if first:
                    bar.write(
                        f"step {step}: a loss or gradient is not finite; no rank made the update ({skipped} in all)"
                    )
                if bad > config.max_bad_steps:
                    bar.close()
                    last = (folder / "latest").read_text().strip() if (folder / "latest").exists() else "not there"
                    if first:
                        print(
                            f"train_pdd.py: error: {bad} updates in a row had a loss or gradient that is not finite, more than "
                            f"max_bad_steps {config.max_bad_steps}; the last good checkpoint of {folder} is {last}",
                            file=sys.stderr, flush=True,
                        )  # fmt: skip
                    return 1
            bar.update()
            meter.updated(time.perf_counter() - began, applied)

            if step % config.log_every == 0 or step == config.max_train_steps:
                line = meter.line(processes)
                lr, head_lr = config.learning_rates(step - 1)
                line |= {"grad_norm": engine.grad_norm, "lr": lr, "head_lr": head_lr}
                line |= {"teacher_uncond_forwards": teacher.uncond_forwards, "skipped_steps": skipped}
                if first:
                    log.write(step=step, **line)
                    bar.set_postfix(loss=line["loss"])
                monitor(engine, line, step)
            if validator and (step % config.validation_every == 0 or step == config.max_train_steps):
                with engine.averaged():
                    errors = engine(validator, student, teacher, folder, step)
                line = {f"validation_endpoint_error_{nfe}": error for nfe, error in errors.items()}
                if first:
                    log.write(step=step, **line)
                    bar.write(f"step {step}: " + "  ".join(f"{n} forwards {e:.3f}" for n, e in errors.items()))
                    preview = picture_grid(backbone.to_images(losses.x0), 8)
                    with runs.best_effort("the x0 preview"):
                        preview.save(folder / "samples" / f"step-{step:06d}-x0.png")
                monitor(engine, line, step)

            interrupted = processes.agree(stop.received)
            stopping = interrupted or (config.stop_after and step >= config.stop_after)
            if step == config.max_train_steps or stopping or (config.save_every and step % config.save_every == 0):
                problem = save()
            if stopping and step < config.max_train_steps:
                bar.close()
                if first and not problem:
                    print(f"stopped and saved at step {step}; continue with --resume --run {folder}", flush=True)
                return 128 + interrupted if interrupted else bool(problem)

        bar.close()
        stored = PRECISIONS.get(config.export_dtype)  # none of auto: as trained
        weights = engine.whole_weights(stored, trained_only=bool(config.lora_rank))
        if first:
            weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
            facts = contract(config, grid, backbone, step, engine.has_average)
            try:
                save_trained(folder / "student", config, backbone, transformer, weights, facts, stored or dtype)
            except OSError as error:
                print(f"train_pdd.py: error: no student was written: {error}; --resume writes it", file=sys.stderr)
                return 1
            print(f"student written to {folder / 'student'}", flush=True)
    return 0


def encode_data(config: Config, folder: Path | None, processes) -> Config:
    """The knobs with the dataset that the prompts of the table ``data`` were encoded into, now or for an earlier run.

    Rank 0 encodes, the others wait; its text encoders are gone before any weights are loaded for training.

    Raises:
        ConfigError: prompts alone for data_latent, or prompts that the teacher cannot encode; on every rank alike.
    """
    from encode_prompts import encoded

    if config.rollout_mode == "data_latent":
        raise ConfigError(
            f"data {config.data!r} has prompts alone, but rollout_mode is 'data_latent'; allowed is a folder that "
            "encode_prompts.py --media has written"
        )
    out, prompts, parent = runs.encoded_data(config, folder)
    processes.start()
    failed = None
    if processes.rank == 0:
        flags = ["--device", str(processes.device), "--dtype", "bf16" if processes.on_accelerator else "fp32"]
        try:
            encoded(parent, config.teacher, prompts, config.negative_prompt, None, *flags)
        except ConfigError as error:
            failed = str(error)
    if failed := processes.from_first(failed):
        raise ConfigError(failed)
    return dataclasses.replace(config, data=str(out))


def shifts(config: Config, backbone) -> dict[str, float]:
    """Modality -> shift: the knob where it says one, the checkpoint's scheduler elsewhere."""
    own = backbone.shifts()
    given = config.shift or {}
    if not isinstance(given, dict):
        given = dict.fromkeys(own, given)
    tables = {"shift": given, **{name: getattr(config, name) for name in NUMBERS if name != "shift"}}
    for name, table in tables.items():
        for modality in table if isinstance(table, dict) else ():
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
    """Averages between two log lines: losses, loss by distance k - n, and where the forwards started.

    What is on a device stays there until a line is written: to fetch it would be to wait for the step.
    """

    BINS = 4

    def __init__(self, pdd_steps: int, block_size_max: int):
        self.width = block_size_max
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, object] = {}
        self.count, self.updates, self.seconds = 0, 0, 0.0
        self.samples: list[tuple] = []  # (bin, loss) of a round's supervised heads
        self.latest: dict[str, float] = {}
        self.lost = 0  # trajectories dropped since their state was not finite
        self.pending: list[tuple] = []

    def add(self, losses, facts) -> None:
        """One accumulation round; it counts once its update is made."""
        named = {"loss": losses.total, **{f"loss_{m}": loss for m, loss in losses.per_modality.items()}}
        self.pending.append(({name: value.detach() for name, value in named.items()}, losses.per_sample, facts))

    def updated(self, seconds: float, applied: bool) -> None:
        self.updates += 1
        self.seconds += seconds
        for named, per_sample, facts in self.pending if applied else ():
            for name, value in named.items():
                self.sums[name] = self.sums.get(name, 0) + value
            self.count += 1
            self.samples.append(((facts["distance"] * self.BINS // self.width).flatten(), per_sample.flatten()))
            self.lost += int(facts["lost"].sum()) if "lost" in facts else 0
            self.latest = {"block_start": float(facts["n"].double().mean())}
            if "rung" in facts:
                self.latest["rung"] = float(facts["rung"].double().mean())
        self.pending = []

    def line(self, processes) -> dict[str, float | None]:
        """The averages over all ranks, and a fresh start; collective."""
        import torch

        if not self.count:  # no update was made
            seconds = self.seconds / self.updates
            self.reset()
            return {"loss": None, "seconds_per_step": seconds}
        names = list(self.sums)
        packed = torch.cat([
            torch.stack([self.sums[n].double() for n in names]).cpu() / self.count,
            torch.tensor([self.seconds / self.updates], dtype=torch.float64),
            torch.tensor(list(self.latest.values()), dtype=torch.float64),
        ])  # fmt: skip
        packed = (processes.sum(packed) / processes.world).tolist()
        bins, losses = (torch.cat(parts).cpu() for parts in zip(*self.samples))
        by_distance = torch.zeros(2, self.BINS, dtype=torch.float64)
        by_distance.index_add_(1, bins, torch.stack([losses.double(), torch.ones(len(losses), dtype=torch.float64)]))
        total, count = processes.sum(by_distance).tolist()
        out: dict[str, float | None] = dict(zip([*names, "seconds_per_step", *self.latest], packed))
        for i, (a, b) in enumerate(zip(total, count)):
            lower, upper = i * self.width // self.BINS, (i + 1) * self.width // self.BINS
            out[f"loss_distance_{lower}_{upper}"] = a / b if b else None
        if "rung" in self.latest:
            out["lost_trajectories"] = int(processes.sum(torch.tensor(self.lost)))
        self.reset()
        return out


def monitor(engine, line: dict[str, float | None], step: int) -> None:
    """The same numbers through DeepSpeed's own monitor: tensorboard, wandb or csv, as the ds_config says."""
    if engine.deepspeed.monitor.enabled:
        engine.deepspeed.monitor.write_events([(f"pdd/{k}", v, step) for k, v in line.items() if v is not None])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
