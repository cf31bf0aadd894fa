"""The engine runs the steps of one model over a world of ranks.

world = Meeting.join(store, rank, size)
engine = Engine(world, model, Partition((9, 9)), StepOptions("zb-h1", microbatches=8))
for step in range(steps):
    result = engine.step(step, inputs, targets, lr=3e-4, max_norm=1.0)
    costs = engine.costs()                    # measured, the same on every rank

What changes between steps is in `dynmo.pipeline.actions`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import ConfigError, InputError, RunError
from dynmo.models.loss import joined
from dynmo.models.model import Model
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.clock import clock_for
from dynmo.runtime.comm.error_text import clear_frames
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.comm.process_mesh import FirstReplica
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.batch_check import (
    Hashes,
    Inputs,
    Targets,
    check_batch,
    check_rates,
    find_difference,
    hashes_to_compare,
)
from dynmo.runtime.engine.executor import StepOutput
from dynmo.runtime.engine.not_finite import NotFiniteError, StepBatch, explained
from dynmo.runtime.engine.optimizer_step import OptimizerStep
from dynmo.runtime.engine.options import (
    StepOptions,
    UpdateOptions,
    check_partition,
    check_recompute,
)
from dynmo.runtime.engine.post_validation import PostValidation
from dynmo.runtime.engine.profiler import Profiler, measure_links
from dynmo.runtime.engine.programs import Programs
from dynmo.runtime.engine.rank_speeds import RankSpeeds
from dynmo.runtime.engine.schedule_keeper import ScheduleKeeper
from dynmo.runtime.engine.sm_slices import make_streams
from dynmo.runtime.engine.step_reduction import StepRecord, StepReduction
from dynmo.runtime.optim.loss_scale import make_scaler
from dynmo.runtime.optim.parameter_groups import Rates
from dynmo.runtime.state.digest import weights_digest
from dynmo.runtime.state.layer_options import LayerOptions, ReplicaOptions
from dynmo.runtime.state.layer_store import LayerStore


class Engine:
    """Runs the steps of a model whose layers are spread over a world of ranks.

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
            outside of. The engine then holds nothing until `Actions.arrive`.

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
        self.layouts = steps.layouts(model.layers, replicas.groups(world.replicas))
        mesh = elsewhere or (steps.slices or world.size, world.replicas)
        layout = self.layouts.make(*mesh, steps.microbatches, partition)
        streams = make_streams(world.device, steps.slices, layout.stage_ranks)
        self.clock = clock_for(world.device)
        self.profiler = Profiler(self.clock)
        self.store = store = LayerStore(
            world, model, layout, self.clock, layers, update.optimizer, replicas, is_bare
        )
        links = {} if is_bare else measure_links(world, layout.pairs)
        self.speeds = RankSpeeds(store, self.profiler)
        self.schedule_keeper = ScheduleKeeper(
            store, steps, links, self.speeds, post_validation=post_validation
        )
        self.programs = Programs(
            store,
            self.schedule_keeper,
            self.profiler,
            self.clock,
            streams,
            post_validation=post_validation,
            replicates=replicas.replicates or world.replicas > 1,
        )
        # Gradients wait for `update` or `discard`.
        self._halfway = False
        # Undoes what the step that runs has written beside gradients.
        self._undo: Callable[[], None] = _nothing
        # Batches of the steps that are not final, by step.
        self._batches: dict[int, StepBatch] = {}
        scaler = update.scaler or make_scaler(layers.dtype)
        table = StepReduction(store, self.clock)
        self.optimizer_step = OptimizerStep(store, table, self.profiler, scaler, update.clip_scope)
        self.pending = PostValidation(
            store,
            self.optimizer_step,
            validates=post_validation,
            copies=update.rollback == "exact" or not store.groups.inverts,
            explain=self._explained,
            attempt=self.attempt,
        )

    # -- failures ----------------------------------------------------------------------------------

    @contextmanager
    def attempt(self, step: int | None = None, *, is_final: bool = False) -> Generator[None]:
        """Runs what one rank may fail at while others wait for it.

        If it fails, all ranks raise its error, and go on as before the step. No weight was changed.

        Args:
            step: A step without a barrier. Its error is raised in the next call, since other ranks
                may have ended the step.
            is_final: Whether the ranks cannot go on after an error.
        """
        if self.store.generation != self.store.world.everyone.generation:
            self._renew()  # another pipeline of these ranks has failed
        try:
            yield
        except Exception as error:
            everyone, self._halfway = self.store.world.everyone, False
            self._undo()
            self._undo = _nothing
            if everyone.size > 1:
                # A message under way that somebody holds would keep the groups, and the others
                # would wait.
                self.programs.relower()
                self.pending.ring.drop()
                clear_frames(error)
                gc.collect()
                if not meeting_of(everyone).give_up(error, is_final or self.pending.is_halfway):
                    raise
                self._renew()
            if is_final:
                raise
            if not self.pending.recover(step, error):
                self.pending.raise_failure()
                raise

    def _renew(self) -> None:
        """Takes note that the ranks have met anew."""
        self.programs.relower()
        self.store.renewed()
        self.pending.ring.drop()
        self.pending.reshaped()

    # -- training ----------------------------------------------------------------------------------

    def step(
        self,
        step: int,
        inputs: Inputs,
        targets: Targets,
        *,
        lr: Rates,
        max_norm: float = 0.0,
        flag: int = 0,
        work: Tensor | float = 0.0,
    ) -> StepRecord:
        """Trains on one batch: forward, backward, clipping, update.

        Args:
            inputs: This replica's microbatches, [microbatches, ...], on the rank of the first
                stage. Or a list with the first layer's arguments for each microbatch. Every replica
                has as many. They follow those of the replica before it in the batch.
            targets: Likewise, on the rank of the last stage.
            lr: Learning rate, or all options of each group of parameters.
            max_norm: Norm to clip the gradients to. 0 clips nothing.
            flag: Number that every rank gets in `StepRecord.flags`, such as a wish to stop.
            work: Operations of this replica's batch, on the rank of the first stage. Every rank
                gets the sum in `StepRecord.work`.

        Raises:
            InputError: Ranks of a replica were given different batches. Nothing was updated.
            RunError: The loss or a gradient is not finite. Under a dynamic loss scale such a
                gradient skips the step.
        """
        results = self.advance(
            step,
            inputs,
            targets,
            lr=lr,
            max_norm=max_norm,
            flag=flag,
            work=work,
        )
        return (results + self.drain())[-1]

    def advance(
        self,
        step: int,
        inputs: Inputs,
        targets: Targets,
        *,
        lr: Rates,
        max_norm: float = 0.0,
        flag: int = 0,
        work: Tensor | float = 0.0,
    ) -> tuple[StepRecord, ...]:
        """Trains like `step`, but without a barrier at its end under post-validation.

        The next step then begins before this one is final. `drain` waits for the last step, and so
        does every method that reads or changes the model. An error is raised one step late.

        Returns:
            The results that have become final and were not returned before, in order. With a
            barrier the last is that of this step, and without one that of the step before.
        """
        check_rates(lr, max_norm)
        pending = self.pending
        pending.raise_failure()
        self._batches[step] = StepBatch(inputs, targets)
        self._batches.pop(step - 2, None)
        if not pending.validates:
            step_output = self.forward_backward(step, inputs, targets)
            step_output.work = work
            record = self.update(step, step_output, lr=lr, max_norm=max_norm, flag=flag)
            self._batches.clear()
            return *pending.take_done(), record
        has_run = False
        with self.attempt(step):
            check_batch(self.store, inputs, targets, self.store.layout.microbatches)
            pending.begin()
            step_output = self._run(step, inputs, targets)
            self._undo, step_output.work = step_output.undo, work
            pending.end(step, step_output, lr, max_norm, flag)
            self._undo, has_run = _nothing, True
        if has_run:  # or the error of this step is raised in the next call
            pending.raise_failure()
        return pending.take_done()

    def drain(self) -> tuple[StepRecord, ...]:
        """Waits until the last step is final. Returns results not returned before."""
        return self.pending.drain()

    def forward_backward(self, step: int, inputs: Inputs, targets: Targets) -> StepOutput:
        """Runs the first half of `step`. Gradients wait for `update` or `discard`."""
        store = self.pending.final
        if self._halfway:
            raise RunError(
                "forward_backward was called again before update or discard; a step's "
                "microbatches are given all at once"
            )
        with self.attempt():
            check_batch(store, inputs, targets, store.layout.microbatches)
            step_output = self._run(step, inputs, targets)
            self._undo = step_output.undo
        self._halfway = True
        return step_output

    def _run(self, step: int, inputs: Inputs, targets: Targets) -> StepOutput:
        # Nobody else may hold the executor when it fails (`attempt`).
        executor, pending = self.programs.executor(), self.pending
        is_validated = partial(pending.is_validated, executor) if pending.is_out else None
        scale = self.optimizer_step.scaler.scale
        return self.programs.train(executor, step, inputs, targets, scale, is_validated)

    def update(
        self, step: int, step_output: StepOutput, *, lr: Rates, max_norm: float = 0.0, flag: int = 0
    ) -> StepRecord:
        """Runs the second half of `step`: agreement of the ranks, clipping, the optimizer."""
        check_rates(lr, max_norm)
        self._halfway = False
        end = self.optimizer_step
        with self.attempt():
            record, failed, error = end.agree(step, step_output, max_norm, flag)
        if error is not None:
            self.discard()
            step_output.undo()
            raise self._explained(error)
        self._undo = _nothing
        with self.attempt(is_final=True):
            record = end.make(record, failed, lr, max_norm)
        return self.pending.observed(record, failed)

    def _explained(self, error: Exception) -> Exception:
        """Says where a value is not finite first."""
        batch = self._batches.pop(error.step, None) if isinstance(error, NotFiniteError) else None
        if batch is None or not isinstance(error, NotFiniteError):
            return error
        with self.attempt():
            scale = self.optimizer_step.scaler.scale
            said = explained(error, self.store, self.programs, batch, scale)
        self.discard()
        return said

    def discard(self) -> None:
        """Drops the gradients instead of `update`, and keeps the measurements."""
        self._halfway, self._undo = False, _nothing
        self.optimizer_step.discard()

    def evaluate(
        self,
        inputs: Inputs,
        targets: Targets,
        microbatches: int,
        *,
        shares: bool = False,
        outputs: dict[int, object] | None = None,
        observe: Callable[[Any, Any], None] | None = None,
    ) -> float:
        """Computes the mean loss over microbatches without training, alike on all ranks.

        Args:
            inputs: [microbatches, ...] on the rank of the first stage.
            targets: [microbatches, ...] on the rank of the last stage.
            shares: Whether each replica has microbatches of its own. If not, the first replica's
                loss counts, because all have the same.
            outputs: Takes the model's output of each microbatch on the ranks of the last stage.
                These then need no targets, and the loss is NaN without.
            observe: Called with outputs and targets of each microbatch on these ranks.

        Raises:
            InputError: Ranks of a replica were given different batches, or no target counts.
        """
        if microbatches < 1:
            raise InputError(f"microbatches = {microbatches}: an evaluation needs at least 1")
        store = self.pending.final
        with self.attempt():
            check_batch(store, inputs, targets, microbatches, outputs is None)
            hashes = hashes_to_compare(self.store.world, inputs, targets)
            own = self.programs.evaluate(inputs, targets, microbatches, outputs, observe)
            losses, rows = self._shared(own, hashes, shares)
        difference = find_difference("the evaluation", rows, self.store.world.replicas)
        if difference is not None:
            raise difference
        if outputs is None and not losses[1].any():
            raise InputError(
                "the evaluation: no target of the whole batch is counted (all labels are -100?)"
            )
        return joined(losses[0].reshape(-1), losses[1].reshape(-1).tolist(), self.model.sums)

    def _shared(self, own: Tensor, hashes: Hashes, shares: bool) -> tuple[Tensor, list[Any]]:
        """Returns losses and counts of all replicas, and hashes of all ranks."""
        world, ranks = self.store.world, self.store.world.everyone.size
        replicas, microbatches = world.replicas if shares else 1, own.shape[1]
        table = torch.zeros(2 * replicas * microbatches + len(hashes) * ranks, dtype=torch.float64)
        losses = table[: 2 * replicas * microbatches].view(2, replicas, microbatches)
        rows = table[losses.numel() :].view(-1, ranks)
        if shares or not world.replica:
            losses[:, world.replica] = own
        for row, value in zip(rows, hashes, strict=True):
            if value is not None:
                row[world.everyone.rank] = value
        (world.everyone if shares else FirstReplica(world)).sum(table, "the evaluation to end")
        return losses, rows.tolist()

    # -- measurements ------------------------------------------------------------------------------

    def costs(self) -> tuple[LayerCost, ...]:
        """Returns the measured cost of every layer: seconds per microbatch, and bytes.

        Seconds are those on a rank of speed 1 (`speeds`).
        """
        store = self.store
        pairs = [(layer, store.optimizers[index]) for index, layer in store.layers.items()]
        costs = self.profiler.gather(
            store.world,
            pairs,
            store.model.layers,
            copies=self.pending.copies,
            accumulation_groups=store.accumulation_groups,
        )
        return self.speeds.normalized(costs)

    def halves(self, costs: tuple[LayerCost, ...]) -> tuple[tuple[LayerCost, ...], ...]:
        """Returns `costs` from the earlier and from the later readings alone.

        Empty if some time has one reading only.
        """
        return self.profiler.gather_halves(self.store.world, self.store.layers, costs)

    def digest(self) -> str:
        """Returns the SHA-256 of all weights, or raises RunError if replicas differ."""
        return weights_digest(self.pending.final)


def _nothing() -> None:
    pass


def _check(
    world: World, model: object, partition: object, steps: StepOptions, update: UpdateOptions
) -> None:
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
