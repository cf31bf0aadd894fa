"""A limit for calls that have none of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
