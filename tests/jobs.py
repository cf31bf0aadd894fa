"""Jobs that the pool's ranks can run.

Each function takes the job's world first. Arguments and results are JSON.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from dynmo.cli import main
from dynmo.config import Config, parse
from dynmo.elastic.managers import parks
from dynmo.event_log import to_json
from dynmo.events import Event, StepResult
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.run import come_back
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer
from tests.runtime.fake_time import emulated_time

SOURCE = f"file:{Path(__file__).resolve().parents[1] / 'LICENSE'}"


def parsed(config: dict[str, Any]) -> Config:
    """The configuration, on a short text if no other is asked for.

    Collecting and shuffling the standard library takes longer than a small run.
    """
    return parse({"data": {"source": SOURCE}} | config)


def train(world: Meeting, config: dict[str, Any]) -> dict[str, Any]:
    """A whole run without a folder.

    Returns the digest and the last loss. Rank 0 also returns every step's loss and placement.
    """
    loaded = parsed(config)
    events: list[Event] = []
    result = Trainer(loaded, world, model_of(loaded), None, listen=events.append).run()
    steps = [e for e in events if isinstance(e, StepResult)]
    return {
        "digest": result.weights_digest,
        "loss": result.loss,
        "losses": [e.loss for e in steps],
        "layers": [list(e.layers) for e in steps],
        "frozen": [e.frozen for e in steps],
    }


def train_staged(world: Meeting, config: dict[str, Any]) -> dict[str, Any]:
    """As `train`, with messages that are received into other memory first.

    CUDA ranks over gloo do the same.
    """
    world.staged = True
    return train(world, config)


def train_and_weights(world: Meeting, config: dict[str, Any]) -> dict[str, Any]:
    """As `train`, with this rank's weights by layer, flat, in parameter order."""
    loaded = parsed(config)
    events: list[Event] = []
    trainer = Trainer(loaded, world, model_of(loaded), None, listen=events.append)
    trainer.run()
    layers = trainer.pipeline._engine.store.own
    return {
        "losses": [e.loss for e in events if isinstance(e, StepResult)],
        "weights": {
            index: [x for p in module.parameters() for x in p.flatten().tolist()]
            for index, (module, _) in layers.items()
        },
    }


def train_in(
    world: Meeting,
    config: dict[str, Any],
    folder: str,
    resume: bool = False,
    stop_after: int | None = None,
) -> dict[str, Any]:
    """A run in a folder.

    Args:
        world: Meeting of all ranks.
        config: Configuration of the run.
        folder: Folder of the run.
        resume: True goes on from the newest checkpoint in the folder.
        stop_after: Step after which rank 0 is asked to stop, by the signal that a launcher sends.
    """

    def listen(event: Event) -> None:
        if isinstance(event, StepResult) and event.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    loaded = parsed(config)
    return vars(Trainer(loaded, world, model_of(loaded), Path(folder), resume, listen).run())


def resume_and_listen(world: Meeting, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """A run that goes on. The key `said` has what it prints on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        result = train_in(world, config, folder, resume=True)
    return {**result, "said": said.getvalue()}


def events(world: Meeting, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that a run without a folder tells its listener, as in the log."""
    loaded = parsed(config)
    told: list[Event] = []
    Trainer(loaded, world, model_of(loaded), None, listen=told.append).run()
    return [to_json(event) for event in told]


def train_elastic(world: Meeting, config: dict[str, Any]) -> dict[str, Any]:
    """As `train`, for a run whose ranks may leave and come back.

    Returns what rank 0 saw, and how often this process was a rank.
    """
    loaded = parsed(config)
    events: list[Event] = []
    model = model_of(loaded)
    trainer = Trainer(loaded, world, model, None, listen=events.append)
    result = trainer.run()
    if result.left and parks(loaded.elastic):
        result = come_back(trainer) or result
    return {
        "left": result.left,
        "digest": result.weights_digest,
        "buffers": result.buffers_digest,
        "loss": result.loss,
        "events": [to_json(event) for event in events],
    }


@contextlib.contextmanager
def launched(world: Meeting, size: int, port: str, folder: str = ".") -> Iterator[None]:
    """This process as torchrun starts it, or as a shell starts a single rank.

    Args:
        world: Meeting of all ranks. It is closed.
        size: Number of ranks that torchrun starts.
        port: A free port.
        folder: Working folder.
    """
    torchrun = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(world.rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    world.close()
    with (
        mock.patch.dict(os.environ, torchrun),
        mock.patch.object(sys, "path", [*sys.path]),
        contextlib.chdir(folder),
    ):
        for name in ("DYNMO_RENDEZVOUS", "DYNMO_PROCESS", *(torchrun if size == 1 else ())):
            os.environ.pop(name, None)
        yield


def script(
    world: Meeting, path: str, port: str, arguments: Sequence[str] = (), size: int | None = None
) -> str:
    """Runs a Python script on each rank, and returns what it prints.

    Args:
        world: Meeting of all ranks.
        path: Path of the script.
        port: A free port.
        arguments: Arguments of the script.
        size: Number of ranks that the script sees. The default is the size of `world`.
    """
    with (
        launched(world, size or world.size, port),
        mock.patch.object(sys, "argv", [path, *arguments]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def command(world: Meeting, lines: list[list[str]], folder: str, port: str) -> tuple[int, str, str]:
    """Runs `dynmo` with a line for each rank. Returns exit status, stdout and stderr."""
    with (
        launched(world, world.size, port, folder),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        sys.modules.pop("models", None)
        status = main(lines[world.rank])
    return status, out.getvalue(), err.getvalue()


def command_in_emulated_time(world: Meeting, **given: Any) -> tuple[int, str, str]:
    with emulated_time():
        return command(world, **given)
