"""How tokens choose experts, and how equally many tokens go to each.

The balanced assignments are those of BASE layers (Lewis et al. 2021):

    sinkhorn   scales exp(scores) until rows and columns have equal sums. The sums are balanced. The
               largest entries of the rows need not be
    auction    assigns every token, no expert more than its share, and the sum of the scores is the
               largest to within `slack` per token

Both are functions of the scores alone, with a limited number of operations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dynmo import ModelOptions
from dynmo.extend import WeightTape, add_loss, jit

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


def compile_ahead() -> None:
    auction(torch.randn(8, 2))


class ExpertRouter(nn.Module):
    """Scores the experts, and chooses.

    Attributes:
        load: Tokens of each expert since it was set to 0, int64 [experts].
    """

    bias: Tensor
    tape: WeightTape | None = None

    def __init__(self, m: ModelOptions) -> None:
        super().__init__()
        self.experts, self.top_k, self.routing = m.experts, m.top_k, m.routing
        self.loss_weight = m.router_loss
        self.weight = nn.Parameter(torch.empty(m.experts, m.hidden))
        nn.init.normal_(self.weight, std=m.init_std)
        if m.routing == "bias":
            self.register_buffer("bias", torch.zeros(m.experts))
        self.load: Tensor | int = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns x, experts and weights [tokens, top_k], and the tokens of each expert."""
        scores = functional.linear(x.float(), self.weight.float())
        probabilities = scores.softmax(-1)
        with torch.no_grad():
            chosen = self._choose(scores)
            load = torch.zeros(self.experts, dtype=torch.int64, device=x.device)
            load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        weights = probabilities.gather(1, chosen)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        if self.training:
            self.load = self.load + load
            if self.routing == "aux-loss" and len(x):
                share = load / chosen.numel()
                loss = self.experts * (share * probabilities.mean(0)).sum()
                x = add_loss(x, self.loss_weight * loss, self.tape)
        return x, chosen, weights, load

    def _choose(self, scores: Tensor) -> Tensor:
        routing, top_k = self.routing, self.top_k
        if routing == "bias":
            return (scores.sigmoid() + self.bias).topk(top_k, dim=1).indices
        # A run of shapes only has no scores to balance.
        if not self.training or routing == "aux-loss" or type(scores) is not Tensor:
            return scores.topk(top_k, dim=1).indices
        if routing == "sinkhorn":
            return sinkhorn(scores).topk(top_k, dim=1).indices
        # One balanced assignment after the other. A token takes each expert once. If the balance
        # would give it an expert again, the token takes the best of the others.
        left, choices = scores.clone(), list[Tensor]()
        taken = torch.zeros_like(scores, dtype=torch.bool)
        for _ in range(top_k):
            choice = auction(left)[:, None]
            best = scores.masked_fill(taken, -math.inf).argmax(1, keepdim=True)
            choices.append(torch.where(taken.gather(1, choice), best, choice))
            taken.scatter_(1, choices[-1], True)
            left.masked_fill_(taken, -1e4)
        return torch.cat(choices, 1)
