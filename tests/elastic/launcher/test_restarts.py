"""Restarts after failures: how many, after which, and what is told."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

import pytest

from dynmo.elastic.launcher.restarts import with_restarts
from dynmo.errors import ConfigError, DynmoError, Interrupted, RunError

Attempt = tuple[int, Exception | int]


def run(most: int, *attempts: Attempt) -> tuple[int, int]:
    """Runs attempts, each with its steps and its end. Returns the status and their number."""
    done: list[Attempt] = []

    def attempt() -> int:
        done.append(attempts[len(done)])
        end = done[-1][1]
        if isinstance(end, Exception):
            raise end
        return end

    status = with_restarts(attempt, most, lambda: done[-1][0], lambda: "begins anew")
    return status, len(done)


def test_each_restart_is_told(caplog: pytest.LogCaptureFixture) -> None:
    attempts: Sequence[Attempt] = [
        (23, RunError("rank 1 died")),
        (30, RunError("rank 1 died")),
        (30, RunError("rank 0 died")),
        (40, 0),
    ]
    assert run(3, *attempts) == (0, 4)
    assert caplog.messages == [
        "after 23 steps: rank 1 died; restart 1 of 3 begins anew",
        "after 30 steps: rank 1 died; restart 2 of 3 begins anew",
        "after 30 steps: rank 0 died; restart 3 of 3 begins anew",
    ]


@pytest.mark.parametrize(
    ("most", "attempts", "kind", "line"),
    [
        (0, [(5, RunError("it died"))], RunError, "it died"),
        (
            5,
            [(5, RunError("it died")), (9, RunError("other")), (6, RunError("it died"))],
            RunError,
            "it died; this came twice after 6 steps",
        ),
        (1, [(5, RunError("a")), (9, RunError("b"))], RunError, "b; this came after 1 restart"),
        (5, [(0, ConfigError("wrong"))], ConfigError, "wrong"),
        (5, [(5, RunError("it died")), (5, ConfigError("no data"))], RunError, "no data"),
        (5, [(5, Interrupted("interrupted"))], Interrupted, "interrupted"),
    ],
    ids=["none", "twice", "exhausted", "input", "input after steps", "interrupted"],
)
def test_run_that_fails_at_last(
    most: int, attempts: list[Attempt], kind: type[DynmoError], line: str
) -> None:
    with pytest.raises(kind) as caught:
        run(most, *attempts)
    assert str(caught.value) == line


def test_no_restart_follows_a_signal() -> None:
    """The signal may come while the attempt ends, or between two attempts."""

    def asked(then: Callable[[], str]) -> None:
        def attempt() -> int:
            raise RunError("rank 1 died")

        with pytest.raises(RunError, match="rank 1 died"):
            with_restarts(attempt, 3, lambda: 0, then)

    def signalled() -> str:
        signal.raise_signal(signal.SIGTERM)
        return "begins anew"

    asked(signalled)
