"""The device and the clock of the benchmarks of this package.

The device is the CPU in a dry run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import harness, output
from benchmarks.gpu.checks import NO_GPU
from dynmo.models.model import Model

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


class Option(NamedTuple):
    """A size of the command line, with its default and that of a dry run."""

    name: str
    default: int
    dry: int
    text: str


class Shape(NamedTuple):
    """Sizes of a GPT and of its step.

    Attributes:
        blocks: Depth of the model.
        hidden: Width of the model.
        sequence: Tokens of a sequence.
        batch: Sequences of a microbatch.
        microbatches: Microbatches of a step.
    """

    blocks: int
    hidden: int
    sequence: int
    batch: int
    microbatches: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> Shape:
        """Returns the sizes of a command line."""
        return cls(*(getattr(options, name) for name in cls._fields))

    @property
    def model(self) -> dict[str, Any]:
        """The section `model` of the configuration. A head is 64 wide."""
        heads = max(1, self.hidden // 64)
        sizes = {"blocks": self.blocks, "hidden": self.hidden}
        return sizes | {"heads": heads, "sequence": self.sequence}

    @property
    def train(self) -> dict[str, Any]:
        """The section `train` of the configuration, in bfloat16."""
        sizes = {"global_batch": self.batch * self.microbatches, "micro_batch": self.batch}
        return sizes | {"precision": "bfloat16"}

    def tokens(self, device: torch.device) -> Tensor:
        """Draws inputs and targets, [2, microbatches, batch, sequence].

        They are the same on all devices.
        """
        size = (2, self.microbatches, self.batch, self.sequence)
        return torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0)).to(device)


class Verdict(NamedTuple):
    """Says whether the figures are as expected, and what they are in one line."""

    met: bool
    came: str


_START = time.perf_counter()

Measure = Callable[[torch.device, argparse.Namespace], dict[str, Any]]


def main(
    about: str,
    measure: Measure,
    assess: Callable[[dict[str, Any]], Verdict],
    options: Sequence[Option] = (),
) -> None:
    """Prints the figures on the first CUDA device, or on CPU with `--dry`.

    Ends with one line and status 2 without a CUDA device. A dry run says nothing about time, so
    only its end is judged.
    """
    parser = output.parser_of(about)
    parser.add_argument("--dry", action="store_true", help="on CPU, with tiny sizes")
    parser.add_argument("--out", help="a file that the benchmark leaves, if it leaves one")
    for option in options:
        parser.add_argument(
            f"--{option.name}",
            type=int,
            help=f"{option.text} (default {option.default}, dry {option.dry})",
        )
    parsed = parser.parse_args()
    for option in options:
        if getattr(parsed, option.name) is None:
            setattr(parsed, option.name, option.dry if parsed.dry else option.default)
    if parsed.dry:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        print(f"benchmarks.gpu: {NO_GPU}, or with --dry on CPU", file=sys.stderr)
        sys.exit(2)
    device = torch.device("cpu") if parsed.dry else torch.device("cuda", 0)
    progress("modules are loaded")
    result = measure(device, parsed)
    progress("measured")
    met, came = assess(result)
    output.report(
        result
        | {
            "met": met or parsed.dry,
            "came": came,
            "machine": output.machine(),
            "device": about_device(device),
        },
        parsed.json,
    )


def about_device(device: torch.device) -> dict[str, Any]:
    """Returns name, size and capability of a CUDA device."""
    if device.type != "cuda":
        return {"name": device.type}
    known = torch.cuda.get_device_properties(device)
    return {
        "name": known.name,
        "sms": known.multi_processor_count,
        "memory": known.total_memory,
        "capability": f"{known.major}.{known.minor}",
        "cuda": torch.version.cuda,
    }


def built_on(device: torch.device, model: Model) -> Model:
    """Returns the model with weights drawn on the device.

    That is faster. The weights are not those of the CPU.
    """

    def build(owned: Collection[int]) -> list[nn.Module]:
        with device:
            return model.build(owned)

    return replace(model, build=build)


def progress(text: str) -> None:
    """Prints one line to stderr, with the seconds since the benchmark began."""
    print(f"{time.perf_counter() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Times work from an idle device to an idle device, in seconds.

    Launching counts if it takes longest.
    """
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def turns(
    device: torch.device, sides: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, float]:
    """Returns the median seconds of each side, in turn.

    The first two of each are not counted.
    """
    timed = {name: lambda work=work: seconds(device, work) for name, work in sides.items()}
    return harness.medians(harness.alternate(timed, rounds, warmup=2))
