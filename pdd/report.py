"""report.html: what an evaluation found, on one page that needs nothing else; and the README's share of it."""

from __future__ import annotations

import base64
import io
import math
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pdd.evaluate import Method, Trajectories, flat
from pdd.media import write_video
from pdd.pictures import grid as picture_grid
from pdd.pictures import table as picture_table
from pdd.run import write_text

NAMES = {
    "student": "student", "calibrated": "calibrated", "euler": "Euler", "midpoint": "midpoint",
    "dpm-solver++": "DPM-Solver++", "unipc": "UniPC",
}  # fmt: skip
OURS = ("student", "calibrated")


class Pictures:
    """The first samples of every method and prompt.

    Args:
        prompts: in the order of what is added.
        teacher: for each prompt, pictures ``[B, C, H, W]`` (videos ``[B, F, C, H, W]``) in [-1, 1], and sounds.
        frame_rate, sound_rate: of videos.
    """

    SHOWN = 8

    def __init__(self, prompts: list[str], teacher: list[tuple[Tensor, Any]], frame_rate: float, sound_rate: int):
        self.prompts, self.frame_rate, self.sound_rate = prompts, frame_rate, sound_rate
        self.samples: dict[tuple, list[tuple[Tensor, Any]]] = {("teacher",): teacher}

    def add(self, name: str, forwards: int, shown: list[tuple[Tensor, Any]]) -> None:
        self.samples[name, forwards] = shown

    def image(self, key: tuple, prompt: int) -> Image.Image:
        """A grid of samples; of videos, their middle frames."""
        pixels = self.samples[key][prompt][0]
        return picture_grid(pixels if pixels.ndim == 4 else pixels[:, pixels.shape[1] // 2], 4)

    def html(self, key: tuple, prompt: int, label: str) -> str:
        """The grid as an inline PNG; of videos, the first one as an inline MP4 above it."""
        pixels, sounds = self.samples[key][prompt]
        file = io.BytesIO()
        self.image(key, prompt).save(file, "PNG", optimize=True)
        small = " class=pixels" if max(pixels.shape[-2:]) < 64 else ""
        out = f'<img{small} alt="{escape(label)}" src="data:image/png;base64,{_base64(file.getvalue())}">'
        if pixels.ndim == 4:
            return out
        frames = pixels[0].expand(-1, 3, -1, -1) if pixels.shape[2] == 1 else pixels[0]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            even = (slice(None), slice(None), *(slice(side - side % 2) for side in frames.shape[-2:]))
            write_video(path, (frames[even] + 1) / 2, self.frame_rate or 8, sounds[0], self.sound_rate)
            data = _base64(path.read_bytes())
        kind = "controls" if sounds[0] is not None else "muted autoplay loop"
        return f'<video {kind} playsinline src="data:video/mp4;base64,{data}"></video>{out}'


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@torch.no_grad()
def paths(trajectories: Trajectories, student: Method, euler: Method | None, forwards: int) -> dict[str, Any] | None:
    """The first samples' ways from noise to picture, each on the plane of its own two principal components.

    Returns:
        ``{"forwards", "panels": [{"share": of the variance in the plane, role: points [n, 2]}]}``; None on a rank that
        does not have the first chunk.
    """
    if 0 not in trajectories.states:
        return None
    roles: dict[str, list] = {"teacher": [trajectories.states[0][n] for n in trajectories.nodes]}
    roles["student"] = [state for _, state in trajectories.bench.walk(0, student)]
    if euler is not None:
        roles["euler"] = [state for _, state in trajectories.bench.walk(0, euler)]
    stacked = {name: torch.stack([flat(x) for x in states], 1) for name, states in roles.items()}  # [B, n, D]
    panels = []
    for b in range(min(4, len(stacked["teacher"]))):
        every = torch.cat([x[b] for x in stacked.values()])
        centre = every.mean(0)
        _, values, axes = torch.linalg.svd(every - centre, full_matrices=False)
        plane = axes[:2].T  # [D, 2]
        points = {name: (x[b] - centre) @ plane for name, x in stacked.items()}
        way = points["teacher"]
        # noise at the left, and the teacher's bend upwards, whatever signs the decomposition chose
        signs = torch.tensor([1.0, 1.0], dtype=way.dtype)
        signs[0] = 1 if way[-1, 0] >= way[0, 0] else -1
        chord = torch.linspace(0, 1, len(way), dtype=way.dtype) * (way[-1, 1] - way[0, 1]) + way[0, 1]
        signs[1] = 1 if (way[:, 1] - chord).sum() >= 0 else -1
        share = float(values[:2].square().sum() / values.square().sum())
        panels.append({"share": share, **{name: (p * signs).tolist() for name, p in points.items()}})
    return {"forwards": forwards, "panels": panels}


# ---------------------------------------------------------------------------------------------- charts


class Axis:
    """Numbers to positions, and the ticks in between."""

    def __init__(self, values: Sequence[float], ends: tuple[float, float], scale: str, ticks: Sequence[float] = ()):
        self.log = scale == "log"
        low, high = min(values), max(values)
        if self.log:
            self.low, self.high = math.log(low), math.log(high)
            pad = 0.06 * (self.high - self.low) or 0.1
            self.low, self.high = self.low - pad, self.high + pad
        else:
            pad = 0.06 * (high - low) or 0.1
            self.low, self.high = (0.0 if scale == "zero" else low - pad), high + pad
        if scale == "falling":
            self.low, self.high = high + pad, low - pad
        self.ends, self.ticks = ends, list(ticks) or self._ticks()

    def __call__(self, value: float) -> float:
        place = (math.log(value) if self.log else value) - self.low
        return round(self.ends[0] + (self.ends[1] - self.ends[0]) * place / (self.high - self.low), 1)

    def _ticks(self) -> list[float]:
        low, high = sorted((self.low, self.high))
        if self.log:
            powers = range(math.floor(low / math.log(10)) - 1, math.ceil(high / math.log(10)) + 1)
            many = [m * 10.0**p for p in powers for m in (1, 2, 5)]
            inside = [t for t in many if low <= math.log(t) <= high]
            return inside if len(inside) > 1 else [math.exp(low), math.exp(high)]
        step = 10 ** math.floor(math.log10(high - low))
        step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 6)
        return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def chart(
    series: list[dict[str, Any]],
    x: str,
    y: str,
    scales: tuple[str, str],
    ticks: Sequence[float] = (),
    level: tuple = (),
) -> str:
    """A line chart as SVG, labelled at the lines' ends; its colours come from the page's style sheet.

    Args:
        series: ``name``, ``css`` class, ``points`` ``[(x, y)]``; ``faint`` from 0 to 1, ``dots`` to leave out the line.
        x, y: what the axes show.
        scales: of both axes, ``log``, ``zero`` (linear, from 0), ``linear`` or ``falling``.
        ticks: of the x axis.
        level: (value, name) of a horizontal line.
    """
    width, height, left, right, top, bottom = 460, 290, 40, 106, 12, 40
    series = [s for s in series if s["points"]]
    xs = [p[0] for s in series for p in s["points"]]
    ys = [p[1] for s in series for p in s["points"]] + ([level[0]] if level else [])
    across = Axis(xs, (left, width - right), scales[0], ticks)
    up = Axis(ys, (height - bottom, top), scales[1])
    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(y)} over {escape(x)}">']
    for tick in up.ticks:
        out.append(f'<line class="rule" x1="{left}" x2="{width - right}" y1="{up(tick)}" y2="{up(tick)}"/>')
        out.append(f'<text class="tick" x="{left - 6}" y="{up(tick) + 4}" text-anchor="end">{tick:g}</text>')
    for tick in across.ticks:
        out.append(
            f'<text class="tick" x="{across(tick)}" y="{height - bottom + 17}" text-anchor="middle">{tick:g}</text>'
        )
    out.append(
        f'<text class="axis" x="{(left + width - right) / 2}" y="{height - 4}" text-anchor="middle">{escape(x)}</text>'
    )
    labels = []  # (wanted y, class, opacity, text)
    if level:
        out.append(f'<line class="level" x1="{left}" x2="{width - right}" y1="{up(level[0])}" y2="{up(level[0])}"/>')
        labels.append([up(level[0]), "level", 1.0, level[1]])
    for s in reversed(series):  # the first is drawn last, on top
        points = [(across(a), up(b)) for a, b in s["points"]]
        opacity = 1 - 0.65 * s.get("faint", 0.0)
        if not s.get("dots"):
            line = " ".join(f"{a},{b}" for a, b in points)
            out.append(f'<polyline class="{s["css"]}" opacity="{opacity:.2f}" points="{line}"/>')
        for (a, b), (u, v) in zip(points, s["points"]):
            tip = f"{s['name']}: {v:.3g} at {u:.3g}"
            dot = f'<circle class="{s["css"]}" opacity="{opacity:.2f}" cx="{a}" cy="{b}" r="3.2">'
            out.append(f"{dot}<title>{escape(tip)}</title></circle>")
        labels.append([points[-1][1], s["css"], opacity, s["name"]])
    labels.sort(key=lambda item: item[0])
    gap, floor = 13.5, float(top)
    for label in labels:  # down from the top, then up from the bottom, so that none covers another
        label[0] = floor = max(label[0], floor)
        floor += gap
    ceiling = height - bottom + 4.0
    for label in reversed(labels):
        label[0] = ceiling = min(label[0], ceiling)
        ceiling -= gap
    for place, css, opacity, text in labels:
        where = f'x="{width - right + 8}" y="{place + 4:.1f}" opacity="{max(opacity, 0.6):.2f}"'
        out.append(f'<text class="label {css}" {where}>{escape(text)}</text>')
    return "".join(out) + "</svg>"


