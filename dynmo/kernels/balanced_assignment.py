"""Tokens to experts, equally many to each (BASE layers, Lewis et al. 2021).

    sinkhorn   scales exp(scores) until rows and columns have equal sums. The sums are balanced. The
               largest entries of the rows need not be
    auction    assigns every token, no expert more than its share, and the sum of the scores is the
               largest to within `slack` per token

Both are functions of the scores alone, with a limited number of operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynmo.jit import jit

# The auction stops after so many bids per token. The tokens that are left take the free places in
# order.
_MOST_BIDS = 1000


def sinkhorn(scores: Tensor, rounds: int = 100, tolerance: float = 1e-4) -> Tensor:
    """Scale exp(scores), [tokens, experts], to equal sums of rows and of columns.

    Rows sum to 1 / tokens, columns nearly to 1 / experts.

    Args:
        scores: float32 [tokens, experts].
        rounds: Most rounds.
        tolerance: The scaling ends once the factors of the columns change less on average.
    """
    tokens, experts = scores.shape
    if not tokens:
        return scores
    # The largest score of a row cancels out. Without it nothing overflows.
    cost = torch.exp(scores - scores.amax(1, keepdim=True))
    columns = torch.ones(experts, dtype=cost.dtype, device=cost.device)
    rows = torch.ones(tokens, dtype=cost.dtype, device=cost.device)
    for _ in range(rounds):
        rows = 1 / (tokens * (cost @ columns).clamp_min(1e-30))
        before, columns = columns, 1 / (experts * (rows @ cost).clamp_min(1e-30))
        if float((columns - before).abs().mean()) < tolerance:
            break
    rows = 1 / (tokens * (cost @ columns).clamp_min(1e-30))
    return rows[:, None] * cost * columns


@jit()
def _auction(
    scores: NDArray[np.float64],
    room: NDArray[np.int64],
    slack: float,
    most: int,
    out: NDArray[np.int64],
) -> None:
    tokens, experts = scores.shape
    prices = np.zeros(experts)
    bids = np.zeros(tokens)
    held = np.zeros(experts, dtype=np.int64)
    out[:] = -1
    waiting = np.arange(tokens)
    first, last, count = 0, 0, tokens  # a ring of tokens without an expert
    for _ in range(most):
        if count == 0:
            break
        token = waiting[first]
        first = (first + 1) % tokens
        count -= 1
        best, value, second = -1, -np.inf, -np.inf
        for expert in range(experts):
            if room[expert] == 0:
                continue
            gain = scores[token, expert] - prices[expert]
            if gain > value:
                best, value, second = expert, gain, value
            elif gain > second:
                second = gain
        raised = value - second if second > -np.inf else 0.0
        bids[token] = prices[best] + raised + slack
        if held[best] == room[best]:
            # The expert lets the lowest bid go.
            lowest = -1
            for other in range(tokens):
                if out[other] == best and (lowest < 0 or bids[other] < bids[lowest]):
                    lowest = other
            out[lowest] = -1
            waiting[last] = lowest
            last = (last + 1) % tokens
            count += 1
        else:
            held[best] += 1
        out[token] = best
        if held[best] == room[best]:
            lowest_bid = np.inf
            for other in range(tokens):
                if out[other] == best:
                    lowest_bid = min(lowest_bid, bids[other])
            prices[best] = lowest_bid
    for token in range(tokens):
        if out[token] < 0:
            for expert in range(experts):
                if held[expert] < room[expert]:
                    held[expert] += 1
                    out[token] = expert
                    break


def auction(scores: Tensor, slack: float = 1e-3) -> Tensor:
    """Return an expert for each token, int64 [tokens].

    Args:
        scores: float32 [tokens, experts].
        slack: How far the sum of the scores may be from the largest possible one, per token.
    """
    tokens, experts = scores.shape
    table: NDArray[Any] = scores.detach().double().cpu().numpy()
    room = np.array(
        [tokens // experts + (expert < tokens % experts) for expert in range(experts)],
        dtype=np.int64,
    )
    out = np.empty(tokens, dtype=np.int64)
    _auction(np.ascontiguousarray(table), room, slack, _MOST_BIDS * max(1, tokens), out)
    return torch.from_numpy(out).to(scores.device)
