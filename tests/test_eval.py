"""Evaluation: solvers, partitions and tolerances against what they claim, and the report in a real browser."""

import copy
import json
import re
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch
from conftest import student_weights
from diffusers import DPMSolverMultistepScheduler, StableDiffusion3Pipeline, UniPCMultistepScheduler
from PIL import Image

from pdd.backbones import read_backbone
from pdd.config import Config
from pdd.data import Rows
from pdd.draws import noise
from pdd.evaluate import Baselines, Bench, Endpoints, Space, Trajectories, best, by_blocks, by_tolerance, calibrate
from pdd.grid import Grid, partition
from pdd.metrics import diversity, endpoint_error, frechet_distance, precision_recall
from pdd.sampling import adaptive, endpoint, initial
from pdd.student import FusedStudent, head_parameters, widen

DIGITS = Path(__file__).resolve().parent.parent / "assets" / "digits"
N = 8


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------------- metrics


def test_precision_and_recall_are_shares_of_points_in_some_ball():
    a, b = torch.randn(23, 3, generator=generator(1)), torch.randn(17, 3, generator=generator(2)) + 1

    def share(points, of, k=3):
        radii = [sorted(float((p - q).norm()) for q in of)[k] for p in of]  # its own distance 0 comes first
        inside = [any(float((x - p).norm()) <= r for p, r in zip(of, radii)) for x in points]
        return sum(inside) / len(inside)

    precision, recall = precision_recall(a, b)
    assert precision == pytest.approx(share(a, b)) and recall == pytest.approx(share(b, a))
    assert 0 < precision < 1 and 0 < recall < 1 and precision != recall
    assert precision_recall(a, a) == (1, 1) and precision_recall(a, a + 100) == (0, 0)
    collapsed = b[:1] + 1e-3 * torch.randn(17, 3, generator=generator(3))
    assert precision_recall(collapsed, b)[0] == 1 > 0.2 > precision_recall(collapsed, b)[1]
    with pytest.raises(ValueError, match="more than 3"):
        precision_recall(a[:3], b)
    with pytest.raises(ValueError, match="compares features"):
        precision_recall(a, b[:, :2])


# ---------------------------------------------------------------------------------------------------- the digits


@pytest.fixture(scope="module")
def config():
    return Config(teacher=str(DIGITS), pdd_steps=N, block_size_min=2, block_size_max=N, shift=2.0)


@pytest.fixture(scope="module")
def rows(config):
    return Rows(config, read_backbone(DIGITS))


@pytest.fixture(scope="module")
def baselines(config, rows):
    return Baselines(config, rows, Grid(N, {"image": 2.0}), "cpu")


@pytest.fixture(scope="module")
def student(baselines):
    """The teacher, widened, with heads that all differ: good at nothing, but at some blocks less than at others."""
    torch.manual_seed(4)
    transformer = widen(copy.deepcopy(baselines.model.transformer), baselines.backbone, N)
    with torch.no_grad():
        for parameter in head_parameters(transformer):
            parameter += 0.02 * torch.randn_like(parameter)
    return FusedStudent(transformer, baselines.backbone, baselines.grid)


# ---------------------------------------------------------------------------------------------------- solvers


