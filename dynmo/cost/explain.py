"""One-line messages about a file that pydantic has refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

_LONGEST = 40


def first_problem(error: ValidationError, rank: Callable[[Any], int] = lambda problem: 0) -> Any:
    """Picks one of pydantic's problems.

    A mistyped key comes before the key that is missing for it.

    Args:
        error: The exception of pydantic.
        rank: Orders the other problems, the least first. Equal ones stay in pydantic's order.

    Returns:
        The problem as pydantic describes it: `type`, `loc`, `input` and `msg`.
    """
    problems = error.errors(include_url=False)
    return min(problems, key=lambda problem: (problem["type"] != "extra_forbidden", rank(problem)))


def unknown_key(key: str, keys: Iterable[str], name: str | None = None) -> str:
    """Says that a key is unknown, and suggests the one that was meant.

    Args:
        key: The key as it was written.
        keys: The known keys.
        name: How to call the key in the message. The default is the key itself.

    Returns:
        One line.
    """
    keys = list(keys)
    near = get_close_matches(key.lower(), keys, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(keys)}"
    return f"unknown key {name or key!r}; {hint}"


def short(value: object) -> str:
    """Writes a value as JSON does, cut to at most 40 characters."""
    text = (
        "NaN" if isinstance(value, float) and math.isnan(value) else json.dumps(value, default=str)
    )
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
