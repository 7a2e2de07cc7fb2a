"""Sampling in K fused blocks against K forwards of the plain teacher.

    python benchmarks/sampling.py                   # about a minute; --json prints one JSON object
    python benchmarks/sampling.py --layers 30 --width 1536 --tokens 32760 --steps 4 --compile         # Wan 1.3 B, on a GPU

The student walks from noise to a sample as sample_pdd.py does; the teacher, which shares all its weights but the last linear,
is called K times and nothing is done with what it says. Both take turns. Fused heads are built once, before; a column says
what that took.
"""

from __future__ import annotations

import json
import time

from common import accelerated, device, family, flops, inputs, matrix_rate, parser, show, turns, wan


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, layers=4, width=512, tokens=256, batch=1, pdd_steps=128, rounds=9)
    flags.add_argument("--steps", type=int, nargs="+", default=[1, 4, 8], help="K (default 1 4 8)")
    flags.add_argument("--compile", action="store_true", help="compile the transformers' blocks")
    args = flags.parse_args(argv)
    figures = {**vars(args), "cases": measure(args)}
    if args.json:
        return print(json.dumps(figures))
    rows = [
        [c["steps"], c["teacher_seconds"], c["over_teacher"], c["fusing_seconds"]]
        + ([c["flops_per_second"] / 1e12, c["matrix_rate"] / 1e12] if accelerated() else [])
        for c in figures["cases"]
    ]
    columns = ["forwards", "teacher, s", "student / teacher", "fusing once, s"]
    columns += ["TFLOP/s", "of a matrix product"] if accelerated() else []
    title = f"{args.layers} layers of width {args.width}, {args.batch} x {args.tokens} tokens, N {args.pdd_steps}, "
    show(title + f"least of {args.rounds} turns", columns, rows)


def measure(args) -> list[dict]:
    import torch

    from pdd.grid import Grid, partition
    from pdd.sampling import endpoint
    from pdd.student import FusedStudent, Velocity, widen

    where, dtype = device(args.threads)
    model = wan(args.layers, args.width, where, dtype).eval().requires_grad_(False)
    if args.compile:
        model.compile_repeated_blocks()
    backbone, grid, head = family(model), Grid(args.pdd_steps, {"video": 3.0}), model.proj_out
    teacher = Velocity(model, backbone)
    student = FusedStudent(widen(model, backbone, args.pdd_steps), backbone, grid)
    state, cond = inputs(args.tokens, args.batch, where)
    calls, fusing = {}, {}
    for steps in args.steps:
        nodes = partition(args.pdd_steps, steps)
        sigmas = [{"video": grid.sigma["video"][n].to(where, torch.float32).expand(args.batch)} for n in nodes[:-1]]

        @torch.no_grad()
        def teach(sigmas=sigmas):
            model.proj_out = head
            for sigma in sigmas:
                teacher(state, sigma, cond)

        def sample(nodes=nodes):
            endpoint(student.block(cond), state, grid, nodes)

        calls[steps, "teacher"], calls[steps, "student"] = teach, sample
        began = time.process_time()
        for start, end in zip(nodes, nodes[1:]):
            student.linear("video", start, end)
        fusing[steps] = time.process_time() - began
    seconds = turns(calls, args.rounds)
    out = []
    for steps in args.steps:
        of_student, of_teacher = seconds[steps, "student"], seconds[steps, "teacher"]
        out.append({
            "steps": steps, "student_seconds": of_student, "teacher_seconds": of_teacher,
            "over_teacher": of_student / of_teacher, "fusing_seconds": fusing[steps],
        })  # fmt: skip
        if accelerated():
            rate = flops(calls[steps, "student"]) / out[-1]["student_seconds"]
            out[-1] |= {"flops_per_second": rate, "matrix_rate": matrix_rate(where, dtype)}
    return out


if __name__ == "__main__":
    main()
