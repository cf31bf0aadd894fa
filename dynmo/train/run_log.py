"""Rank 0's record of a run: its events, its config as it is now, and the costs of its layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynmo.config import Config, with_options
from dynmo.cost import costs_file
from dynmo.cost.costs_file import Profile
from dynmo.errors import DynmoError, InputError
from dynmo.event_log import EventLog
from dynmo.events import Event
from dynmo.files import LineLog, write_whole
from dynmo.metrics import NumberSink, open_sink
from dynmo.plan.decide import DECISIONS, DecisionRecord
from dynmo.plan.problem import Kind

_logger = logging.getLogger(__name__)

Listener = Callable[[Event], None]


class RunLog:
    """Writes the files of a run that grow or change while it trains.

    Every rank has one, so that all ranks run the same code. Only rank 0's is given a folder and a
    listener.

    Args:
        goes_on: Whether another rank 0 wrote so far. A sink that cannot be opened where this one
            runs is then left out, with a line.

    Attributes:
        config: The config as it is now.
    """

    def __init__(
        self, config: Config, folder: Path | None, listen: Listener | None, goes_on: bool = False
    ) -> None:
        self.config, self._folder, self._listen = config, folder, listen
        self._decisions: LineLog | None = None
        self._stayed = set[Kind]()  # kinds of decisions of which the last changed nothing
        self._sinks = list[NumberSink]()
        for kind in config.metrics.to:
            try:
                self._sinks += [] if folder is None else [open_sink(kind, folder, config.name)]
            except DynmoError as error:
                if not goes_on:
                    raise
                _logger.warning(f"{error}; the run goes on without it")
        self._events = None if folder is None else EventLog(folder / "events.jsonl")

    @property
    def writes(self) -> bool:
        return self._folder is not None

    @property
    def is_removed(self) -> bool:
        """Whether the run's folder was removed or moved."""
        return self._folder is not None and not (self._folder / "events.jsonl").exists()

    def emit(self, event: Event) -> None:
        if self._events is not None:
            self._events.write(event)
        for sink in self._sinks:
            sink(event)
        if self._listen is not None:
            self._listen(event)

    def record_options(self, case: str, options: Mapping[str, Any]) -> None:
        """Adds options that a case has measured by itself to the run's own config."""
        self.config = with_options(self.config, ("dynamism", case), options)
        self._write_config(", ".join(options))

    def record_micro_batch(self, size: int) -> None:
        """Notes in the run's own config that a microbatch has another size."""
        self.config = with_options(self.config, ("train",), {"micro_batch": size})
        self._write_config("the size of microbatches")

    def write_config(self) -> None:
        """Writes the config, in a folder that was made anew."""
        self._write_config("the run")

    def _write_config(self, what: str) -> None:
        """Writes the config as it is now. `what` names the change in messages."""
        if self._folder is None:
            return
        path = self._folder / "config.toml"
        try:
            write_whole(path, self.config.to_toml())
        except OSError as error:  # the checkpoints have it, too
            _logger.warning(
                f"{path} cannot be written: {error.strerror}; it does not say {what} as it is"
            )

    def record_costs(self, profile: Profile) -> None:
        if self._folder is None:
            return
        try:
            costs_file.write(self._folder / costs_file.IN_RUN, profile)
        except InputError as error:  # missing costs must not end the run
            _logger.warning(str(error))

    def record_decisions(self, decisions: Sequence[DecisionRecord]) -> None:
        """Adds decisions, with what they rest on, for `dynmo simulate`.

        A decision that changes nothing is left out if the one before of its kind did neither.
        """
        if self._folder is None:
            return
        path = self._folder / DECISIONS
        for each in decisions:
            if each.stays and each.rules.kind in self._stayed:
                continue
            try:
                self._decisions = self._decisions or LineLog(path)
                self._decisions.write(each.to_text())
            except OSError as error:  # missing records must not end the run
                _logger.warning(f"{path} cannot be written: {error.strerror}")
                return
            if each.stays:
                self._stayed.add(each.rules.kind)
            else:
                self._stayed.discard(each.rules.kind)

    def close(self) -> None:
        """Closes the files. A rank 0 that has left and comes back calls it twice."""
        while self._sinks:
            self._sinks.pop(0).close()
        if self._decisions is not None:
            self._decisions.close()
        if self._events is not None:
            self._events.close()
