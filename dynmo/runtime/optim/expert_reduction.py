"""Gradients of experts on several replicas, summed in the replicas' order.

    expert 3 on replica 0                  replica 0   gradients of the rows of replicas 0, 1
    expert 3 on replica 2 (other group)    replica 2   gradients of the rows of replicas 2, 3
                                           both        the sum, as a tree over replicas 0, 1, 2, 3

Each replica's rows have a gradient of their own, wherever they were computed. The tree is that of
weights that all replicas hold (`gradient_reduction.py`). So the sums have the same bits for every
placement of the experts, and for experts that are not spread.
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
class SharedExpert(Shared):
    """A weight of an expert, which some of the replicas hold.

    Attributes:
        held: Whether this replica holds it. If not, `parameter` is one like it.
        gradients: Parameters with the gradients of rows computed here, by replica of the rows.
        sources: Replicas whose rows each replica computes, by replica. Empty: the replica does not
            hold the expert.
    """

    held: bool
    gradients: Mapping[int, nn.Parameter]
    sources: tuple[tuple[int, ...], ...]

    @property
    def holders(self) -> int:
        return sum(map(bool, self.sources))


def reduce_experts(
    peers: World, layer: int, experts: Sequence[SharedExpert], bucket: int = REDUCED_AT_ONCE
) -> list[tuple[nn.Parameter, Tensor]]:
    """Sums the gradients of a layer's experts over the peers, in place, for all holders."""
    for expert in experts:
        if expert.holders == 1 and expert.held and expert.parameter.requires_grad:
            tree = Tree()
            for source, parameter in sorted(expert.gradients.items()):
                tree.put(source, parameter.grad)
            expert.parameter.grad = tree.total(peers.size)
    missing: list[tuple[nn.Parameter, Tensor]] = []
    several = [expert for expert in experts if expert.holders > 1]
    # A holder sends a row for each replica that it computes.
    most = max((len(sources) for expert in several for sources in expert.sources), default=1)
    for group in buckets(several, bucket // most):
        missing += _Bucket(peers, group, f"the gradients of layer {layer}").reduce()
    for expert in experts:
        for parameter in expert.gradients.values():
            if parameter is not expert.parameter:
                parameter.grad = None
    return missing


class _Bucket:
    """Experts that several replicas hold, whose gradients are reduced at once.

    A flag behind each row of gradients says whether the row is there.
    """

    def __init__(self, peers: World, experts: Sequence[SharedExpert], what: str) -> None:
        like = experts[0].parameter
        self._peers, self._experts, self._what = peers, experts, what
        self._empty = torch.empty(
            0, dtype=torch.float32 if like.dtype in LOW else like.dtype, device=like.device
        )

    def reduce(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Returns the parameters without a gradient here, and whether any replica has one."""
        absent = [
            expert.held and all(parameter.grad is None for parameter in expert.gradients.values())
            for expert in self._experts
        ]
        sums = self._sum_own_ranges()
        self._gather(sums)
        return [
            (expert.parameter, sums[expert.name][-1].clone())
            for expert, none in zip(self._experts, absent, strict=True)
            if none
        ]

    def _sum_own_ranges(self) -> dict[str, Tensor]:
        """Returns the sum over this replica's range of each held expert, and its flag."""
        me = self._peers.rank
        gradients = [
            (expert.name, source, parameter)
            for expert in self._experts
            for source, parameter in expert.gradients.items()
        ]
        flags = {
            (name, source): self._empty.new_full((1,), parameter.grad is not None)
            for name, source, parameter in gradients
        }
        flats = {(name, source): _flat(parameter) for name, source, parameter in gradients}
        arrived = self._exchange(
            lambda expert, replica: [
                piece
                for source in (expert.sources[me] if expert.sources[replica] else ())
                for piece in (
                    flats[expert.name, source][slice(*expert.ranges[replica])],
                    flags[expert.name, source],
                )
            ],
            lambda expert, replica: (
                (_length(expert, me) + 1) * len(expert.sources[replica]) if expert.held else 0
            ),
        )
        return {
            expert.name: _sum(expert, rows, self._peers.size)
            for expert, rows in zip(self._experts, _rows(self._experts, arrived, me), strict=True)
            if rows
        }

    def _gather(self, sums: Mapping[str, Tensor]) -> None:
        """Puts the sums of all replicas' ranges into the gradients of the held experts."""
        arrived = self._exchange(
            lambda expert, replica: (
                [sums[expert.name][:-1]] if expert.sources[replica] and expert.held else []
            ),
            lambda expert, replica: _length(expert, replica) if expert.held else 0,
        )
        for replica, received in enumerate(arrived):
            rest = received
            for expert in self._experts:
                if expert.held:
                    own, rest = rest.split(
                        [_length(expert, replica), rest.numel() - _length(expert, replica)]
                    )
                    _flat(expert.parameter)[slice(*expert.ranges[replica])] = own

    def _exchange(
        self,
        pieces: Callable[[SharedExpert, int], Sequence[Tensor]],
        size: Callable[[SharedExpert, int], int],
    ) -> list[Tensor]:
        """Sends each replica its pieces. `size` counts the elements that it sends."""
        parts = [
            self._joined([each for expert in self._experts for each in pieces(expert, replica)])
            for replica in range(self._peers.size)
        ]
        sizes = [
            sum(size(expert, replica) for expert in self._experts)
            for replica in range(self._peers.size)
        ]
        return self._peers.exchange(parts, sizes, self._what)

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces)) if pieces else self._empty


def _length(expert: SharedExpert, replica: int) -> int:
    low, high = expert.ranges[replica]
    return high - low


def _flat(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = zero_gradient(parameter)
    return parameter.grad.view(-1)


def _rows(
    group: Sequence[SharedExpert], arrived: Sequence[Tensor], me: int
) -> list[dict[int, Tensor]]:
    """Returns the gradients of all replicas' rows in this replica's range, by expert."""
    out: list[dict[int, Tensor]] = [{} for _ in group]
    for replica, received in enumerate(arrived):
        start = 0
        for expert, rows in zip(group, out, strict=True):
            for source in expert.sources[replica] if expert.held else ():
                rows[source] = received[start : start + _length(expert, me) + 1]
                start += _length(expert, me) + 1
    return out


def _sum(expert: SharedExpert, rows: Mapping[int, Tensor], replicas: int) -> Tensor:
    tree = Tree()
    for source, row in sorted(rows.items()):
        tree.put(source, row)
    total = tree.total(replicas)
    assert total is not None, f"every replica's rows of {expert.name} are computed somewhere"
    return total
