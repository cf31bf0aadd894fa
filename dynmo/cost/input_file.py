"""Parts of the files that users write: types of values, and one-line messages about wrong ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import Field, ValidationError

from dynmo import files
from dynmo.cost.layer_cost import LinkCost
from dynmo.errors import InputError, one_line
from dynmo.files import parse_json
from dynmo.options import Options, problems_of

Time = Annotated[float, Field(ge=0, le=1e30)]
Rate = Annotated[float, Field(ge=1e-30)]

_Checked = TypeVar("_Checked", bound=Options)


class Link(Options):
    latency: Time = 0.0
    bytes_per_second: Rate | None = None

    def to_link_cost(self) -> LinkCost:
        rate = math.inf if self.bytes_per_second is None else self.bytes_per_second
        return LinkCost(self.latency, rate)


def read_text(path: Path, where: str, folder_hint: str = "give a file") -> str:
    """Reads a text file. `where` names it in messages."""
    try:
        return files.read_text(path)
    except IsADirectoryError:
        raise InputError(f"{where}: a folder; {folder_hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InputError(f"{where}: cannot be read: {reason}") from None


def read_json(path: Path, where: str) -> object:
    text = read_text(path, where)
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{where}: not JSON: {error.msg} at {place}") from None
    except ValueError as error:
        raise InputError(f"{where}: not JSON that can be read: {error}") from None


def checked(kind: type[_Checked], data: Mapping[str, Any], where: str = "") -> _Checked:
    """Returns what a file says, checked. A mistyped key comes before one that is missing for it."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = min(problems_of(error, data), key=lambda problem: not problem.is_unknown)
        text = first.text
        if first.is_unknown:
            *section, key = (part for part in first.place if isinstance(part, str))
            found: type[Options] = kind
            for part in section:
                found = _section(found.model_fields[part].annotation) or found
            text = unknown_key(key, found.model_fields, ".".join([*section, key]))
        raise InputError(one_line(where + text)) from None


def _section(annotation: object) -> type[Options] | None:
    """Returns the record of a field, or that of the items of its list."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return annotation
    return next(filter(None, map(_section, get_args(annotation))), None)


def unknown_key(key: str, keys: Iterable[str], name: str | None = None) -> str:
    """Says that a key is unknown, and suggests the one that was meant."""
    keys = list(keys)
    near = get_close_matches(key.lower(), keys, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(keys)}"
    return f"unknown key {name or key!r}; {hint}"
