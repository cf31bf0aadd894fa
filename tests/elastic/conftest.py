"""Fixtures that start launchers and check that no process is left."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import end_all, gone, start


@pytest.fixture
def start_here(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command in the test's folder, with more variables of its environment.

    After the test no process works there, and no launch folder is left.
    """
    started: list[subprocess.Popen[str]] = []

    def call(command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        started.append(start(command, tmp_path, env))
        return started[-1]

    yield call
    end_all([process for process in started if process.poll() is None])
    assert gone(tmp_path)
    assert not list((tmp_path / "tmp").iterdir()), "a launch folder was left behind"
