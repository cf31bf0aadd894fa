"""`Finding`: the result of one check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How much a finding matters to a run."""

    ok = "ok"
    warning = "warning"
    """Runs work. They are slower, or an option of dynmo does not work."""
    problem = "problem"
    """A run would fail."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: What was looked at, such as "disk".
        seen: What was found there.
        remedy: What to do. Empty if there is nothing to do.
        figures: The numbers of `seen`, for programs.
    """

    check: str
    state: State
    seen: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
