"""What the benchmarks of this package share: the device, or a refusal without one, and seconds on it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import harness

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(
    about: str, measure: Callable[[torch.device, argparse.Namespace], dict[str, Any]], options: Sequence[tuple[str, int, str]] = ()
) -> None:
    """As `harness.main`, on the first CUDA device; without one, one line and status 2."""

    def checked(parsed: argparse.Namespace) -> dict[str, Any]:
        if not torch.cuda.is_available():
            print("benchmarks.gpu: torch sees no CUDA device; run this on a machine that has one", file=sys.stderr)
            sys.exit(2)
        device = torch.device("cuda", 0)
        return measure(device, parsed) | {"device": about_device(device)}

    harness.main(about, checked, options)


def about_device(device: torch.device) -> dict[str, Any]:
    known = torch.cuda.get_device_properties(device)
    return {
        "name": known.name,
        "sms": known.multi_processor_count,
        "memory": known.total_memory,
        "capability": f"{known.major}.{known.minor}",
        "cuda": torch.version.cuda,
    }


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """From an idle device to an idle device: launching counts where it is what takes longest."""
    settle(device)
    start = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - start


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def turns(device: torch.device, sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each side, in turn; the first two of each are not counted (compilers, caches, memory)."""
    timed = {name: lambda work=work: seconds(device, work) for name, work in sides.items()}
    return harness.medians(harness.alternate(timed, rounds, warmup=2))
