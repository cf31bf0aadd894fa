"""Wording of ranks and of a backend's exceptions in messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

# FileStore and gloo give no reason codes. Only the words of their messages tell a late peer from a
# dead one.
LATE = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def reason(error: BaseException) -> str:
    """Returns a backend's message without source position and advice."""
    return re.sub(r"^\[\S*\] ", "", first_line(error)).split(". ")[0]


def ranks_text(ranks: Sequence[int | str]) -> str:
    if not ranks:
        return "the other ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
