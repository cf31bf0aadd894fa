"""Gradients of weights that are spread over replicas, summed in the replicas' order.

    weight 3 on replica 0                  replica 0   gradients of the rows of replicas 0, 1
    weight 3 on replica 2 (other group)    replica 2   gradients of the rows of replicas 2, 3
                                           both        the sum, as a tree over replicas 0, 1, 2, 3

Each replica's rows have a gradient of their own, wherever they were computed. The tree is that of
weights that all replicas hold (`gradient_reduction.py`). So the sums have the same bits for every
placement of the weights, and for weights that are not spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynmo.kernels.split import LOW, zero_gradient
from dynmo.runtime.comm.world import World
from dynmo.runtime.layer.accumulation import Tree
from dynmo.runtime.optim.gradient_reduction import Shared, buckets
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
            tree = Tree()
            for source, parameter in sorted(weight.gradients.items()):
                tree.put(source, parameter.grad)
            weight.parameter.grad = tree.total(peers.size)
    missing: list[tuple[nn.Parameter, Tensor]] = []
    several = [weight for weight in weights if weight.holders > 1]
    # A holder sends a row for each replica that it computes.
    most = max((len(sources) for weight in several for sources in weight.sources), default=1)
    for group in buckets(several, bucket // most):
        missing += _Bucket(peers, group, f"the gradients of layer {layer}").reduce()
    for weight in weights:
        for parameter in weight.gradients.values():
            if parameter is not weight.parameter:
                parameter.grad = None
    return missing


class _Bucket:
    """Weights that several replicas hold, whose gradients are reduced at once.

    A flag behind each row of gradients says whether the row is there.
    """

    def __init__(self, peers: World, weights: Sequence[SpreadWeight], what: str) -> None:
        like = weights[0].parameter
        self._peers, self._weights, self._what = peers, weights, what
        self._empty = torch.empty(
            0, dtype=torch.float32 if like.dtype in LOW else like.dtype, device=like.device
        )

    def reduce(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Returns the parameters without a gradient here, and whether any replica has one."""
        absent = [
            weight.held and all(parameter.grad is None for parameter in weight.gradients.values())
            for weight in self._weights
        ]
        sums = self._sum_own_ranges()
        self._gather(sums)
        return [
            (weight.parameter, sums[weight.name][-1].clone())
            for weight, none in zip(self._weights, absent, strict=True)
            if none
        ]

    def _sum_own_ranges(self) -> dict[str, Tensor]:
        """Returns the sum over this replica's range of each held weight, and its flag."""
        me = self._peers.rank
        gradients = [
            (weight.name, source, parameter)
            for weight in self._weights
            for source, parameter in weight.gradients.items()
        ]
        flags = {
            (name, source): self._empty.new_full((1,), parameter.grad is not None)
            for name, source, parameter in gradients
        }
        flats = {(name, source): _flat(parameter) for name, source, parameter in gradients}
        arrived = self._exchange(
            lambda weight, replica: [
                piece
                for source in (weight.sources[me] if weight.sources[replica] else ())
                for piece in (
                    flats[weight.name, source][slice(*weight.ranges[replica])],
                    flags[weight.name, source],
                )
            ],
            lambda weight, replica: (
                (_length(weight, me) + 1) * len(weight.sources[replica]) if weight.held else 0
            ),
        )
        return {
            weight.name: _sum(weight, rows, self._peers.size)
            for weight, rows in zip(self._weights, _rows(self._weights, arrived, me), strict=True)
            if rows
        }

    def _gather(self, sums: Mapping[str, Tensor]) -> None:
        """Puts the sums of all replicas' ranges into the gradients of the held weights."""
        arrived = self._exchange(
            lambda weight, replica: (
                [sums[weight.name][:-1]] if weight.sources[replica] and weight.held else []
            ),
            lambda weight, replica: _length(weight, replica) if weight.held else 0,
        )
        for replica, received in enumerate(arrived):
            rest = received
            for weight in self._weights:
                if weight.held:
                    own, rest = rest.split(
                        [_length(weight, replica), rest.numel() - _length(weight, replica)]
                    )
                    _flat(weight.parameter)[slice(*weight.ranges[replica])] = own

    def _exchange(
        self,
        pieces: Callable[[SpreadWeight, int], Sequence[Tensor]],
        size: Callable[[SpreadWeight, int], int],
    ) -> list[Tensor]:
        """Sends each replica its pieces. `size` counts the elements that it sends."""
        parts = [
            self._joined([each for weight in self._weights for each in pieces(weight, replica)])
            for replica in range(self._peers.size)
        ]
        sizes = [
            sum(size(weight, replica) for weight in self._weights)
            for replica in range(self._peers.size)
        ]
        return self._peers.exchange(parts, sizes, self._what)

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces)) if pieces else self._empty


def _length(weight: SpreadWeight, replica: int) -> int:
    low, high = weight.ranges[replica]
    return high - low


def _flat(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = zero_gradient(parameter)
    return parameter.grad.view(-1)


def _rows(
    group: Sequence[SpreadWeight], arrived: Sequence[Tensor], me: int
) -> list[dict[int, Tensor]]:
    """Returns the gradients of all replicas' rows in this replica's range, by weight."""
    out: list[dict[int, Tensor]] = [{} for _ in group]
    for replica, received in enumerate(arrived):
        start = 0
        for weight, rows in zip(group, out, strict=True):
            for source in weight.sources[replica] if weight.held else ():
                rows[source] = received[start : start + _length(weight, me) + 1]
                start += _length(weight, me) + 1
    return out


def _sum(weight: SpreadWeight, rows: Mapping[int, Tensor], replicas: int) -> Tensor:
    tree = Tree()
    for source, row in sorted(rows.items()):
        tree.put(source, row)
    total = tree.total(replicas)
    assert total is not None, f"every replica's rows of {weight.name} are computed somewhere"
    return total
