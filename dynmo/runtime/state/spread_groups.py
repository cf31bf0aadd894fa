"""Grouped linears whose groups are spread over replicas (expert parallelism).

    parallel.replicas = 2, parallel.expert = 2         replica 0            replica 1
    a layer whose linears have 4 groups            norm, router         norm, router      (the same)
                                                   groups 0, 1          groups 2, 3

A group on another replica is a parameter that is None. So nothing here trains, moves or saves it.
Digests and checkpoints must see a whole layer. They gather its groups for as long as they read it.
Groups move between replicas with their weights and optimizer state.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.models.group_placement import GroupPlacement, Spreads, even_placement
from dynmo.runtime.comm.headers import as_bytes
from dynmo.runtime.comm.process_mesh import Sharers
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.optim.gradient_reduction import ReplicatedWeight
from dynmo.runtime.optim.optimizer import Share, share_ranges
from dynmo.runtime.optim.replicas import whole_parameters
from dynmo.runtime.state.layer_tensors import Contents


class SpreadGroups:
    """The groups of all layers, as one replica sees them.

    A part of a layer spreads its groups if it has the methods of `Spreads`.

    Args:
        ranks: Number of replicas that share one set of groups. 1: every replica has every group.
        modules: All layers. Those on other ranks are on the meta device.

    Attributes:
        placements: The groups that each replica holds, by layer. Empty if every one has them all.
    """

    def __init__(self, ranks: int, modules: Sequence[nn.Module]) -> None:
        self._ranks, self._modules = ranks, modules
        self._sharers: Sharers | None = None
        self.placements = _even_placements(ranks, modules) if ranks > 1 else {}

    @property
    def sharers(self) -> Sharers:
        assert self._sharers is not None, "the replicas share groups, and have met"
        return self._sharers

    def join(
        self, world: RankGroup, placements: Mapping[int, GroupPlacement] | None = None
    ) -> None:
        """Exchanges from now on in these process groups. All ranks call it.

        Args:
            world: This rank's pipeline. It has as many replicas at each call.
            placements: The present placements, for a rank that joins a run.
        """
        self._world, is_first = world, self._sharers is None
        if not self.placements:
            return
        assert world.replicas % self._ranks == 0, "parallel.expert divides parallel.replicas"
        self._sharers = Sharers(world, self._ranks)
        if is_first:
            self.placements |= placements or {}
            for index, placement in self.placements.items():
                self.take_note(index, placement)

    def _hold(self, index: int) -> None:
        """Drops the groups that other replicas hold."""
        for part in spreading(self._modules[index]):
            part.hold(self.placements[index].held_by(self.sharers.place))

    def take_note(self, index: int, placement: GroupPlacement) -> None:
        """Takes note of another placement of a layer that other ranks hold."""
        self.placements[index] = placement
        for linear in spread_linears(self._modules[index]).values():
            like = _one_here(linear)
            for group in placement.held_by(self.sharers.place):
                if linear.weights[group] is None:
                    linear._parameters[str(group)] = nn.Parameter(
                        torch.empty_like(like), requires_grad=like.requires_grad
                    )
        self._hold(index)

    def connect(self, index: int) -> list[ReplicatedWeight]:
        """Has a layer of this rank compute with the other replicas."""
        placement, module = self.placements.get(index), self._modules[index]
        if placement is None:
            return []
        for part in spreading(module):
            part.spread(placement, self.sharers.place, self.sharers)
        return [
            group
            for path, linear in spread_linears(module).items()
            for group in self._shared(path, linear, placement)
        ]

    def _shared(
        self, path: str, linear: GroupedLinear, placement: GroupPlacement
    ) -> list[ReplicatedWeight]:
        world = self._world
        like = _one_here(linear)
        out: list[ReplicatedWeight] = []
        for group, weight in enumerate(linear.weights):
            sources = tuple(
                self._sources(placement, group, replica) for replica in range(world.replicas)
            )
            holders = [replica for replica, of in enumerate(sources) if of]
            ranges = [(0, 0)] * world.replicas
            for place, replica in enumerate(holders):
                (ranges[replica],) = share_ranges([like.numel()], Share(place, len(holders)))
            first = self.sharers.number * self._ranks
            copies = linear.source_gradients(group).items()
            out.append(
                ReplicatedWeight(
                    name=key_of(path, group),
                    parameter=like if weight is None else weight,
                    ranges=tuple(ranges),
                    gradients={first + source: copy for source, copy in copies},
                    sources=sources,
                    is_spread=True,
                )
            )
        return out

    def _sources(self, placement: GroupPlacement, group: int, replica: int) -> tuple[int, ...]:
        """Returns the replicas whose rows for a group a replica computes."""
        ranks = self._ranks
        first, place = replica // ranks * ranks, replica % ranks
        if place not in placement.holders[group]:
            return ()
        return tuple(
            first + source for source in range(ranks) if placement.target(group, source) == place
        )

    def own_part(self, index: int, tensors: Contents) -> Contents:
        """Returns this replica's part of a layer that was saved whole."""
        if index not in self.placements:
            return tensors
        absent = {
            key_of(path, group)
            for path, linear in spread_linears(self._modules[index]).items()
            for group, weight in enumerate(linear.weights)
            if weight is None
        }
        return {
            (section, name): t
            for (section, name), t in tensors.items()
            if (name.rpartition("/")[0] if section == "optimizer" else name) not in absent
        }

    @contextmanager
    def whole(self, index: int, groups: Sequence[ReplicatedWeight]) -> Generator[nn.Module]:
        """Yields a layer with all of its groups. All replicas enter it."""
        module, weights = self._modules[index], whole_parameters(self._world.peers, groups)
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
            yield module
        finally:
            for part, key in places:
                part._parameters[key] = None

    def check(self, placements: Mapping[int, GroupPlacement]) -> None:
        """Refuses placements for other layers, groups or replicas, before anything moves."""
        for index, placement in sorted(placements.items()):
            known = self.placements.get(index)
            new, ranks = (placement.groups, placement.ranks), range(placement.ranks)
            if (
                known is None
                or new != (known.groups, known.ranks)
                or not all(map(placement.held_by, ranks))
            ):
                has = f"{known.groups} groups on {known.ranks} replicas" if known else "no groups"
                raise ConfigError(
                    f"layer {index} has {has}, so {placement.groups} groups on {placement.ranks} "
                    f"replicas cannot be placed as {placement.holders}; layers "
                    f"{sorted(self.placements)} have groups, and each replica needs one or more"
                )

    def move(
        self, index: int, placement: GroupPlacement, state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], int]:
        """Moves groups of an own layer between replicas. All that share them call it.

        The layer must be connected again. Returns the new state, and the bytes that arrived here.
        """
        before, self.placements[index] = self.placements[index], placement
        linears, place = spread_linears(self._modules[index]), self.sharers.place
        weights = {
            key_of(path, group): weight.detach()
            for path, linear in linears.items()
            for group, weight in enumerate(linear.weights)
            if weight is not None
        }
        what = f"the groups of layer {index}"
        arrived = exchange_groups(
            self.sharers, before, placement, linears, {**weights, **state}, what
        )
        moved = sum(t.nbytes for t in arrived.values())
        for path, linear in linears.items():
            trains = _one_here(linear).requires_grad
            for group, _ in arrivals(before, placement, place):
                weight = arrived.pop(key_of(path, group))
                linear._parameters[str(group)] = nn.Parameter(weight, requires_grad=trains)
        self._hold(index)
        held = {None, *placement.held_by(place)}
        out = {
            key: t
            for key, t in (*state.items(), *arrived.items())
            if _group_of(key.rpartition("/")[0], linears) in held
        }
        return out, moved


