"""Checks devices, memory, disk and kernels, also against the needs of a config."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.cuda import nccl

from dynmo import RunPlan
from dynmo.cases.pruning.crossover import kept_crossovers
from dynmo.config import Config
from dynmo.doctor.finding import Finding, State
from dynmo.errors import ConfigError, InputError, NoRoomError, how_to_install
from dynmo.runtime.state.background import spare_memory
from dynmo.train.setup import device_for, plan_run, warnings_of

# Bytes of a process of torch, before it has a model.
PROCESS = 200 << 20
# Bytes of a run's log, and of a launch folder, at least.
_LOG, _LAUNCH = 64 << 20, 1 << 20


def check_resources(
    config: Config, is_given: bool, ranks: Sequence[int], folder: Path
) -> Iterator[Finding]:
    """Checks what the ranks of this machine need.

    Args:
        is_given: Whether the config is a run. Otherwise only its devices are looked for.
        ranks: Numbers of the ranks on this machine.
        folder: The folder of the run.
    """
    plan = None
    yield from _devices(config, len(ranks))
    if is_given:
        yield from (Finding("config", State.warning, text) for text in warnings_of(config))
        try:
            plan = plan_run(config)
        except InputError as error:
            check = "memory of the run" if isinstance(error, NoRoomError) else "config"
            yield Finding(check, State.problem, str(error))
    yield from _memory(config, plan, ranks)
    yield from _disk(config, plan, folder)
    yield from _kernels(config)


def _devices(config: Config, ranks: int) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    seen = ", ".join([f"{cores} cores", *names])
    figures = {"cores": cores, "gpus": names}
    try:
        device_for(config, ranks - 1)
    except ConfigError as error:
        yield Finding("devices", State.problem, seen, str(error), figures)
    else:
        yield _of_driver(seen, figures)
    if not dist.is_gloo_available():
        yield Finding("backends", State.problem, "torch has no gloo", "install another torch")
    elif names and not dist.is_nccl_available() and not config.parallel.staged:
        remedy = 'install torch for CUDA, or set parallel.backend = "gloo"'
        yield Finding("backends", State.problem, "torch has no nccl", remedy)
    else:
        version = ", nccl " + ".".join(map(str, nccl.version())) if names else ""
        yield Finding("backends", State.ok, f"gloo{version}")


def _of_driver(seen: str, figures: dict[str, object]) -> Finding:
    if torch.cuda.is_available() or not Path("/proc/driver/nvidia").exists():
        return Finding("devices", State.ok, seen, figures=figures)
    seen += f"; a GPU is here, and torch {torch.__version__} sees none"
    remedy = (
        "install torch for CUDA, as pytorch.org says"
        if torch.version.cuda is None
        else f"install a driver for CUDA {torch.version.cuda}, or unset CUDA_VISIBLE_DEVICES"
    )
    return Finding("devices", State.warning, seen, remedy, figures)


def _memory(config: Config, plan: RunPlan | None, ranks: Sequence[int]) -> Iterator[Finding]:
    needs = {rank: _need_of(config, plan, rank) for rank in ranks}
    gpus = 0 if config.parallel.device == "cpu" else torch.cuda.device_count()
    need = len(ranks) * PROCESS + (0 if gpus else sum(needs.values()))
    unknown = plan is not None and plan.activations_unknown is not None
    beside = " without activations" if unknown else ""
    yield _of_memory("host memory", _spare(), need, beside)
    for gpu in range(gpus):
        need = sum(size for place, size in enumerate(needs.values()) if place % gpus == gpu)
        free, _ = torch.cuda.mem_get_info(gpu)
        yield _of_memory(f"memory of GPU {gpu}", free, need, beside)


def _need_of(config: Config, plan: RunPlan | None, rank: int) -> int:
    """Returns the bytes of tensors of a rank of the run. A rank beyond the run needs none."""
    if plan is None or rank >= config.ranks:
        return 0
    if config.parallel.slices:
        return sum(plan.memory)
    return plan.memory[rank // config.parallel.replicas]


def _spare() -> int:
    return spare_memory() if sys.platform == "linux" else psutil.virtual_memory().available


def _of_memory(check: str, free: int, need: int, beside: str) -> Finding:
    seen = f"{_size(free)} free, {_size(need)} needed by the ranks here{beside}"
    figures = {"free_bytes": free, "needed_bytes": need}
    if need <= free:
        return Finding(check, State.ok, seen, figures=figures)
    remedy = (
        "end other processes, use more machines or smaller microbatches, or set train.recompute = "
        '"auto"; dynmo train --dry-run shows each rank\'s memory'
    )
    return Finding(check, State.problem, seen, remedy, figures)


def _disk(config: Config, plan: RunPlan | None, folder: Path) -> Iterator[Finding]:
    saves = plan is not None and config.checkpoint.every != 0
    # A new checkpoint is complete before the oldest is removed.
    kept = config.checkpoint.keep + config.checkpoint.keep_best + 1
    size = plan.checkpoint_bytes if plan is not None and saves else 0
    what = f"{kept} checkpoints of {_size(size)}" if size else "the log"
    yield _of_disk("disk", folder, kept * size + _LOG, what)
    yield _of_disk("temporary folder", Path(tempfile.gettempdir()), _LAUNCH, "to start ranks")


def _of_disk(check: str, folder: Path, need: int, what: str) -> Finding:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    figures = {"folder": str(folder), "free_bytes": free, "needed_bytes": need}
    seen = f"{_size(free)} free for {folder}, {_size(need)} needed ({what})"
    if not os.access(there, os.W_OK):
        seen = f"{there} cannot be written"
        remedy = "start in another folder" if check == "disk" else "set TMPDIR to another folder"
        return Finding(check, State.problem, seen, remedy, figures)
    if free >= need:
        return Finding(check, State.ok, seen, figures=figures)
    remedy = "remove files, or start in a folder of another disk"
    remedy += "; or lower checkpoint.keep" if need > _LOG else ""
    remedy = remedy if check == "disk" else "remove files, or set TMPDIR to another folder"
    return Finding(check, State.problem, seen, remedy, figures)


def _kernels(config: Config) -> Iterator[Finding]:
    on_cuda = config.parallel.device != "cpu" and torch.cuda.is_available()
    kept = kept_crossovers(torch.device("cuda" if on_cuda else "cpu"))
    seen = "; ".join(f"{shape}: from {sparsity:.0%}" for shape, sparsity in kept.items())
    seen = (
        f"sparse weights pay, {seen}"
        if seen
        else ("no crossover of sparse weights is known yet: a run that prunes measures it")
    )
    yield Finding("kernels", State.ok, seen, figures={"sparsity": kept})
    if on_cuda and find_spec("triton") is None:
        seen = "triton is not installed (for sparse attention and train.compile on CUDA)"
        yield Finding("kernels", State.warning, seen, how_to_install("triton"))
    if config.train.compile and not on_cuda and not _compiler():
        seen = "no C++ compiler is here (for train.compile)"
        remedy = "install g++, name one in CXX, or leave out train.compile"
        yield Finding("kernels", State.problem, seen, remedy)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:,.0f} MiB"
