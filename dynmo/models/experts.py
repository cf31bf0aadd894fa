"""Feed-forward halves made of experts (mixture of experts).

Sources: Mixtral, Switch, S-BASE, DeepSeek-V3.

    x' = x + sum over the chosen experts e of p_e expert_e(norm(x)) + sum of the shared experts

A router gives each token a score per expert, in float32. `ExpertRule.routing` says how a token
chooses its `top_k` experts:

    aux-loss    the largest scores. A loss beside the model's evens the load: alpha E sum(f_e P_e)
    sinkhorn    the largest entries of the scores after Sinkhorn's scaling (S-BASE)
    auction     the balanced assignment with the largest sum of scores (BASE)
    bias        the largest sums of sigmoid(score) and a bias, which moves against the load
                (DeepSeek-V3)

Evaluation takes the largest scores, or the largest sums with the bias. p are the softmax of the
scores. If top_k is over 1, they are scaled to sum 1. Tokens are sorted by expert and computed as
one grouped product. With a capacity factor, an expert drops tokens over its capacity, later tokens
first.

Experts may be spread over the replicas of a stage (`ExpertsHalf.spread`). Each replica then sends
its rows to the replicas that hold the experts, and gets the results back. The numbers are those of
replicas that hold all experts, bit for bit. The reason is that rows of different replicas are never
computed together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.balance.expert_placement import ExpertPlacement
from dynmo.kernels.balanced_assignment import auction, sinkhorn
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.kernels.own_loss import add_loss
from dynmo.kernels.row_exchange import RowExchange, exchange_rows
from dynmo.kernels.split import WeightTape
from dynmo.models.early_exit import Tensors
from dynmo.models.gpt import feed_forward_size
from dynmo.models.mixture_of_depths import add_selected


@dataclass(frozen=True)
class ExpertRule:
    """How tokens choose experts.

    Attributes:
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
        if self.capacity_factor is None:
            return tokens
        return max(1, math.ceil(self.capacity_factor * tokens * self.top_k / self.experts))