def _even_placements(ranks: int, modules: Sequence[nn.Module]) -> dict[int, GroupPlacement]:
    """Returns the placement of each layer that has groups, with as many on each replica."""
    placements: dict[int, GroupPlacement] = {}
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
            placements[index] = even_placement(groups, ranks)
    if not placements:
        raise ConfigError(
            f"parallel.expert = {ranks}, but no layer of the model has experts; set "
            "parallel.expert = 1"
        )
    return placements


def spreading(module: nn.Module) -> list[Spreads]:
    return [part for part in module.modules() if isinstance(part, Spreads)]


def spread_linears(module: nn.Module) -> dict[str, GroupedLinear]:
    """Returns the grouped linears of the parts that spread. Every replica has the others whole."""
    inside = {each for part in spreading(module) for each in cast(nn.Module, part).modules()}
    return {
        path: part
        for path, part in module.named_modules()
        if isinstance(part, GroupedLinear) and part in inside
    }


def _one_here(linear: GroupedLinear) -> nn.Parameter:
    return next(weight for weight in linear.weights if weight is not None)


def key_of(path: str, group: int) -> str:
    """Returns the name of a group's weight in its layer."""
    return f"{path}.{group}".lstrip(".")


def _group_of(name: str, linears: Mapping[str, GroupedLinear]) -> int | None:
    """Returns the group whose weight has this name, or None for another parameter."""
    path, _, key = name.rpartition(".")
    return int(key) if path in linears else None


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
    paths: Iterable[str],
    tensors: Mapping[str, Tensor],
    what: str,
) -> dict[str, Tensor]:
    """Sends groups to their new holders. All that share them call it.

    Args:
        paths: The grouped linears.
        tensors: Weights and moments by name. Every group has equal ones.

    Returns:
        The tensors that have arrived, by name.
    """
    place, ranks = sharers.place, range(sharers.ranks)
    # Linear, rest of the name, and an example of each tensor of a group.
    like = [
        (path, name.removeprefix(key), tensor)
        for path in paths
        for key in [key_of(path, before.held_by(place)[0])]
        for name, tensor in sorted(tensors.items(), key=itemgetter(0))
        if name == key or name.startswith(f"{key}/")
    ]
    sizes = [tensor.nbytes for *_, tensor in like]

    empty = torch.empty(0, dtype=torch.uint8, device=sharers.world.device)
    parts = [
        [
            empty,
            *(
                as_bytes(tensors[key_of(path, group) + rest].contiguous())
                for group, giver in arrivals(before, after, rank)
                for path, rest, _ in like
                if giver == place
            ),
        ]
        for rank in ranks
    ]
    coming = [[g for g, giver in arrivals(before, after, place) if giver == r] for r in ranks]
    counts = [sum(sizes) * len(groups) for groups in coming]
    received = sharers.world.exchange(parts, counts, what)
    out: dict[str, Tensor] = {}
    for groups, data in zip(coming, received, strict=True):
        split = iter(data.split(sizes * len(groups)))
        for group in groups:
            for path, rest, tensor in like:
                part = next(split).clone().view(tensor.dtype).view(tensor.shape)
                out[key_of(path, group) + rest] = part
    return out
