"""Sends groups of grouped linears between replicas: weights and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.models.group_placement import GroupPlacement
from dynmo.runtime.comm.headers import as_bytes
from dynmo.runtime.comm.process_mesh import Sharers

Linears = Mapping[str, GroupedLinear]
"""The grouped linears of a layer, by path."""
GroupTensors = dict[tuple[str, str | None], Tensor]
"""Tensors of a group: its weight (None) and its moments, by linear."""


def key_of(path: str, group: int) -> str:
    """Returns the name of a group's weight in its layer."""
    return f"{path}.{group}".lstrip(".")


def group_of(name: str, linears: Linears) -> int | None:
    """Returns the group whose weight has this name, or None for another parameter."""
    path, _, key = name.rpartition(".")
    return int(key) if path in linears else None


def tensors_of(group: int, linears: Linears, state: Mapping[str, Tensor]) -> GroupTensors:
    out: GroupTensors = {}
    for path, linear in linears.items():
        weight = linear.weights[group]
        assert weight is not None, "who gives a group holds it"
        out[path, None] = weight.detach().contiguous()
        prefix = f"{key_of(path, group)}/"
        out |= {
            (path, key.removeprefix(prefix)): t.contiguous()
            for key, t in sorted(state.items())
            if key.startswith(prefix)
        }
    return out


def arrivals(before: GroupPlacement, after: GroupPlacement, rank: int) -> list[tuple[int, int]]:
    """Lists the groups that a replica will get, and their givers. Holders take turns."""
    new = [group for group in after.held_by(rank) if rank not in before.holders[group]]
    return [
        (group, before.holders[group][(group + rank) % len(before.holders[group])]) for group in new
    ]


def exchange_groups(
    sharers: Sharers,
    before: GroupPlacement,
    after: GroupPlacement,
    linears: Linears,
    state: Mapping[str, Tensor],
    what: str,
) -> dict[int, GroupTensors]:
    """Sends groups to their new holders. All that share them call it."""
    place, device = sharers.place, sharers.world.device
    like = tensors_of(before.held_by(place)[0], linears, state)
    size = sum(t.nbytes for t in like.values())
    parts = [
        _joined(
            [
                tensors_of(group, linears, state)
                for group, giver in arrivals(before, after, rank)
                if giver == place
            ],
            device,
        )
        for rank in range(sharers.ranks)
    ]
    coming = arrivals(before, after, place)
    sizes = [size * sum(giver == rank for _, giver in coming) for rank in range(sharers.ranks)]
    arrived: dict[int, GroupTensors] = {}
    for rank, received in enumerate(sharers.world.exchange(parts, sizes, what)):
        groups = [group for group, giver in coming if giver == rank]
        for group, data in zip(groups, received.split(size) if groups else (), strict=True):
            arrived[group] = _parted(data, like)
    return arrived


def _joined(groups: Sequence[GroupTensors], device: torch.device) -> Tensor:
    pieces = [as_bytes(t) for group in groups for t in group.values()]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)


def _parted(data: Tensor, like: GroupTensors) -> GroupTensors:
    """Inverts `_joined` for one group. `like` is another group."""
    pieces = data.split([t.nbytes for t in like.values()])
    return {
        key: piece.clone().view(t.dtype).view(t.shape)
        for piece, (key, t) in zip(pieces, like.items(), strict=True)
    }
