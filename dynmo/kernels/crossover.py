"""The sparsity from which the CSR kernels pay, measured per machine and shape.

    ~/.cache/dynmo/crossover/1f0c9a....json
    {"measured_on": "AMD EPYC, 2 cores, 1 threads, torch 2.13.0, float32, 1024x256, 512 tokens",
     "sparsity": 0.6875}

A measurement differs from time to time. The file gives every later call the same answer, and two
runs of one machine the same bits. `DYNMO_CACHE` in the environment is another folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from dynmo.files import parse_json, read_text
from dynmo.kernels.sparse_linear import prune
from dynmo.kernels.split import SplitLinear, WeightTape, float32_gradients

# Kernels of another speed get another number: measurements of the old ones are no longer valid.
_KERNELS = 2


def known_crossover(linear: nn.Linear, tokens: int) -> float:
    """Return the sparsity from which CSR is faster, for a microbatch of `tokens` rows.

    A first measurement on this machine takes about a second.
    """
    weight = cast(nn.Parameter, linear.weight)
    shape = (
        f"{str(weight.dtype).removeprefix('torch.')}, "
        f"{linear.out_features}x{linear.in_features}, {tokens} tokens"
    )
    where = f"{_machine(weight.device)}, torch {torch.__version__}, kernels {_KERNELS}, {shape}"
    path = _folder() / f"{hashlib.sha256(where.encode()).hexdigest()[:32]}.json"
    sparsity = _read(path, where)
    if sparsity is None:
        sparsity = measure_crossover(
            linear.out_features, linear.in_features, tokens, weight.device, weight.dtype
        )
        sparsity = _keep(path, where, sparsity)
    return sparsity


def time_linear(linear: nn.Linear, tokens: int, repeats: int = 5) -> tuple[float, float, float]:
    """Return the median seconds of F, B and W on one microbatch. Clears the gradient."""
    device = linear.weight.device
    x, gy = (
        torch.randn(tokens, width).to(device, linear.weight.dtype)
        for width in (linear.in_features, linear.out_features)
    )
    tape = WeightTape()
    tape.deferred = True
    before, taped = getattr(linear, "tape", None), cast(Any, linear)
    taped.tape = tape

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    rows: list[tuple[float, float, float]] = []
    for _ in range(repeats + 1):
        leaf = x.requires_grad_()
        marks = [now()]
        y = linear(leaf)
        marks.append(now())
        y.backward(gy)
        marks.append(now())
        for work, _ in tape.take():
            work()
        marks.append(now())
        rows.append((marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]))
        leaf.grad = None
    linear.weight.grad = None
    taped.tape = before
    f, b, w = zip(*rows[1:], strict=True)
    return median(f), median(b), median(w)


def make_pruned(
    rows: int,
    columns: int,
    sparsity: float,
    sparse: bool,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Linear:
    """Make a linear that is pruned at random places, for measurements."""
    generator = torch.Generator().manual_seed(1)
    linear = SplitLinear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(
        torch.randn(rows, columns, generator=generator).to(device or "cpu", dtype)
    )
    order = torch.rand(rows * columns, generator=generator).to(linear.weight.device).argsort()
    keep = order >= round(sparsity * rows * columns)
    if sparsity > 0 or sparse:
        prune(linear, keep, sparse, {})
    float32_gradients(linear)
    return linear


def measure_crossover(
    rows: int,
    columns: int,
    tokens: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Find the sparsity from which F + B + W take less time in CSR form.

    The result differs from time to time and from rank to rank. All ranks must use one rank's
    result, and a resumed run the result that it began with. It is found to 1/64, and 1.0 if CSR
    is never faster.
    """

    def faster(sparsity: float) -> bool:
        return (
            sum(time_linear(make_pruned(rows, columns, sparsity, True, device, dtype), tokens))
            < dense
        )

    dense = sum(time_linear(make_pruned(rows, columns, 0.0, False, device, dtype), tokens))
    low, high = 0.0, 1.0
    while high - low > 1 / 64:
        middle = (low + high) / 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    return high


def _folder() -> Path:
    own = os.environ.get("DYNMO_CACHE")
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home: the result is not kept
        cache = Path(os.devnull)
    return (Path(own) if own else cache / "dynmo") / "crossover"


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        told = []
    names = [line.partition(":")[2].strip() for line in told if line.startswith("model name")]
    return (
        f"{names[0] if names else platform.machine()}, "
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    )


def _read(path: Path, where: str) -> float | None:
    """Return the kept sparsity. None if there is no valid one."""
    try:
        kept = cast("dict[str, Any]", parse_json(read_text(path)))
        sparsity = float(kept["sparsity"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return sparsity if kept.get("measured_on") == where and 0 <= sparsity <= 1 else None


def _keep(path: Path, where: str, sparsity: float) -> float:
    """Keep a sparsity, or return the one that another process has kept meanwhile."""
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(
            json.dumps({"measured_on": where, "sparsity": sparsity}) + "\n", encoding="utf-8"
        )
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
        kept = _read(path, where)
        if kept is None:  # there is a file that is not valid
            partial.replace(path)
        else:
            sparsity = kept
    with contextlib.suppress(OSError):
        partial.unlink()
    return sparsity
