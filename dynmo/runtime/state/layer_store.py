"""The layers of a model that this rank holds.

Each layer has its optimizer and the tensors that dynamic cases keep with it.

    layer 4    module       here, or on the meta device: shapes without memory
               Layer        runs it: F, B, W
               optimizer    its state, or this replica's share of it
               tensors      those of dynamic cases

Whole layers come (`adopt`) and go between steps. The layout knows where all of them are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from weakref import proxy

from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.kernels.grouped_linear import gradient_parameters
from dynmo.models.group_placement import GroupPlacement
from dynmo.models.identity import identity_of
from dynmo.models.model import Model
from dynmo.plan.partition import Layout, Move
from dynmo.runtime.comm.agreement import raised_on_all
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.layer.accumulation import AccumulationGroups
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.reads import others_of
from dynmo.runtime.layer.token_pieces import token_pieces_of
from dynmo.runtime.optim.optimizer import LayerOptimizer
from dynmo.runtime.optim.parameter_groups import ParameterGroups
from dynmo.runtime.optim.precision import lower as lower_precision
from dynmo.runtime.optim.replicas import Replicas, cut_state, whole_state
from dynmo.runtime.optim.tied_weights import TiedWeights
from dynmo.runtime.optim.update import Update
from dynmo.runtime.options import EngineOptions
from dynmo.runtime.state.frozen_weights import Frozen
from dynmo.runtime.state.layer_checks import (
    are_double,
    check_arrival,
    check_layer,
    check_moments,
    check_same_groups,
    check_same_model,
    check_saved_moments,
    check_views,
)
from dynmo.runtime.state.layer_tensors import fill, make_contiguous
from dynmo.runtime.state.migration import Arrival, Packed, pack
from dynmo.runtime.state.spread_groups import SpreadGroups

# Prefixes of the tensors of dynamic cases, and of `Layer.beside`, among the optimizer's state.
_KEPT, _BESIDE = "case:", "beside:"


class LayerStore:
    """The layers of this rank. It is made on every rank alike.

    Args:
        is_bare: Whether the rank is outside of the run and holds no layer until it joins
            (`reshaped`).
        former: The store of this rank before a fault, which is empty.

    Attributes:
        modules: All layers, by global index. Those on other ranks are on the meta device.
        layers: Own layers, by global index.
        optimizers: Their optimizer state, by global index.
        update: Steps them all at once.
        spread: The groups that each replica holds, if replicas share them.
        case_tensors: Tensors of dynamic cases, by global index of own layers.
        rebuilt: Own layers that were rebuilt, of which other ranks do not know.
        identity: What decides the model's numbers.
        is_double: Whether all weights are float64. Inputs and the loss then are, too.
        groups: Groups of the model's parameters, and their options.
        pieces: Cuts microbatches for the last layer and the loss. None leaves them whole.
        accumulation_groups: Number of accumulation groups of the whole mesh.
        generation: Generation of the ranks whose process groups it uses.
    """

    def __init__(
        self,
        world: RankGroup,
        model: Model,
        layout: Layout,
        clock: Clock,
        options: EngineOptions,
        is_bare: bool = False,
        former: LayerStore | None = None,
    ) -> None:
        self.world, self.model, self.layout = world, model, layout
        self.generation = world.generation
        self._clock = clock
        self._options = options
        self.pieces = token_pieces_of(options.head_tokens, model)
        self.accumulation_groups = options.groups(world.replicas)
        stages = () if is_bare else self.own_stages
        own_layers = [index for stage in stages for index in layout.partition.range_of(stage)]
        if former is None:
            self.modules = model.build(frozenset(own_layers))
            self.groups = ParameterGroups(options.optimizer, model, self.modules, world.device)
            self.identity = identity_of(model, self.modules).with_code(self.groups.code)
            self.frozen = Frozen(self.modules, model.tied)
            check_same_model(world, self.identity)
            check_same_groups(world, self.groups)
        else:
            self.modules, self.groups = former.modules, former.groups
            self.identity, self.frozen = former.identity, former.frozen
        self.is_double = are_double(self.modules, options.dtype)
        if options.zero:
            self.groups.check_is_elementwise("zero = 1")
        self.spread = SpreadGroups(options.expert, self.modules)
        if not is_bare:
            self.spread.join(world)
        # Told on all ranks of layers whose output changes, other than by training.
        self.on_change: Callable[[Iterable[int]], None] = lambda _: None
        self.case_tensors: dict[int, dict[str, Tensor]] = {index: {} for index in own_layers}
        self.rebuilt = set[int]()
        self.layers: dict[int, Layer] = {}
        self.optimizers: dict[int, LayerOptimizer] = {}
        self.update = Update()
        self.replicas = self._new_replicas()
        for index in own_layers:
            check_views(index, self.modules[index], self._tied(index), world.device, options.dtype)
            module = self.modules[index] = self.modules[index].to(world.device)
            self._adopt(index, {}, masters=lower_precision(module, options.dtype))
        if not is_bare:
            self.tied.join()
            self.tied.publish(())

    @property
    def spreads_groups(self) -> bool:
        """Whether the replicas of a stage hold parts of its groups."""
        return bool(self.spread.placements)

    @property
    def own_stages(self) -> tuple[int, ...]:
        return self.layout.stages_of(self.world.rank)

    @property
    def tied(self) -> TiedWeights:
        return TiedWeights(self.world, self.model.tied, self.layout.rank_of, self.modules)

    @property
    def own(self) -> dict[int, tuple[nn.Module, LayerOptimizer]]:
        """This rank's layers by their index in the model, each with its optimizer."""
        return {i: (layer.module, self.optimizers[i]) for i, layer in self.layers.items()}

    # -- layers come and go ------------------------------------------------------------------------

    def _adopt(
        self,
        index: int,
        moments: Mapping[str, Tensor],
        whole: bool = False,
        masters: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Makes a layer run on this rank.

        `whole` says that the optimizer's moments are the whole layer's, of which this replica may
        keep a share only. `masters` are float32 weights of a new layer, by parameter.
        """
        module, shared = self.modules[index], frozenset(self._tied(index))
        check_layer(index, module, self.world.replicas)
        make_contiguous(module)
        weights = self.spread.connect(index)
        self.replicas.adopt(index, module, shared, weights)
        layer = self.layers[index] = Layer(
            index,
            module,
            self._clock,
            self._options.seed,
            self._options.compiles,
            first_microbatch=self.world.replica * self.layout.microbatches,
            groups=AccumulationGroups(
                gradient_parameters(module),
                self.layout.microbatches,
                self.accumulation_groups // self.world.replicas,
                self.replicas.reduction(index),
            ),
            others=partial(LayerStore._others, proxy(self), index),
            loss=self.model.loss if index == self.model.layers - 1 else None,
        )
        layer.warns = not self.world.replica and self._is_last_of_its_kind(index)
        layer.recompute = index in self.layout.recomputed
        self.update.release()
        optimizer = self.optimizers[index] = LayerOptimizer(
            module,
            partial(self.groups.group, index),
            shared,
            self.replicas.share,
            masters,
            {weight.name for weight in weights},
        )
        optimizer.load(cut_state(optimizer, moments) if whole else moments)

    def _restore(self, index: int, state: Mapping[str, Tensor], whole: bool = False) -> None:
        """Makes a layer run on this rank with its former state (`state`)."""
        self._adopt(index, _moments(state), whole)
        self.layers[index].beside.put(_with_prefix(_BESIDE, state))
        self.case_tensors[index] = {n: t.cpu() for n, t in _with_prefix(_KEPT, state).items()}

    def _tied(self, index: int) -> set[str]:
        """Returns the parameters of a layer that another layer owns."""
        return {name for _, (user, name) in self.model.tied if user == index}

    def _others(self, index: int) -> Mapping[int, str]:
        """Returns the tensors that are not those of a layer, by their memory.

        The modules that a user gave are among them, wherever the layers are now.
        """
        layers = [*enumerate(self.model.given), *enumerate(self.modules)]
        return others_of(layers, self.modules[index])

    def _is_last_of_its_kind(self, index: int) -> bool:
        """The first stage may run whole backwards, for which no weight gradient has to wait."""
        kinds = [(type(x), [p.shape for p in x.parameters()]) for x in self.modules]
        return kinds[index] not in kinds[index + 1 :]

    def _new_replicas(self) -> Replicas:
        return Replicas(self.world, self.model.tied, bool(self._options.zero))

    def _drop(self, index: int) -> None:
        module = self.modules[index]
        for parameter in module.parameters():
            parameter.grad = None
        self.modules[index] = module.to("meta")
        self.replicas.drop(index)
        self.update.release()
        del self.layers[index], self.optimizers[index], self.case_tensors[index]

    def rebuild(self, index: int, moments: Mapping[str, Tensor]) -> None:
        """Makes an own layer run again after it got other modules or parameters.

        `moments` is the state of its optimizer, whole, `parameter/moment` -> tensor.

        Raises:
            RunError: A moment has not as many elements as its parameter.
        """
        layer = f"layer {index} ({self.model.names[index]})"
        check_moments(layer, self.modules[index], self.optimizers[index], moments)
        self._adopt(index, moments, whole=True)
        self.rebuilt.add(index)
        self.tied.join()

    def replace(self, index: int, tensors: dict[tuple[str, str], Tensor]) -> None:
        """Replaces one of this rank's layers by its saved state, whole.

        The same parameters train as before. Other ranks know them by the layer on "meta".

        Raises:
            CheckpointError: The saved optimizer state does not fit this optimizer.
        """
        state = {name: t for (section, name), t in tensors.items() if section == "optimizer"}
        layer = f"layer {index} ({self.model.names[index]})"
        check_saved_moments(layer, self.optimizers[index], _moments(state))
        module = self.modules[index]
        flags = {name: p.requires_grad for name, p in module.named_parameters()}
        self._restore(index, fill(module, tensors, flags), whole=True)
        self.tied.join()

    def moved(self, layout: Layout, plan: Sequence[Move], arrivals: Sequence[Arrival]) -> None:
        """Takes note that the plan's layers have changed ranks.

        Tied weights are still to be joined, once all ranks are here.
        """
        self.layout = layout
        for move in plan:
            if move.source == self.world.rank:
                self._drop(move.layer)
        for arrival in arrivals:
            self._restore(arrival.layer, arrival.fill(self.modules[arrival.layer]))
        for index, layer in self.layers.items():
            layer.recompute = index in layout.recomputed

    def reshaped(
        self,
        layout: Layout,
        gone: Collection[int],
        states: Mapping[int, dict[str, Tensor]],
        arrivals: Sequence[Arrival],
        groups: Mapping[int, GroupPlacement] | None = None,
    ) -> None:
        """Takes note that the ranks are another mesh. All ranks call it together.

        Args:
            gone: Own layers that leave this rank.
            states: States of the own layers that stay. They are whole, unless replicas share
                groups: then they are this replica's part.
            groups: Placement of the groups, by layer, for a newcomer.
        """
        self.replicas.close()
        for index in gone:
            self._drop(index)
        self.world, self.layout = arrange(self.world.everyone, layout.replicas), layout
        self.generation = self.world.generation
        self.spread.join(self.world, groups)
        self.replicas = self._new_replicas()
        arrived = {each.layer: each.fill(self.modules[each.layer]) for each in arrivals}
        for index in sorted({*self.layers, *arrived}):
            state = arrived[index] if index in arrived else states[index]
            self._restore(index, state, whole=not self.spreads_groups)
        self.tied.join()

    def check_names(self, moving: Collection[int] = ()) -> None:
        """Raises ConfigError on all ranks if a layer can neither move nor be saved on one.

        Args:
            moving: Layers that are to move. A move gives them new tensors.
        """
        with raised_on_all(self.world, ConfigError, "the parameters of all layers"):
            for index, layer in self.layers.items():
                layer.census.check_names()
                if index in moving:
                    layer.census.check_move(self._tied(index))

    def check_arrival(self, move: Move, arrival: Arrival) -> None:
        """Refuses a layer whose hooks or packed weights this rank does not have."""
        given = self.model.given[move.layer] if self.model.given else None
        check_arrival(self.world.everyone, move, arrival, self.modules[move.layer], given)

    def renewed(self) -> None:
        """Takes note that the same ranks have met anew."""
        self.replicas.close()
        self.world = arrange(self.world.everyone, self.layout.replicas)
        self.generation = self.world.generation
        self.replicas.renew(self.world)
        self.spread.join(self.world)
        for index in self.layers:
            self.spread.connect(index)
        self.tied.join()

    def empty(self) -> None:
        """Drops all layers, since this rank has left the run."""
        self.on_change(range(len(self.modules)))
        for index in list(self.layers):
            self._drop(index)

    # -- state of a layer beside its module --------------------------------------------------------

    def state(self, index: int, whole: bool = False) -> dict[str, Tensor]:
        """Returns an own layer's state that is not in its modules.

        It is that of the optimizer, of generators and the loss, and tensors that cases keep.

        If `whole`, it is gathered from all replicas, with ZeRO-1. All call it, in the same order.
        """
        others = {f"{_KEPT}{name}": t for name, t in self.case_tensors[index].items()}
        others |= {f"{_BESIDE}{name}": t for name, t in self.layers[index].beside.state().items()}
        others = {name: t.to(self.world.device) for name, t in others.items()}
        return (self.moments(index) if whole else self.optimizers[index].state()) | others

    def packed(self, index: int, state: dict[str, Tensor]) -> Packed:
        """Returns an own layer as it moves, with its `state`."""
        return pack(index, self.modules[index], state)

    def moments(self, index: int) -> dict[str, Tensor]:
        """Returns the optimizer's whole state. All replicas call it, in the same order."""
        return whole_state(self.world.peers, self.optimizers[index], self.replicas.spread(index))

    def whole(self, index: int) -> AbstractContextManager[nn.Module]:
        """Gives an own layer all groups. All replicas enter it, in the same order."""
        return self.spread.whole(index, self.replicas.spread(index))

    def place_groups(self, placements: Mapping[int, GroupPlacement]) -> int:
        """Moves groups between replicas, with their optimizer state. All ranks call it.

        Returns the bytes that arrived here.
        """
        moved = 0
        for index, placement in sorted(placements.items()):
            if index in self.layers:
                state = self.optimizers[index].state()
                moments, arrived = self.spread.move(index, placement, state)
                self._adopt(index, moments)
                moved += arrived
            else:
                self.spread.take_note(index, placement)
        return moved


def _moments(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in state.items() if not name.startswith((_KEPT, _BESIDE))}


def _with_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
