"""The `dynmo` command: one file per command, and `main`, which reports errors.

The file of a command is loaded if the command is called. The file loads what its options need, and
the rest inside its function. `dynmo --help` and a typing mistake are therefore answered at once.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from dynmo import __version__
from dynmo.errors import DynmoError, one_line

COMMANDS = {
    "train": "Train a model over pipeline ranks, rebalancing as it changes.",
    "doctor": "Look at this machine: what works, what does not, and what to do.",
    "data": "Tokenise the data of a run ahead, and show what a batch looks like.",
    "profile": "Measure a model's layers and write a costs file.",
    "plan": "Plan placement and schedule for measured layer costs.",
    "schedule": "Make or read a pipeline schedule and replay it at given costs.",
    "simulate": "Replay a changing workload under a balancing policy, or the decisions of a run.",
    "report": "Show what was measured in a run; compare several runs against the first.",
    "dashboard": "Show runs in a browser while they train.",
    "checkpoint": "Use the checkpoints of a run.",
}
"""The commands, each a name in the file of that name, and their help."""

# Base class of the usage errors (wrong option, missing argument, wrong type). Typer does not export
# it by name.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]


class _StderrHandler(logging.Handler):
    """Prints to the stderr of the moment, which a progress line may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print("dynmo:", one_line(record.getMessage()), file=sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dynmo {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Pipeline-parallel training of language models whose work changes while they train."""


def application(*called: str) -> typer.Typer:
    """Returns the command line. Of its commands, only those in `called` can run."""
    app = typer.Typer(add_completion=False, callback=_options)
    for name, summary in COMMANDS.items():
        loaded = getattr(import_module(f"dynmo.cli.{name}"), name) if name in called else _options
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name, help=summary)
        else:
            app.command(name, help=summary)(loaded)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Every error becomes one line on stderr.

    Args:
        arguments: The arguments. The default is the process's own.

    Returns:
        The exit status: 0 done, 1 the run failed, 2 the input is wrong, 130 interrupted.
    """
    logger = logging.getLogger("dynmo")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    status = 0
    try:
        command = typer.main.get_command(application(*given))
        try:
            # Not command.main(): it would print errors in boxes of its own.
            with command.make_context("dynmo", given) as context:
                command.invoke(context)
        except typer.Exit as done:
            status = done.exit_code
        sys.stdout.flush()
        return status
    except DynmoError as error:
        if os.environ.get("DYNMO_TRACEBACK") == "1":
            traceback.print_exc()
        return _fail(str(error), error.exit_status)
    except _ClickException as error:
        message: str = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        context = getattr(error, "ctx", None)
        called = "dynmo" if context is None else context.command_path
        return _fail(f"{message} ('{called} --help' lists what there is)", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output has seen enough (`| head`). Python would complain again when it
        # flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _fail(f"no space left to write to: {error}", 1)
        if os.environ.get("DYNMO_TRACEBACK") == "1":
            traceback.print_exc()
        return _fail(
            f"a defect in dynmo, please report it: {_place(error)}: {type(error).__name__}: "
            f"{error} (DYNMO_TRACEBACK=1 shows more)",
            1,
        )


def _fail(message: str, status: int) -> int:
    print("dynmo:", one_line(message), file=sys.stderr)
    return status


def _place(error: Exception) -> str:
    """Returns the innermost place in dynmo's own code that the error came through."""
    package = Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    *_, last = (frame for frame in frames if Path(frame.filename).is_relative_to(package))
    return f"{Path(last.filename).relative_to(package.parent)}:{last.lineno}"
