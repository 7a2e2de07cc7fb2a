"""Time and memory of the last layer: heads read through a plan, all heads materialised, and the plain linear.

    python benchmarks/head_path.py                  # of Wan's size, N 32, 128, 256, minutes; --json prints one JSON object
    python benchmarks/head_path.py --tokens 32760   # 81 frames of 480 x 832; 16 GB and more for all heads at N 128

Every sample wants a displacement, a supervised head and an advance, as in training. Materialising is what a trainer does that
calls one linear of N times the rows and integrates its output. Activations are the tensors allocated at the peak of forward
and backward, less the gradients that are left afterwards, which every form has.
"""

from __future__ import annotations

import json

from common import allocated, device, parser, show, turns


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, tokens=2048, width=1536, out=64, window=32, rounds=5)
    flags.add_argument("--steps", type=int, nargs="+", default=[32, 128, 256], help="N (default 32 128 256)")
    flags.add_argument("--batches", type=int, nargs="+", default=[1, 2], help="default 1 2")
    args = flags.parse_args(argv)
    figures = measure(args)
    if args.json:
        return print(json.dumps(figures))
    columns = ["N", "batch", "time / plain", "materialised / time", "materialised / activations"]
    columns += ["forward / plain", "MB", "materialised MB", "bank's gradient MB"]
    rows = [
        [c["pdd_steps"], c["batch"], c["over_plain"], c["materialised_over"], c["materialised_activations_over"],
         c["forward_over_plain"], c["activation_bytes"] / 1e6, c["materialised_activation_bytes"] / 1e6,
         c["bank_gradient_bytes"] / 1e6]
        for c in figures["cases"]
    ]  # fmt: skip
    show(f"{args.tokens} tokens, {args.width} -> {args.out}, window {args.window}, {figures['device']}", columns, rows)
    for batch, growth in figures["forward_growth"].items():
        print(f"batch {batch}: forward at N {max(args.steps)} / at N {min(args.steps)}: {growth:.3f}")


def measure(args) -> dict:
    import torch
    from torch import nn

    from pdd.grid import Grid
    from pdd.heads import ParallelHead

    where, dtype = device(args.threads)
    out = {"tokens": args.tokens, "width": args.width, "out": args.out, "window": args.window, "device": str(where)}
    out |= {"dtype": str(dtype), "cases": [], "forward_growth": {}}
    for batch in args.batches:
        forwards, calls, parameters, bytes_of = {}, {}, {}, {}
        g = torch.Generator().manual_seed(0)
        hidden = torch.randn(batch, args.tokens, args.width, generator=g).to(where, dtype).requires_grad_()
        for steps in args.steps:
            linear = nn.Linear(args.width, args.out).to(where, dtype)
            bank = ParallelHead(linear, steps)
            starts = [i * (steps - args.window) // batch for i in range(batch)]  # samples start apart
            k = [[n + args.window - 1 - i] for i, n in enumerate(starts)]
            ends = [[k, n + args.window // 2] for n, (k,) in zip(starts, k)]
            plan = Grid(steps, {"video": 3.0}).plan(starts, ends, k)["video"]
            every = nn.Linear(args.width, steps * args.out).to(where, dtype)
            dense = plan.dense(steps).to(where, torch.float32)

            def planned(bank=bank, plan=plan):
                bank.plan = plan
                out = bank(hidden)
                return out[..., -args.out :]

            def materialised(every=every, dense=dense, k=torch.tensor(k, device=where), steps=steps):
                velocities = every(hidden).unflatten(2, (steps, args.out))  # [B, T, N, out]
                with torch.no_grad():
                    moves = torch.einsum("bdn,btno->btdo", dense[:, :2], velocities.float())
                chosen = velocities[torch.arange(batch, device=where), :, k[:, 0]]
                return torch.cat([moves.to(chosen.dtype), chosen[:, :, None]], 2).flatten(2)[..., -args.out :]

            def plain(linear=linear):
                return linear(hidden)

            target = torch.randn(batch, args.tokens, args.out, generator=g).to(where, dtype)
            forms = {"planned": (planned, bank), "materialised": (materialised, every), "plain": (plain, linear)}
            for name, (form, module) in forms.items():

                def both(form=form, module=module, target=target):
                    module.zero_grad()
                    hidden.grad = None
                    form().backward(target)

                calls[name, steps], parameters[name, steps] = both, module
                if name != "materialised":
                    forwards[name, steps] = form
            bytes_of[steps] = sum(p.numel() * p.element_size() for p in bank.parameters())
        seconds, forward_seconds = turns(calls, args.rounds), turns(forwards, 4 * args.rounds)
        for steps in args.steps:
            gradients, activations = bytes_of[steps] + hidden.numel() * hidden.element_size(), {}
            for name in ("planned", "materialised"):
                hidden.grad = parameters[name, steps].weight.grad = parameters[name, steps].bias.grad = None
                activations[name] = allocated(calls[name, steps])[0] - gradients
                parameters[name, steps].zero_grad()
            whole, forward = seconds["planned", steps], forward_seconds["planned", steps]
            out["cases"].append({
                "pdd_steps": steps, "batch": batch, "seconds": whole, "forward_seconds": forward,
                "over_plain": whole / seconds["plain", steps],
                "forward_over_plain": forward / forward_seconds["plain", steps],
                "materialised_over": seconds["materialised", steps] / whole,
                "activation_bytes": activations["planned"], "materialised_activation_bytes": activations["materialised"],
                "materialised_activations_over": activations["materialised"] / activations["planned"],
                "bank_gradient_bytes": bytes_of[steps],
            })  # fmt: skip
        first, last = (forward_seconds["planned", steps] for steps in (min(args.steps), max(args.steps)))
        out["forward_growth"][batch] = last / first
    return out


if __name__ == "__main__":
    main()
