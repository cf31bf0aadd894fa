"""Counter-based random streams: a seed is a pure function of integer keys.

It depends neither on a rank nor on the number of earlier calls. No random state has to move with a
layer, and any schedule or placement draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache, lru_cache

import torch

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """The purpose of a stream. It keeps streams of different purposes apart."""

    INITIAL = 1
    FORWARD = 2
    CASE = 3


def case_seed(seed: int, layer: int, step: int) -> int:
    """Make the seed of what a dynamic case draws for a layer at a step."""
    return mix(seed, Purpose.CASE, layer, step)


def mix(*keys: int) -> int:
    """Make a 63-bit seed. Each key is added and the sum scrambled (splitmix64)."""
    return _seed(_state(*keys))


def _state(*keys: int) -> int:
    state = _START
    for key in keys:
        state = _mixed(state, key)
    return state


def _mixed(state: int, key: int) -> int:
    state = (state + key) * 0xBF58476D1CE4E5B9 & _MASK
    return (state ^ (state >> 29)) * 0x94D049BB133111EB & _MASK


def _seed(state: int) -> int:
    return (state ^ (state >> 32)) >> 1


_recent_state = lru_cache(_state)


def seed_forward(device: torch.device, seed: int, step: int, layer: int, microbatch: int) -> None:
    """Seed torch's generator of `device` for one layer and one microbatch."""
    state = _recent_state(seed, Purpose.FORWARD, step, layer)
    generator_of(device).manual_seed(_seed(_mixed(state, microbatch)))


@contextmanager
def generators_kept(device: torch.device) -> Generator[None]:
    """Restore torch's generators of the CPU and of `device` at the end of the block."""
    generators = {generator_of(torch.device("cpu")), generator_of(device)}
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@cache
def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that torch's own operations draw from on the device."""
    return (
        torch.cuda.default_generators[device.index or 0]
        if device.type == "cuda"
        else torch.default_generator
    )
