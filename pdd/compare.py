"""A student beside its teacher's fine trajectory and beside few Euler steps of that teacher, from the same noise."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from pdd.config import Config
from pdd.data import Rows
from pdd.evaluate import Baselines, Bench, Method, by_blocks, mean
from pdd.metrics import diversity, endpoint_error, frechet_distance, load_features, vague_prompts
from pdd.pictures import grid as picture_grid
from pdd.pictures import table as picture_table
from pdd.student import FusedStudent

SHOWN = 8  # samples per cell of the picture


@torch.no_grad()
def compare(
    student: FusedStudent,
    config: Config,
    rows: Rows,
    prompts: list[str],
    partitions: dict[int, list[int]],
    num: int,
    seed: int,
    batch: int,
    device: str,
) -> tuple[Image.Image, dict[str, Any]]:
    """Sample everything and measure it.

    The Euler baseline is the guided teacher in as many steps, on the recipe's shift and on shift 1; for each figure it
    is given the better of the two. Frechet distance and diversity need a feature space (``features/`` in the teacher
    folder); without one they are None.

    Returns:
        The picture, and ``{"teacher": {...}, "steps": {"1": {...}}, "by_prompt": {prompt: the same}}``. On top stand
        the vague prompts: endpoint error over all their samples, Frechet distance and diversity averaged over them.
    """
    baselines = Baselines(config, rows, student.grid, device)
    methods: dict[tuple, Method] = {("teacher",): baselines.fine()}
    for steps, nodes in partitions.items():
        methods["student", steps] = by_blocks(student, student.grid, nodes)
        for i, method in enumerate(baselines.solver("euler", steps)):
            methods["euler", steps, i] = method

    vague = vague_prompts(config.teacher_dir)
    prompts = prompts or [p for p in vague if p in rows.prompts] + [
        rows.prompts[i] for i in rows.trained if rows.prompts[i] not in vague
    ]
    bench = Bench(rows, prompts, num, (seed, "compare"), batch, device)
    samples: dict[tuple, dict[str, dict[str, Tensor]]] = {}  # method -> prompt -> samples [num, D], pictures
    for key, method in tqdm(methods.items(), desc="compare", unit="method", leave=False):
        ends = [{m: x.cpu() for m, x in bench.end(chunk, method).items()} for chunk in range(len(bench.chunks))]
        samples[key] = {prompt: {} for prompt in prompts}
        for p, prompt in enumerate(prompts):
            own = [end for end, (q, _) in zip(ends, bench.chunks) if q == p]
            x = torch.cat([torch.cat([v.flatten(1) for v in end.values()], 1) for end in own])
            samples[key][prompt] = {"x": x, "shown": student.backbone.to_images(own[0])[:SHOWN]}

    figures = {prompt: _figures({k: v[prompt] for k, v in samples.items()}, prompt, config, rows) for prompt in prompts}
    top = [p for p in prompts if p in vague] or prompts
    pooled = {k: torch.cat([v[p]["x"] for p in top]) for k, v in samples.items()}
    table = mean([figures[p] for p in top])
    for steps in partitions:
        row = table["steps"][str(steps)]
        row["endpoint_error"] = endpoint_error(pooled["student", steps], pooled[("teacher",)])
        row["euler_endpoint_error"] = min(
            endpoint_error(x, pooled[("teacher",)]) for key, x in pooled.items() if key[:2] == ("euler", steps)
        )
    table |= {"prompts": top, "samples_per_prompt": num, "teacher_steps": student.grid.pdd_steps, "by_prompt": figures}
    return _picture(samples, prompts, list(partitions), student.grid.pdd_steps, table), table


def _figures(samples: dict[tuple, dict[str, Tensor]], prompt: str, config: Config, rows: Rows) -> dict[str, Any]:
    """One prompt's figures."""
    space = load_features(config.teacher_dir)
    shape = next(iter(rows.latent_shapes.values()))
    features: dict[tuple, Tensor] = {}
    if space is not None and prompt in space[1]:
        features = {key: space[0].features(v["x"].view(-1, *shape).float()) for key, v in samples.items()}

    def quality(key: tuple) -> tuple[float | None, float | None]:
        if key not in features or len(features[key]) < 2:
            return None, None
        return frechet_distance(features[key], space[1][prompt]), diversity(features[key])

    reference = samples[("teacher",)]["x"]
    frechet, spread = quality(("teacher",))
    out: dict[str, Any] = {"teacher": {"frechet": frechet, "diversity": spread}, "steps": {}}
    for key in samples:
        if key[0] != "student":
            continue
        frechet, spread = quality(key)
        euler = [k for k in samples if k[:2] == ("euler", key[1])]
        distances = [quality(k)[0] for k in euler]
        out["steps"][str(key[1])] = {
            "endpoint_error": endpoint_error(samples[key]["x"], reference),
            "euler_endpoint_error": min(endpoint_error(samples[k]["x"], reference) for k in euler),
            "frechet": frechet,
            "euler_frechet": None if None in distances else min(distances),
            "diversity": spread,
        }
    return out


def _picture(samples: dict, prompts: list[str], steps: list[int], fine: int, table: dict) -> Image.Image:
    """Rows are prompts; columns the teacher's fine trajectory, then student and Euler at each number of forwards."""
    columns, keys = [f"teacher\n{fine} forwards"], [("teacher",)]
    for k in steps:
        for name in ("student", "euler"):
            keys.append((name, k) if name == "student" else (name, k, 0))
            error = table["steps"][str(k)]["endpoint_error" if name == "student" else "euler_endpoint_error"]
            label = "student" if name == "student" else "teacher, Euler"
            columns.append(f"{label}\n{k} forward{'s' * (k > 1)}\nerror {error:.2f}")
    cells = [[picture_grid(samples[key][prompt]["shown"], 4) for key in keys] for prompt in prompts]
    return picture_table(cells, prompts, columns)
