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
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo import Model, ModelOptions
from dynmo.cases.experts.routing import ExpertRouter
from dynmo.extend import GroupedLinear, GroupPlacement, exchange_rows, gpt


class SpreadExperts(nn.Module):
    """Experts whose weights may be spread over replicas. They are two grouped linears."""

    gate_up: GroupedLinear
    down: GroupedLinear
    _placed: tuple[Any, list[list[int]], list[int]] | None = None

    @property
    def groups(self) -> int:
        return self.gate_up.groups

    def hold(self, groups: Sequence[int]) -> None:
        """Drops the weights of all other experts."""
        self.gate_up.hold(groups)
        self.down.hold(groups)

    def spread(self, placement: GroupPlacement, place: int, exchange: Any) -> None:
        """Computes rows where their experts are. Call it again for new weights.

        Args:
            placement: The experts that each replica of the group holds.
            place: This replica's place in the group. It holds its experts alone (`hold`).
            exchange: Sends rows between the replicas of the group.
        """
        replicas, experts = range(placement.ranks), range(placement.groups)

        def between(source: int, target: int) -> list[int]:
            return [e for e in experts if placement.target(e, source) == target]

        # The experts that compute this replica's rows elsewhere, and those of others here.
        sent = [between(place, target) for target in replicas]
        taken = [between(source, place) for source in replicas]
        self._placed = exchange, sent, [len(each) for each in taken]
        blocks = [(source, expert) for source in replicas for expert in taken[source]]
        for linear in (self.gate_up, self.down):
            linear.take_rows(blocks, place)

    def gated(self, x: Tensor) -> Tensor:
        """Returns what lies between the two linears."""
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def by_pairs(
        self, flat: Tensor, weights: Tensor, counts: Sequence[int], order: Tensor
    ) -> Tensor:
        """Returns the weighted sum of what the experts give each token, [tokens, hidden].

        Args:
            flat: [tokens, hidden].
            weights: [tokens, choices].
            counts: Pairs of a token and an expert, by expert.
            order: The places of these pairs in the flat weights, by expert.
        """
        rows = flat.index_select(0, order // weights.shape[1])
        out = (self._here if self._placed is None else self._elsewhere)(rows, counts)
        out = out * weights.flatten().index_select(0, order).unsqueeze(1).to(out.dtype)
        # Each pair has its own place, so that the sum over a token's experts has one order.
        pairs = flat.new_zeros(weights.numel(), flat.shape[1]).index_copy(0, order, out)
        return pairs.view(*weights.shape, flat.shape[1]).sum(1)

    def _here(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return self.down(self.gated(self.gate_up(rows, counts)), counts)

    def _elsewhere(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Like `_here`, with the experts of all replicas of the group."""
        assert self._placed is not None
        exchange, targets, taken_experts = self._placed
        order = [expert for experts in targets for expert in experts]
        by_expert = rows.split(list(counts))
        there = torch.cat([by_expert[expert] for expert in order])
        sends = [[counts[expert] for expert in experts] for experts in targets]
        takes = exchange.counts(sends, taken_experts)
        sent, taken = ([sum(each) for each in of] for of in (sends, takes))
        arrived = exchange_rows(there, sent, taken, exchange)
        out = self._here(arrived, [count for each in takes for count in each])
        back = exchange_rows(out, taken, sent, exchange).split([counts[expert] for expert in order])
        return torch.cat(
            [part for _, part in sorted(zip(order, back, strict=True), key=itemgetter(0))]
        )


def counts_of(load: Tensor, pairs: int) -> list[int]:
    """Returns the tokens of each expert. If only shapes are known, they are even."""
    if type(load) is Tensor:
        return load.tolist()
    each, over = divmod(pairs, len(load))
    return [each + (expert < over) for expert in range(len(load))]


class ExpertsHalf(SpreadExperts, gpt.AddingHalf):
    """x + experts(norm(x)), with `shared_experts` that compute every token."""

    varying_time = True

    def __init__(self, m: ModelOptions) -> None:
        super().__init__(m)
        inner, shared = gpt.feed_forward_size(m.hidden), m.shared_experts
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

    def added(self, x: Tensor) -> Tensor:
        flat = self.norm(x.reshape(-1, x.shape[-1]))
        flat, chosen, weights, load = self.router(flat)
        _, counts, order = self.sort_by_expert(chosen, load)
        total = self.by_pairs(flat, weights, counts, order)
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = self.shared_gate_up(flat).chunk(2, dim=-1)
            total = total + self.shared_down(functional.silu(gate) * up)
        return self.dropout(total.view(x.shape))

    def sort_by_expert(self, chosen: Tensor, load: Tensor) -> tuple[Tensor, list[int], Tensor]:
        """Sorts (token, choice) pairs of `chosen` by expert, earlier tokens first.

        Returns:
            The token of each kept pair, the kept pairs of each expert, and the places of the pairs
            in the flat `chosen`.
        """
        router, pairs = self.router, chosen.flatten()
        order = pairs.argsort(stable=True)
        counts = counts_of(load, len(pairs))
        most = len(chosen)
        if self.capacity_factor is not None:
            room = self.capacity_factor * most * router.top_k / router.experts
            most = max(1, math.ceil(room))
        if max(counts, default=0) > most:
            kept = torch.cat([part[:most] for part in order.split(counts)])
            order, counts = kept, [min(count, most) for count in counts]
        return order // router.top_k, counts, order


def make(options: ModelOptions, seed: int, cases: Iterable[Any]) -> Model:
    """Makes a GPT in which every `moe_every`-th block has experts."""
    plain = gpt.GptLayers.plain(options)

    def feed_forward(block: int) -> nn.Module:
        return (
            plain.feed_forward(block) if (block + 1) % options.moe_every else ExpertsHalf(options)
        )

    return gpt.make(options, seed, cases, replace(plain, feed_forward=feed_forward))
