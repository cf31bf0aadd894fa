"""Feed-forward halves made of experts (mixture of experts; Mixtral, Switch, S-BASE, DeepSeek-V3).

    x' = x + sum over the chosen experts e of p_e expert_e(norm(x)) + sum of the shared experts

A router gives each token a score per expert, in float32. `ExpertRule.routing` says how a token
chooses its `top_k` experts:

    aux-loss    the largest scores. A loss beside the model's evens the load: alpha E sum(f_e P_e)
    sinkhorn    the largest entries of the scores after Sinkhorn's scaling (S-BASE)
    auction     the balanced assignment with the largest sum of scores (BASE)
    bias        the largest sums of sigmoid(score) and a bias, which moves against the load
                (DeepSeek-V3)

Evaluation takes the largest scores, or the largest sums with the bias. p are the softmax of the
scores, scaled to sum 1 if top_k is over 1. Tokens are sorted by expert and computed as one grouped
product. With a capacity factor, an expert drops what is over its capacity, later tokens first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.kernels.balanced_assignment import auction, sinkhorn
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.kernels.own_loss import add_loss
from dynmo.kernels.split import WeightTape
from dynmo.models.early_exit import Tensors
from dynmo.models.gpt import feed_forward_size
from dynmo.models.mixture_of_depths import add_selected


@dataclass(frozen=True)
class ExpertRule:
    """How tokens choose experts.

    Attributes:
        experts: Number of experts.
        top_k: Experts of a token.
        routing: "aux-loss", "sinkhorn", "auction" or "bias".
        loss_weight: Weight alpha of the auxiliary loss.
        capacity_factor: Most tokens of an expert, over the mean. None drops nothing.
    """

    experts: int
    top_k: int
    routing: str
    loss_weight: float
    capacity_factor: float | None

    def capacity(self, tokens: int) -> int:
        """Most tokens that an expert takes of so many."""
        if self.capacity_factor is None:
            return tokens
        return max(1, math.ceil(self.capacity_factor * tokens * self.top_k / self.experts))


class ExpertRouter(nn.Module):
    """Scores the experts, and chooses.

    Args:
        hidden: Width of the stream.
        rule: How tokens choose.
        std: Standard deviation of the initial weights.

    Attributes:
        load: Tokens of each expert since the last record, int64 [experts] on the CPU.
    """

    bias: Tensor
    tape: WeightTape | None = None

    def __init__(self, hidden: int, rule: ExpertRule, std: float) -> None:
        super().__init__()
        self.rule = rule
        self.weight = nn.Parameter(torch.empty(rule.experts, hidden))
        nn.init.normal_(self.weight, std=std)
        if rule.routing == "bias":
            self.register_buffer("bias", torch.zeros(rule.experts))
        self.load: Tensor | int = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Chooses the experts of each token.

        Args:
            x: [tokens, hidden].

        Returns:
            `x`; the chosen experts, int64 [tokens, top_k]; their weights, float32 like these; and
            how many chose each expert, int64 [experts].
        """
        scores = functional.linear(x.float(), self.weight.float())
        probabilities = scores.softmax(-1)
        with torch.no_grad():
            chosen = self._choose(scores)
            load = torch.zeros(self.rule.experts, dtype=torch.int64, device=x.device)
            load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        weights = probabilities.gather(1, chosen)
        if self.rule.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        if self.training:
            self.load = self.load + load
            if self.rule.routing == "aux-loss" and len(x):
                share = load / chosen.numel()
                loss = self.rule.experts * (share * probabilities.mean(0)).sum()
                x = add_loss(x, self.rule.loss_weight * loss, self.tape)
        return x, chosen, weights, load

    def _choose(self, scores: Tensor) -> Tensor:
        routing, top_k = self.rule.routing, self.rule.top_k
        if routing == "bias":
            return (scores.sigmoid() + self.bias).topk(top_k, dim=1).indices
        # Shapes alone have no scores to balance.
        if not self.training or routing == "aux-loss" or type(scores) is not Tensor:
            return scores.topk(top_k, dim=1).indices
        if routing == "sinkhorn":
            return sinkhorn(scores).topk(top_k, dim=1).indices
        # One balanced assignment after the other. A token takes each expert once.
        left, choices = scores.clone(), list[Tensor]()
        for _ in range(top_k):
            choices.append(auction(left))
            left.scatter_(1, choices[-1][:, None], -1e4)
        return torch.stack(choices, 1)


