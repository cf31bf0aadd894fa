"""Feed-forward halves made of experts (mixture of experts).

Sources: Mixtral, Switch, S-BASE, DeepSeek-V3.

    x' = x + sum over the chosen experts e of p_e expert_e(norm(x)) + sum of the shared experts

A router gives each token a score per expert, in float32. `model.routing` says how a token
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.balance.group_placement import GroupPlacement
from dynmo.kernels.balanced_assignment import auction, sinkhorn
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.kernels.own_loss import add_loss
from dynmo.kernels.row_exchange import RowExchange, exchange_rows
from dynmo.kernels.split import WeightTape
from dynmo.models.gpt import AddingHalf, GptLayers, feed_forward_size
from dynmo.models.gpt import make as make_gpt
from dynmo.models.model import Model
from dynmo.models.options import ModelOptions


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
    def of(cls, placement: GroupPlacement, place: int, exchange: RowExchange) -> _Spread:

        def between(source: int, target: int) -> tuple[int, ...]:
            return tuple(
                e for e in range(placement.groups) if placement.target(e, source) == target
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


class ExpertsHalf(AddingHalf):
    """x + experts(norm(x)), with `shared_experts` that compute every token."""

    varying_time = True

    def __init__(self, m: ModelOptions) -> None:
        super().__init__(m)
        inner, shared = feed_forward_size(m.hidden), m.shared_experts
        self.capacity_factor = m.capacity_factor
        self.router = ExpertRouter(m)
        self.gate_up = GroupedLinear(m.experts, m.hidden, 2 * inner, m.init_std)
        self.down = GroupedLinear(m.experts, inner, m.hidden, m.residual_std)
        self.gate_up.per_token = self.down.per_token = m.top_k
        self.shared_gate_up: nn.Linear | None = None
        self.shared_down: nn.Linear | None = None
        if shared:
            self.shared_gate_up = nn.Linear(m.hidden, 2 * shared * inner, bias=False)
            self.shared_down = nn.Linear(shared * inner, m.hidden, bias=False)
            nn.init.normal_(self.shared_gate_up.weight, std=m.init_std)
            nn.init.normal_(self.shared_down.weight, std=m.residual_std)
        self._spread: _Spread | None = None

    @property
    def groups(self) -> int:
        return self.router.experts

    def hold(self, groups: Sequence[int]) -> None:
        """Drops the weights of all other experts."""
        self.gate_up.hold(groups)
        self.down.hold(groups)

    def spread(self, placement: GroupPlacement, place: int, exchange: RowExchange) -> None:
        """Computes rows where their experts are. Call it again for new weights.

        Args:
            placement: The experts that each replica of the group holds.
            place: This replica's place in the group. It holds its experts alone (`hold`).
            exchange: Sends rows between the replicas of the group.
        """
        self._spread = _Spread.of(placement, place, exchange)
        for linear in (self.gate_up, self.down):
            linear.take_rows(self._spread.blocks, place)

    def added(self, x: Tensor) -> Tensor:
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
        router, pairs = self.router, chosen.flatten()
        order = pairs.argsort(stable=True)
        counts: list[int] = (
            load.tolist() if type(load) is Tensor else _even(len(pairs), router.experts)
        )
        most = len(chosen)
        if self.capacity_factor is not None:
            most = math.ceil(self.capacity_factor * most * router.top_k / router.experts)
            most = max(1, most)
        if max(counts, default=0) > most:
            kept = torch.cat([part[:most] for part in order.split(counts)])
            order, counts = kept, [min(count, most) for count in counts]
        return order // router.top_k, counts, order


def _even(pairs: int, experts: int) -> list[int]:
    """Returns the pairs of each expert if only shapes are known."""
    return [pairs // experts + (expert < pairs % experts) for expert in range(experts)]


def compile_ahead() -> None:
    """Compiles the loop of `routing = "auction"`."""
    auction(torch.randn(8, 2))


def make(options: ModelOptions, seed: int, cases: Iterable[Any]) -> Model:
    """Makes a GPT in which every `moe_every`-th block has experts."""
    plain = GptLayers.plain(options)

    def feed_forward(block: int) -> nn.Module:
        return (
            plain.feed_forward(block) if (block + 1) % options.moe_every else ExpertsHalf(options)
        )

    return make_gpt(options, seed, cases, replace(plain, feed_forward=feed_forward))
