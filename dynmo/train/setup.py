"""Sets a config up on this machine: ranks, device, memory, placement, optimizer.

The trainer, the profiler and the plan all begin with it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from dynmo import Dynamism, RunPlan, dry_run, load_model
from dynmo.config import Config, with_options
from dynmo.data.corpus import kind_of, open_corpus
from dynmo.data.records import open_records
from dynmo.elastic.launcher.environment import prepare_cuda
from dynmo.errors import ConfigError
from dynmo.models.model import Model
from dynmo.options import find_own, value_text
from dynmo.pipeline.cases import from_class
from dynmo.runtime.comm.agreement import first_difference
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.rendezvous import Rendezvous
from dynmo.runtime.comm.store import open_store
from dynmo.runtime.comm.waits import ranks_text
from dynmo.train.data import check_tokens, open_batches, open_text, order_of

_logger = logging.getLogger(__name__)


def check_world(config: Config, rendezvous: Rendezvous) -> None:
    if rendezvous.size != config.ranks:
        sizes = (
            "replicas (each pipeline is slices of one GPU)"
            if config.parallel.slices
            else "pipeline x replicas"
        )
        raise ConfigError(
            f"the launcher started {rendezvous.size} ranks, but parallel.{sizes} = "
            f"{config.ranks}; start as many as the config says"
        )


@contextmanager
def start(config: Config, rendezvous: Rendezvous) -> Generator[tuple[Meeting, Model]]:
    """Sets a rank up: threads, device, model, and the world of all ranks.

    The world ends with the context.
    """
    check_world(config, rendezvous)
    torch.set_num_threads(config.parallel.threads)
    device = device_for(config, rendezvous.local_rank)
    model = model_of(config)
    freeze_imports()
    with join_world(config, rendezvous, device) as world:
        yield world, model


def freeze_imports() -> None:
    """Leaves what was imported out of collections, of which a rank makes one after each fault."""
    if not gc.get_freeze_count():  # a program may train more than once
        gc.freeze()


# Keys that may differ between ranks. The loader compares the data itself.
_OWN = {"data.source", "parallel.threads", "parallel.timeout", "parallel.work_timeout"}


def join_world(config: Config, rendezvous: Rendezvous, device: torch.device) -> Meeting:
    parallel = config.parallel
    world = Meeting.join(
        open_store(rendezvous, parallel.timeout),
        rendezvous.rank,
        rendezvous.size,
        device=device,
        timeout=parallel.timeout,
        staged=parallel.staged,
        work_timeout=parallel.work_timeout,
    )
    try:
        _check_same(world, config)
    except BaseException:
        world.close(failed=True)
        raise
    return world


def _check_same(world: RankGroup, config: Config) -> None:
    values = {key: value for key, value in _flat(config.model_dump()) if key not in _OWN}
    parts = [f"{key} = {value_text(value)}" for key, value in values.items()]
    difference = first_difference(world, parts, "the configs of all ranks to be compared")
    if difference is not None:
        index, others = difference
        here = f" ({parts[index]} on rank {world.rank})" if index < len(parts) else ""
        advice = "start all ranks with the same config and version of dynmo"
        raise ConfigError(f"rank 0 and {ranks_text(others)} have different configs{here}; {advice}")


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (`section.key`, value) of every key."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(cast(dict[str, Any], value), f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def device_for(config: Config, local_rank: int) -> torch.device:
    """Returns the device of a local rank, set up as the config asks.

    It is the CUDA device of the rank if there is one, and the CPU otherwise.
    """
    wanted = config.parallel.device
    if wanted != "cpu":
        prepare_cuda(config.ranks)
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(
            "parallel.device = 'cuda', but torch sees no CUDA device; use 'auto' or 'cpu'"
        )
    if wanted != "cpu" and not available and config.parallel.slices:
        raise ConfigError(
            "parallel.slices = true, but torch sees no CUDA device; with parallel.device = 'cpu' "
            "the stages would compute in turn"
        )
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if local_rank >= devices and not config.parallel.staged:
        raise ConfigError(
            f"local rank {local_rank} has no CUDA device ({devices} here); use fewer ranks, "
            "device = 'cpu', parallel.slices = true, which puts a pipeline on one device, or "
            "parallel.backend = 'gloo', which lets ranks share one"
        )
    index = local_rank % devices
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def model_of(config: Config) -> Model:
    """Loads the model that a config names."""
    own = config.train.loss
    # Not the wrapper of `find_own`: the attributes of a loss count.
    loss = None if own is None else find_own("train.loss", own).__wrapped__  # type: ignore
    return load_model(config.model, config.seed, config.dynamism.named.values(), loss)


def _shapes_of(config: Config) -> Model:
    """Loads the model without memory, if a user's function can make it on the meta device.

    A folder of transformers needs no weights there.
    """
    is_own = config.model.kind.startswith("python:")
    if is_own or config.model.kind == "hf":
        tries = contextlib.suppress(ConfigError) if is_own else contextlib.nullcontext()
        with tries, torch.device("meta"):
            return model_of(config)
    return model_of(config)


def own_cases(config: Config) -> list[Dynamism]:
    """Makes the dynamic cases of the user's own classes that a config names."""
    own = [case for case in config.dynamism.cases if case.startswith("python:")]
    return [from_class(case) for case in own]


