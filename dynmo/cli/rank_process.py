"""The ways in which a process becomes a rank, for `dynmo train` and `dynmo profile`.

The command's own process starts the ranks on this machine. Each of them runs the command once more,
as a local rank. A process that torchrun or Slurm has started is a rank itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dynmo.errors import DynmoError, RunError

if TYPE_CHECKING:
    from dynmo.config import Config
    from dynmo.runtime.comm.rendezvous import Rendezvous


def import_from_working_folder() -> None:
    """Makes modules in the working folder importable, after all installed ones.

    The folder comes last in `sys.path`. A file there with the name of a module of Python or of a
    package, such as `types.py`, therefore hides nothing.
    """
    here = str(Path.cwd())
    if sys.path[:1] in ([""], [here]):  # `python -m dynmo` puts it first
        del sys.path[0]
    if here not in sys.path:
        sys.path.append(here)


def rank_command(*arguments: str) -> list[str]:
    """Returns the command line of a local rank.

    With -P, Python does not put the working folder first in `sys.path`.
    """
    return [sys.executable, "-P", "-m", "dynmo", *arguments]


@contextlib.contextmanager
def folder_of_ranks(config: Config, command: str) -> Iterator[Path]:
    """Makes a temporary folder with a config, for ranks on this machine.

    The folder stays only if a rank fails and says why in its log.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"dynmo-{command}-"))
    says_why = False
    try:
        (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        yield folder
    except RunError:
        says_why = any(log.stat().st_size for log in folder.glob("*.log"))
        raise
    finally:
        if not says_why:
            shutil.rmtree(folder, ignore_errors=True)


def check_input(config: Config) -> None:
    """Checks the config without torch, before anything is made or overwritten."""
    from dynmo.data.corpus import TokenFile, check_vocab, open_corpus
    from dynmo.elastic.managers import make_manager

    source = config.data.source
    if config.model.kind not in ("emulated", "hf") and not source.startswith("tokens:"):
        check_vocab(config.model.vocab)
    if source.startswith("file:"):
        open_corpus(source)
    if source.startswith("tokens:"):
        TokenFile(Path(source.removeprefix("tokens:")))
    make_manager(config.elastic)


def with_known_steps(config: Config, as_json: bool) -> Config:
    """Returns the config with the steps that `train.epochs` gives."""
    if config.train.epochs is None:
        return config
    from dynmo.train.setup import with_steps

    with stdout_for_json(as_json):
        return with_steps(config)


def run_local_rank(path: Path, run: Callable[[Config, Rendezvous], int]) -> int:
    """Runs a rank that dynmo's launcher started on the config in its run's folder.

    Errors go to the launcher, which reports the cause.
    """

    def start() -> int:
        from dynmo.config import load
        from dynmo.runtime.comm.rendezvous import from_environment

        rendezvous = from_environment()
        assert rendezvous is not None
        return run(load(path), rendezvous)

    return report_to_launcher(path.parent / f"rank-{os.environ['RANK']}.log", start)


def report_to_launcher(log: Path, run: Callable[[], int]) -> int:
    """Runs a process that dynmo's launcher started. Its errors go to the launcher."""
    from dynmo.elastic.launcher.rank_side import enter_rank, report_failure

    enter_rank(log)
    try:
        return run()
    except Exception as error:
        return report_failure(error, log)


def prepare_joined_rank(rendezvous: Rendezvous) -> None:
    """Sets up a process that torchrun or Slurm started, before it imports torch."""
    from dynmo.elastic.launcher.rank_side import quiet_torch

    quiet_torch()
    if rendezvous.loopback and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@contextlib.contextmanager
def described_errors(rank: int | None) -> Iterator[None]:
    """Turns errors of a rank that has no launcher into RunError, with the user's line."""
    from dynmo.elastic.launcher.rank_side import describe

    try:
        yield
    except DynmoError:
        raise
    except Exception as error:
        raise RunError(f"{describe(error, rank)} (DYNMO_TRACEBACK=1 shows more)") from error


def show_progress_of_reading() -> None:
    """Lets a rank tell how much of a large model it has read."""
    logging.getLogger("dynmo.models.huggingface.build").setLevel(logging.INFO)


def stdout_for_json(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Redirects the prints of a user's own model to stderr with --json.

    Stdout is for the one JSON object.
    """
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