def _panel(panel: dict[str, Any]) -> str:
    """One sample's ways on its plane."""
    width, height, pad = 220, 170, 14
    every = [p for name in ("teacher", "student", "euler") for p in panel.get(name, [])]
    across = Axis([p[0] for p in every], (pad, width - pad), "linear", [0])
    up = Axis([p[1] for p in every], (height - pad, pad), "linear", [0])
    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="ways of one sample">']
    for name in ("teacher", "euler", "student"):
        points = [(across(a), up(b)) for a, b in panel.get(name, [])]
        line = " ".join(f"{a},{b}" for a, b in points)
        out.append(f'<polyline class="{name}" points="{line}"/>')
        if name != "teacher":
            out += [f'<circle class="{name}" cx="{a}" cy="{b}" r="3"/>' for a, b in points[1:]]
        elif points:
            a, b = points[-1]
            out.append(f'<circle class="teacher" cx="{points[0][0]}" cy="{points[0][1]}" r="3"/>')
            out.append(f'<circle class="teacher ring" cx="{a}" cy="{b}" r="6"/>')
    return "".join(out) + "</svg>"


def _bars(metrics: dict[str, Any]) -> str:
    """Partitions as bars along the fine grid, the calibrated one under the one it replaces."""
    total, width, left, right = metrics["student"]["pdd_steps"], 460, 88, 64
    place = lambda node: left + (width - left - right) * node / total  # noqa: E731
    out, y = [], 18
    for k, row in metrics["steps"].items():
        if "calibrated" not in row:
            continue
        out.append(f'<text class="axis" x="0" y="{y + 12}">{k} forward{"s" * (k != "1")}</text>')
        for name in OURS:
            nodes = row[name]["nodes"]
            for a, b in zip(nodes, nodes[1:]):
                x, wide = place(a) + 0.75, place(b) - place(a) - 1.5
                bar = f'<rect class="{name}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="13" rx="2.5">'
                out.append(f"{bar}<title>{a} to {b}</title></rect>")
            error = f"{row[name]['endpoint_error']:.3f}"
            out.append(f'<text class="label {name}" x="{width - right + 8}" y="{y + 11}">{error}</text>')
            y += 16
        y += 12
    for start in metrics["student"]["starts"]:
        out.insert(0, f'<line class="rule" x1="{place(start):.1f}" x2="{place(start):.1f}" y1="14" y2="{y}"/>')
        out.append(f'<text class="tick" x="{place(start):.1f}" y="10" text-anchor="middle">{start}</text>')
    return f'<svg viewBox="0 0 {width} {y}" role="img" aria-label="partitions">' + "".join(out) + "</svg>"