@pytest.mark.parametrize(
    "name, scheduler", [("dpm-solver++", DPMSolverMultistepScheduler), ("unipc", UniPCMultistepScheduler)]
)
def test_multistep_solvers_are_the_stock_pipeline_with_that_scheduler(name, scheduler, rows, baselines):
    """On shift 1, where Diffusers' noise levels are ours; 27 steps, whose time steps are whole numbers."""
    steps, prompts = 27, ["any digit", "three"]
    absent = ["vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3"]
    pipe = StableDiffusion3Pipeline.from_pretrained(DIGITS, **dict.fromkeys(absent))
    # whole numbers of Diffusers' clock survive its conversion to integers a little above them
    pipe.scheduler = scheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
    pipe.set_progress_bar_config(disable=True)
    (method,) = [m for m in baselines.solver(name, steps) if m.grid.schedules["image"].shift == 1]
    cond = rows.cond(torch.tensor([rows.find(p) for p in prompts]), "cpu")
    state = initial({"image": torch.randn(2, 1, 8, 8, generator=generator(5))}, method.grid)
    for _, end in method.walk(state, cond):
        pass
    latents = state["image"] * pipe.scheduler.init_noise_sigma
    theirs = pipe(**cond, latents=latents, num_inference_steps=steps, guidance_scale=1, output_type="latent").images
    assert (end["image"] - theirs).norm() / theirs.norm() < 5e-3  # its time steps are cut to integers
    euler = next(m for m in baselines.solver("euler", steps) if m.grid.schedules["image"].shift == 1)
    *_, (_, other) = euler.walk(state, cond)
    assert (other["image"] - theirs).norm() / theirs.norm() > 1e-2, "another solver"

    for k, shift in enumerate((2, 1)):  # the first step is Euler's, exactly, on our own noise levels at any shift
        multistep, euler = baselines.solver(name, 3)[k], baselines.solver("euler", 3)[k]
        assert multistep.grid.schedules["image"].shift == euler.grid.schedules["image"].shift == shift
        first, other = (list(method.walk(state, cond))[1][1]["image"] for method in (multistep, euler))
        torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-5)


def test_midpoint_takes_two_forwards_a_step_and_no_odd_number_of_them(rows, baselines):
    assert baselines.solver("midpoint", 3) == [] and len(baselines.solver("midpoint", 4)) == 2
    method = baselines.solver("midpoint", 2)[1]  # one step, on shift 1
    teacher, cond = baselines.teacher(method.grid), rows.cond(rows.row_of("seven"), "cpu")
    x = torch.randn(1, 1, 8, 8, generator=generator(6))
    *_, (node, end) = method.walk({"image": x}, cond)
    half = x - 0.4995 * teacher.velocity({"image": x}, torch.tensor([0.999]).double(), cond)["image"]
    there = teacher.velocity({"image": half}, torch.tensor([0.4995]).double(), cond)["image"]
    torch.testing.assert_close(end["image"], x - 0.999 * there, rtol=1e-4, atol=1e-5)
    assert node == 1 and method.forwards == 2


# ---------------------------------------------------------------------------------------------------- figures


def test_figures_are_those_of_all_samples_at_once(config, rows, baselines, student):
    """Chunks, sums and averages over prompts against the plain metrics on plain tensors."""
    prompts, space = ["any digit", "four"], Space(config, None)
    bench = Bench(rows, prompts, 10, (3, "test"), 4, "cpu")
    pixels = lambda state, cond: (baselines.backbone.to_images(state), [None] * len(state["image"]))  # noqa: E731
    endpoints = Endpoints(bench, baselines.fine(), pixels, space, 8)
    nodes = [0, 3, N]
    figures = endpoints(by_blocks(student, student.grid, nodes)).figures
    ends, fine = [], []
    for p, prompt in enumerate(prompts):
        eps = {"image": torch.stack([noise((1, 8, 8), 3, "test", p, "image", i) for i in range(10)])}
        cond = rows.cond(rows.row_of(prompt).expand(10), "cpu")
        start = initial(eps, student.grid)
        ends.append(endpoint(student.block(cond), start, student.grid, nodes)["image"])
        teacher = baselines.teacher(baselines.grid)
        fine.append(endpoint(teacher.block(cond), start, baselines.grid, range(N + 1))["image"])
    assert figures["endpoint_error"] == pytest.approx(endpoint_error(torch.cat(ends), torch.cat(fine)), rel=1e-4)
    features = [space.extract(x) for x in ends]
    expected = [frechet_distance(f, space.real[p]) for f, p in zip(features, prompts)]
    assert figures["frechet"] == pytest.approx(sum(expected) / 2, rel=1e-3)
    assert figures["diversity"] == pytest.approx(sum(map(diversity, features)) / 2, rel=1e-3)
    assert figures["forwards"] == 2 and endpoints.teacher.figures["forwards"] == N
    assert endpoints.teacher.figures["endpoint_error"] == 0


