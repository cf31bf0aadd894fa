"""What the trainer and `dynmo.Pipeline` run on: one model over the ranks of a world, step by step.

world = World.join(store, rank, size)
engine = Engine(world, model, Partition((9, 9)), schedule="zb-h1", microbatches=8)
for step in range(steps):
    result = engine.step(step, inputs, targets, lr=3e-4, max_norm=1.0)
    costs = engine.costs()                    # measured, the same on every rank
    engine.move(exact(...))                   # layers change ranks; nothing else changes
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from dynmo.balance.layout import Layouts, RecomputeRule
from dynmo.balance.partition import Partition
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import ConfigError, InputError, RunError
from dynmo.models.model import Model
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.case_context import CaseContext
from dynmo.pipeline.layer_states import LayerStates
from dynmo.pipeline.measurements import Measurements
from dynmo.pipeline.membership import Membership
from dynmo.pipeline.program_runner import ProgramRunner
from dynmo.pipeline.schedule_keeper import ScheduleKeeper, Shapes
from dynmo.pipeline.step_inputs import (
    check_batch,
    check_choice,
    check_partition,
    check_rates,
    check_recompute,
)
from dynmo.runtime.comm.clock import clock_for
from dynmo.runtime.comm.process_mesh import FirstReplica
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.executor import StepOutput
from dynmo.runtime.engine.optimizer_step import OptimizerStep
from dynmo.runtime.engine.post_validation import PostValidation
from dynmo.runtime.engine.profiler import Profiler, measure_links
from dynmo.runtime.engine.programs import Programs
from dynmo.runtime.engine.sm_slices import make_streams
from dynmo.runtime.engine.stage_streams import DefaultStream
from dynmo.runtime.engine.step_reduction import StepReduction, StepResult
from dynmo.runtime.layer.output_cache import Keys
from dynmo.runtime.optim.loss_scale import LossScaler, make_scaler
from dynmo.runtime.optim.optimizer import LayerOptimizer, OptimizerSettings
from dynmo.runtime.state.layer_store import LayerStore
from dynmo.runtime.state.migration import Migration
from dynmo.schedule.bounds import Objective
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import Timeline


class Engine:
    """A model's layers spread over a world of ranks, and what may be done with them.

    All ranks call every method together, with equal arguments.

    Args:
        world: The ranks of one pipeline. It may be one of several in a mesh (`arrange`).
        model: What to train.
        partition: Number of layers on each stage. The schedule says which rank holds which stage.
        schedule: Name of the schedule.
        microbatches: Microbatches of a step of one pipeline.
        chunks: Stages per rank. None means the schedule's own number.
        slices: Number of slices of this process's GPU that are the pipeline's ranks. The world then
            has one rank, and layers move between slices without a message. None means that the
            ranks of the world are the pipeline's.
        memory_limit: Bytes of a rank, for schedules that are made within a limit.
        seed: Seeds what layers draw while training.
        optimizer: Its kind and options.
        compiles: Whether torch.compile runs the layers.
        accumulation_groups: In how many groups the gradients of all pipelines' microbatches are
            summed. The default is one group per replica.
        zero: 1 shares the optimizer's state over the replicas (ZeRO-1).
        w_granularity: "whole" runs every W where the schedule has it. "linear" may run parts of a W
            earlier, while a message is late.
        post_validation: Whether steps have no barrier at their end. See `advance`.
        rollback: How a step is taken back. "exact" restores copies. "in-place" inverts the update
            without copies and is approximate.
        clip_scope: "global" clips by the norm of all layers, "local" each layer by its own.
        dtype: What the model computes in.
        scaler: Scale of the loss. The default is dynamic in float16, and none otherwise.
        recompute: Indices of the layers whose activations are recomputed in B. Or a pure function
            of a placement, the schedule with every stage training, and the number of replicas.
        cache_bytes: Host memory of each rank for the outputs of a frozen prefix. Steps and
            evaluations must then get the keys of their microbatches.
        replicates: Whether a reshape may make replicas later.
        shapes: Costs by shapes alone. Schedules within `memory_limit` are made from them until
            costs are measured.
        elsewhere: Ranks of a pipeline and number of replicas of a run that this process is still
            outside of. The engine then holds nothing until `membership.arrive`.

    Raises:
        ConfigError: An option is wrong, or the model has a layer that cannot be trained so.
        PartitionError: The placement does not fit the model or the schedule.
    """

    #   _layouts          which layouts there can be
    #   _layer_store      what this rank holds, where everything is, what is frozen
    #   _programs         what it runs
    #   _optimizer_step   what follows once it has run
    #   _pending          with post-validation: the step that is not final yet
    #   _runner           runs the programs
    #   schedule_keeper   in which order the ranks work, and what is known of costs
    #   actions           what changes any of these
    #   membership        which ranks there are
    #   case_context      what a dynamic case sees of them
    #   measurements      what was measured of the layers
    #   layer_states      what is saved and restored

    def __init__(
        self,
        world: World,
        model: Model,
        partition: Partition,
        *,
        schedule: str,
        microbatches: int,
        chunks: int | None = None,
        slices: int | None = None,
        memory_limit: int | None = None,
        seed: int = 0,
        optimizer: OptimizerSettings | None = None,
        compiles: bool = False,
        accumulation_groups: int | None = None,
        zero: int = 0,
        expert: int = 1,
        w_granularity: Literal["whole", "linear"] = "whole",
        post_validation: bool = False,
        rollback: Literal["exact", "in-place"] = "exact",
        clip_scope: Literal["global", "local"] = "global",
        dtype: torch.dtype = torch.float32,
        scaler: LossScaler | None = None,
        recompute: RecomputeRule = (),
        cache_bytes: int = 0,
        replicates: bool = False,
        shapes: Shapes | None = None,
        elsewhere: tuple[int, int] | None = None,
    ) -> None:
        check_choice("w_granularity", w_granularity, ("whole", "linear"))
        check_choice("rollback", rollback, ("exact", "in-place"))
        check_choice("clip_scope", clip_scope, ("global", "local"))
        if not isinstance(cast(object, model), Model):
            raise ConfigError(
                f"model is a {type(model).__name__}; make a Model of it with dynmo.models.model.from_factories"
            )
        check_partition(partition)
        check_recompute(recompute, model.layers)
        self.model = model
        accumulation_groups = accumulation_groups or world.replicas
        if slices is not None and (world.size > 1 or post_validation):
            raise ConfigError(
                "slices of one GPU are one process, whose steps end together: use one rank a replica, without post_validation"
            )
        self._layouts = Layouts(
            model.layers,
            schedule,
            chunks,
            accumulation_groups,
            recompute,
            sliced=slices is not None,
        )
        ranks, replicas = elsewhere or (slices or world.size, world.replicas)
        layout = self._layouts.make(ranks, replicas, microbatches, partition)
        streams = (
            DefaultStream()
            if slices is None
            else make_streams(world.device, slices, layout.placement)
        )
        self.clock = clock_for(world.device)
        self.profiler = Profiler(self.clock)
        self._layer_store = LayerStore(
            world,
            model,
            layout,
            self.clock,
            seed=seed,
            optimizer=optimizer or OptimizerSettings(),
            compiles=compiles,
            accumulation_groups=accumulation_groups,
            zero=bool(zero),
            expert=expert,
            dtype=dtype,
            cache_bytes=cache_bytes,
            is_bare=elsewhere is not None,
        )
        links = measure_links(world, layout.pairs) if elsewhere is None else {}
        self.schedule_keeper = ScheduleKeeper(
            *(self._layer_store, schedule, chunks, memory_limit, links),
            post_validation=post_validation,
            accumulation_groups=accumulation_groups,
            shapes=shapes,
        )
        self._programs = Programs(
            self._layer_store, self.clock, streams, post_validation=post_validation
        )
        self._runner = ProgramRunner(
            *(self._layer_store, self.schedule_keeper, self._programs, self.profiler, self.clock),
            partial_weights=w_granularity == "linear",
            replicates=replicates or world.replicas > 1,
        )
        # Gradients wait for `update` or `discard`.
        self._halfway = False
        table = StepReduction(self._layer_store, self.clock)
        self._optimizer_step = OptimizerStep(
            self._layer_store, table, self.profiler, scaler or make_scaler(dtype), clip_scope
        )
        self._pending = PostValidation(
            self._layer_store,
            self._optimizer_step,
            validates=post_validation,
            copies=rollback == "exact",
        )
        self.actions = Actions(
            self._layouts,
            self._layer_store,
            self.schedule_keeper,
            self._programs,
            self.profiler,
            self._pending,
        )
        self.membership = Membership(
            *(
                self._layouts,
                self._layer_store,
                self.schedule_keeper,
                self._programs,
                self.profiler,
                self._pending,
            ),
            self.actions.on_recompute_change,
        )
        self.case_context = CaseContext(self._layer_store, self.actions, self._pending)
        self.measurements = Measurements(
            self._layer_store, self.profiler, self._pending, accumulation_groups
        )
        self.layer_states = LayerStates(self._layer_store, self._pending, self._programs)

    # -- what is where -----------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """This rank's pipeline: one of the mesh."""
        return self._layer_store.world

    @property
    def partition(self) -> Partition:
        return self._layer_store.layout.partition

    @property
    def shape(self) -> tuple[int, int]:
        """Ranks (or slices) of a pipeline, and how many pipelines."""
        return self._layer_store.layout.ranks, self._layer_store.layout.replicas

    @property
    def sliced(self) -> bool:
        """Whether the pipeline's ranks are slices of this process's GPU."""
        return self._layer_store.layout.sliced

    @property
    def placement(self) -> tuple[int, ...]:
        """Per stage, the rank (or slice) that holds it."""
        return self._layer_store.layout.placement

    @property
    def recomputed(self) -> frozenset[int]:
        """The layers whose activations are computed again in B."""
        return self._layer_store.layout.recomputed

    @property
    def count(self) -> int:
        """Number of layers of the model."""
        return self.model.layers

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each layer."""
        return self.model.names

    @property
    def modules(self) -> Sequence[nn.Module]:
        """All layers. Those of other ranks are on the meta device."""
        return self._layer_store.modules

    @property
    def own_layers(self) -> dict[int, tuple[nn.Module, LayerOptimizer]]:
        """This rank's layers by their index in the model, each with its optimizer."""
        return self.layer_states.own

    @property
    def frozen(self) -> frozenset[int]:
        return self._layer_store.frozen.layers

    @property
    def first_trainable(self) -> int:
        """Global index of the first layer with something to train."""
        return self._layer_store.frozen.first_trainable

    # -- training ----------------------------------------------------------------------------------

    @property
    def scaler(self) -> LossScaler:
        """Of the loss."""
        return self._optimizer_step.scaler

    @scaler.setter
    def scaler(self, scaler: LossScaler) -> None:
        self._optimizer_step.scaler = scaler

    def step(
        self,
        step: int,
        inputs: Tensor | None,
        targets: Tensor | None,
        *,
        lr: float,
        max_norm: float = 0.0,
        flag: int = 0,
        keys: Keys | None = None,
    ) -> StepResult:
        """Forward, backward, clip, update. inputs: [microbatches, ...] with the first stage,
        targets: [microbatches, ...] with the last: this replica's, which are as many as all others'
        and follow those of the replica before it in the batch.

        `flag` is handed to every rank in `StepResult.flags` (a wish to stop, say). keys, for the
        cache of outputs: of each microbatch, on every rank, equal only where the inputs are (the
        numbers of its sequences, say); None where none comes again. Raises RunError if loss or
        gradient is not finite; under a dynamic loss scale such a gradient skips the step.
        """
        results = (
            self.advance(step, inputs, targets, lr=lr, max_norm=max_norm, flag=flag, keys=keys)
            + self.drain()
        )
        return results[-1]

    def advance(
        self,
        step: int,
        inputs: Tensor | None,
        targets: Tensor | None,
        *,
        lr: float,
        max_norm: float = 0.0,
        flag: int = 0,
        keys: Keys | None = None,
    ) -> tuple[StepResult, ...]:
        """As `step`, but without a barrier at its end where the pipeline validates afterwards: the
        next begins before this one is final.

        Returns the results that have become final and were not returned before, in order: with a
        barrier this step's, without one that of the step before. RunError, too, is then raised a
        step late; nothing was updated. `drain` waits for the last one, and so does every method
        that looks at the model or changes it.
        """
        check_rates(lr, max_norm)
        pending = self._pending
        if self.post_validates:
            check_batch(self._layer_store, inputs, targets, self._layer_store.layout.microbatches)
            executor = self._runner.executor()
            pending.begin()
            is_validated = partial(pending.is_validated, executor) if pending.is_out else None
            step_output = self._runner.train(
                executor, step, inputs, targets, keys, self.scaler.scale, is_validated
            )
            pending.end(step, step_output, lr, max_norm, flag)
        else:
            step_output = self.forward_backward(step, inputs, targets, keys)
            pending.add(self.update(step, step_output, lr=lr, max_norm=max_norm, flag=flag))
        return pending.take_done()

    def drain(self) -> tuple[StepResult, ...]:
        """Waits until the last step is final, where `advance` has not. Returns the results that
        were not returned before."""
        return self._pending.drain()

    def forward_backward(
        self, step: int, inputs: Tensor | None, targets: Tensor | None, keys: Keys | None = None
    ) -> StepOutput:
        """The first half of `step`: runs the program; gradients are left on the parameters."""
        layer_store = self._pending.final
        check_batch(layer_store, inputs, targets, layer_store.layout.microbatches)
        if self._halfway:
            raise RunError(
                "forward_backward was called again before update or discard; a step's microbatches are given all at once"
            )
        step_output = self._runner.train(
            self._runner.executor(), step, inputs, targets, keys, self.scaler.scale
        )
        self._halfway = True
        return step_output

    def update(
        self, step: int, step_output: StepOutput, *, lr: float, max_norm: float = 0.0, flag: int = 0
    ) -> StepResult:
        """The second half of `step`: what the ranks must agree on, clipping, the optimizer."""
        check_rates(lr, max_norm)
        self._halfway = False
        return self._pending.observed(
            *self._optimizer_step.update(step, step_output, lr, max_norm, flag)
        )

    def discard(self) -> None:
        """Instead of `update`: drops the gradients and keeps the measurements."""
        self._halfway = False
        self._optimizer_step.discard()

    def evaluate(
        self,
        inputs: Tensor | None,
        targets: Tensor | None,
        microbatches: int,
        keys: Keys | None = None,
        *,
        shares: bool = False,
    ) -> float:
        """Computes the mean loss over microbatches without training.

        Args:
            inputs: As in `step`.
            targets: As in `step`.
            microbatches: How many there are.
            keys: As in `step`.
            shares: Whether each replica has microbatches of its own. If not, the first replica's
                loss counts, because all have the same.

        Returns:
            The mean loss, the same on every rank.
        """
        if microbatches < 1:
            raise InputError(f"microbatches = {microbatches}: an evaluation needs at least 1")
        check_batch(self._pending.final, inputs, targets, microbatches)
        loss = self._runner.evaluate(inputs, targets, microbatches, keys)
        table = torch.tensor([loss], dtype=torch.float64)
        what = "the evaluation to end"
        if shares:
            return float(self.world.everyone.sum(table, what)) / self.world.replicas
        return float(FirstReplica(self.world).sum(table, what))

    @property
    def post_validates(self) -> bool:
        """Whether the next step has no barrier at its end. A weight tied over two ranks gets its
        gradient from both: there, one stays."""
        return self._pending.validates

    @property
    def objective(self) -> Objective:
        """What makes a step of this pipeline short."""
        return self.schedule_keeper.objective

    # -- what changes: between steps ---------------------------------------------------------------

    def freeze(self, layers: Collection[int]) -> None:
        """See `Actions.freeze`."""
        self.actions.freeze(layers)

    def unfreeze(self, layers: Collection[int]) -> None:
        """See `Actions.unfreeze`."""
        self.actions.unfreeze(layers)

    def on_workload_change(self, layers: Iterable[int]) -> None:
        """See `Actions.on_workload_change`."""
        self.actions.on_workload_change(layers)

    def move(self, partition: Partition) -> Migration:
        """See `Actions.move`."""
        return self.actions.move(partition)

    def reshape(self, *, pipeline: int, data: int, partition: Partition | None = None) -> Migration:
        """See `Actions.reshape`."""
        return self.actions.reshape(pipeline=pipeline, data=data, partition=partition)

    def digest(self) -> str:
        """Returns the SHA-256 of all weights. See `LayerStates.digest`."""
        return self.layer_states.digest()

    # -- what is known -----------------------------------------------------------------------------

    def costs(self) -> tuple[LayerCost, ...]:
        """See `Measurements.costs`."""
        return self.measurements.costs()

    def predict(self, layers: tuple[LayerCost, ...], partition: Partition) -> Timeline:
        """What the simulator says of one step under these costs and this placement, with the
        schedule made for them."""
        return self.schedule_keeper.predict(layers, partition)

    def schedule_for(
        self, partition: Partition, layers: tuple[LayerCost, ...] | None = None
    ) -> Schedule:
        """The schedule that would run on this placement, with what is frozen now, made for these
        costs (default: for what is known of them) where it is made for any."""
        return self.schedule_keeper.on(partition, layers)

    def largest(self, value: float) -> float:
        """Returns the largest of the ranks' values."""
        return self.measurements.maxima((value,))[0]
