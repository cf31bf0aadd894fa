"""This process as the only rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dynmo
from dynmo.runtime.comm.meeting import Meeting


@pytest.fixture(scope="module")
def world() -> Iterator[Meeting]:
    with dynmo.init(device="cpu") as world:
        assert isinstance(world, Meeting)
        yield world
