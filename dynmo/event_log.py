"""Writes and reads a run's log (`runs/<name>/events.jsonl`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from dynmo.errors import InputError, RunError
from dynmo.events import Event, from_json, to_json
from dynmo.files import LineLog, parse_json, read_text


class EventLog:
    """Appends events to a file, a line each. A torn last line is dropped."""

    def __init__(self, path: Path) -> None:
        """Raises InputError if the file cannot be opened."""
        self._path = path
        try:
            self._log = LineLog(path)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None

    def write(self, event: Event) -> None:
        """Raises RunError if the file cannot be written, or has been removed."""
        try:
            self._log.write(json.dumps(to_json(event)))
        except OSError as error:
            raise RunError(f"{self._path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        self._log.close()


def read(path: Path) -> Iterator[Event]:
    """Reads the events of a log.

    A torn last line (the run was cut off) is left out.

    Args:
        path: The log.

    Raises:
        InputError: Any other line is bad. The message has its number.
    """
    try:
        lines = read_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InputError(f"{path} cannot be read: {reason}") from None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = parse_json(line)
        except ValueError:
            if number == len(lines):
                return
            raise InputError(f"{path}:{number}: not a line of JSON") from None
        try:
            if not isinstance(record, dict):
                raise InputError("not an event")
            yield from_json(cast(dict[str, Any], record))
        except InputError as error:
            raise InputError(f"{path}:{number}: {error}") from None
