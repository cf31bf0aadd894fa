"""Grouped linears whose groups are spread over replicas (expert parallelism).

    parallel.replicas = 2, parallel.expert = 2         replica 0            replica 1
    a layer whose linears have 4 groups            norm, router         norm, router      (the same)
                                                   groups 0, 1          groups 2, 3

A group on another replica is a parameter that is None. So nothing here trains, moves or saves it.
Digests and checkpoints must see a whole layer. They gather its groups for as long as they read it.
Groups move between replicas with their weights and optimizer state.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.models.group_placement import GroupPlacement, Spreads, even_placement
from dynmo.runtime.comm.headers import as_bytes
from dynmo.runtime.comm.process_mesh import Sharers
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.optim.gradient_reduction import Shared
from dynmo.runtime.optim.optimizer import Share, share_ranges
from dynmo.runtime.optim.replicas import whole_parameters


class SpreadGroups:
    """The groups of all layers, as one replica sees them.

    A part of a layer spreads its groups if it has the methods of `Spreads`.
    """

    def __init__(self, world: RankGroup, ranks: int, modules: Sequence[nn.Module]) -> None:
        if world.replicas % ranks:
            raise ConfigError(
                f"parallel.expert = {ranks} does not divide parallel.replicas = {world.replicas}"
            )
        self._world = world
        self.placements: dict[int, GroupPlacement] = {}
        for index, module in enumerate(modules):
            counts = {part.groups for part in spreading(module)}
            if len(counts) > 1:
                raise ConfigError(
                    f"layer {index} has parts with {' and '.join(map(str, sorted(counts)))} "
                    "experts; give each part a layer of its own"
                )
            for groups in counts:
                if groups % ranks:
                    raise ConfigError(
                        f"parallel.expert = {ranks} does not divide the {groups} experts of layer "
                        f"{index}"
                    )
                self.placements[index] = even_placement(groups, ranks)
        if not self.placements:
            raise ConfigError(
                f"parallel.expert = {ranks}, but no layer of the model has experts; set "
                "parallel.expert = 1"
            )
        self.sharers = Sharers(world, ranks)
        for index in self.placements:
            self._hold(modules[index], self.placements[index])

    def renew(self, world: RankGroup) -> None:
        """Goes on in other process groups, with as many replicas. All ranks call it."""
        self._world, self.sharers = world, Sharers(world, self.sharers.ranks)

    def _hold(self, module: nn.Module, placement: GroupPlacement) -> None:
        for part in spreading(module):
            part.hold(placement.held_by(self.sharers.place))

    def take_note(self, index: int, module: nn.Module, placement: GroupPlacement) -> None:
        """Takes note of another placement of a layer that other ranks hold."""
        self.placements[index] = placement
        for _, linear in _linears(module):
            like = _one_here(linear)
            for group in placement.held_by(self.sharers.place):
                if linear.weights[group] is None:
                    linear._parameters[str(group)] = nn.Parameter(
                        torch.empty_like(like), requires_grad=like.requires_grad
                    )
        self._hold(module, placement)

    def connect(self, index: int, module: nn.Module) -> list[Shared]:
        """Has a layer of this rank compute with the other replicas."""
        placement = self.placements.get(index)
        if placement is None:
            return []
        for part in spreading(module):
            part.spread(placement, self.sharers.place, self.sharers)
        return [
            group
            for path, linear in _linears(module)
            for group in self._shared(path, linear, placement)
        ]

    def _shared(self, path: str, linear: GroupedLinear, placement: GroupPlacement) -> list[Shared]:
        world, ranks = self._world, self.sharers.ranks
        like = _one_here(linear)
        out: list[Shared] = []
        for group, weight in enumerate(linear.weights):
            sources = tuple(
                self._sources(placement, group, replica) for replica in range(world.replicas)
            )
            holders = [replica for replica, of in enumerate(sources) if of]
            ranges = [(0, 0)] * world.replicas
            for place, replica in enumerate(holders):
                (ranges[replica],) = share_ranges([like.numel()], Share(place, len(holders)))
            first = self.sharers.number * ranks
            copies = linear.source_gradients(group).items()
            out.append(
                Shared(
                    name=key_of(path, group),
                    parameter=like if weight is None else weight,
                    ranges=tuple(ranges),
                    sources=sources,
                    gradients={first + source: copy for source, copy in copies},
                )
            )
        return out

    def _sources(self, placement: GroupPlacement, group: int, replica: int) -> tuple[int, ...]:
        """Returns the replicas whose rows for a group a replica computes."""
        ranks = self.sharers.ranks
        first, place = replica // ranks * ranks, replica % ranks
        if place not in placement.holders[group]:
            return ()
        return tuple(
            first + source for source in range(ranks) if placement.target(group, source) == place
        )

    def is_elsewhere(self, module: nn.Module, name: str) -> bool:
        """Returns whether a parameter belongs to a group that another replica holds."""
        path, _, key = name.rpartition(".")
        part = dict(module.named_modules()).get(path)
        return (
            isinstance(part, GroupedLinear)
            and part in spread_linears(module)
            and key in part._parameters
            and part._parameters[key] is None
        )

    @contextmanager
    def whole(self, module: nn.Module, groups: Sequence[Shared]) -> Generator[None]:
        """Gives a layer all of its groups within the context. All replicas enter it."""
        weights = whole_parameters(self._world.peers, groups)
        absent = [group for group in groups if not group.sources[self._world.replica]]
        places = [
            (module.get_submodule(path), key)
            for path, _, key in (group.name.rpartition(".") for group in absent)
        ]
        for (part, key), group in zip(places, absent, strict=True):
            part._parameters[key] = nn.Parameter(
                weights[group.name], requires_grad=group.parameter.requires_grad
            )
        try:
            yield
        finally:
            for part, key in places:
                part._parameters[key] = None

    def check(self, placements: Mapping[int, GroupPlacement]) -> None:
        """Refuses placements for other layers, groups or replicas, before anything moves."""
        for index, placement in sorted(placements.items()):
            known = self.placements.get(index)
            if known is None:
                raise ConfigError(
                    f"layer {index} has no groups to place; layers {sorted(self.placements)} have"
                )
            if (placement.groups, placement.ranks) != (known.groups, known.ranks):
                raise ConfigError(
                    f"layer {index} has {known.groups} groups on {known.ranks} replicas, and its "
                    f"new placement {placement.groups} on {placement.ranks}; give as many"
                )
            idle = next((r for r in range(known.ranks) if not placement.held_by(r)), None)
            if idle is not None:
                raise ConfigError(
                    f"the new placement of layer {index} leaves replica {idle} without a group; "
                    "give each one or more"
                )

    def move(
        self, index: int, module: nn.Module, placement: GroupPlacement, state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], int]:
        """Moves groups of an own layer between replicas. All that share them call it.

        The layer must be connected again. Returns the new state, and the bytes that arrived here.
        """
        before, self.placements[index] = self.placements[index], placement
        linears = dict(_linears(module))
        arrived = exchange_groups(
            self.sharers, before, placement, linears, state, f"the groups of layer {index}"
        )
        out = dict(state)
        for path, linear in linears.items():
            trains = _one_here(linear).requires_grad
            for group, tensors in arrived.items():
                linear._parameters[str(group)] = nn.Parameter(
                    tensors[path, None], requires_grad=trains
                )
        for group, tensors in arrived.items():
            out |= {
                f"{key_of(path, group)}/{moment}": t
                for (path, moment), t in tensors.items()
                if moment is not None
            }
        self._hold(module, placement)
        held = {None, *placement.held_by(self.sharers.place)}
        out = {
            key: t for key, t in out.items() if group_of(key.rpartition("/")[0], linears) in held
        }
        return out, sum(t.nbytes for tensors in arrived.values() for t in tensors.values())


def spreading(module: nn.Module) -> list[Spreads]:
    return [part for part in module.modules() if isinstance(part, Spreads)]


def spread_linears(module: nn.Module) -> set[GroupedLinear]:
    """Returns the grouped linears of the parts that spread. Every replica has the others whole."""
    return {
        linear
        for part in spreading(module)
        for linear in cast(nn.Module, part).modules()
        if isinstance(linear, GroupedLinear)
    }


def _one_here(linear: GroupedLinear) -> nn.Parameter:
    return next(weight for weight in linear.weights if weight is not None)


def _linears(module: nn.Module) -> list[tuple[str, GroupedLinear]]:
    inside = spread_linears(module)
    return [
        (path, part)
        for path, part in module.named_modules()
        if isinstance(part, GroupedLinear) and part in inside
    ]


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
    place = sharers.place
    like = tensors_of(before.held_by(place)[0], linears, state)
    size = sum(t.nbytes for t in like.values())
    empty = torch.empty(0, dtype=torch.uint8, device=sharers.world.device)
    parts = [
        [
            empty,
            *(
                as_bytes(t)
                for group, giver in arrivals(before, after, rank)
                if giver == place
                for t in tensors_of(group, linears, state).values()
            ),
        ]
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


def _parted(data: Tensor, like: GroupTensors) -> GroupTensors:
    """Returns the tensors of a group that has arrived. `like` is another group."""
    parts = data.split([t.nbytes for t in like.values()])
    return {
        key: part.clone().view(t.dtype).view(t.shape)
        for part, (key, t) in zip(parts, like.items(), strict=True)
    }
