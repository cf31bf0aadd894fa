"""`dynmo data` tokenises the data of a run ahead, and shows what a batch looks like."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dynmo.cli.options import OfRun, command
from dynmo.cli.output import check_folder, console_for_tables, print_facts, print_json, progress
from dynmo.cli.rank_process import import_from_working_folder
from dynmo.errors import InputError
from dynmo.options import Count
from dynmo.report.numbers import show_share

if TYPE_CHECKING:
    from dynmo.train.look_ahead import DataView

_logger = logging.getLogger(__name__)

_BAR = 40
_LETTERS = 1200


class DataCommandOptions(OfRun):
    out: Path | None = None
    """Write the tokens to this file."""
    workers: Count | None = None
    """Processes that tokenise (default: one a core)."""
    force: bool = False
    """Replace a file that is there."""


@command
def data(options: DataCommandOptions) -> None:
    from dynmo.config import load

    import_from_working_folder()
    config = load(options.config, options.set_ or [])
    workers = options.workers or os.cpu_count() or 1
    _check_out(options)

    from dynmo.train.look_ahead import tokenise, view_of

    with progress(f"reading {config.data.source}") as listen:
        view = view_of(config, listen)
    for text in view.warnings:
        _logger.warning(text)
    written = None
    if options.out is not None:
        with progress(f"tokenising {config.data.source}") as listen:
            try:
                written = tokenise(config, options.out, workers, listen)
            except OSError as error:
                raise InputError(f"--out {options.out}: {error.strerror or error}") from None
    if options.as_json:
        told = {"file": None if written is None else asdict(written), **view.numbers}
        told |= {"histogram": view.histogram, "microbatches": view.microbatches}
        told["evaluates_on"] = view.held_out
        print_json(told)
        return
    _print_text(view)
    if written is not None:
        left_out = f", {written.skipped} left out" if written.skipped else ""
        many = "" if written.samples is None else f"{written.samples:,} samples, "
        print(f"{options.out}: {many}{written.tokens:,} tokens{left_out}")
        answers = " (without data.answers_only)" if config.data.answers_only else ""
        print(f'train on it with data.source = "{written.source}"{answers}')


def _check_out(options: DataCommandOptions) -> None:
    out = options.out
    if out is None:
        return
    check_folder("--out", out)
    if out.exists() and not (options.force and out.is_file()):
        raise InputError(f"--out {out} exists; choose another name, or give --force")


def _print_text(view: DataView) -> None:
    from rich.text import Text

    console = console_for_tables()
    print_facts(
        (
            name.replace("_", " "),
            show_share(number) if name in ("counted", "padding") else f"{number:,.0f}",
            "",
        )
        for name, number in view.numbers.items()
    )
    print(f"held out for evaluations: {view.held_out}")
    most = max(view.histogram.values(), default=0)
    for edge, count in view.histogram.items():
        print(f"up to {edge:>6,} tokens {count:>9,} {'#' * round(_BAR * count / most)}")
    shapes = ", ".join(f"{rows} x {length}" for rows, length in view.microbatches[:8])
    more = ", ..." if len(view.microbatches) > 8 else ""
    print(f"microbatches of the first step, rows x tokens: {shapes}{more}")
    for number, pieces in enumerate(view.texts):
        print(f"--- sample {number} of the first step; the loss counts what is between « and »")
        shown = Text()
        for text, is_counted in pieces:
            shown.append(f"«{text}»" if is_counted else text, "bold" if is_counted else "dim")
        if len(shown) > _LETTERS:
            shown.truncate(_LETTERS)
            shown.append(" ...")
        console.print(shown, soft_wrap=True)
