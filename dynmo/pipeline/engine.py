"""The engine of the trainer and of `dynmo.Pipeline`.

It trains one model over a world.

world = World.join(store, rank, size)
engine = Engine(world, model, Partition((9, 9)), StepOptions("zb-h1", microbatches=8))
for step in range(steps):
    result = engine.step(step, inputs, targets, lr=3e-4, max_norm=1.0)
    costs = engine.costs()                    # measured, the same on every rank
    engine.move(exact(...))                   # layers change ranks, and nothing else changes
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dynmo.balance.partition import Partition
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import ConfigError, InputError, RunError
from dynmo.models.model import Model
from dynmo.pipeline.actions import Actions, EngineParts
from dynmo.pipeline.case_context import CaseContext
from dynmo.pipeline.engine_options import StepOptions, UpdateOptions
from dynmo.pipeline.layer_states import LayerStates
from dynmo.pipeline.measurements import Measurements
from dynmo.pipeline.membership import Membership
from dynmo.pipeline.program_runner import ProgramRunner
from dynmo.pipeline.schedule_keeper import ScheduleKeeper
from dynmo.pipeline.step_inputs import (
    check_batch,
    check_partition,
    check_rates,
    check_recompute,
)
from dynmo.pipeline.whole_model import WholeModel
from dynmo.runtime.comm.clock import clock_for
from dynmo.runtime.comm.process_mesh import FirstReplica
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.batch_check import find_difference, hashes_to_compare
from dynmo.runtime.engine.executor import StepOutput
from dynmo.runtime.engine.optimizer_step import OptimizerStep
from dynmo.runtime.engine.post_validation import PostValidation
from dynmo.runtime.engine.profiler import Profiler, measure_links
from dynmo.runtime.engine.programs import Programs
from dynmo.runtime.engine.sm_slices import make_streams
from dynmo.runtime.engine.step_reduction import StepRecord, StepReduction
from dynmo.runtime.layer.output_cache import Keys
from dynmo.runtime.optim.loss_scale import LossScaler, make_scaler
from dynmo.runtime.optim.optimizer import LayerOptimizer
from dynmo.runtime.state.layer_options import LayerOptions, ReplicaOptions
from dynmo.runtime.state.layer_store import LayerStore
from dynmo.runtime.state.migration import Migration
from dynmo.schedule.bounds import Objective
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import Timeline


class Engine:
    """Trains and changes a model whose layers are spread over a world of ranks.

    All ranks call every method together, with equal arguments.

    Args:
        world: The ranks of one pipeline. It may be one of several in a mesh (`arrange`).
        model: The model to train.
        partition: Number of layers on each stage. The schedule says which rank holds which stage.
        steps: The ops of a step: schedule, microbatches, recomputation.
        update: The end of a step: clipping, optimizer, post-validation.
        layers: How the layers compute: precision, seed, compilation.
        replicas: What the replicas share.
        elsewhere: Ranks of a pipeline and number of replicas of a run that this process is still
            outside of. The engine then holds nothing until `membership.arrive`.

    Attributes:
        model: The model that it trains.
        clock: Gives the marks of ops.
        profiler: Holds this rank's readings.
        schedule_keeper: Knows the schedule of the ranks, and the costs.
        actions: Changes layers, placement, mesh and schedule between steps.
        membership: Changes the set of ranks.
        case_context: The view that a dynamic case has of the model.
        measurements: Gathers the measured costs of the layers.
        layer_states: Saves and restores layers.
        whole_model: Gathers and replaces the weights of all layers.

    Raises:
        ConfigError: An option is wrong, or it does not allow some layer of the model.
        PartitionError: The placement does not fit the model or the schedule.
    """

    def __init__(
        self,
        world: World,
        model: Model,
        partition: Partition,
        steps: StepOptions,
        update: UpdateOptions | None = None,
        layers: LayerOptions | None = None,
        replicas: ReplicaOptions | None = None,
        elsewhere: tuple[int, int] | None = None,
    ) -> None:
        update, layers = update or UpdateOptions(), layers or LayerOptions()
        replicas, is_bare = replicas or ReplicaOptions(), elsewhere is not None
        post_validation = update.post_validation
        _check(world, model, partition, steps, update)
        self.model = model
        self._layouts = steps.layouts(model.layers, replicas.groups(world.replicas))
        mesh = elsewhere or (steps.slices or world.size, world.replicas)
        layout = self._layouts.make(*mesh, steps.microbatches, partition)
        streams = make_streams(world.device, steps.slices, layout.placement)
        self.clock = clock_for(world.device)
        self.profiler = Profiler(self.clock)
        self._layer_store = store = LayerStore(
            world,
            model,
            layout,
            self.clock,
            layers,
            update.optimizer,
            replicas,
            is_bare,
        )
        links = {} if is_bare else measure_links(world, layout.pairs)
        self.schedule_keeper = ScheduleKeeper(store, steps, links, post_validation=post_validation)
        self._programs = Programs(store, self.clock, streams, post_validation=post_validation)
        self._runner = ProgramRunner(
            store,
            self.schedule_keeper,
            self._programs,
            self.profiler,
            self.clock,
            partial_weights=steps.w_granularity == "linear",
            replicates=replicas.replicates or world.replicas > 1,
        )
        # Gradients wait for `update` or `discard`.
        self._halfway = False
        scaler = update.scaler or make_scaler(layers.dtype)
        table = StepReduction(store, self.clock)
        self._optimizer_step = OptimizerStep(store, table, self.profiler, scaler, update.clip_scope)
        # Holds the last step until it is final.
        self._pending = PostValidation(
            store,
            self._optimizer_step,
            validates=post_validation,
            copies=update.rollback == "exact",
        )
        self._make_views()

    def _make_views(self) -> None:
        """Makes the objects through which others change and read the engine's parts."""
        store, pending = self._layer_store, self._pending
        parts = EngineParts(
            self._layouts, store, self.schedule_keeper, self._programs, self.profiler, pending
        )
        self.actions = Actions(parts)
        self.membership = Membership(parts, self.actions.on_recompute_change)
        self.case_context = CaseContext(store, self.actions, pending)
        self.measurements = Measurements(store, self.profiler, pending)
        self.layer_states = LayerStates(store, pending, self._programs)
        self.whole_model = WholeModel(store, pending)

    # -- places of layers --------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """This rank's pipeline, which is one of the mesh."""
        return self._layer_store.world

    @property
    def partition(self) -> Partition:
        return self._layer_store.layout.partition

    @property
    def shape(self) -> tuple[int, int]:
        """Number of ranks (or slices) of a pipeline, and number of pipelines."""
        return self._layer_store.layout.ranks, self._layer_store.layout.replicas

    @property
    def sliced(self) -> bool:
        """True if the pipeline's ranks are slices of this process's GPU."""
        return self._layer_store.layout.sliced

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank (or slice) that holds each stage."""
        return self._layer_store.layout.placement

    @property
    def recomputed(self) -> frozenset[int]:
        """The layers whose activations are recomputed in B."""
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
        """Scale of the loss."""
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
    ) -> StepRecord:
        """Trains on one batch: forward, backward, clipping, update.

        Args:
            step: Number of the step.
            inputs: This replica's microbatches, [microbatches, ...], on the rank of the first
                stage. Every replica has as many. They follow those of the replica before it in the
                batch.
            targets: Likewise, on the rank of the last stage.
            lr: Learning rate.
            max_norm: Norm to clip the gradients to. 0 clips nothing.
            flag: Number that every rank gets in `StepRecord.flags`, such as a wish to stop.
            keys: Key of each microbatch, on every rank, for the cache of outputs. Two keys are
                equal only if the inputs are, such as the numbers of the sequences. None if no
                microbatch comes again.

        Returns:
            The result of this step.

        Raises:
            InputError: Ranks of a replica were given different batches. Nothing was updated.
            RunError: The loss or a gradient is not finite. Under a dynamic loss scale such a
                gradient skips the step.
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
    ) -> tuple[StepRecord, ...]:
        """Trains like `step`, but without a barrier at its end under post-validation.

        The next step then begins before this one is final. `drain` waits for the last step. Every
        method that reads or changes the model waits for it too.

        Args:
            step: As in `step`.
            inputs: As in `step`.
            targets: As in `step`.
            lr: As in `step`.
            max_norm: As in `step`.
            flag: As in `step`.
            keys: As in `step`.

        Returns:
            The results that have become final and were not returned before, in order. With a
            barrier this is the result of this step. Without one it is that of the step before.

        Raises:
            InputError: As in `step`. Without a barrier it is raised one step late.
            RunError: As in `step`. Without a barrier it is raised one step late, and nothing was
                updated.
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

    def drain(self) -> tuple[StepRecord, ...]:
        """Waits until the last step is final, if `advance` has not.

        Returns:
            The results that were not returned before.
        """
        return self._pending.drain()

    def forward_backward(
        self, step: int, inputs: Tensor | None, targets: Tensor | None, keys: Keys | None = None
    ) -> StepOutput:
        """Runs the first half of `step`: the program. Gradients stay on the parameters.

        Args:
            step: As in `step`.
            inputs: As in `step`.
            targets: As in `step`.
            keys: As in `step`.

        Returns:
            The losses, and the interval of each op.

        Raises:
            RunError: The gradients of an earlier call still wait for `update` or `discard`.
        """
        layer_store = self._pending.final
        check_batch(layer_store, inputs, targets, layer_store.layout.microbatches)
        if self._halfway:
            raise RunError(
                "forward_backward was called again before update or discard; a step's "
                "microbatches are given all at once"
            )
        step_output = self._runner.train(
            self._runner.executor(), step, inputs, targets, keys, self.scaler.scale
        )
        self._halfway = True
        return step_output

    def update(
        self, step: int, step_output: StepOutput, *, lr: float, max_norm: float = 0.0, flag: int = 0
    ) -> StepRecord:
        """Runs the second half of `step`: agreement of the ranks, clipping, the optimizer.

        Args:
            step: As in `step`.
            step_output: From `forward_backward`.
            lr: As in `step`.
            max_norm: As in `step`.
            flag: As in `step`.

        Returns:
            The result of the step.
        """
        check_rates(lr, max_norm)
        self._halfway = False
        return self._pending.observed(
            *self._optimizer_step.update(step, step_output, lr, max_norm, flag)
        )

    def discard(self) -> None:
        """Drops the gradients instead of `update`, and keeps the measurements."""
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
        outputs: dict[int, object] | None = None,
    ) -> float:
        """Computes the mean loss over microbatches without training.

        Args:
            inputs: As in `step`.
            targets: As in `step`.
            microbatches: Number of microbatches.
            keys: As in `step`.
            shares: Whether each replica has microbatches of its own. If not, the first replica's
                loss counts, because all have the same.
            outputs: Takes the model's output of each microbatch on the ranks of the last stage.
                These then need no targets, and the loss is NaN without.

        Returns:
            The mean loss, the same on every rank.

        Raises:
            InputError: Ranks of a replica were given different batches.
        """
        if microbatches < 1:
            raise InputError(f"microbatches = {microbatches}: an evaluation needs at least 1")
        check_batch(self._pending.final, inputs, targets, microbatches, outputs is None)
        hashes = hashes_to_compare(self.world, inputs, targets)
        loss = self._runner.evaluate(inputs, targets, microbatches, keys, outputs)
        world, ranks = self.world, self.world.everyone.size
        table = torch.zeros(1 + 2 * ranks, dtype=torch.float64)
        table[0], rows = loss, table[1:].view(2, ranks)
        for row, value in zip(rows, hashes, strict=True):
            if value is not None:
                row[world.everyone.rank] = value
        (world.everyone if shares else FirstReplica(world)).sum(table, "the evaluation to end")
        difference = find_difference("the evaluation", rows.tolist(), world.replicas)
        if difference is not None:
            raise difference
        return float(table[0]) / (world.replicas if shares else 1)

    @property
    def post_validates(self) -> bool:
        """True if the next step has no barrier at its end.

        A weight tied over two ranks gets its gradient from both. The barrier then stays.
        """
        return self._pending.validates

    @property
    def objective(self) -> Objective:
        """The time that this pipeline's schedule keeps short."""
        return self.schedule_keeper.objective

    # -- changes between steps ---------------------------------------------------------------------

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
        """Makes the same ranks another mesh. See `Actions.reshape`.

        Args:
            pipeline: Number of ranks of a pipeline.
            data: Number of replicas.
            partition: Layers on each new stage. The default is as even as possible.
        """
        return self.actions.reshape(pipeline=pipeline, data=data, partition=partition)

    def digest(self) -> str:
        """Returns the SHA-256 of all weights. See `LayerStates.digest`."""
        return self.layer_states.digest()

    # -- costs and predictions ---------------------------------------------------------------------

    def costs(self) -> tuple[LayerCost, ...]:
        """See `Measurements.costs`."""
        return self.measurements.costs()

    def predict(self, layers: tuple[LayerCost, ...], partition: Partition) -> Timeline:
        """Simulates one step. See `ScheduleKeeper.predict`.

        Args:
            layers: Cost of each layer.
            partition: Number of layers on each stage.
        """
        return self.schedule_keeper.predict(layers, partition)

    def schedule_for(
        self, partition: Partition, layers: tuple[LayerCost, ...] | None = None
    ) -> Schedule:
        """Returns the schedule that would run on a placement. See `ScheduleKeeper.on`.

        Args:
            partition: Number of layers on each stage.
            layers: Costs to make it for. The default is the known costs.
        """
        return self.schedule_keeper.on(partition, layers)

    def largest(self, value: float) -> float:
        """Returns the largest of the ranks' values."""
        return self.measurements.maxima((value,))[0]


def _check(
    world: World, model: object, partition: object, steps: StepOptions, update: UpdateOptions
) -> None:
    """Raises ConfigError if the arguments of an engine do not fit each other."""
    if not isinstance(model, Model):
        raise ConfigError(
            f"model is a {type(model).__name__}; make a Model of it with "
            "dynmo.models.model.from_factories"
        )
    check_partition(partition)
    check_recompute(steps.recompute, model.layers)
    if steps.slices is not None and (world.size > 1 or update.post_validation):
        raise ConfigError(
            "slices of one GPU are one process, whose steps end together: use one rank a "
            "replica, without post_validation"
        )