def test_of_two_schedules_every_figure_is_the_better_one():
    def measured(error, frechet, precision, recall, spread):
        figures = dict(forwards=4.0, endpoint_error=error, frechet=frechet, precision=precision, recall=recall)
        return types.SimpleNamespace(figures={**figures, "diversity": spread})

    several = [measured(0.2, 3.0, 0.9, 0.1, 5.0), measured(0.1, 4.0, 0.8, 0.7, 7.5)]
    expected = measured(0.1, 3.0, 0.9, 0.7, 7.5).figures
    assert best(several, measured(None, 2.0, 1, 1, 6.5)) == expected
    assert best(several, measured(None, 2.0, 1, 1, 6.0))["diversity"] == 5.0, "closer to the teacher's"
    none = [measured(0.2, None, None, None, None), measured(0.3, None, None, None, None)]
    assert best(none, none[0]) == none[0].figures


def test_errors_along_the_way_and_by_head(rows, baselines, student):
    bench = Bench(rows, ["any digit"], 3, (5, "test"), 2, "cpu")
    trajectories = Trajectories(bench, baselines.fine(), range(N + 1))
    way = trajectories.along(by_blocks(student, student.grid, [0, 2, N]))
    assert [at["node"] for at in way] == [0, 2, N] and way[0]["error"] == 0 < way[1]["error"] < way[2]["error"]
    assert [at["sigma"] for at in way] == [float(student.grid.sigma["image"][n]) for n in (0, 2, N)]
    # Euler in half as many steps, on the student's shift, visits every second node
    euler = trajectories.along(baselines.solver("euler", N // 2)[0], 2)
    assert [at["node"] for at in euler] == [0, 2, 4, 6, N] and euler[1]["error"] > 1e-3
    own = trajectories.along(baselines.solver("euler", N)[0])
    assert max(at["error"] for at in own) < 1e-5, "the teacher itself"

    # a widened teacher: head n at n is the teacher, later ones still say what the teacher said at n
    transformer = widen(copy.deepcopy(baselines.model.transformer), baselines.backbone, N)
    same = FusedStudent(transformer, baselines.backbone, baselines.grid)
    grid, teacher = baselines.grid, baselines.teacher(baselines.grid)
    x = torch.cat([trajectories.states[chunk][4]["image"] for chunk in (0, 1)])
    cond = rows.cond(rows.row_of("any digit").expand(3), "cpu")
    velocity = lambda x, k: teacher.velocity({"image": x}, grid.u[k].expand(3), cond)["image"]  # noqa: E731
    first = velocity(x, 4)
    second = velocity(x + float(grid.h["image"][4]) * first, 5)
    for row in trajectories.heads(same.unfused(), teacher, [0, 4], 3, "euler"):
        assert row["k"] == [row["n"], row["n"] + 1, row["n"] + 2]
        assert row["error"][0] < 1e-5 < 1e-3 < row["error"][1] < row["error"][2]
    assert row["error"][1] == pytest.approx(float((first - second).norm() / second.norm()), rel=1e-3)


# ---------------------------------------------------------------------------------------------------- partitions


def test_calibration_finds_the_best_two_blocks_and_walks_what_it_says(rows, baselines, student):
    bench = Bench(rows, ["any digit", "six"], 5, (7, "test"), 4, "cpu")
    trajectories = Trajectories(bench, baselines.fine(), range(N + 1))
    error = lambda nodes: trajectories.along(by_blocks(student, student.grid, nodes))[-1]["error"]  # noqa: E731
    given = {k: partition(N, k) for k in (2, 3, 4)}
    errors = {nodes: error(nodes) for nodes in ((0, n, N) for n in range(3, 6))}
    errors_of_given = {k: error(given[k]) for k in given}
    found = calibrate(trajectories, student.unfused(), [2, 3, 4], 5, given)
    assert tuple(found[2]["nodes"]) == min(errors, key=errors.get), "exhaustive for two blocks of at most 5"
    assert len({round(e, 6) for e in errors.values()}) == 3 and found[2]["nodes"] != given[2]
    for k, entry in found.items():
        assert len(entry["nodes"]) == k + 1 and max(b - a for a, b in zip(entry["nodes"], entry["nodes"][1:])) <= 5
        assert entry["error"] == pytest.approx(error(entry["nodes"]), rel=1e-3)
        assert (
            entry["given_error"] == pytest.approx(errors_of_given[k], rel=1e-3)
            and entry["error"] <= entry["given_error"]
        )
    assert found[4]["error"] < errors_of_given[4]
    narrow = calibrate(trajectories, student.unfused(), [2], 4, {2: [0, 1, N]})[2]
    assert narrow["nodes"] == [0, 4, N], "the only two blocks of at most 4, which were not the best"


# ---------------------------------------------------------------------------------------------------- adaptive


class Told:
    """A student that says the same velocities ``[N, 2]`` from wherever it is asked."""

    def __init__(self, grid: Grid, velocities: torch.Tensor):
        self.grid, self.velocities = grid, velocities

    def directions(self, state, starts, cond, plans):
        return {
            m: (plan.dense(self.grid.pdd_steps) @ self.velocities).expand(len(starts), -1, -1)
            for m, plan in plans.items()
        }


def test_a_block_ends_where_the_heads_part_by_more_than_the_tolerance():
    grid, angle = Grid(N, {"image": 1.0}, 1.0), torch.tensor([0, 0, 0.1, 0.1, 0.5, 0.5, 1.0, 1.0]).double()
    student = Told(grid, torch.stack([angle.cos(), angle.sin()], 1))
    start = {"image": torch.zeros(3, 2).double()}

    def bend(n: int, end: int) -> float:
        v = student.velocities[n:end]
        return float((v - v[0]).sum(0).norm() / v.sum(0).norm())

    bends = [bend(0, end) for end in (2, 4, 6, 8)]
    assert bends == sorted(bends) and bends[0] == 0
    for i, end in enumerate((4, 6, 8), 1):
        for tolerance, expected in ((bends[i] * 1.001, end), (bends[i] * 0.999, end - 2)):
            visited = list(adaptive(student, start, {}, tolerance, [0, 2, 4, 6, 8], N))
            assert visited[1][0] == expected
            # one norm over the batch: the walk is as far as the heads say, whatever the partition
            torch.testing.assert_close(visited[-1][1]["image"][1], -student.velocities.sum(0) / N)
    assert [n for n, _ in adaptive(student, start, {}, 9.0, [0, 2, 4, 6, 8], 5)] == [0, 4, 8], "as wide as may be"
    assert [n for n, _ in adaptive(student, start, {}, 0.0, [0, 2, 4, 6, 8], N)] == [0, 2, 4, 6, 8]
    assert [n for n, _ in adaptive(student, start, {}, 0.0, [0, 3, 8], N)] == [0, 3, 8], (
        "the nearest, if none is straight"
    )


def test_an_adaptive_walk_is_the_fused_walk_over_the_nodes_it_chose(rows, baselines, student):
    bench = Bench(rows, ["any digit"], 3, (9, "test"), 3, "cpu")
    with torch.no_grad():
        walked = list(bench.walk(0, by_tolerance(student, 0.25, [0, 2, 4, 6, 8], 6)))
        nodes = [n for n, _ in walked]
        fused = bench.end(0, by_blocks(student, student.grid, nodes))
    assert 2 <= len(nodes) - 1 < 4, nodes
    torch.testing.assert_close(walked[-1][1]["image"], fused["image"], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- the script


SHORT = ["--steps", "1", "4", "--num", "6", "--batch", "4", "--trajectories", "6", "--tol", "0", "0.3"]


def figures(folder: Path) -> dict:
    metrics = json.loads((folder / "metrics.json").read_text())
    assert all(seconds > 0 for seconds in metrics.pop("seconds_per_sample").values())
    return metrics


@pytest.fixture(scope="module")
def evaluated(warm, baseline, tmp_path_factory):
    """An evaluation of the small run, on a copy that keeps its calibrated partition to itself."""
    run = tmp_path_factory.mktemp("evaluated") / "run"
    shutil.copytree(baseline / "student", run / "student")
    shutil.copy(baseline / "config.yaml", run)
    code, output = warm("eval", "--run", run, *SHORT, "--calibrate", "2", "4")
    assert code == 0 and str(run / "report.html") in output, output
    return run


def test_two_ranks_find_what_one_process_found(warm, evaluated, tmp_path):
    code, output = warm("eval", "--run", evaluated, *SHORT, "--out", tmp_path, ranks=2)
    assert code == 0 and output.count("report ") == 1, output
    assert figures(tmp_path) == figures(evaluated)
    code, output = warm("eval", "--run", evaluated, *SHORT, "--steps", "4", "--tol", "--out", tmp_path, "--seed", "1")
    assert code == 0, output
    for name, entry in figures(tmp_path)["steps"]["4"].items():
        assert entry["endpoint_error"] != figures(evaluated)["steps"]["4"][name]["endpoint_error"]


def test_a_calibrated_partition_is_stored_and_sampled(warm, evaluated, baseline, tmp_path):
    contract = json.loads((evaluated / "student" / "pdd_config.json").read_text())
    found = contract.pop("calibrated_grid_indices")
    assert set(found) == {"2", "4"} and contract == json.loads((baseline / "student" / "pdd_config.json").read_text())
    metrics = figures(evaluated)
    assert metrics["steps"]["4"]["calibrated"]["nodes"] == found["4"] and "calibrated" not in metrics["steps"]["1"]
    assert metrics["steps"]["4"]["student"]["nodes"] == [0, 4, 8, 12, 16]
    contract["calibrated_grid_indices"] = {"2": [0, 3, 16]}  # one that is surely another
    pictures = []
    for name, facts in (("found", contract), ("none", {**contract, "calibrated_grid_indices": None})):
        run = tmp_path / name
        shutil.copytree(evaluated / "student", run / "student")
        shutil.copy(evaluated / "config.yaml", run)
        (run / "student" / "pdd_config.json").write_text(json.dumps(facts))
        assert warm("sample", "--run", run, "--steps", "2", "--num", "2", "--prompt", "any digit")[0] == 0
        pictures.append((run / "sample-nfe2-seed0.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_a_student_alone_is_evaluated_by_its_contract(warm, evaluated, tmp_path):
    shutil.copytree(evaluated / "student", tmp_path / "student")
    words = ["--steps", "4", "--tol", "--features", "statistics_of.pixels"]
    code, output = warm("eval", "--student", tmp_path / "student", *SHORT, *words, prelude=EXTRACTOR)
    assert code == 0, output
    alone, own = figures(tmp_path / "student"), figures(evaluated)
    for name, entry in own["steps"]["4"].items():
        assert alone["steps"]["4"][name]["endpoint_error"] == entry["endpoint_error"]
        assert alone["steps"]["4"][name]["frechet"] != entry["frechet"]
    assert alone["reference"] == "teacher" and own["reference"] == "real"
    assert alone["teacher"]["frechet"] == pytest.approx(0, abs=1e-6) and alone["teacher"]["precision"] == 1


EXTRACTOR = """
import types
def pixels(images):
    assert images.shape[1:] == (1, 8, 8) and images.min() < -0.5 and images.max() <= 3
    return images.mean(2).flatten(1)
sys.modules["statistics_of"] = types.SimpleNamespace(pixels=pixels)
"""


@pytest.mark.parametrize("words, said", [
    (["--steps", "99"], "1 to 16 blocks, not 99"),
    (["--calibrate", "99"], "1 to 16 blocks, not 99"),
    (["--num", "0"], "num is 0; allowed is 1 or more"),
    (["--tol", "-1"], "tol is -1.0; allowed is 0 or more"),
    (["--features", "no.such"], "features is 'no.such'; allowed is a dotted name"),
    (["--student", "nowhere"], "run and student are both given"),
    (["--prompt", "a hat"], "prompt 'a hat' is not known"),
    (["--readme", "--steps", "1"], r"steps is \[1\]; with --readme"),
])  # fmt: skip
def test_bad_words_end_with_one_line(warm, baseline, words, said):
    code, output = warm("eval", "--run", baseline, *words)
    assert code == 2 and re.search(f"^eval_pdd.py: error: .*{said}.*\n$", output), output


@pytest.mark.parametrize("words", [("--tol", "0.2", "--steps", "2"), ("--tol", "0.2", "--compare"), ("--tol", "-1")])
def test_a_tolerance_is_instead_of_steps(warm, baseline, words):
    code, output = warm("sample", "--run", baseline, *words)
    assert code == 2 and re.fullmatch(r"sample_pdd.py: error: tol is .*; allowed is 0 or more, without.*\n", output), (
        output
    )


def test_the_weights_are_left_alone(evaluated, baseline):
    assert all(torch.equal(v, student_weights(evaluated)[k]) for k, v in student_weights(baseline).items())


# ---------------------------------------------------------------------------------------------------- the report

PROBE = """<script>
addEventListener("load", () => {
  const wide = (e) => e.getBoundingClientRect().width
  document.documentElement.setAttribute("data-probe", JSON.stringify({
    images: [...document.images].map((i) => [i.complete && i.naturalWidth, wide(i)]),
    videos: [...document.querySelectorAll("video")].map((v) => v.readyState),
    charts: [...document.querySelectorAll("svg")].map((s) => [wide(s), s.querySelectorAll("polyline, rect").length]),
    page: [document.documentElement.scrollWidth, innerWidth],
  }))
})
</script>"""


def browse(page: Path, *flags: str) -> subprocess.CompletedProcess:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
               f"--user-data-dir={page.parent / 'profile'}", *flags, page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
    return done


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_the_report_in_a_browser(evaluated, tmp_path):
    """Everything on the page is drawn, nothing is asked of the network, on a desk and on a phone, in light and dark."""
    text = (evaluated / "report.html").read_text()
    assert "default-src 'none'" in text and not re.search(r"""(src|href)=(?!"data:)|url\(|@import|<script""", text)
    shot = tmp_path / "page.png"
    plain = tmp_path / "report.html"
    plain.write_text(text)
    grounds = []
    for scheme in ("0", "1"):  # dark, light
        browse(
            plain, f"--screenshot={shot}", "--window-size=1120,3600", f"--blink-settings=preferredColorScheme={scheme}"
        )
        pixels = (
            torch.frombuffer(bytearray(Image.open(shot).convert("L").tobytes()), dtype=torch.uint8)
            .view(3600, 1120)
            .float()
        )
        assert pixels.std() > 10 and all(part.std() > 3 for part in pixels[:2400].split(400)), "no blank stretch"
        grounds.append(float(pixels[:, :8].mean()))
    assert grounds[0] < 60 < 200 < grounds[1]

    probed = tmp_path / "probed.html"
    probed.write_text(text.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'") + PROBE)
    for size in ("1120,3600", "500,900"):  # no narrower: the browser's windows are at least 500 wide
        dom = browse(probed, "--dump-dom", f"--window-size={size}").stdout
        seen = json.loads(re.search('data-probe="([^"]*)"', dom)[1].replace("&quot;", '"'))
        assert len(seen["images"]) == 3 * 5 and all(natural and shown > 100 for natural, shown in seen["images"])
        assert len(seen["charts"]) == 8 and all(wide > 150 and drawn > 1 for wide, drawn in seen["charts"])
        assert seen["page"][0] <= seen["page"][1], "nothing sticks out sideways"
