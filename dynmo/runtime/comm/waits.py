"""Limits of waits, and the wording of ranks and of a backend's exceptions in messages."""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def call_with_limit(seconds: float, call: Callable[[], Result]) -> Result:
    """Returns the result of `call`, or raises TimeoutError after `seconds`.

    torch's stores wait for their server without a limit. A late call goes on in a thread that
    ends with the process. It must not keep Python's lock while it waits.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


# FileStore and gloo give no reason codes. Only the words of their messages tell a late peer from a
# dead one.
LATE = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def clear_frames(error: BaseException | None) -> None:
    """Drops what the frames of an error hold, such as messages under way."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def reason(error: BaseException) -> str:
    """Returns a backend's message without source position and advice."""
    return re.sub(r"^\[\S*\] ", "", first_line(error)).split(". ")[0]


def ranks_text(ranks: Sequence[int | str]) -> str:
    if not ranks:
        return "the other ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
