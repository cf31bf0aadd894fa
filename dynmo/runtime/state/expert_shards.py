"""Placement of the experts of each layer on the replicas (expert parallelism).

    parallel.replicas = 2, parallel.expert = 2         replica 0            replica 1
    an experts half with 4 experts                 norm, router         norm, router      (the same)
                                                   experts 0, 1         experts 2, 3

An expert on another replica is a parameter that is None. So nothing here trains, moves or saves it.
Digests and checkpoints must see a whole layer. They gather its experts for as long as they read it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dynmo.balance.expert_placement import ExpertPlacement, even_placement
from dynmo.errors import ConfigError
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.models.experts import halves
from dynmo.runtime.comm.expert_group import ExpertGroup
from dynmo.runtime.comm.world import World
from dynmo.runtime.optim.expert_reduction import SharedExpert
from dynmo.runtime.optim.optimizer import Share, cut
from dynmo.runtime.optim.zero import whole_parameters
from dynmo.runtime.state.expert_moves import exchange_experts, expert_of, key_of


class ExpertShards:
    """The experts of all layers, as one replica sees them."""

    def __init__(self, world: World, ranks: int, modules: Sequence[nn.Module]) -> None:
        if world.replicas % ranks:
            raise ConfigError(
                f"parallel.expert = {ranks} does not divide parallel.replicas = {world.replicas}"
            )
        self._world = world
        self.placements: dict[int, ExpertPlacement] = {}
        for index, module in enumerate(modules):
            counts = {half.router.experts for half in halves(module)}
            if len(counts) > 1:
                raise ConfigError(
                    f"layer {index} has halves with {' and '.join(map(str, sorted(counts)))} "
                    "experts; give each half a layer of its own"
                )
            for experts in counts:
                if experts % ranks:
                    raise ConfigError(
                        f"parallel.expert = {ranks} does not divide the {experts} experts of layer "
                        f"{index}"
                    )
                self.placements[index] = even_placement(experts, ranks)
        if not self.placements:
            raise ConfigError(
                f"parallel.expert = {ranks}, but no layer of the model has experts; set "
                "parallel.expert = 1"
            )
        self.group = ExpertGroup(world, ranks)
        for index in self.placements:
            self._hold(modules[index], self.placements[index])

    def renew(self, world: World) -> None:
        """Goes on in other process groups, with as many replicas. All ranks call it."""
        self._world, self.group = world, ExpertGroup(world, self.group.ranks)

    def _hold(self, module: nn.Module, placement: ExpertPlacement) -> None:
        for half in halves(module):
            half.hold(placement.held_by(self.group.place))

    def take_note(self, index: int, module: nn.Module, placement: ExpertPlacement) -> None:
        """Takes note of another placement of a layer that other ranks hold."""
        self.placements[index] = placement
        for _, linear in _linears(module):
            like = _one_here(linear)
            for expert in placement.held_by(self.group.place):
                if linear.weights[expert] is None:
                    linear._parameters[str(expert)] = nn.Parameter(
                        torch.empty_like(like), requires_grad=like.requires_grad
                    )
        self._hold(module, placement)

    def connect(self, index: int, module: nn.Module) -> list[SharedExpert]:
        """Has a layer of this rank compute with the other replicas."""
        placement = self.placements.get(index)
        if placement is None:
            return []
        for half in halves(module):
            half.spread(placement, self.group.place, self.group)
        return [
            expert
            for path, linear in _linears(module)
            for expert in self._shared(path, linear, placement)
        ]

    def _shared(
        self, path: str, linear: GroupedLinear, placement: ExpertPlacement
    ) -> list[SharedExpert]:
        world, ranks = self._world, self.group.ranks
        like = _one_here(linear)
        out: list[SharedExpert] = []
        for expert, weight in enumerate(linear.weights):
            sources = tuple(
                self._sources(placement, expert, replica) for replica in range(world.replicas)
            )
            holders = [replica for replica, of in enumerate(sources) if of]
            ranges = [(0, 0)] * world.replicas
            for place, replica in enumerate(holders):
                (ranges[replica],) = cut([like.numel()], Share(place, len(holders)))
            first = self.group.number * ranks
            copies = linear.source_gradients(expert).items()
            out.append(
                SharedExpert(
                    name=key_of(path, expert),
                    parameter=like if weight is None else weight,
                    ranges=tuple(ranges),
                    owned=True,
                    held=weight is not None,
                    gradients={first + source: copy for source, copy in copies},
                    sources=sources,
                )
            )
        return out

    def _sources(self, placement: ExpertPlacement, expert: int, replica: int) -> tuple[int, ...]:
        """Returns the replicas whose rows for an expert a replica computes."""
        ranks = self.group.ranks
        first, place = replica // ranks * ranks, replica % ranks
        if place not in placement.holders[expert]:
            return ()
        return tuple(
            first + source for source in range(ranks) if placement.target(expert, source) == place
        )

    def is_elsewhere(self, module: nn.Module, name: str) -> bool:
        """Returns whether a parameter belongs to an expert that another replica holds."""
        path, _, key = name.rpartition(".")
        part = dict(module.named_modules()).get(path)
        return (
            isinstance(part, GroupedLinear)
            and key in part._parameters
            and part._parameters[key] is None
        )

    @contextmanager
    def whole(self, module: nn.Module, experts: Sequence[SharedExpert]) -> Generator[None]:
        """Gives a layer all of its experts within the context. All replicas enter it."""
        weights = whole_parameters(self._world.peers, experts)
        absent = [expert for expert in experts if not expert.held]
        places = [
            (module.get_submodule(path), key)
            for path, _, key in (expert.name.rpartition(".") for expert in absent)
        ]
        for (part, key), expert in zip(places, absent, strict=True):
            part._parameters[key] = nn.Parameter(
                weights[expert.name], requires_grad=expert.parameter.requires_grad
            )
        try:
            yield
        finally:
            for part, key in places:
                part._parameters[key] = None

    def move(
        self, index: int, module: nn.Module, placement: ExpertPlacement, state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], int]:
        """Moves experts of an own layer between the replicas of a group. All call it.

        The layer must be connected again. Returns the new state, and the bytes that arrived here.
        """
        before, self.placements[index] = self.placements[index], placement
        linears = dict(_linears(module))
        arrived = exchange_experts(
            self.group, before, placement, linears, state, f"the experts of layer {index}"
        )
        out = dict(state)
        for path, linear in linears.items():
            trains = _one_here(linear).requires_grad
            for expert, tensors in arrived.items():
                linear._parameters[str(expert)] = nn.Parameter(
                    tensors[path, None], requires_grad=trains
                )
        for expert, tensors in arrived.items():
            out |= {
                f"{key_of(path, expert)}/{moment}": t
                for (path, moment), t in tensors.items()
                if moment is not None
            }
        self._hold(module, placement)
        held = {None, *placement.held_by(self.group.place)}
        out = {
            key: t for key, t in out.items() if expert_of(key.rpartition("/")[0], linears) in held
        }
        return out, sum(t.nbytes for tensors in arrived.values() for t in tensors.values())


def _one_here(linear: GroupedLinear) -> nn.Parameter:
    return next(weight for weight in linear.weights if weight is not None)


def _linears(module: nn.Module) -> list[tuple[str, GroupedLinear]]:
    return [
        (path, part) for path, part in module.named_modules() if isinstance(part, GroupedLinear)
    ]
