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
import re
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from dynmo.cases.pruning.csr import wide
from dynmo.cases.pruning.sparse_linear import prune

# Kernels of another speed get another number: measurements of the old ones are no longer valid.
_KERNELS = 3


def known_crossover(linear: nn.Linear, tokens: int) -> float:
    """Returns the sparsity from which CSR is faster, for a microbatch of `tokens` rows.

    A first measurement on this machine takes about a second.
    """
    rows, columns, weight = linear.out_features, linear.in_features, linear.weight
    shape = f"{str(weight.dtype).removeprefix('torch.')}, {rows}x{columns}, {tokens} tokens"
    where = f"{_measured_on(weight.device)}{shape}"
    path = _folder() / f"{hashlib.sha256(where.encode()).hexdigest()[:32]}.json"
    sparsity = _read(path, where)
    if sparsity is None:
        sparsity = measure_crossover(rows, columns, tokens, weight.device, weight.dtype)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps({"measured_on": where, "sparsity": sparsity}) + "\n")
            partial.replace(path)
    return sparsity


def kept_crossovers(device: torch.device) -> dict[str, float]:
    """Returns the sparsities that are known for this machine, by type and shape."""
    start, kept = _measured_on(device), dict[str, float]()
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            where = json.loads(path.read_text())["measured_on"]
            sparsity = _read(path, where)
            if where.startswith(start) and sparsity is not None:
                kept[where.removeprefix(start)] = sparsity
    return kept


def measure_crossover(
    rows: int,
    columns: int,
    tokens: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Finds the sparsity from which F + B + W take less time in CSR form.

    The result differs from time to time and from rank to rank. All ranks must use one rank's
    result, and a resumed run the result that it began with. It is found to 1/64, and 1.0 if CSR
    is never faster.
    """
    dense = seconds(make_pruned(rows, columns, None, device, dtype), tokens)
    low, high = 0.0, 1.0
    while high - low > 1 / 64:
        middle = (low + high) / 2
        sparse = seconds(make_pruned(rows, columns, middle, device, dtype), tokens)
        low, high = (low, middle) if sparse < dense else (middle, high)
    return high


def make_pruned(
    rows: int,
    columns: int,
    sparsity: float | None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    sparse: bool = True,
) -> nn.Linear:
    """Makes a linear that is pruned at random places, for measurements. None: a plain one."""
    generator = torch.Generator().manual_seed(1)
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    weight = torch.randn(rows, columns, generator=generator).to(device or "cpu", dtype)
    linear.weight = nn.Parameter(weight)
    if sparsity is not None:
        order = torch.rand(rows * columns, generator=generator).to(weight.device).argsort()
        prune(linear, order >= round(sparsity * rows * columns), sparse, {})
    linear.weight.grad_dtype = wide(dtype)
    return linear


def seconds(linear: nn.Linear, tokens: int, repeats: int = 5) -> float:
    """Returns the median seconds of F, B and W on one microbatch."""
    device, dtype = linear.weight.device, linear.weight.dtype
    x, gy = (
        torch.randn(tokens, width).to(device, dtype)
        for width in (linear.in_features, linear.out_features)
    )
    taken = list[float]()
    for _ in range(repeats + 1):
        start = time.perf_counter()
        linear(x.requires_grad_()).backward(gy)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
        x.grad = linear.weight.grad = None
    return median(taken[1:])


def _folder() -> Path:
    own = os.environ.get("DYNMO_CACHE")
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home: the result is not kept
        cache = Path(os.devnull)
    return (Path(own) if own else cache / "dynmo") / "crossover"


def _measured_on(device: torch.device) -> str:
    return f"{_machine(device)}, torch {torch.__version__}, kernels {_KERNELS}, "


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: *(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = found[1] if found else name
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def _read(path: Path, where: str) -> float | None:
    """Returns the kept sparsity. None if there is no valid one."""
    try:
        kept = json.loads(path.read_text())
        sparsity = float(kept["sparsity"])
        return sparsity if kept["measured_on"] == where and 0 <= sparsity <= 1 else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
