"""Parts of the files that users write: types of values, and one-line messages about wrong ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dynmo import files
from dynmo.cost.layer_cost import LinkCost
from dynmo.errors import InputError
from dynmo.files import parse_json

Time = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e-30, allow_inf_nan=False)]

_LONGEST = 40  # characters of a value in a message


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Link(Strict):
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


def read_json(path: Path, where: str, folder_hint: str = "give a file") -> object:
    text = read_text(path, where, folder_hint)
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{where}: not JSON: {error.msg} at {place}") from None
    except ValueError as error:
        raise InputError(f"{where}: not JSON that can be read: {error}") from None


def first_problem(error: ValidationError, rank: Callable[[Any], int] = lambda problem: 0) -> Any:
    """Picks one of pydantic's problems: the first of those with the least `rank`.

    A mistyped key comes before the key that is missing for it.
    """
    problems = error.errors(include_url=False)
    return min(problems, key=lambda problem: (problem["type"] != "extra_forbidden", rank(problem)))


def unknown_key(key: str, keys: Iterable[str], name: str | None = None) -> str:
    """Says that a key is unknown, and suggests the one that was meant."""
    keys = list(keys)
    near = get_close_matches(key.lower(), keys, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(keys)}"
    return f"unknown key {name or key!r}; {hint}"


def short(value: object) -> str:
    """Writes a value as JSON does, cut to at most 40 characters."""
    is_nan = isinstance(value, float) and math.isnan(value)
    text = "NaN" if is_nan else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
