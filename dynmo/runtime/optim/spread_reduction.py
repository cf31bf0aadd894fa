"""Gradients of weights that are spread over replicas, summed in the replicas' order.

    weight 3 on replica 0                  replica 0   gradients of the rows of replicas 0, 1
    weight 3 on replica 2 (other group)    replica 2   gradients of the rows of replicas 2, 3
                                           both        the sum, as a tree over replicas 0, 1, 2, 3

Each replica's rows have a gradient of their own, wherever they were computed. The tree is that of
weights that all replicas hold (`gradient_reduction.py`). So the sums have the same bits for every
placement of the weights, and for weights that are not spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynmo.kernels.split import gradient_dtype
from dynmo.runtime.comm.world import World
from dynmo.runtime.layer.accumulation import tree_sum
from dynmo.runtime.optim.gradient_reduction import Shared, buckets, flat_gradient
from dynmo.schedule.memory import REDUCED_AT_ONCE


@dataclass(frozen=True)
class SpreadWeight(Shared):
    """A weight that some of the replicas hold.

    Attributes:
        held: Whether this replica holds it. If not, `parameter` is one like it.
        gradients: Parameters with the gradients of rows computed here, by replica of the rows.
        sources: Replicas whose rows each replica computes, by replica. Empty: the replica does not
            hold the weight.
    """

    held: bool
    gradients: Mapping[int, nn.Parameter]
    sources: tuple[tuple[int, ...], ...]

    @property
    def holders(self) -> int:
        return sum(map(bool, self.sources))


def reduce_spread(
    peers: World, layer: int, weights: Sequence[SpreadWeight], bucket: int = REDUCED_AT_ONCE
) -> list[tuple[nn.Parameter, Tensor]]:
    """Sums the gradients of a layer's spread weights over the peers, in place, for all holders."""
    for weight in weights:
        if weight.holders == 1 and weight.held and weight.parameter.requires_grad:
            rows = [(source, p.grad) for source, p in sorted(weight.gradients.items())]
            weight.parameter.grad = tree_sum(rows, peers.size)
    missing: list[tuple[nn.Parameter, Tensor]] = []
    several = [weight for weight in weights if weight.holders > 1]
    # A holder sends a row for each replica that it computes.
    most = max((len(sources) for weight in several for sources in weight.sources), default=1)
    for group in buckets(several, bucket // most):
        missing += _reduce(peers, group, f"the gradients of layer {layer}")
    for weight in weights:
        for parameter in weight.gradients.values():
            if parameter is not weight.parameter:
                parameter.grad = None
    return missing


def _reduce(
    peers: World, weights: Sequence[SpreadWeight], what: str
) -> list[tuple[nn.Parameter, Tensor]]:
    """Reduces a bucket of weights that several replicas hold.

    Returns the parameters without a gradient here, and whether any replica has one. A flag behind
    each row of gradients says whether the row is there.
    """
    me, replicas = peers.rank, range(peers.size)
    like = weights[0].parameter
    empty = torch.empty(0, dtype=gradient_dtype(like), device=like.device)
    held = [weight for weight in weights if weight.held]
    flags = {
        (weight.name, source): empty.new_full((1,), parameter.grad is not None)
        for weight in held
        for source, parameter in weight.gradients.items()
    }
    absent = [w for w in held if all(p.grad is None for p in w.gradients.values())]
    parts = [
        [
            piece
            for weight in held
            for source in (weight.sources[me] if weight.sources[replica] else ())
            for piece in (
                flat_gradient(weight.gradients[source])[slice(*weight.ranges[replica])],
                flags[weight.name, source],
            )
        ]
        for replica in replicas
    ]
    # A row for each replica whose rows the sender computes, and its flag.
    sizes = [sum((w.length(me) + 1) * len(w.sources[i]) for w in held) for i in replicas]
    arrived = peers.exchange([torch.cat([empty, *part]) for part in parts], sizes, what)
    sums = _sums(held, arrived, me)
    parts = [[sums[w.name][:-1] for w in held if w.sources[i]] for i in replicas]
    sizes = [sum(w.length(i) for w in held) for i in replicas]
    arrived = peers.exchange([torch.cat([empty, *part]) for part in parts], sizes, what)
    for replica, received in enumerate(arrived):
        pieces = received.split([weight.length(replica) for weight in held])
        for weight, own in zip(held, pieces, strict=True):
            flat_gradient(weight.parameter)[slice(*weight.ranges[replica])] = own
    return [(weight.parameter, sums[weight.name][-1].clone()) for weight in absent]


def _sums(weights: Sequence[SpreadWeight], arrived: Sequence[Tensor], me: int) -> dict[str, Tensor]:
    """Returns the sum over this replica's range of each weight, and its flag."""
    rows: dict[str, dict[int, Tensor]] = {weight.name: {} for weight in weights}
    for replica, received in enumerate(arrived):
        start = 0
        for weight in weights:
            for source in weight.sources[replica]:
                end = start + weight.length(me) + 1
                rows[weight.name][source], start = received[start:end], end
    return {
        name: total
        for name, own in rows.items()  # every replica's rows are computed somewhere
        if (total := tree_sum(sorted(own.items()), len(arrived))) is not None
    }
