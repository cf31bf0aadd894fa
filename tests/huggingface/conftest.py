"""This process as the only rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dynmo
from dynmo.runtime.comm.world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with dynmo.init(device="cpu") as world:
        assert isinstance(world, World)
        yield world
