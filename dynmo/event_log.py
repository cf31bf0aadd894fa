"""Writes and reads a run's log (`runs/<name>/events.jsonl`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from dynmo import change_events  # noqa: F401  # its events are kinds, too
from dynmo.errors import InputError, RunError
from dynmo.events import EndEvent, Event
from dynmo.files import LineLog, parse_json, read_text

_WORDS = {"source": "from", "target": "to"}
_LAST = 1 << 16  # most bytes of the last event


def to_json(event: Event) -> dict[str, Any]:
    """Returns the record that is written for an event."""
    return {
        "event": event.event,
        **{_WORDS.get(key, key): value for key, value in vars(event).items()},
    }


def from_json(record: dict[str, Any]) -> Event:
    """Reads an event from a record.

    Keys that the kind does not know are left out. Fields with a default may be missing, because an
    older version did not write them.
    """
    kind = Event.kinds.get(str(record.get("event")))
    if kind is None:
        raise InputError(f"unknown event {record.get('event')!r}")
    values: dict[str, Any] = {}
    for each in fields(kind):
        key = each.name
        word = _WORDS.get(key, key)
        if word not in record:
            if key != "time" and (each.default, each.default_factory) != (MISSING, MISSING):
                continue
            raise InputError(f"event {kind.event!r} lacks {word!r}")
        values[key] = record[word]
    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        word, problem = _WORDS.get(key, key), first["msg"]
        raise InputError(f"event {kind.event!r} has a wrong {word!r}: {problem}") from None


@cache
def _adapter(kind: type[Event]) -> TypeAdapter[Event]:
    return TypeAdapter(kind)


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


def has_ended(path: Path) -> bool:
    """Returns whether the last event of a log, if there is one, is that of a run's end."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST))
        *_, last = [b"", *file.read().splitlines()]
    with suppress(ValueError, LookupError, TypeError):  # torn or damaged
        return json.loads(last)["event"] == EndEvent.event
    return False


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
