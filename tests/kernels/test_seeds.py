"""Random streams: seeds are a function of their purpose and keys."""

from __future__ import annotations

from itertools import product

import torch
from torch.nn import functional

from dynmo.kernels.seeds import Purpose, mix, seed_forward


def test_mix_has_recorded_values() -> None:
    """Initial weights depend on these numbers, and therefore every digest."""
    assert (mix(), mix(0)) == (0x4F1BBCDCF0BE82D6, 0x685EBFF9C3568394)
    assert (mix(1), mix(0, 0)) == (0x7AEFA8AE07BBE509, 0x48AD469F86F95272)
    assert mix(7, Purpose.FORWARD, 3, 5, 1) == 0x726E95FE2C5DC5C1


def test_mix_separates_keys() -> None:
    seeds = [mix(*keys) for n in (1, 2, 3) for keys in product(range(-3, 12), repeat=n)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix(2**64 - 1) == mix(-1), "keys are taken modulo 2**64"
    bits = [sum(seed >> bit & 1 for seed in seeds) / len(seeds) for bit in range(63)]
    assert all(0.45 < share < 0.55 for share in bits), "every bit is set about half the time"


def draw(*keys: int) -> list[float]:
    seed_forward(torch.device("cpu"), *keys)
    return functional.dropout(torch.ones(64), 0.5).tolist()


def test_dropout_draws_do_not_depend_on_generator_state() -> None:
    first = draw(0, 3, 5, 1)
    torch.rand(100)  # however often the generator was used in between
    assert draw(0, 3, 5, 1) == first
    others = [draw(1, 3, 5, 1), draw(0, 4, 5, 1), draw(0, 3, 6, 1), draw(0, 3, 5, 2)]
    assert all(other != first for other in others)
    assert len({tuple(x) for x in others}) == 4
