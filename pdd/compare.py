"""A student beside its teacher's fine trajectory and beside few Euler steps of that teacher, from the same noise."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from pdd.config import Config
from pdd.data import Rows
from pdd.draws import noise
from pdd.formats import load_transformer
from pdd.grid import Grid
from pdd.metrics import diversity, endpoint_error, frechet_distance, load_features, vague_prompts
from pdd.pictures import grid as picture_grid
from pdd.pictures import table as picture_table
from pdd.sampling import endpoint, initial
from pdd.student import FusedStudent, Velocity
from pdd.teacher import Teacher, unconditional_condition

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
    backbone, grid = student.backbone, student.grid
    model = (
        Velocity(load_transformer(config.teacher_dir, torch.float32), backbone).to(device).eval().requires_grad_(False)
    )
    uncond = unconditional_condition(config, backbone, rows)

    def teacher(g: Grid) -> Teacher:
        return Teacher(model, backbone, g, config, uncond)

    shifts = {m: s.shift for m, s in grid.schedules.items()}
    euler_shifts = [shifts] if set(shifts.values()) == {1.0} else [shifts, dict.fromkeys(shifts, 1.0)]
    methods: dict[tuple, tuple[Any, Grid, list[int]]] = {
        ("teacher",): (teacher(grid), grid, list(range(grid.pdd_steps + 1)))
    }
    for steps, nodes in partitions.items():
        methods["student", steps] = (student, grid, nodes)
        for i, shift in enumerate(euler_shifts):
            coarse = Grid(steps, shift, grid.max_t)
            methods["euler", steps, i] = (teacher(coarse), coarse, list(range(steps + 1)))

    vague = vague_prompts(config.teacher_dir)
    prompts = prompts or [p for p in vague if p in rows.prompts] + [
        rows.prompts[i] for i in rows.trained if rows.prompts[i] not in vague
    ]
    samples: dict[tuple, dict[str, Tensor]] = {}  # method -> prompt -> pictures [num, ...]
    bar = tqdm(total=len(methods) * len(prompts), desc="compare", unit="set", leave=False)
    for key, (role, own_grid, nodes) in methods.items():
        samples[key] = {}
        for p, prompt in enumerate(prompts):
            parts = []
            for begin in range(0, num, batch):
                count = range(begin, min(begin + batch, num))
                eps = {
                    m: torch.stack([noise(shape, seed, "compare", p, m, i) for i in count]).to(device)
                    for m, shape in rows.latent_shapes.items()
                }
                cond = rows.cond(torch.full((len(count),), rows.find(prompt)), device)
                x = endpoint(role.block(cond), initial(eps, own_grid), own_grid, nodes)
                parts.append(torch.cat([v.flatten(1) for v in x.values()], 1).cpu())
                if begin == 0:
                    first = backbone.to_images(x)[:SHOWN].cpu()
            samples[key][prompt] = {"x": torch.cat(parts), "shown": first}
            bar.update()
    bar.close()

    figures = {prompt: _figures({k: v[prompt] for k, v in samples.items()}, prompt, config, rows) for prompt in prompts}
    top = [p for p in prompts if p in vague] or prompts
    pooled = {k: torch.cat([v[p]["x"] for p in top]) for k, v in samples.items()}
    table = _mean([figures[p] for p in top])
    for steps in partitions:
        row = table["steps"][str(steps)]
        row["endpoint_error"] = endpoint_error(pooled["student", steps], pooled[("teacher",)])
        row["euler_endpoint_error"] = min(
            endpoint_error(x, pooled[("teacher",)]) for key, x in pooled.items() if key[:2] == ("euler", steps)
        )
    table |= {"prompts": top, "samples_per_prompt": num, "teacher_steps": grid.pdd_steps, "by_prompt": figures}
    return _picture(samples, prompts, list(partitions), grid.pdd_steps, table), table


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


def _mean(figures: list[Any]) -> Any:
    """Average of equally shaped dicts of numbers; None where one is None."""
    if isinstance(figures[0], dict):
        return {k: _mean([f[k] for f in figures]) for k in figures[0]}
    return None if None in figures else sum(figures) / len(figures)


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