def plan_run(config: Config) -> RunPlan:
    """Plans the run of a config without running it. Raises the errors that a run would raise."""
    model = _shapes_of(config)
    options = model.options or config.model
    if config.data.has_samples:
        open_batches(config, model)
    else:
        for each in config.data.sources:
            check_tokens(each, options)
            if not each.startswith("tokens:"):
                open_corpus(each)
    on_cuda = config.parallel.device != "cpu" and torch.cuda.is_available()
    return dry_run(model, config.options, own_cases(config), on_cuda)


def with_steps(config: Config) -> Config:
    """Returns the config with the steps that `train.epochs` gives. Reads the length of the data.

    Raises:
        ConfigError: The length is unknown, or the steps do not fit the other options.
    """
    train, data = config.train, config.data
    if train.epochs is None:
        return config
    if data.streaming:
        raise ConfigError(
            f'train.epochs = {train.epochs:g}: the length of data.source = "{data.source}" is '
            "unknown with data.streaming; give train.steps"
        )
    if data.has_samples:
        lengths = [len(open_records(each)) for each in data.sources]
    else:
        options = model_of(config).options or config.model
        lengths = [len(open_text(each, options)) for each in data.sources]
    order = order_of(config, lengths)
    steps = order.steps(train.epochs)
    if os.environ.get("RANK", "0") == "0":
        _logger.warning(
            f"train.epochs = {train.epochs:g} with {order.windows} samples: {steps} steps"
        )
    return with_options(config, ("train",), {"epochs": None, "steps": steps})


def warnings_of(config: Config) -> list[str]:
    """Returns what a run of this config should know before it trains, a line each."""
    found = (
        _warn_of_cores(config),
        _warn_of_gpus(config),
        _warn_of_data(config),
        _warn_of_torchrun(config),
    )
    return [text for text in found if text is not None]


def _warn_of_torchrun(config: Config) -> str | None:
    """Returns a warning if no rank can go on without a dead one."""
    if config.elastic.recover == "none" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return (
        "torchrun stops all its workers when one ends, so a dead rank is a restart here in spite "
        "of elastic.recover; give torchrun --max-restarts, or start the ranks by dynmo train"
    )


def _warn_of_gpus(config: Config) -> str | None:
    """Returns a warning if some GPUs of this machine have no rank."""
    if config.parallel.device == "cpu" or config.model.kind == "emulated":
        return None
    gpus, ranks = torch.cuda.device_count(), config.ranks
    if ranks >= gpus:
        return None
    return (
        f"{gpus} GPUs here, and {ranks} rank{'s' * (ranks > 1)}: the other GPUs idle; "
        "parallel.pipeline and parallel.replicas set the number of ranks"
    )


def _warn_of_data(config: Config) -> str | None:
    """Returns a warning if the text is a file of some structure. Its bytes are trained anyway."""
    start, _, name = config.data.source.partition(":")
    path = Path(name)
    if start != "file" or not path.is_file():
        return None
    kind = None
    with contextlib.suppress(OSError):  # the loader says why
        kind = kind_of(path)
    if kind is None:
        return None
    how = "as plain text" if config.model.kind == "hf" else "byte by byte"
    return (
        f'data.source = "{config.data.source}" looks like {kind}, and is trained {how}; '
        "give a file of plain text, or pass tokens in a loop of your own"
    )


def _warn_of_cores(config: Config) -> str | None:
    """Returns a warning if the ranks cannot all compute at once on this machine."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    needed = config.ranks * config.parallel.threads
    if config.model.kind == "emulated" or needed <= cores:
        return None
    return (
        f"{config.ranks} ranks of {config.parallel.threads} threads on {cores} cores: ranks take "
        "turns, so timings say little"
    )
