"""From which sparsity on the CSR kernels pay: measured once per machine and shape, and kept among this user's files.

    ~/.cache/dynmo/crossover/1f0c9a....json     {"measured_on": "AMD EPYC, 2 cores, 1 threads, torch 2.13.0, float32, 1024x256, 512 tokens",
                                                 "sparsity": 0.6875}

A measurement differs from time to time: who asks for it twice gets one answer, and two runs of one machine the same bits. `DYNMO_CACHE` in
the environment is another folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import cast

import torch
from torch import nn

from dynmo.kernels.sparse_linear import crossover

# Kernels of another speed are another number: what was measured of the old ones holds no more.
_KERNELS = 1


def known_crossover(linear: nn.Linear, tokens: int) -> float:
    """For so many tokens of a microbatch: as it was measured here, else measured now, which takes a second or so."""
    weight = cast(nn.Parameter, linear.weight)
    shape = f"{str(weight.dtype).removeprefix('torch.')}, {linear.out_features}x{linear.in_features}, {tokens} tokens"
    where = f"{_machine(weight.device)}, torch {torch.__version__}, kernels {_KERNELS}, {shape}"
    path = _folder() / f"{hashlib.sha256(where.encode()).hexdigest()[:32]}.json"
    sparsity = _read(path, where)
    if sparsity is None:
        sparsity = crossover(linear.out_features, linear.in_features, tokens, weight.device, weight.dtype)
        sparsity = _keep(path, where, sparsity)
    return sparsity


def _folder() -> Path:
    own = os.environ.get("DYNMO_CACHE")
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home: nothing is kept
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
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def _read(path: Path, where: str) -> float | None:
    """None where there is none, or none that holds."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        sparsity = float(kept["sparsity"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return sparsity if kept.get("measured_on") == where and 0 <= sparsity <= 1 else None


def _keep(path: Path, where: str, sparsity: float) -> float:
    """Returns what is kept: the first number, should several processes have measured at once. Where nothing can be written, the next run
    measures again."""
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"measured_on": where, "sparsity": sparsity}) + "\n", encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
        kept = _read(path, where)
        if kept is None:  # there is one that does not hold
            partial.replace(path)
        else:
            sparsity = kept
    with contextlib.suppress(OSError):
        partial.unlink()
    return sparsity