class ExpertsHalf(nn.Module):
    """x + experts(norm(x)).

    Args:
        hidden: Width of the stream.
        rule: How tokens choose experts.
        shared: Experts that compute every token.
        std: Standard deviation of the initial weights.
        residual_std: The same of the last matrix of each expert.
        dropout: Probability of dropout.
    """

    def __init__(self, hidden: int, rule: ExpertRule, shared: int, std: float, residual_std: float, dropout: float) -> None:
        super().__init__()
        inner = feed_forward_size(hidden)
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.router = ExpertRouter(hidden, rule, std)
        self.gate_up = GroupedLinear(rule.experts, hidden, 2 * inner, std)
        self.down = GroupedLinear(rule.experts, inner, hidden, residual_std)
        self.shared_gate_up = nn.Linear(hidden, 2 * shared * inner, bias=False) if shared else None
        self.shared_down = nn.Linear(shared * inner, hidden, bias=False) if shared else None
        if self.shared_gate_up is not None and self.shared_down is not None:
            nn.init.normal_(self.shared_gate_up.weight, std=std)
            nn.init.normal_(self.shared_down.weight, std=residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.added(x)

    def added(self, x: Tensor) -> Tensor:
        """What the half adds to the stream. x: [..., hidden]."""
        flat = self.norm(x.reshape(-1, x.shape[-1]))
        flat, chosen, weights, load = self.router(flat)
        places, counts, order = self.sort_by_expert(chosen, load)
        gate, up = self.gate_up(flat.index_select(0, places), counts).chunk(2, dim=-1)
        out = self.down(functional.silu(gate) * up, counts)
        out = out * weights.flatten().index_select(0, order).unsqueeze(1).to(out.dtype)
        # Each pair has a place of its own, so that the sum over a token's experts has one order.
        pairs = flat.new_zeros(chosen.numel(), flat.shape[1]).index_copy(0, order, out)
        total = pairs.view(*chosen.shape, flat.shape[1]).sum(1)
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = self.shared_gate_up(flat).chunk(2, dim=-1)
            total = total + self.shared_down(functional.silu(gate) * up)
        return self.dropout(total.view(x.shape))

    def sort_by_expert(self, chosen: Tensor, load: Tensor) -> tuple[Tensor, list[int], Tensor]:
        """Sorts (token, choice) pairs by expert, earlier tokens first.

        Args:
            chosen: int64 [tokens, top_k].
            load: Pairs of each expert.

        Returns:
            The token of each kept pair; kept pairs of each expert; and the places of the pairs in
            `chosen`, flat.
        """
        rule, pairs = self.router.rule, chosen.flatten()
        order = pairs.argsort(stable=True)
        counts: list[int] = load.tolist() if type(load) is Tensor else _even(len(pairs), rule.experts)
        most = rule.capacity(len(chosen))
        if max(counts, default=0) > most:
            kept = torch.cat([part[:most] for part in order.split(counts)])
            order, counts = kept, [min(count, most) for count in counts]
        return order // rule.top_k, counts, order


def _even(pairs: int, experts: int) -> list[int]:
    """Pairs of each expert where only shapes are known."""
    return [pairs // experts + (expert < pairs % experts) for expert in range(experts)]


class ExitExpertsHalf(ExpertsHalf):
    """Experts for the tokens that have not exited (`early_exit.py`)."""

    varying_shapes = False

    def forward(self, x: Tensor, *rest: Tensor) -> Tensors:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x), *rest


class RoutedExpertsHalf(ExpertsHalf):
    """Experts for the tokens that a routed block selects: depths and experts together (MoDE)."""

    def forward(self, x: Tensor, attended: Tensor, weights: Tensor, index: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return add_selected(x, attended, weights, index, self.added)
