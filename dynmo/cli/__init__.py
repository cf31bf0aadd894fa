"""The `dynmo` command: one file per command, and `main`, which reports errors.

A command's file imports its modules inside its function, so that `dynmo --help` and a typing
mistake are answered at once.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dynmo import __version__
from dynmo.cli.checkpoint import checkpoint
from dynmo.cli.data import data
from dynmo.cli.plan import plan
from dynmo.cli.profile import profile
from dynmo.cli.report import report
from dynmo.cli.schedule import schedule
from dynmo.cli.simulate import simulate
from dynmo.cli.train import train
from dynmo.errors import DynmoError, one_line

app = typer.Typer(
    add_completion=False,
    help="Pipeline-parallel training of language models whose work changes while they train.",
)

# One line per command.
app.command("train")(train)
app.command("data")(data)
app.command("profile")(profile)
app.command("plan")(plan)
app.command("schedule")(schedule)
app.command("simulate")(simulate)
app.command("report")(report)
app.add_typer(checkpoint, name="checkpoint")

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


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


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
    command = typer.main.get_command(app)
    status = 0
    try:
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
        return _fail(f"{message} ('{_help(error)} --help' lists what there is)", 2)
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


def _help(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return "dynmo" if context is None else context.command_path


def _place(error: Exception) -> str:
    """Returns the innermost place in dynmo's own code that the error came through."""
    package = Path(__file__).parents[1]
    places = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(package)
    ]
    last = places[-1]
    return f"{Path(last.filename).relative_to(package.parent)}:{last.lineno}"
