"""The cost of a split backward of a stage of GPT blocks, four ways.

Each side runs several microbatches.

    plain       torch's own: the modules, y.backward(g)
    fused       dynmo's layers, BW: input and weight gradient in one op
    split       dynmo's layers, B then W of each microbatch
    deferred    dynmo's layers, all B's, then all W's: what a zero-bubble schedule may do at most

Each runs eager and under torch.compile (dynmo's layers between their linears, plain as a whole).
`split_over_fused` is the cost of splitting. `fused_over_plain` is the cost of dynmo's layers beside
plain. In low precision plain sums its gradients in that precision and dynmo in float32, which is a
part of dynmo's cost.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.device import PRECISIONS, Option, Shape, Verdict, main, progress, turns
from dynmo.config import parse
from dynmo.runtime.comm.clock import clock_for
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.optim.precision import lower
from dynmo.train.setup import model_of


def halves(device: torch.device, shape: Shape) -> list[nn.Module]:
    """Builds the halves of so many GPT blocks in float32."""
    model = model_of(parse({"model": shape.model}))
    with device:
        built = model.build(frozenset(range(1, model.layers - 1)))
    return [built[i] for i in range(1, model.layers - 1)]


def plain(
    modules: list[nn.Module], x: Tensor, gy: Tensor, microbatches: int, compiles: bool
) -> Callable[[], None]:
    """Returns a side that runs torch's own backward."""
    whole: Callable[[Tensor], Tensor] = nn.Sequential(*modules)
    parameters = [p for module in modules for p in module.parameters()]
    if compiles:
        whole = torch.compile(whole, dynamic=False)

    def step() -> None:
        for _ in range(microbatches):
            whole(x.detach().requires_grad_()).backward(gy)
        for p in parameters:
            p.grad = None

    return step


def ours(
    layers: list[Layer], x: Tensor, gy: Tensor, microbatches: int, how: str
) -> Callable[[], None]:
    """Returns a side that runs dynmo's layers."""

    def step() -> None:
        for j in range(microbatches):
            tensors = (x.requires_grad_(),)
            for layer in layers:
                tensors = layer.forward(j, tensors, 0)
            tensors = (gy,)
            for layer in reversed(layers):
                tensors = layer.backward_input(j, tensors, deferred=how != "fused")
            if how == "split":
                weights(j)
        for j in range(microbatches) if how == "deferred" else ():
            weights(j)
        for layer in layers:
            layer.marks.clear()
            layer.module.zero_grad()

    def weights(j: int) -> None:
        for layer in reversed(layers):
            layer.backward_weight(j)

    return step


def stage(
    device: torch.device, dtype: torch.dtype, compiles: bool, shape: Shape, rounds: int
) -> dict[str, Any]:
    """Measures one precision, eager or compiled."""
    generator, microbatches = torch.Generator().manual_seed(0), shape.microbatches
    size = (shape.batch, shape.sequence, shape.hidden)
    x, gy = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(2))
    progress(f"{dtype}, {'compiled' if compiles else 'eager'}")
    modules = halves(device, shape)
    low = [copy.deepcopy(m).to(device, dtype) for m in modules]
    sides = {"plain": plain(low, x, gy, microbatches, compiles)}
    for how in ("fused", "split", "deferred"):
        own = [copy.deepcopy(m).to(device) for m in modules]
        for module in own:
            lower(module, dtype)
        layers = [Layer(i, m, clock_for(device), 0, compiles) for i, m in enumerate(own)]
        sides[how] = ours(layers, x, gy, microbatches, how)
    medians = turns(device, sides, rounds)
    tokens = shape.batch * shape.sequence * microbatches
    return {
        "seconds": medians,
        "tokens_per_second": {name: tokens / each for name, each in medians.items()},
        "split_over_fused": medians["split"] / medians["fused"],
        "deferred_over_fused": medians["deferred"] / medians["fused"],
        "fused_over_plain": medians["fused"] / medians["plain"],
    }


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all precisions that the options ask for."""
    shape = Shape.of(options)
    figures: dict[str, dict[str, Any]] = {}
    for name in list(PRECISIONS)[: options.precisions]:
        # float32 without tensor cores takes ten times as long.
        rounds = min(1, options.rounds) if name == "float32" else options.rounds
        figures[name] = {"eager": stage(device, PRECISIONS[name], False, shape, rounds)}
    for name in list(PRECISIONS)[: options.compiled]:
        compiled = stage(device, PRECISIONS[name], True, shape, options.rounds)
        figures.setdefault(name, {})["compiled"] = compiled
    return {**shape._asdict(), "rounds": options.rounds, "stage": figures}


GOAL = 1.02


def assess(result: dict[str, Any]) -> Verdict:
    ratios = {
        f"{name} {mode}": row["split_over_fused"]
        for name, modes in result["stage"].items()
        for mode, row in modes.items()
    }
    met = all(ratio <= GOAL for name, ratio in ratios.items() if name.startswith("bfloat16"))
    return Verdict(met, ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))


OPTIONS = (
    Option("blocks", 2, 1, "blocks of the stage"),
    Option("hidden", 4096, 64, "width"),
    Option("sequence", 2048, 16, "tokens"),
    Option("batch", 2, 1, "sequences of a microbatch"),
    Option("microbatches", 4, 2, "microbatches of a step"),
    Option("rounds", 5, 1, "counted turns"),
    Option("precisions", 3, 2, "eager precisions: the first so many of bfloat16, float32, float16"),
    Option("compiled", 0, 0, "precisions under torch.compile: the first so many"),
)

if __name__ == "__main__":
    main(__doc__ or "", measure, assess, OPTIONS)
