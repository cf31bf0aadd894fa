"""`dynmo profile` measures a model's layers and writes a costs file.

It measures for a few steps. `dynmo plan` reads the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import typer

from dynmo.cli.options import OfRun, command
from dynmo.cli.output import check_folder, compilation_told, print_json, print_table, progress
from dynmo.cli.rank_process import (
    check_input,
    described_errors,
    folder_of_ranks,
    import_from_working_folder,
    prepare_joined_rank,
    rank_command,
    run_local_rank,
    show_progress_of_reading,
    stdout_for_json,
    with_known_steps,
)
from dynmo.errors import InputError
from dynmo.options import Count
from dynmo.report.numbers import show_mebibytes, show_share

if TYPE_CHECKING:
    from dynmo import LayerCost
    from dynmo.config import Config
    from dynmo.cost.costs_file import Profile
    from dynmo.runtime.comm.rendezvous import Rendezvous

_logger = logging.getLogger(__name__)

_SIZES = {
    "held": "static_bytes",
    "activations": "activation_bytes",
    "until W": "stash_bytes",
    "output": "output_bytes",
}


class ProfileOptions(OfRun):
    steps: Count = 8
    """Steps to measure, after one that warms up."""
    out: Path | None = None
    """The costs file (default: NAME-costs.json)."""


@command
def profile(options: ProfileOptions) -> None:
    from dynmo.config import load
    from dynmo.elastic.launcher.rank_side import is_local_rank

    import_from_working_folder()
    if is_local_rank():
        raise typer.Exit(run_local_rank(options.config, partial(_measure, options)))

    from dynmo.runtime.comm.rendezvous import from_environment

    config = with_known_steps(load(options.config, options.set_ or []), options.as_json)
    out = options.out or Path(f"{config.name}-costs.json")
    options = options.model_copy(update={"out": out})
    rendezvous = from_environment()
    if rendezvous is None:
        check_input(config)
        _check_out(out)
        raise typer.Exit(_spawn(options, config))
    if rendezvous.rank == 0:
        _check_out(out)
    prepare_joined_rank(rendezvous)
    with described_errors(rendezvous.rank):  # this rank reports its errors itself
        status = _measure(options, config, rendezvous)
    raise typer.Exit(status)


def _check_out(out: Path) -> None:
    """Rejects another file of that name, or a missing folder, before the work begins."""
    from dynmo.cost.costs_file import KIND

    check_folder("--out", out)
    if not out.exists():
        return
    try:
        known = KIND in out.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        known = False
    if not known:
        raise InputError(
            f"--out {out} exists and was not written by dynmo profile; choose another name"
        )


def _spawn(options: ProfileOptions, config: Config) -> int:
    """Starts the ranks on this machine."""
    from dynmo.elastic.launcher.supervisor import spawn

    with folder_of_ranks(config, "profile") as folder:
        given = ["--steps", str(options.steps), "--out", str(options.out)]
        given += ["--json"] * options.as_json
        line = rank_command("profile", str(folder / "config.toml"), *given)
        return spawn(line, config.ranks, config.parallel.threads, folder)


def _measure(options: ProfileOptions, config: Config, rendezvous: Rendezvous) -> int:
    """Runs one rank. Rank 0 writes and prints the result. Returns the exit status."""
    from dynmo.cost.costs_file import to_json, write
    from dynmo.train.setup import warnings_of

    if rendezvous.rank:
        _measured(config, rendezvous, options.steps, lambda done, steps: None)
        return 0
    for warning in warnings_of(config):
        _logger.warning(warning)
    show_progress_of_reading()
    with (
        compilation_told(),
        stdout_for_json(options.as_json),
        progress(f"measuring {config.name}") as listen,
    ):
        measured = _measured(config, rendezvous, options.steps, listen)
    assert options.out is not None
    write(options.out, measured)
    if options.as_json:
        print_json({"file": str(options.out), **to_json(measured)})
    else:
        _print_text(measured, options.out)
    return 0


def _measured(
    config: Config, rendezvous: Rendezvous, steps: int, listen: Callable[[int, int], None]
) -> Profile:
    """Measures a model's layers over a few steps, as they run in training. All ranks call it.

    The dynamic cases act before the first step only, which warms up and is not counted. They may
    freeze a prefix, for example. Nothing changes later. A layer's figure is the median of the
    steps, so that one disturbed step does no harm. Every rank gets the same profile.
    """
    from dynmo import Pipeline
    from dynmo.train.data import open_data
    from dynmo.train.setup import own_cases, start

    options = config.pipeline_arguments(
        optimizer=config.optimizer.model_copy(update={"lr": 0.0}),
        learning_rate=None,
        elastic=None,
        max_grad_norm=0.0,
        check_memory=False,
    )
    with start(config, rendezvous) as (world, model):
        cases = [*config.dynamism.named.values(), *own_cases(config)]
        pipeline = Pipeline(model, world, cases=cases, **options)
        readings: list[tuple[LayerCost, ...]] = []
        with closing(open_data(config, pipeline, model)) as loader:
            for step in range(steps + 1):
                pipeline.measured.forget()
                inputs, targets, _ = loader.train(step)
                pipeline.step(inputs, targets, adapt=step == 0)
                costs = pipeline.measured.costs()
                if step:
                    readings.append(costs)
                    listen(step, steps)
        measured = tuple(_median(layer) for layer in zip(*readings, strict=True))
        return pipeline.measured.profile(steps, measured)


def _median(costs: Sequence[LayerCost]) -> LayerCost:
    """Returns a layer's cost with the median of each figure.

    Sizes are the same in every step, unless they depend on a microbatch's content.
    """
    from dynmo.cost.costs_file import SIZES

    middle = {name: median(getattr(x, name) for x in costs) for name in vars(costs[0])}
    return replace(costs[0], **middle | {name: int(middle[name]) for name in SIZES})


def _print_text(measured: Profile, out: Path) -> None:
    whole = sum(layer.seconds for layer in measured.layers) or 1.0
    rows = [
        {"layer": name}
        | {f"{kind.upper()} ms": f"{getattr(layer, kind) * 1e3:.3f}" for kind in "fbw"}
        | {"share": show_share(layer.seconds / whole), "parameters": f"{layer.parameters:,}"}
        | {
            f"{heading} MiB": show_mebibytes(getattr(layer, size), 2)
            for heading, size in _SIZES.items()
        }
        for name, layer in zip(measured.names, measured.layers, strict=True)
    ]
    print_table(
        rows,
        f"{len(rows)} layers, microbatches of {measured.microbatch}, median of {measured.steps} "
        "steps",
    )
    for (low, high), link in measured.links:
        rate = (
            f"{link.bytes_per_second / 1e9:.2f} GB/s"
            if link.bytes_per_second < 1e15
            else "no measurable time per byte"
        )
        print(f"rank {low} - rank {high}: {link.latency * 1e6:.0f} us, {rate}")
    print(f"{out}: plan with it: dynmo plan --costs {out}")
