"""A run that cannot be lost: resumed bit for bit, on other ranks and stages, after kills, damage, full disks and bad numbers."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ENVIRONMENT, REPO, SMALL, TRAIN, ds_config, equal, free_port, lines, student_weights
from safetensors.torch import load_file

from pdd.checkpoint import Shards, verify


def newest(run):
    return run / "checkpoints" / (run / "latest").read_text().strip()


def whole(folder):
    """Every state of every parameter of a checkpoint, put together from its ranks' fragments, and the optimizer's counts."""
    shards = Shards(folder)
    tensors = {key: shards.read(*key.rsplit("|", 1), 0, numel) for key, numel in shards.numel.items()}
    return tensors, json.loads((folder / "state.json").read_text())


def trajectories(folder):
    return [load_file(path) for path in sorted(folder.glob("trajectories-*"))]


def kill_at(step, rank=None):
    """A prelude: SIGKILL to this process (or to one rank's) as it begins a step."""
    return f"""
import pdd.objective
call = pdd.objective.Objective.__call__
def killed(self, step, round):
    if step == {step} and {rank!r} in (None, self.rank):
        os.kill(os.getpid(), 9)
    return call(self, step, round)
pdd.objective.Objective.__call__ = killed
"""


# -- the same run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, bf16, regime, steps", [
    (0, False, "simulate", 8), (0, True, "data_latent", 8), (1, True, "simulate", 8), (2, False, "data_latent", 8),
    (2, True, "simulate", 40), (3, True, "simulate", 8), (3, False, "data_latent", 8),
])  # fmt: skip
def test_a_killed_and_resumed_run_is_the_same_run(stage, bf16, regime, steps, warm, tmp_path):
    """Losses, masters, optimizer, average, student and trajectories, bit for bit, on two ranks with accumulation."""
    half = steps // 2
    flags = ["train", *TRAIN[1:], *SMALL, "--ds_config", ds_config(tmp_path, stage, bf16), "--max_train_steps", steps,
             "--train_micro_batch_size_per_gpu", "2", "--gradient_accumulation_steps", "2", "--ema_decay", "0.9",
             "--rollout_mode", regime, "--save_every", half, "--export_dtype", "fp32"]  # fmt: skip
    code, output = warm(*flags, "--run", tmp_path / "straight", ranks=2)
    assert code == 0, output
    code, output = warm(*flags, "--run", tmp_path / "killed", prelude=kill_at(half + 2), ranks=2)
    assert code != 0 and newest(tmp_path / "killed").name == f"step-{half:06d}", output
    code, output = warm(
        "train", "--ds_config", ds_config(tmp_path, stage, bf16), "--resume", "--run", tmp_path / "killed", ranks=2
    )
    assert code == 0, output
    for key in ("step", "loss", "grad_norm"):
        assert lines(tmp_path / "killed", key) == lines(tmp_path / "straight", key)
    (a, facts), (b, same) = whole(newest(tmp_path / "straight")), whole(newest(tmp_path / "killed"))
    assert equal(a, b) and facts == same
    assert {key.rsplit("|", 1)[1] for key in a} == {"master", "exp_avg", "exp_avg_sq", "ema"}
    assert equal(student_weights(tmp_path / "straight"), student_weights(tmp_path / "killed"))
    carried = [trajectories(newest(tmp_path / name)) for name in ("straight", "killed")]
    assert len(carried[0]) == (2 if regime == "simulate" else 0) and all(map(equal, *carried))


LOADED = """
import pdd.checkpoint, pdd.engine
from pathlib import Path
load = pdd.engine.Engine.load
def loaded(self, run, on_damage):
    out = load(self, run, on_damage)
    folder = Path({folder!r})
    folder.mkdir(exist_ok=True)
    pdd.checkpoint.write_shard(folder, pdd.engine.dist.get_rank(), self._fragments(), {{}})
    model = {{n: p for n, p in self.module.named_parameters()}}
    from deepspeed.runtime.zero import GatheredParameters
    with GatheredParameters(list(model.values()), enabled=self.stage == 3):
        pdd.checkpoint.write_tensors(folder / f"model-{{pdd.engine.dist.get_rank()}}.safetensors", model)
    return out
pdd.engine.Engine.load = loaded
"""


