"""Says in one line what is wrong with a file that pydantic has refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

_LONGEST = 40


def first_problem(error: ValidationError, rank: Callable[[Any], int] = lambda problem: 0) -> Any:
    """Picks one of pydantic's problems: a mistyped key before the key that is missing for it.

    Args:
        error: What pydantic raised.
        rank: Orders the other problems, the least first. Equal ones stay in pydantic's order.

    Returns:
        The problem as pydantic describes it: `type`, `loc`, `input` and `msg`.
    """
    problems = error.errors(include_url=False)
    return min(problems, key=lambda problem: (problem["type"] != "extra_forbidden", rank(problem)))


def unknown_key(key: str, keys: Iterable[str], name: str | None = None) -> str:
    """Refuses a key, and suggests the one that was meant.

    Args:
        key: What was written.
        keys: The keys that there are.
        name: How to call the key in the message. The default is the key itself.
    """
    keys = list(keys)
    near = get_close_matches(key.lower(), keys, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(keys)}"
    return f"unknown key {name or key!r}; {hint}"


def short(value: object) -> str:
    """A value as JSON has it, cut to at most 40 characters."""
    text = (
        "NaN" if isinstance(value, float) and math.isnan(value) else json.dumps(value, default=str)
    )
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