class ExpertRouter(nn.Module):
    """Scores the experts, and chooses.

    Attributes:
        load: Tokens of each expert since it was set to 0, int64 [experts].
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
        """Returns x, experts and weights [tokens, top_k], and the tokens of each expert."""
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


@dataclass(frozen=True)
class _Spread:
    """The replicas that compute each expert, seen from one replica.

    Attributes:
        sent: By replica of the group, the experts that compute this replica's rows there.
        taken: By replica of the group, how many experts compute its rows here.
        blocks: Replica and expert of each block of rows that comes.
    """

    exchange: RowExchange
    sent: tuple[tuple[int, ...], ...]
    taken: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, placement: ExpertPlacement, place: int, exchange: RowExchange) -> _Spread:

        def between(source: int, target: int) -> tuple[int, ...]:
            return tuple(
                e for e in range(placement.experts) if placement.target(e, source) == target
            )

        replicas = range(placement.ranks)
        taken = [between(source, place) for source in replicas]
        blocks = tuple((source, expert) for source in replicas for expert in taken[source])
        return cls(
            exchange,
            tuple(between(place, target) for target in replicas),
            tuple(map(len, taken)),
            blocks,
        )


class ExpertsHalf(nn.Module):
    """x + experts(norm(x)), with `shared` experts that compute every token."""

    def __init__(
        self,
        hidden: int,
        rule: ExpertRule,
        shared: int,
        std: float,
        residual_std: float,
        dropout: float,
    ) -> None:
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
        self._spread: _Spread | None = None

    def hold(self, experts: Sequence[int]) -> None:
        """Drops the weights of all other experts."""
        self.gate_up.hold(experts)
        self.down.hold(experts)

    def spread(self, placement: ExpertPlacement, place: int, exchange: RowExchange) -> None:
        """Computes rows where their experts are. Call it again for new weights.

        Args:
            placement: The experts that each replica of the group holds.
            place: This replica's place in the group. It holds its experts alone (`hold`).
            exchange: Sends rows between the replicas of the group.
        """
        self._spread = _Spread.of(placement, place, exchange)
        for linear in (self.gate_up, self.down):
            linear.take_rows(self._spread.blocks, place)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.added(x)

    def added(self, x: Tensor) -> Tensor:
        """Returns the part that the half adds to the stream."""
        flat = self.norm(x.reshape(-1, x.shape[-1]))
        flat, chosen, weights, load = self.router(flat)
        places, counts, order = self.sort_by_expert(chosen, load)
        rows = flat.index_select(0, places)
        out = (
            self._experts(rows, counts)
            if self._spread is None
            else self._spread_experts(rows, counts, self._spread)
        )
        out = out * weights.flatten().index_select(0, order).unsqueeze(1).to(out.dtype)
        # Each pair has its own place, so that the sum over a token's experts has one order.
        pairs = flat.new_zeros(chosen.numel(), flat.shape[1]).index_copy(0, order, out)
        total = pairs.view(*chosen.shape, flat.shape[1]).sum(1)
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = self.shared_gate_up(flat).chunk(2, dim=-1)
            total = total + self.shared_down(functional.silu(gate) * up)
        return self.dropout(total.view(x.shape))

    def _experts(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        gate, up = self.gate_up(rows, counts).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up, counts)

    def _spread_experts(self, rows: Tensor, counts: Sequence[int], spread: _Spread) -> Tensor:
        """Like `_experts`, with the experts of all replicas of the group."""
        by_expert = rows.split(list(counts))
        there = torch.cat([by_expert[expert] for targets in spread.sent for expert in targets])
        takes = spread.exchange.counts(
            [[counts[expert] for expert in experts] for experts in spread.sent], spread.taken
        )
        sent = [sum(counts[expert] for expert in experts) for experts in spread.sent]
        taken = [sum(each) for each in takes]
        arrived = exchange_rows(there, sent, taken, spread.exchange)
        out = self._experts(arrived, [count for each in takes for count in each])
        back = exchange_rows(out, taken, sent, spread.exchange)
        order = [expert for experts in spread.sent for expert in experts]
        returned = dict(zip(order, back.split([counts[expert] for expert in order]), strict=True))
        return torch.cat([returned[expert] for expert in range(len(counts))])

    def sort_by_expert(self, chosen: Tensor, load: Tensor) -> tuple[Tensor, list[int], Tensor]:
        """Sorts (token, choice) pairs of `chosen` by expert, earlier tokens first.

        Returns:
            The token of each kept pair, the kept pairs of each expert, and the places of the pairs
            in the flat `chosen`.
        """
        rule, pairs = self.router.rule, chosen.flatten()
        order = pairs.argsort(stable=True)
        counts: list[int] = (
            load.tolist() if type(load) is Tensor else _even(len(pairs), rule.experts)
        )
        most = rule.capacity(len(chosen))
        if max(counts, default=0) > most:
            kept = torch.cat([part[:most] for part in order.split(counts)])
            order, counts = kept, [min(count, most) for count in counts]
        return order // rule.top_k, counts, order


def halves(module: nn.Module) -> list[ExpertsHalf]:
    return [part for part in module.modules() if isinstance(part, ExpertsHalf)]


def _even(pairs: int, experts: int) -> list[int]:
    """Returns the pairs of each expert if only shapes are known."""
    return [pairs // experts + (expert < pairs % experts) for expert in range(experts)]


class ExitExpertsHalf(ExpertsHalf):
    """Experts for the tokens that have not exited (`early_exit.py`)."""

    varying_shapes = False

    def forward(self, x: Tensor, *rest: Tensor) -> Tensors:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x), *rest


class RoutedExpertsHalf(ExpertsHalf):
    """Experts for the tokens that a routed block selects (MoDE)."""

    def forward(self, x: Tensor, attended: Tensor, weights: Tensor, index: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return add_selected(x, attended, weights, index, self.added)
