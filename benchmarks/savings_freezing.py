"""The savings of layer freezing in F, B and W, and the cost of watching.

A frozen layer is measured against one that trains. Layers: both halves of a GPT block at DynMo's
width (hidden 1024, 32 heads). One microbatch of one sequence, one thread, in the runtime's own
`Layer`. The sides take turns; medians. The ideal:

    prefix   nothing trainable before it: F alone
    above    a trainable layer before it: F and B

share_of_ideal = (trains - frozen) / (trains - ideal), over F + B + W. `lost` is the seconds over
the ideal in each of F, B and W. `bounded_by` names the worst where the share is under 85 %.

`cache` measures F of both halves of a frozen block in three ways: run, run and kept, and taken from
the cache (`dynamism.freezing.cache_bytes`). It also gives the bytes of a sequence's output. Only
the last layer's output is kept, so longer prefixes gain more.

`egeria` gives a reading (the reference's forward and two similarities) and a new reference, as
parts of a step. A step has 8 microbatches, with one reading in 10 steps and one reference in 200.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.harness import alternate, bound_of, elapsed, medians
from benchmarks.output import main
from benchmarks.savings_pruning import half
from dynmo.cases.freezing.cache import OutputCache
from dynmo.cases.freezing.egeria import plasticity, quantised, relations
from dynmo.runtime.comm.clock import clock_for
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.stage import FrozenPrefix
from dynmo.schedule.op import Kind

MICROBATCHES, EVERY, REFRESH = 8, 10, 200


def step(
    layer: Layer, x: torch.Tensor, gy: torch.Tensor, trains: bool, backward: bool
) -> dict[str, float]:
    layer.marks.clear()
    layer.forward(0, (x.requires_grad_(backward),), 0, graph=backward)
    if backward:
        layer.backward_input(0, (gy,), True)
    if trains:
        layer.backward_weight(0)
    layer.module.zero_grad()
    return dict.fromkeys("fbw", 0.0) | {
        kind.value.lower(): end - start
        for kind, start, end, _ in layer.marks
        if kind in (Kind.F, Kind.B, Kind.W)
    }


def layers(hidden: int, heads: int, sequence: int, rounds: int) -> list[dict[str, Any]]:
    """Measures both halves: frozen against one that trains."""
    out: list[dict[str, Any]] = []
    clock = clock_for(torch.device("cpu"))
    x = torch.randn(1, sequence, hidden)
    gy = torch.randn_like(x)
    for which, name in enumerate(("attention", "feed_forward")):
        modules = {
            kind: half(which, hidden, heads, sequence) for kind in ("trains", "above", "prefix")
        }
        for kind in ("above", "prefix"):
            modules[kind].requires_grad_(False)
        sides = {kind: Layer(0, module, clock, 0) for kind, module in modules.items()}
        samples = alternate(
            {
                kind: partial(step, layer, x, gy, kind == "trains", kind != "prefix")
                for kind, layer in sides.items()
            },
            rounds,
            warmup=1,
        )
        times = {
            kind: {op: median(row[op] for row in rows) for op in "fbw"}
            for kind, rows in samples.items()
        }
        whole = sum(times["trains"].values())
        for kind, kept in (("prefix", "f"), ("above", "fb")):
            now, ideal = sum(times[kind].values()), sum(times["trains"][op] for op in kept)
            share = (whole - now) / (whole - ideal)
            out.append(
                {
                    "layer": name,
                    "frozen": kind,
                    "trains": times["trains"],
                    "now": times[kind],
                    "speedup": whole / now,
                }
                | {"ideal_speedup": whole / ideal, "share_of_ideal": share}
                | bound_of(
                    share,
                    {
                        op: times[kind][op] - (times["trains"][op] if op in kept else 0.0)
                        for op in "fbw"
                    },
                )
            )
        reading, refreshing = watching(modules["trains"], x, rounds)
        out.append(
            {"layer": name, "egeria": {"reading": reading, "reference": refreshing}}
            | {"share_of_a_step": (reading / EVERY + refreshing / REFRESH) / (MICROBATCHES * whole)}
        )
    return out


def cache(hidden: int, heads: int, sequence: int, rounds: int) -> dict[str, Any]:
    """Times F of a frozen block: run, run and kept, and taken from the cache.

    The three take turns. F is of both halves.
    """
    clock, x = clock_for(torch.device("cpu")), torch.randn(1, sequence, hidden)
    block = [
        Layer(which, half(which, hidden, heads, sequence).requires_grad_(False), clock, 0)
        for which in (0, 1)
    ]
    outputs = OutputCache(1 << 40)

    def seconds(samples: int | None) -> float:
        start = time.perf_counter()
        outputs.run(FrozenPrefix(block, 0, (x,), 0, training=True), samples)
        return time.perf_counter() - start

    turns = count()
    times = alternate(
        {
            "run": lambda: seconds(None),
            "run_and_kept": lambda: seconds(next(turns)),
            "taken": lambda: seconds(0),
        },
        rounds,
        warmup=1,
    )
    summary = medians(times)
    kept = outputs.run(FrozenPrefix(block, 0, (x,), 0, training=True), 0)
    size = sum(y.nbytes for y in kept)
    return {
        "layers": len(block),
        "seconds": summary,
        "speedup": summary["run"] / summary["taken"],
        "bytes_per_sequence": size,
    }


def watching(module: nn.Module, x: torch.Tensor, rounds: int) -> tuple[float, float]:
    """Returns the seconds of a reading, and of a new reference."""
    reference = quantised(module)

    def read() -> object:
        return plasticity(module, reference, (x,), relations(x), (0, 0, 0))

    reading = median(elapsed(read) for _ in range(rounds))
    return reading, median(elapsed(lambda: quantised(module)) for _ in range(rounds))


def measure(sequence: int, rounds: int) -> dict[str, Any]:
    """Runs on one rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return {
        "layers": layers(1024, 32, sequence, rounds),
        "cache": cache(1024, 32, sequence, rounds),
    }


if __name__ == "__main__":
    main(
        __doc__ or "",
        lambda options: measure(options.sequence, options.rounds),
        [
            ("sequence", 2048, "tokens of the layer's microbatch"),
            ("rounds", 7, "counted turns of each side"),
        ],
    )
