"""The way of a batch through the code: calls from `Pipeline.step` down to the user's module.

Two ranks train a list of linear layers. `sys.setprofile` counts the calls of dynmo's functions that
are open on rank 0 when a layer begins.

path       These calls, after some steps.
modules    Modules of the package that a loop of one's own on one rank has loaded after its first
           step.

python -m benchmarks.step_path
"""

from __future__ import annotations

import subprocess
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import dynmo
from benchmarks.harness import run_ranks
from benchmarks.output import parser_of, run
from dynmo.runtime.comm.meeting import Meeting

HIDDEN, ROWS = 8, 4


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def deepest(pipeline: dynmo.Pipeline, batch: tuple[Tensor, Tensor]) -> list[str]:
    """Returns dynmo's functions between `step` and the first layer that runs."""
    open_, found = list[tuple[FrameType, str]](), list[str]()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            if frame.f_code is _Layer.forward.__code__ and not found:
                found.extend(name for _, name in open_)
            home = frame.f_globals.get("__name__", "")
            if home.startswith("dynmo."):
                open_.append((frame, f"{home}.{frame.f_code.co_qualname}"))
        elif event == "return" and open_ and open_[-1][0] is frame:
            open_.pop()

    sys.setprofile(watch)
    try:
        pipeline.step(*batch)
    finally:
        sys.setprofile(None)
    begin = next(i for i, name in enumerate(found) if name.endswith("Pipeline.step"))
    return found[begin:]


def path(world: Meeting) -> dict[str, Any]:
    """Runs on each of two ranks."""
    torch.manual_seed(0)
    layers = [_Layer() for _ in range(4)]
    model = dynmo.Sequential(layers, loss=nn.functional.mse_loss)
    pipeline = dynmo.Pipeline(model, world, microbatches=2)
    batch = torch.ones(ROWS, HIDDEN), torch.zeros(ROWS, HIDDEN)
    for _ in range(8):  # layers are timed one by one in the first steps
        pipeline.step(*batch)
    return {"path": deepest(pipeline, batch)}


# A loop of one's own on one rank.
_LOOP = """
import sys, torch, dynmo
with dynmo.init(device="cpu") as world:
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    model = dynmo.Sequential(layers, loss=torch.nn.functional.mse_loss)
    dynmo.Pipeline(model, world, microbatches=2).step(torch.ones(4, 8), torch.zeros(4, 8))
    print(sum(name.split(".")[0] == "dynmo" for name in sys.modules))
"""


def measure(_: object) -> dict[str, Any]:
    found = run_ranks("benchmarks.step_path:path", 2)
    loop = subprocess.run([sys.executable, "-c", _LOOP], capture_output=True, text=True, check=True)
    return {"calls": len(found["path"]), "modules": int(loop.stdout), **found}


def show(result: dict[str, Any]) -> None:
    print(f"{result['calls']} calls from Pipeline.step to a layer, {result['modules']} modules:")
    print("\n".join(f"  {name}" for name in result["path"]))


if __name__ == "__main__":
    run(parser_of(__doc__), measure, show)