@pytest.mark.parametrize(
    "before, after", [((3, 2), (3, 1)), ((2, 1), (3, 3)), ((3, 2), (0, 1)), ((0, 2), (1, 2)), ((1, 3), (2, 2))]
)
def test_another_number_of_ranks_or_stage_goes_on_with_the_same_state(before, after, warm, tmp_path):
    """Weights, optimizer and average are exact; trajectories are dealt again, and it says so."""
    (stage, ranks), (new_stage, new_ranks) = before, after
    run = tmp_path / "run"
    flags = ["--ema_decay", "0.9", "--stop_after", "3", "--run", run, "--ds_config", ds_config(tmp_path, stage, True)]
    code, output = warm("train", *TRAIN[1:], *SMALL, *flags, ranks=ranks)
    assert code == 0, output
    saved, facts = whole(newest(run))
    code, output = warm(
        "train", "--ds_config", ds_config(tmp_path, new_stage, True), "--resume", "--run", run,
        prelude=LOADED.format(folder=str(tmp_path / "loaded")), ranks=new_ranks,
    )  # fmt: skip
    assert code == 0, output
    if ranks != new_ranks:
        going = min(ranks, new_ranks) * 4
        assert (
            f"saved by {ranks} ranks, resumed by {new_ranks}; {going} of now {new_ranks * 4} trajectories go on"
            in output
        )
    loaded = Shards(tmp_path / "loaded")
    for key, value in saved.items():
        assert torch.equal(loaded.read(*key.rsplit("|", 1), 0, loaded.numel[key]), value), key
    for rank in range(new_ranks):
        for name, weight in load_file(tmp_path / "loaded" / f"model-{rank}.safetensors").items():
            assert torch.equal(weight.flatten(), saved[f"{name}|master"].bfloat16()), name
    assert lines(run, "step") == [1, 2, 3, 4, 5, 6]
    end = json.loads((newest(run) / "state.json").read_text())
    assert end["optimizer"]["step"] == facts["optimizer"]["step"] + 3 == 6
    assert end["samples_seen"] == 3 * 4 * (ranks + new_ranks)


def test_data_latent_goes_on_where_it_was_in_the_data_with_another_batch(warm, tmp_path):
    """No sample of the pass is skipped or seen twice."""
    watch = """
import pdd.data
shuffled = pdd.data.Rows.shuffled
def watched(self, serials, group):
    print("serials", *serials.tolist(), flush=True)
    return shuffled(self, serials, group)
pdd.data.Rows.shuffled = watched
"""
    flags = ["--rollout_mode", "data_latent", "--max_train_steps", "4", "--stop_after", "2", "--run", tmp_path / "run"]
    first = warm("train", *TRAIN[1:], *SMALL, *flags, prelude=watch)[1]
    more = ["--train_micro_batch_size_per_gpu", "3", "--gradient_accumulation_steps", "2"]
    second = warm("train", *TRAIN[1:], "--resume", "--run", tmp_path / "run", *more, prelude=watch)[1]
    seen = [set(map(int, " ".join(re.findall("serials (.*)", text)).split())) for text in (first, second)]
    assert seen == [set(range(8)), set(range(8, 20))]


