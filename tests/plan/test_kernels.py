"""The compiled neighbours of a placement, beside the definition."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from dynmo.plan._replay_kernels import promising


@pytest.mark.parametrize("seed", range(20))
def test_neighbours_are_those_whose_busiest_stage_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    stages, microbatches = draw.randint(2, 6), 4
    counts = [draw.randint(1, 4) for _ in range(stages)]
    bounds = np.cumsum([0, *counts])
    times = np.array([[draw.uniform(0.5, 2) for _ in range(bounds[-1])] for _ in range(3)])
    works = np.concatenate([np.zeros((3, 1)), times.cumsum(1)], 1)[:, None, :]
    order = draw.sample(range(stages), stages)
    ops = np.repeat([microbatches, microbatches, microbatches, 0], stages)

    def busiest(placed: list[int]) -> float:
        total = times.sum(0)
        return microbatches * max(total[a:b].sum() for a, b in pairwise(placed))

    best, expected = busiest(bounds.tolist()) * 1.05, list[list[int]]()
    for source in order:
        for target in reversed(order):
            if source != target and counts[source] > 1:
                moved = list(counts)
                moved[source] -= 1
                moved[target] += 1
                placed = np.cumsum([0, *moved]).tolist()
                if busiest(placed) < best:
                    expected.append(placed)
    found = promising(ops, np.arange(stages), works, bounds, np.array(order), best)
    assert found.tolist() == expected
