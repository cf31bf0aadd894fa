"""A model of how many tokens choose each expert, by layer and moment.

It is made for 16 replicas. It is drawn with a fixed seed and not recorded from a run.

- Popularity. The experts of a layer follow Zipf's law: the expert of place i gets a share in
  proportion to i ** -exponent.
- Skew between layers. The exponent grows with the depth, from about 0 to about `skew`. Each layer
  differs from that line by up to a fifth of `skew`.
- Drift. A score of each expert decides its place. From one moment to the next, scores keep a
  correlation of `DRIFT`, so that hot experts cool down over some moments.
- Replicas. Each replica trains on other tokens: its shares differ by `NOISE`, drawn anew at every
  moment. No decision can foresee them.

Every replica has 2 sequences of 2,048 tokens in a microbatch, and each token chooses 2 of 64
experts. There is no capacity: no token is dropped, so the work of a layer is the same at all
moments.
"""

from __future__ import annotations

import math
import random

EXPERTS, TOP_K, TOKENS = 64, 2, 2 * 2048
REPLICAS, MOMENTS = 16, 24
DRIFT, NOISE = 0.99, 0.1

Counts = list[list[int]]
"""[replica][expert] tokens of a layer, in a microbatch."""


def draw_counts(
    blocks: int,
    skew: float,
    moments: int = MOMENTS,
    seed: int = 1,
    experts: int = EXPERTS,
    replicas: int = REPLICAS,
) -> list[list[Counts]]:
    """Draws the tokens by moment and layer."""
    draw = random.Random(f"{seed} experts {blocks} {skew}")
    exponents = [
        skew * max(0.0, (block + 0.5) / blocks + draw.uniform(-0.2, 0.2)) for block in range(blocks)
    ]
    scores = [[draw.gauss(0, 1) for _ in range(experts)] for _ in range(blocks)]
    counts: list[list[Counts]] = []
    for _ in range(moments):
        counts.append(
            [
                _layer(draw, row, exponent, replicas)
                for row, exponent in zip(scores, exponents, strict=True)
            ]
        )
        scores = [
            [DRIFT * score + math.sqrt(1 - DRIFT**2) * draw.gauss(0, 1) for score in row]
            for row in scores
        ]
    return counts


def _layer(draw: random.Random, scores: list[float], exponent: float, replicas: int) -> Counts:
    popularity = [0.0] * len(scores)
    order = sorted(range(len(scores)), key=lambda expert: -scores[expert])
    for place, expert in enumerate(order):
        popularity[expert] = (place + 1) ** -exponent
    counts: Counts = []
    for _ in range(replicas):
        shares = [x * math.exp(draw.gauss(0, NOISE)) for x in popularity]
        total = sum(shares)
        counts.append([round(TOKENS * TOP_K * share / total) for share in shares])
    return counts