# -- killed anywhere ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_thirty_times_nothing_is_lost_beyond_save_every(warm, tmp_path):
    """SIGKILL to one rank or to all at random moments, within saves, too; at last it is the run that nobody killed."""
    flags = [
        "--max_train_steps",
        "60",
        "--save_every",
        "2",
        "--train_micro_batch_size_per_gpu",
        "2",
        "--ema_decay",
        "0.9",
    ]
    # every stage saves by the same calls; this one starts and steps in the least time
    engine = ["train", "--ds_config", ds_config(tmp_path, 2)]
    reference = tmp_path / "reference"
    code, output = warm(*engine, *SMALL, *flags, "--run", reference, ranks=2)
    assert code == 0, output
    run, dice, kills, in_saves = tmp_path / "run", random.Random(7), 0, 0
    # dies in a random one of the calls that write, sync, rename or remove, or between them, some updates from here
    killer = """
import os, random, threading, time, pathlib, shutil
import pdd.checkpoint, pdd.objective
dice = random.Random({seed})
victim = {victim}
me = int(os.environ.get("RANK", 0))
calls = [0]
def dying(function, moment):
    def wrapped(*args, **kwargs):
        if victim in (None, me) and armed[0]:
            calls[0] += 1
            if calls[0] == moment:
                os.kill(os.getpid(), 9)
        return function(*args, **kwargs)
    return wrapped
armed = [False]
call = pdd.objective.Objective.__call__
started = [None]
def counting(self, step, round):
    if started[0] is None:
        started[0] = step
    if step >= started[0] + {updates}:
        armed[0] = True
        if {timer}:
            threading.Timer(dice.random() * 0.4, lambda: os.kill(os.getpid(), 9)).start() if victim in (None, me) else None
    return call(self, step, round)
pdd.objective.Objective.__call__ = counting
moment = dice.randint(1, 12)
os.fsync, os.rename, os.replace = (dying(f, moment) for f in (os.fsync, os.rename, os.replace))
"""
    while kills < 30:
        seed = dice.randrange(10**6)
        prelude = killer.format(
            seed=seed, victim=dice.choice(["None", "0", "1"]), updates=dice.randint(1, 2), timer=dice.random() < 0.4
        )
        resume = ["--resume"] if (run / "latest").exists() else [*SMALL, *flags]
        if not (run / "latest").exists() and run.exists():
            shutil.rmtree(run)  # killed before the first checkpoint: nothing to resume
        began = int(newest(run).name[5:]) if (run / "latest").exists() else 0
        code, output = warm(*engine, *resume, "--run", run, prelude=prelude, ranks=2)
        if code == 0:
            break
        kills += 1
        reached = max([0, *(int(n) for n in re.findall(r"(\d+)/60", output))])
        in_saves += any((run / "checkpoints").glob("saving-*")) or any((run / "checkpoints").glob("dropping-*"))
        if (run / "latest").exists():
            verify(newest(run))  # whole, whatever happened
            saved = int(newest(run).name[5:])
            assert saved >= began and reached - saved <= 2 + 1, output
    assert kills >= 15 and in_saves >= 3, (kills, in_saves)
    if code != 0:
        code, output = warm(*engine, "--resume", "--run", run, ranks=2)
        assert code == 0, output
    assert lines(run, "step") == list(range(1, 61)) and lines(run, "loss") == lines(reference, "loss")
    assert equal(student_weights(run), student_weights(reference))


def test_a_dead_rank_ends_the_others_with_an_error_and_no_hang(tmp_path):
    """Through the real launcher."""
    prelude = tmp_path / "dying.py"
    prelude.write_text(
        f"import os, sys\nsys.path.insert(0, {str(REPO)!r})\n{kill_at(2, rank=1)}\nimport train_pdd\n"
        "sys.exit(train_pdd.main(sys.argv[1:]))\n"
    )
    command = [
        os.path.join(os.path.dirname(sys.executable), "deepspeed"), "--num_accelerators", "2", "--master_port",
        str(free_port()), str(prelude), *TRAIN[1:], *SMALL, "--run", str(tmp_path / "run"), "--save_every", "1",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=REPO, env=ENVIRONMENT, text=True, capture_output=True, timeout=200)
    assert done.returncode != 0 and newest(tmp_path / "run").name == "step-000002"
    assert "-9" in done.stdout + done.stderr  # the launcher tells how the rank died


def test_sigusr1_saves_and_ends(warm, tmp_path):
    prelude = """
import signal
import pdd.objective
call = pdd.objective.Objective.__call__
def signalled(self, step, round):
    if step == 2: os.kill(os.getpid(), signal.SIGUSR1)
    return call(self, step, round)
pdd.objective.Objective.__call__ = signalled
"""
    run = warm.train(tmp_path / "run", prelude=prelude, code=128 + signal.SIGUSR1)
    assert newest(run).name == "step-000003" and not (run / "student").exists()


