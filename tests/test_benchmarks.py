"""Every benchmark runs, at a tiny size, and prints one JSON object with what its table is made of. No time is judged."""

import json
import math

import pytest


@pytest.fixture
def figures(warm):
    def figures(script: str, *flags: str) -> dict:
        code, output = warm(script, "--json", *flags)
        assert code == 0, output
        (line,) = (line for line in output.splitlines() if line.startswith("{"))  # beside what libraries have to say
        return json.loads(line)

    return figures


SMALL = ["--layers", "1", "--width", "32", "--tokens", "4"]


def test_head_path(figures):
    sizes = ["--tokens", "64", "--width", "32", "--out", "4", "--window", "4", "--rounds", "1", "--steps", "4", "64"]
    out = figures("head_path", *sizes)
    assert [(c["pdd_steps"], c["batch"]) for c in out["cases"]] == [(4, 1), (64, 1), (4, 2), (64, 2)]
    for case in out["cases"]:
        direction = case["batch"] * 64 * 4 * 4  # bytes of one
        assert case["materialised_activation_bytes"] >= case["pdd_steps"] * direction
        assert case["activation_bytes"] <= 8 * direction
        assert case["materialised_over"] > 0 and case["over_plain"] > 0
    assert out["forward_growth"]["1"] > 0


def test_sampling(figures):
    out = figures("sampling", *SMALL, "--pdd_steps", "8", "--rounds", "1", "--steps", "1", "2")
    assert [c["steps"] for c in out["cases"]] == [1, 2]
    assert all(math.isfinite(c["over_teacher"]) and c["over_teacher"] > 0 for c in out["cases"])


def test_train_step(figures):
    (full, lora) = figures("train_step", *SMALL, "--rounds", "1", "--stages", "3")["cases"]
    assert (full["lora"], lora["lora"]) == (False, True) and full["parameters"] < lora["parameters"]
    assert all(case[f"{regime}_over_plain"] > 0 for case in (full, lora) for regime in ("simulate", "data_latent"))


def test_zero3_memory(figures):
    """Also what it finds: shards on two ranks, and nothing of the student or its teacher gathered for no forward."""
    sizes = ["--layers", "2", "--width", "128", "--tokens", "4", "--ranks", "1", "2", "--modes", "full"]
    full, half = figures("zero3_memory", *sizes)["cases"]
    assert (full["ranks"], half["ranks"], full["mode"]) == (1, 2, "full")
    assert half["states_bytes"] < 0.6 * full["states_bytes"] and half["peak_bytes"] > half["states_bytes"]
    assert 0 < half["gathers"] <= half["needed"] and half["extra"] == 0


def test_zero3_step(figures):
    out = figures("zero3_step", *SMALL, "--rounds", "1")
    assert all(f["one_root_forward_resets_per_step"] == 0 for f in out["cases"].values())
    assert out["cases"]["LoRA"]["separate_calls_resets_per_step"] > 0
    assert all(f["ratio"] > 0 for f in out["cases"].values())


def test_lora_memory(figures):
    out = figures("lora_memory", "--sizes", "tiny")
    assert out["tiny"]["full_bytes"] > 0 and out["tiny"]["lora_bytes"] > 0
