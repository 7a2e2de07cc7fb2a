"""How the tests start the real scripts: through the launcher, or, where only the result matters, forked from a warm process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
TEACHER = REPO / "assets" / "digits"
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
TRAIN = ["train_pdd.py", "--ds_config", "ds_configs/zero3.json"]
# a run of a second or two: N = 16, the digits teacher, 6 updates
SMALL = [
    "--pdd_steps", "16", "--block_size_min", "4", "--block_size_max", "16", "--train_micro_batch_size_per_gpu", "4",
    "--max_train_steps", "6", "--warmup_steps", "0", "--lr_scheduler", "constant", "--learning_rate", "1e-3",
    "--head_learning_rate", "3e-3", "--ema_decay", "0", "--log_every", "1", "--validation_every", "0", "--shift", "1",
    "--stagger", "stream", "--prompt_repeats", "{}",
]  # fmt: skip


def run_script(*words: str, launcher: int = 0, timeout: int = 300, **options) -> subprocess.CompletedProcess:
    """A script of the repository as a user starts it: plain Python, or ``deepspeed`` with so many ranks."""
    if launcher:
        deepspeed = Path(sys.executable).with_name("deepspeed")
        start = [str(deepspeed), "--num_accelerators", str(launcher), "--master_port", str(free_port())]
    else:
        start = [sys.executable]
    command = [*start, *map(str, words)]
    return subprocess.run(
        command, cwd=REPO, env=ENVIRONMENT, text=True, capture_output=True, timeout=timeout, **options
    )


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ds_config(folder: Path, stage: int, bf16: bool = False, zero: dict | None = None, **more) -> Path:
    """A ds_config file of a ZeRO stage, with more of its section and more sections."""
    config = json.loads((REPO / "ds_configs" / "zero3.json").read_text())
    config |= {"zero_optimization": {"stage": stage, **(zero or {})}, "bf16": {"enabled": bf16}, **more}
    path = folder / f"zero{stage}{bf16}{len(zero or {})}.json"
    path.write_text(json.dumps(config))
    return path


def lines(run: Path, key: str) -> list:
    """One value of every line of a run's log that has it."""
    logged = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in logged if key in line]


def student_weights(run: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(run / "student" / "transformer" / "diffusion_pytorch_model.safetensors")


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[k].shape == b[k].shape and bool((a[k] == b[k]).all()) for k in a)


SERVER = """
import importlib, io, json, os, sys, tempfile, traceback
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "benchmarks")]
import deepspeed, diffusers, datasets, torch
import deepspeed.runtime.zero.muon.muon_optimizer  # or every child imports half of the compiler for it
import pdd.compare, pdd.engine, pdd.formats, pdd.objective, pdd.report, pdd.validation
import encode_prompts, eval_pdd, sample_pdd, train_pdd
from diffusers import SD3Transformer2DModel
torch.set_num_threads(1)
print("ready", flush=True)
for request in sys.stdin:
    script, argv, prelude, world, port = json.loads(request)
    with tempfile.TemporaryFile("w+") as output:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1); os.dup2(output.fileno(), 2)
                if world > 1:
                    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                    os.environ.update({k: str(v) for k, v in place.items()})
                code = 1
                try:
                    exec(prelude)
                    scripts = {"train": train_pdd, "sample": sample_pdd, "eval": eval_pdd, "encode": encode_prompts}
                    code = (scripts.get(script) or importlib.import_module(script)).main(argv) or 0
                except SystemExit as leaving:
                    code = leaving.code or 0
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush(); sys.stderr.flush()
                os._exit(code)
            children.append(child)
        code = max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)
        output.seek(0)
        print(json.dumps([code, output.read()]), flush=True)
os._exit(0)  # taking all of it down in order would take seconds
"""


class Warm:
    """The scripts' ``main`` in a process forked from one that has imported everything: seconds a run instead of ten."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=REPO,
            env=ENVIRONMENT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        while (line := self.process.stdout.readline()) != "ready\n":
            assert line, "the warm process died"

    def __call__(self, script: str, *words, prelude: str = "", ranks: int = 1) -> tuple[int, str]:
        """``(exit status, what it printed)`` of one process, or of so many ranks that find each other as the launcher's do."""
        port = free_port() if ranks > 1 else 0
        self.process.stdin.write(json.dumps([script, [str(w) for w in words], prelude, ranks, port]) + "\n")
        self.process.stdin.flush()
        code, output = json.loads(self.process.stdout.readline())
        return code, output

    def train(self, run: Path, *words, prelude: str = "", code: int = 0) -> Path:
        """A small training run that ends with ``code``."""
        ended, output = self(
            "train", "--ds_config", "ds_configs/zero3.json", *SMALL, "--run", run, *words, prelude=prelude
        )
        assert ended == code, output
        return run


@pytest.fixture(scope="session")
def warm():
    server = Warm()
    yield server
    server.process.stdin.close()
    server.process.wait(60)  # a loaded machine needs a while to let it go


@pytest.fixture(scope="session")
def baseline(warm, tmp_path_factory):
    """The small run that others are compared with."""
    return warm.train(tmp_path_factory.mktemp("baseline") / "run")