# -- damage -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(warm, tmp_path_factory):
    """A run with checkpoints of step 2 and 4, and no more."""
    return warm.train(
        tmp_path_factory.mktemp("stopped") / "run", "--save_every", "2", "--stop_after", "4", "--ema_decay", "0.9"
    )


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "a truncated shard": ("state-00000-000.safetensors", truncate, "bytes instead of"),
    "a flipped bit": ("state-00000-000.safetensors", flip, "checksum differs"),
    "a missing shard": ("state-00000-000.safetensors", lambda path: path.unlink(), "is missing"),
    "flipped trajectories": ("trajectories-00000.safetensors", flip, "checksum differs"),
    "missing trajectories": ("trajectories-00000.safetensors", lambda path: path.unlink(), "is missing"),
    "an edited state": ("state.json", lambda path: path.write_text(path.read_text().replace("4", "5")), "checksum differs"),
    "no checksums": ("checksums.json", lambda path: path.unlink(), "cannot be read"),
    "damaged checksums": ("checksums.json", truncate, "is damaged"),
    "a foreign file": ("state-00007-000.safetensors", lambda path: path.write_bytes(b"x"), "does not belong"),
    "an escaping name": (
        "checksums.json",
        lambda path: path.write_text(path.read_text().replace("state.json", "../state.json")),
        "is damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_it_taken(damage, stopped, warm, tmp_path):
    name, hurt, message = DAMAGE[damage]
    run = shutil.copytree(stopped, tmp_path / "run")
    hurt(run / "checkpoints" / "step-000004" / name)
    code, output = warm("train", *TRAIN[1:], "--resume", "--run", run, "--on_damage", "stop")
    assert code == 2 and message in output and name in output and "Traceback" not in output, output
    code, output = warm("train", *TRAIN[1:], "--resume", "--run", run, "--stop_after", "4")
    assert code == 0 and message in output and f"resuming {run} at step 2" in output, output
    assert (run / "checkpoints" / "damaged-step-000004").is_dir()  # to be looked at
    verify(newest(run))
    assert newest(run).name == "step-000004"
    a, b = whole(newest(run))[0], whole(stopped / "checkpoints" / "step-000004")[0]
    assert equal(a, b)


def test_nothing_whole_left_is_one_line(stopped, warm, tmp_path):
    run = shutil.copytree(stopped, tmp_path / "run")
    for folder in (run / "checkpoints").iterdir():
        flip(folder / "state-00000-000.safetensors")
    code, output = warm("train", *TRAIN[1:], "--resume", "--run", run)
    assert code == 2 and "has no checkpoint that is whole" in output and "Traceback" not in output, output


def test_a_checkpoint_of_another_model_is_refused(stopped, warm, tmp_path):
    other = warm.train(tmp_path / "other", "--pdd_steps", "32", "--stop_after", "4", "--stagger", "sample")
    run = shutil.copytree(stopped, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-000004")
    shutil.copytree(other / "checkpoints" / "step-000004", run / "checkpoints" / "step-000004")
    code, output = warm("train", *TRAIN[1:], "--resume", "--run", run)
    assert code == 2 and "is of another model: transformer.proj_out" in output and "Traceback" not in output, output


def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_alive(warm, tmp_path):
    """The system refuses to let any file grow past a limit, for a while: the errors are its own."""
    full = """
import resource, signal
import pdd.engine
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save = pdd.engine.Engine.save
def saving(self, run, step, *rest):
    limit = 2**20 if step == 4 and pdd.engine.dist.get_rank() == 1 else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        return save(self, run, step, *rest)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
pdd.engine.Engine.save = saving
"""
    run = tmp_path / "run"
    flags = ["--save_every", "2", "--stop_after", "5", "--keep_last", "5", "--run", run]
    code, output = warm("train", *TRAIN[1:], *SMALL, *flags, prelude=full, ranks=2)
    assert code == 0 and output.count("WARNING: no checkpoint was saved at step 4") == 1, output
    assert "File too large" in output
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-000005"]
    verify(newest(run))


# -- numbers ------------------------------------------------------------------------------------------

BAD = """
import pdd.objective
call = pdd.objective.Objective.__call__
def bad(self, step, round):
    losses, facts = call(self, step, round)
    if step in {steps} and round == 1 and self.rank == self.world - 1:
        losses = losses._replace(total=losses.total * float({value!r}))
    return losses, facts
pdd.objective.Objective.__call__ = bad
"""


@pytest.mark.parametrize("stage, bf16, value", [
    (0, False, "nan"), (0, True, "nan"), (1, False, "inf"), (2, True, "nan"), (3, False, "nan"), (3, True, "inf"),
])  # fmt: skip
def test_all_ranks_skip_an_update_that_is_not_finite_on_one(stage, bf16, value, warm, tmp_path):
    """Weights, optimizer, average and trajectories stay as they were; it is counted, and survives a resume."""
    run = tmp_path / "run"
    flags = ["--gradient_accumulation_steps", "2", "--save_every", "1", "--keep_last", "9", "--ema_decay", "0.9",
             "--ds_config", ds_config(tmp_path, stage, bf16), "--stop_after", "5", "--run", run]  # fmt: skip
    code, output = warm("train", *TRAIN[1:], *SMALL, *flags, prelude=BAD.format(steps=[2, 3], value=value), ranks=2)
    assert code == 0 and output.count("is not finite; no rank made the update") == 2, output
    at = {step: run / "checkpoints" / f"step-{step:06d}" for step in range(1, 6)}
    before, _ = whole(at[2])
    for skipped in (3, 4):
        assert equal(before, whole(at[skipped])[0])
        assert all(map(equal, trajectories(at[2]), trajectories(at[skipped])))
    after, facts = whole(at[5])
    assert not equal(before, after) and all(bool(t.isfinite().all()) for t in after.values())
    assert facts["updates"] == facts["optimizer"]["step"] == 3 and facts["skipped_steps"] == 2
    assert lines(run, "skipped_steps") == [0, 0, 1, 2, 2] and lines(run, "loss")[2:4] == [None, None]
    code, output = warm("train", "--ds_config", ds_config(tmp_path, stage, bf16), "--resume", "--run", run, ranks=2)
    assert code == 0 and lines(run, "skipped_steps")[-1] == 2, output


def test_too_many_bad_updates_end_the_run_and_name_the_last_good_checkpoint(warm, tmp_path):
    flags = [
        "--gradient_accumulation_steps",
        "2",
        "--max_train_steps",
        "9",
        "--save_every",
        "2",
        "--max_bad_steps",
        "2",
    ]
    bad = BAD.format(steps=[3, 5, 6, 7], value="nan")
    code, output = warm("train", *TRAIN[1:], *SMALL, *flags, "--run", tmp_path / "run", prelude=bad)
    assert code == 1 and "3 updates in a row" in output and "max_bad_steps 2" in output, output
    assert "is step-000006" in output and "Traceback" not in output
    assert not (tmp_path / "run" / "student").exists()


# -- one run, one process -----------------------------------------------------------------------------


def test_a_folder_in_use_is_refused(stopped, warm, tmp_path):
    run = shutil.copytree(stopped, tmp_path / "run")
    hold = (
        f"import fcntl, os, time; fcntl.flock(os.open({str(run)!r}, os.O_RDONLY), fcntl.LOCK_EX); print('held', flush=True)\n"
        "time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        code, output = warm("train", *TRAIN[1:], "--resume", "--run", run)
        assert code == 2 and "is in use by another process" in output and "Traceback" not in output, output
    finally:
        holder.kill()
        holder.wait()
    assert warm("train", *TRAIN[1:], "--resume", "--run", run)[0] == 0


def test_a_run_holds_its_folder(warm, tmp_path):
    """From the start, and without a file of its own."""
    prelude = """
import subprocess, sys
import pdd.objective
call = pdd.objective.Objective.__call__
def probing(self, step, round):
    if step == 0:
        code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        print("held", subprocess.run([sys.executable, "-c", code, self.config.run], capture_output=True).returncode)
    return call(self, step, round)
pdd.objective.Objective.__call__ = probing
"""
    code, output = warm("train", *TRAIN[1:], *SMALL, "--run", tmp_path / "run", prelude=prelude)
    assert code == 0 and "held 1" in output, output