# ---------------------------------------------------------------------------------------------- the page

STYLE = Path(__file__).with_suffix(".css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"


def write_report(path: Path, metrics: dict[str, Any], pictures: Pictures) -> None:
    """The page, whole or not at all."""
    write_text(path, page(metrics, pictures))


def page(metrics: dict[str, Any], pictures: Pictures) -> str:
    """The whole page; ``metrics`` as ``eval_pdd.py`` writes them."""
    fine = metrics["student"]["pdd_steps"]
    prompts = ", ".join(f"&ldquo;{escape(p)}&rdquo;" for p in metrics["prompts"][:6])
    sections = [
        _errors(metrics), _quality(metrics), _table(metrics), _samples(metrics, pictures), _ways(metrics), _along(metrics),
        _heads(metrics), _partitions(metrics), _adaptive(metrics),
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>PDD student</title>'
        f"<style>{STYLE.read_text()}</style></head><body><main><header>"
        f"<h1>A student of {escape(Path(metrics['student']['teacher']).name)}</h1>"
        f'<p class="lead">{_headline(metrics)}</p>'
        f'<p class="soft">{metrics["samples_per_prompt"]} samples of each of {prompts}; trained for '
        f"{metrics['student']['trained_steps']} updates on a grid of {fine} intervals.</p></header>"
        f'<div class="grid tiles">{_tiles(metrics)}</div><div class="grid two">{"".join(s for s in sections if s)}</div>'
        f"<footer class=soft>{_notes(metrics)}</footer></main></body></html>\n"
    )


def _section(title: str, text: str, body: str, wide: bool = False) -> str:
    style = ' style="grid-column: 1 / -1"' if wide else ""
    return f'<section{style}><h2>{title}</h2><p class="soft">{text}</p>{body}</section>'


def _rival(row: dict[str, Any]) -> str:
    """The closest solver; with one forward they are all Euler's method, but for rounding."""
    return min((n for n in row if n not in OURS), key=lambda n: round(row[n]["endpoint_error"], 5))


def _own(row: dict[str, Any]) -> str:
    """The partition that sampling uses: the calibrated one where there is one."""
    return "calibrated" if "calibrated" in row else "student"


def _headline(metrics: dict[str, Any]) -> str:
    wins = [
        k
        for k, row in metrics["steps"].items()
        if row[_own(row)]["endpoint_error"] < row[_rival(row)]["endpoint_error"]
    ]
    losses = [k for k in metrics["steps"] if k not in wins]
    count = lambda ks: f"{' and '.join(filter(None, [', '.join(ks[:-1]), ks[-1]]))} forward{'s' * (ks != ['1'])}"  # noqa: E731
    out = f"How close few forwards come to the teacher&rsquo;s own {metrics['student']['pdd_steps']}-step trajectory. "
    if wins:
        out += f"In {count(wins)} the student is closer than every solver tried. "
    if losses:
        out += f"In {count(losses)} a solver that needs no training is closer."
    return out


def _tiles(metrics: dict[str, Any]) -> str:
    out = []
    for k, row in metrics["steps"].items():
        ours, rival = row[_own(row)]["endpoint_error"], row[_rival(row)]["endpoint_error"]
        ratio, way = (rival / ours, "closer") if ours < rival else (ours / rival, "farther")
        verdict = f"{ratio:.1f} &times; {way} than" if ratio >= 1.1 else f"{100 * (ratio - 1):.0f} % {way} than"
        css = "good" if ours < rival else "bad"
        out.append(f'<div class="tile"><span>{k} forward{"s" * (k != "1")}</span><b>{ours:.3f}</b>'
                   f'<span class="{css}">{verdict} {NAMES[_rival(row)]}</span></div>')  # fmt: skip
    return "".join(out)


def _over_forwards(metrics: dict[str, Any], figure: str) -> list[dict[str, Any]]:
    css = {"dpm-solver++": "dpm"}
    out = []
    for name, label in NAMES.items():
        rows = [(int(k), row[name][figure]) for k, row in metrics["steps"].items() if name in row]
        out.append({"name": label, "css": css.get(name, name), "points": sorted(p for p in rows if p[1])})
    return out


def _errors(metrics: dict[str, Any]) -> str:
    text = "Distance of where a method ends to where the teacher ends, from the same noise, relative to the length of the latter."
    body = chart(
        _over_forwards(metrics, "endpoint_error"), "forwards", "endpoint error", ("log", "log"), _counts(metrics)
    )
    return _section("Endpoint error", text, body)


def _quality(metrics: dict[str, Any]) -> str:
    level = metrics["teacher"]["frechet"]
    if level is None:
        return ""
    series = _over_forwards(metrics, "frechet")
    real = metrics["reference"] == "real"
    shown = {"level": (level, "teacher")} if real else {}
    text = f"In the feature space, to {'real pictures' if real else 'the teacher&rsquo;s samples'} of the same prompt."
    body = chart(series, "forwards", "Frechet distance", ("log", "log"), _counts(metrics), **shown)
    return _section("Fr&eacute;chet distance", text, body)


def _counts(metrics: dict[str, Any]) -> list[int]:
    return sorted(int(k) for k in metrics["steps"])


def _table(metrics: dict[str, Any]) -> str:
    columns = [("endpoint_error", "endpoint error", min), ("frechet", "Fr&eacute;chet", min), ("precision", "precision", max),
               ("recall", "recall", max), ("diversity", "diversity", None)]  # fmt: skip
    columns = [
        c for c in columns if any(r[c[0]] is not None for row in metrics["steps"].values() for r in row.values())
    ]
    cell = lambda v, css="": f"<td{css}>{'&ndash;' if v is None else f'{v:.3f}' if v < 10 else f'{v:.1f}'}</td>"  # noqa: E731
    seconds = metrics["seconds_per_sample"]
    time = lambda key: f"<td>{1000 * seconds[key]:.3g}</td>"  # noqa: E731
    out = ["<thead><tr><th class=name>forwards</th><th class=name>method</th>"]
    out += [f"<th>{label}</th>" for _, label, _ in columns] + ["<th>ms / sample</th></tr></thead>"]
    for k, row in metrics["steps"].items():
        winners = {c: better([r[c] for r in row.values()]) for c, _, better in columns
                   if better and None not in [r[c] for r in row.values()]}  # fmt: skip
        out.append("<tbody>")
        for i, (name, figures) in enumerate(row.items()):
            head = f"<th rowspan={len(row)}>{k}</th>" if i == 0 else ""
            cells = [cell(figures[c], " class=best" if winners.get(c) == figures[c] else "") for c, _, _ in columns]
            out.append(
                f'<tr class="{name}">{head}<td class=name>{NAMES[name]}</td>{"".join(cells)}{time(f"{name} {k}")}</tr>'
            )
        out.append("</tbody>")
    cells = [cell(metrics["teacher"].get(c)) for c, _, _ in columns]
    head = f"<th>{metrics['student']['pdd_steps']}</th><td class=name>teacher</td>"
    out.append(f"<tbody><tr>{head}{''.join(cells)}{time('teacher')}</tr></tbody>")
    text = "Every method starts from the same noise. Bold is best at that number of forwards."
    return _section("All figures", text, f'<div class="scroll"><table>{"".join(out)}</table></div>', wide=True)


def _samples(metrics: dict[str, Any], pictures: Pictures) -> str:
    out = []
    for p, prompt in enumerate(metrics["prompts"]):
        row_of = {"student": 1, "euler": 2}
        fine = metrics["student"]["pdd_steps"]
        label = f"teacher, {fine} forwards"
        cells = [f'<div style="grid-area: 1 / 1"><i>teacher</i>, {fine}{pictures.html(("teacher",), p, label)}</div>']
        for column, (k, row) in enumerate(metrics["steps"].items(), 2):
            for name, css_row in row_of.items():
                key = (_own(row) if name == "student" else name, int(k))
                picture = pictures.html(key, p, f"{NAMES[name]}, {k} forward{'s' * (k != '1')}")
                cells.append(f'<div style="grid-area: {css_row} / {column}"><i>{NAMES[name]}</i>, {k}{picture}</div>')
        out.append(f"<h3 class=soft>{escape(prompt)}</h3><div class=samples>{''.join(cells)}</div>")
    text = "The same noise in the same place of every picture. Euler is the teacher itself, on the better of two schedules."
    return _section("Samples", text, "".join(out), wide=True)


def _ways(metrics: dict[str, Any]) -> str:
    drawn = metrics["paths"]
    text = (
        f"Samples of {drawn['forwards']} forwards, each on the plane that holds most of its ways, stretched to fit. Dots are "
        f"forwards; the ring is where the teacher ends.{_keys(ink='teacher', student='student', base='Euler')}"
    )
    panels = "".join(_panel(p) for p in drawn["panels"])
    return _section("From noise to picture", text, f'<div class="panels">{panels}</div>', wide=True)


def _keys(**texts: str) -> str:
    """A legend: colour of the style sheet, and what is drawn in it."""
    keys = (f'<span class=key style="border-color: var(--{color})"></span>{text}' for color, text in texts.items())
    return f"<span class=keys>{' '.join(keys)}</span>"


def _shades(count: int) -> list[float]:
    return [1 - (i + 1) / count for i in range(count)]  # the last one is the strongest


def _along(metrics: dict[str, Any]) -> str:
    series = []
    for name in ("student", "euler"):
        rows = metrics["along"][name]
        for (k, way), faint in zip(rows.items(), _shades(len(rows))):
            points = [(at["sigma"], at["error"]) for at in way if at["error"] > 0]
            series.append({"name": f"{NAMES[name]} {k}", "css": name, "points": points, "faint": faint})
    text = (
        "Distance to the teacher&rsquo;s trajectory at every block&rsquo;s end; Euler on the student&rsquo;s schedule."
    )
    return _section("Along the way", text, chart(series, "noise level", "error", ("falling", "log")))


def _heads(metrics: dict[str, Any]) -> str:
    rows = metrics["heads"]
    series = [{"name": f"from {row['n']}", "css": "student", "faint": faint,
               "points": [(k - row["n"], error) for k, error in zip(row["k"], row["error"])]}
              for row, faint in zip(rows, _shades(len(rows)))]  # fmt: skip
    text = (
        "How far a head is from the teacher&rsquo;s velocity at the state that the heads before it reach, by its distance from "
        "where the block starts."
    )
    return _section(
        "Error by head", text, chart(series, "intervals into the block", "relative error", ("linear", "zero"))
    )


def _partitions(metrics: dict[str, Any]) -> str:
    if not any("calibrated" in row for row in metrics["steps"].values()):
        return ""
    text = (
        "Blocks along the fine grid, and each partition&rsquo;s endpoint error on noise that it was not chosen on. Lines are "
        f"the nodes that training started from.{_keys(student='given', calibrated='calibrated')}"
    )
    return _section("Calibrated blocks", text, _bars(metrics))


def _adaptive(metrics: dict[str, Any]) -> str:
    rows = metrics["adaptive"]
    if not rows:
        return ""
    most = max(row["forwards"] for row in rows)
    fixed = [
        dict(s, points=[p for p in s["points"] if p[0] <= max(most, 2)])
        for s in _over_forwards(metrics, "endpoint_error")[:2]
    ]
    points = sorted((row["forwards"], row["endpoint_error"]) for row in rows)
    series = [{"name": "by tolerance", "css": "adaptive", "points": points}, *fixed]
    text = "Blocks that end where the heads begin to disagree, for several tolerances, at the mean number of forwards they took."
    body = chart(series, "forwards, mean", "endpoint error", ("linear", "linear"))
    tried = "; ".join(f"{row['tol']:g}: {row['forwards']:.2f} forwards, {row['endpoint_error']:.3f}" for row in rows)
    return _section("Adaptive blocks", text, body + f'<p class="soft">Tolerance {tried}.</p>')


def _notes(metrics: dict[str, Any]) -> str:
    reference = "real pictures of the prompt" if metrics["reference"] == "real" else "the teacher&rsquo;s own samples"
    return (
        "A midpoint step takes two forwards, so there are half as many steps; a guided teacher&rsquo;s two passes count as one "
        "forward. DPM-Solver++ and UniPC are Diffusers&rsquo;, second order, in their flow-matching modes. Each figure of a "
        "solver is the better of two schedules: the student&rsquo;s time shift, and none. Fr&eacute;chet distance, precision "
        f"and recall (k-NN, k = 3) are against {reference}; diversity is the mean distance of two samples of a prompt, to be "
        f"compared with the teacher&rsquo;s. {metrics['trajectory_samples']} samples of their own noise stand behind the ways, "
        f"the errors along them and those by head. Seed {metrics['seed']}."
    )


# ---------------------------------------------------------------------------------------------- the README

BEGIN, END = "<!-- eval_pdd.py --readme -->", "<!-- end -->"


def update_readme(root: Path, metrics: dict[str, Any], pictures: Pictures) -> None:
    """Renew the README's table, between its two markers, and ``assets/compare.png``."""
    readme = root / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    write_text(readme, before + BEGIN + "\n" + readme_table(metrics) + END + after)
    columns, keys = [f"teacher\n{metrics['student']['pdd_steps']} forwards"], [("teacher",)]
    for k in ("1", "2", "4"):
        row = metrics["steps"][k]
        for name, label in ((_own(row), "student"), ("euler", "teacher, Euler")):
            keys.append((name, int(k)))
            columns.append(f"{label}\n{k} forward{'s' * (k != '1')}\nerror {row[name]['endpoint_error']:.2f}")
    cells = [[pictures.image(key, p) for key in keys] for p in range(len(pictures.prompts))]
    picture_table(cells, pictures.prompts, columns).save(root / "assets" / "compare.png", optimize=True)


def readme_table(metrics: dict[str, Any]) -> str:
    """Endpoint error and Frechet distance of the student, of Euler and of the best other solver, as Markdown."""
    names = ("forwards", "endpoint error", "Euler's", "best solver's", "Frechet distance", "Euler's", "diversity")
    fine, teacher = metrics["student"]["pdd_steps"], metrics["teacher"]
    number = lambda value, digits: "" if value is None else f"{value:.{digits}f}"  # noqa: E731
    rows = []
    for k, row in metrics["steps"].items():
        own, euler, rival = row[_own(row)], row["euler"], _rival(row)
        best = f"{row[rival]['endpoint_error']:.3f} ({NAMES[rival]})"
        errors = (number(own["endpoint_error"], 3), number(euler["endpoint_error"], 3), best)
        rows.append((k, *errors, number(own["frechet"], 2), number(euler["frechet"], 1), number(own["diversity"], 2)))
    rows.append((f"teacher, {fine}", "", "", "", number(teacher["frechet"], 2), "", number(teacher["diversity"], 2)))
    return "".join(f"| {' | '.join(row)} |\n" for row in (names, ("---",) * len(names), *rows))
