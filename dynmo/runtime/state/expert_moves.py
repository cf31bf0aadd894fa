"""Sends experts between the replicas of a group: weights and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dynmo.balance.expert_placement import ExpertPlacement
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.runtime.comm.expert_group import ExpertGroup
from dynmo.runtime.comm.headers import as_bytes

Linears = Mapping[str, GroupedLinear]
"""Linears of a layer's experts, by path."""
ExpertTensors = dict[tuple[str, str | None], Tensor]
"""Tensors of an expert: its weight (None) and its moments, by linear."""


def key_of(path: str, expert: int) -> str:
    """Returns the name of an expert's weight in its layer."""
    return f"{path}.{expert}".lstrip(".")


def expert_of(name: str, linears: Linears) -> int | None:
    """Returns the expert whose weight has this name, or None for another parameter."""
    path, _, key = name.rpartition(".")
    return int(key) if path in linears else None


def tensors_of(expert: int, linears: Linears, state: Mapping[str, Tensor]) -> ExpertTensors:
    out: ExpertTensors = {}
    for path, linear in linears.items():
        weight = linear.weights[expert]
        assert weight is not None, "who gives an expert holds it"
        out[path, None] = weight.detach().contiguous()
        prefix = f"{key_of(path, expert)}/"
        out |= {
            (path, key.removeprefix(prefix)): t.contiguous()
            for key, t in sorted(state.items())
            if key.startswith(prefix)
        }
    return out


def arrivals(before: ExpertPlacement, after: ExpertPlacement, rank: int) -> list[tuple[int, int]]:
    """Lists the experts that a replica will get, and their givers. Holders take turns."""
    new = [expert for expert in after.held_by(rank) if rank not in before.holders[expert]]
    return [
        (expert, before.holders[expert][(expert + rank) % len(before.holders[expert])])
        for expert in new
    ]


def exchange_experts(
    group: ExpertGroup,
    before: ExpertPlacement,
    after: ExpertPlacement,
    linears: Linears,
    state: Mapping[str, Tensor],
    what: str,
) -> dict[int, ExpertTensors]:
    """Sends experts to their new holders. All replicas of the group call it."""
    place, device = group.place, group.world.device
    like = tensors_of(before.held_by(place)[0], linears, state)
    size = sum(t.nbytes for t in like.values())
    parts = [
        _joined(
            [
                tensors_of(expert, linears, state)
                for expert, giver in arrivals(before, after, rank)
                if giver == place
            ],
            device,
        )
        for rank in range(group.ranks)
    ]
    coming = arrivals(before, after, place)
    sizes = [size * sum(giver == rank for _, giver in coming) for rank in range(group.ranks)]
    arrived: dict[int, ExpertTensors] = {}
    for rank, received in enumerate(group.world.exchange(parts, sizes, what)):
        experts = [expert for expert, giver in coming if giver == rank]
        for expert, data in zip(experts, received.split(size) if experts else (), strict=True):
            arrived[expert] = _parted(data, like)
    return arrived


def _joined(experts: Sequence[ExpertTensors], device: torch.device) -> Tensor:
    pieces = [as_bytes(t) for expert in experts for t in expert.values()]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)


def _parted(data: Tensor, like: ExpertTensors) -> ExpertTensors:
    """Inverts `_joined` for one expert. `like` is another expert."""
    pieces = data.split([t.nbytes for t in like.values()])
    return {
        key: piece.clone().view(t.dtype).view(t.shape)
        for piece, (key, t) in zip(pieces, like.items(), strict=True)
    }
