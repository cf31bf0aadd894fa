"""What a config asks for, on this machine: how many ranks, which device, how much memory, where
layers live at first, which optimizer.

The trainer, the profiler and the plan all begin with it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch

from dynmo.balance.partition import Partition, uniform
from dynmo.config import Config
from dynmo.config.values import value_text
from dynmo.errors import ConfigError
from dynmo.launch.environment import FOR_RANKS_ON_CUDA
from dynmo.models.model import Model
from dynmo.models.registry import load_model
from dynmo.runtime.comm.agreement import first_difference
from dynmo.runtime.comm.messages import ranks_text
from dynmo.runtime.comm.rendezvous import Rendezvous
from dynmo.runtime.comm.store import open_store
from dynmo.runtime.comm.world import World


def check_world(config: Config, rendezvous: Rendezvous) -> None:
    """Raises ConfigError where the launcher started more or fewer ranks than the config has."""
    if rendezvous.size != config.ranks:
        sizes = (
            "data (each pipeline is slices of one GPU)"
            if config.parallel.slices
            else "pipeline x data"
        )
        raise ConfigError(
            f"the launcher started {rendezvous.size} ranks, but parallel.{sizes} = {config.ranks}; start as many as the config says"
        )


@contextmanager
def start(config: Config, rendezvous: Rendezvous) -> Generator[tuple[World, Model]]:
    """Sets a rank up: threads, device, model, and the world of all ranks, which ends with the context.

    Args:
        config: The run, which must be the same on every rank.
        rendezvous: Where the ranks meet.

    Yields:
        The world of all ranks, and the model.

    Raises:
        ConfigError: The config does not fit the ranks or this machine, or differs between ranks.
        RunError: The ranks do not meet.
    """
    check_world(config, rendezvous)
    torch.set_num_threads(config.parallel.threads)
    device = device_for(config, rendezvous.local_rank)
    model = load_model(config)
    with join_world(config, rendezvous, device) as world:
        yield world, model


# What may differ from rank to rank. The data itself is compared where it is read.
_OWN = {"data.source", "parallel.threads", "parallel.timeout"}


def join_world(config: Config, rendezvous: Rendezvous, device: torch.device) -> World:
    """Meet the other ranks of the run.

    Args:
        config: The run, which must be the same on every rank.
        rendezvous: Where the ranks meet.
        device: Where this rank computes.

    Returns:
        The world of all ranks.

    Raises:
        ConfigError: The ranks have different configs. The message names the first such key.
        RunError: The ranks do not meet.
    """
    timeout = config.parallel.timeout
    store = open_store(rendezvous, timeout)
    rank, size, staged = rendezvous.rank, rendezvous.size, config.parallel.staged
    world = World.join(store, rank, size, device=device, timeout=timeout, staged=staged)
    try:
        _check_same(world, config)
    except BaseException:
        world.close(failed=True)
        raise
    return world


def _check_same(world: World, config: Config) -> None:
    values = {key: value for key, value in _flat(config.model_dump()) if key not in _OWN}
    parts = [f"{key} = {value_text(value)}" for key, value in values.items()]
    difference = first_difference(world, parts, "the configs of all ranks to be compared")
    if difference is not None:
        index, others = difference
        here = f" ({parts[index]} on rank {world.rank})" if index < len(parts) else ""
        advice = "start all ranks with the same config and version of dynmo"
        raise ConfigError(f"rank 0 and {ranks_text(others)} have different configs{here}; {advice}")


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(`section.key`, value) of every key."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(cast(dict[str, Any], value), f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def device_for(config: Config, local_rank: int) -> torch.device:
    """The CUDA device of this local rank if there is one, else the CPU, set up as the config asks.
    Raises ConfigError if CUDA is asked for and missing."""
    wanted = config.parallel.device
    if wanted != "cpu":
        # Before anything asks CUDA, which reads them once in a process. So does cuBLAS, whose
        # workspaces must be of one size for the same bits: a run that asks for these may not be the
        # first of its process.
        for name, value in {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            **(FOR_RANKS_ON_CUDA if config.ranks > 1 else {}),
        }.items():
            os.environ.setdefault(name, value)
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(
            "parallel.device = 'cuda', but torch sees no CUDA device; use 'auto' or 'cpu'"
        )
    if wanted != "cpu" and not available and config.parallel.slices:
        raise ConfigError(
            "parallel.slices = true, but torch sees no CUDA device; with parallel.device = 'cpu' the stages would compute in turn"
        )
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if local_rank >= devices and not config.parallel.staged:
        raise ConfigError(
            f"local rank {local_rank} has no CUDA device ({devices} here); use fewer ranks, device = 'cpu', parallel.slices = true, which "
            "puts a pipeline on one device, or parallel.backend = 'gloo', which lets ranks share one"
        )
    index = local_rank % devices
    torch.cuda.set_device(index)
    if (
        config.train.deterministic
    ):  # on CPU, with a fixed number of threads, all that runs here is deterministic
        torch.use_deterministic_algorithms(True)
    return torch.device("cuda", index)


def memory_limit(config: Config, device: torch.device) -> int | None:
    """Bytes per rank: as configured, else what tensors may have of the CUDA device's, in equal
    parts for its slices and for the ranks that share it; None (no limit) on CPU.

    The rest is for what no account of tensors has: the context and its kernels, NCCL's buffers,
    cuBLAS's workspaces, what the allocator rounds up. By the device's size alone, so that equal
    devices have equal limits.
    """
    if config.pipeline.memory_limit is not None:
        return config.pipeline.memory_limit
    if device.type != "cuda":
        return None
    parts = config.parallel.pipeline if config.parallel.slices else 1
    if config.parallel.staged:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", config.ranks))
        parts *= -(-ranks // torch.cuda.device_count())
    return (
        max(1, torch.cuda.get_device_properties(device).total_memory * 92 // 100 - (1 << 30))
        // parts
    )


def check_meshes(config: Config, layers: int) -> None:
    """Raises ConfigError where a mesh that the run comes to at some step cannot hold so many
    layers."""
    for _, pipeline, _ in config.elastic.reshape_at:
        first_partition(config, layers, pipeline)


def first_partition(config: Config, layers: int, pipeline: int | None = None) -> Partition:
    """`balance.initial`, else uniform: before anything is measured nothing is better to go by.
    pipeline: ranks, if not the config's."""
    stages = (pipeline or config.parallel.pipeline) * config.chunks
    if stages > layers:
        what = f"parallel.pipeline = {stages // config.chunks}"
        what += f" with {config.chunks} stages a rank" if config.chunks > 1 else ""
        raise ConfigError(f"{what} is more than the model's {layers} layers; use fewer ranks")
    if config.balance.initial is None or stages != config.stages:
        return uniform(layers, stages)
    if sum(config.balance.initial) != layers:
        raise ConfigError(
            f"balance.initial sums to {sum(config.balance.initial)}, but the model has {layers} layers"
        )
    return Partition(config.balance.initial)


def warn_of_cores(config: Config) -> str | None:
    """A line when the ranks cannot all compute at once on this machine."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    needed = config.ranks * config.parallel.threads
    if config.model.kind == "emulated" or needed <= cores:
        return None
    return f"{config.ranks} ranks of {config.parallel.threads} threads on {cores} cores: ranks take turns, so timings say little"
