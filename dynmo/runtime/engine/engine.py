"""The engine runs the steps of one model over a world of ranks.

world = Meeting.join(store, rank, size)
engine = Engine(world, model, Partition((9, 9)), EngineOptions("zb-h1", microbatches=8))
for step in range(steps):
    engine.train(StepBatch(inputs, targets), StepSettings(step, 3e-4, max_norm=1.0))
    costs = engine.costs()                    # measured, the same on every rank

What changes between steps is in `dynmo.pipeline.actions`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import InputError
from dynmo.models.loss import joined
from dynmo.models.model import Model
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.clock import clock_for
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.comm.process_mesh import FirstReplica
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.waits import clear_frames
from dynmo.runtime.engine.batch_check import (
    Hashes,
    StepBatch,
    StepSettings,
    check_batch,
    find_difference,
    hashes_to_compare,
)
from dynmo.runtime.engine.not_finite import Cause, NotFiniteError, find_cause
from dynmo.runtime.engine.optimizer_step import NON_FINITE, OptimizerStep
from dynmo.runtime.engine.post_validation import PostValidation
from dynmo.runtime.engine.profiler import Profiler, measure_links
from dynmo.runtime.engine.programs import Programs
from dynmo.runtime.engine.rank_speeds import RankSpeeds
from dynmo.runtime.engine.schedule_maker import ScheduleMaker
from dynmo.runtime.engine.stage_streams import make_streams
from dynmo.runtime.engine.step_reduction import StepRecord, StepReduction
from dynmo.runtime.optim.precision import make_scaler
from dynmo.runtime.options import EngineOptions
from dynmo.runtime.state.exact_state import weights_digest
from dynmo.runtime.state.layer_store import LayerStore


class Engine:
    """Runs the steps of a model whose layers are spread over a world of ranks.

    All ranks call every method together, with equal arguments.

    Args:
        world: The ranks of one pipeline. It may be one of several in a mesh (`arrange`).
        model: The model to train.
        partition: Number of layers on each stage. The schedule says which rank holds which stage.
        options: How it trains.
        elsewhere: Ranks of a pipeline and number of replicas of a run that this process is still
            outside of. The engine then holds nothing until `Actions.arrive`.
        former: The engine of this rank before a fault.

    Raises:
        ConfigError: An option is wrong, or it does not allow some layer of the model.
        PartitionError: The placement does not fit the model or the schedule.
    """

    def __init__(
        self,
        world: RankGroup,
        model: Model,
        partition: Partition,
        options: EngineOptions,
        elsewhere: tuple[int, int] | None = None,
        former: Engine | None = None,
    ) -> None:
        is_bare, post_validation = elsewhere is not None, options.post_validation
        self.model = model
        self.layouts = options.layouts(model.layers, world.replicas)
        mesh = elsewhere or (options.slices or world.size, world.replicas)
        layout = self.layouts.make(*mesh, options.microbatches, partition)
        streams = make_streams(world.device, options.slices, layout.stage_ranks)
        self.clock = clock_for(world.device)
        self.profiler = Profiler(self.clock)
        before = None if former is None else former.store
        self.store = store = LayerStore(world, model, layout, self.clock, options, is_bare, before)
        links = {} if is_bare else measure_links(world, layout.pairs)
        self.speeds = RankSpeeds(store, self.profiler)
        self.schedule_maker = ScheduleMaker(store, options, links, self.speeds)
        self.programs = Programs(
            store,
            self.schedule_maker,
            self.profiler,
            self.clock,
            streams,
            post_validation=post_validation,
            replicates=options.replicates or world.replicas > 1,
        )
        # Undoes what the step that runs has written beside gradients.
        self._undo: Callable[[], None] = _nothing
        # Steps that are not final: their batches, and what has seeded their layers.
        self._ran: dict[int, tuple[StepBatch, int]] = {}
        scaler = options.scaler or make_scaler(options.dtype)
        table = StepReduction(store, self.clock)
        self.optimizer_step = OptimizerStep(
            store, table, self.profiler, scaler, options.clip_scope, options.stop_after
        )
        # Called on all ranks before steps that are not finite end the training.
        self.before_end: Callable[[], None] = _nothing
        # Called once a step has run, before it may change weights and before its end is agreed on.
        self.before_update: Callable[[], None] = _nothing
        # Called once the end of a step with a barrier is agreed on, before weights change.
        self.after_agreement: Callable[[], None] = _nothing
        self.pending = PostValidation(
            store,
            self.optimizer_step,
            validates=post_validation,
            copies=options.rollback == "exact" or not store.groups.inverts,
            # A cycle would keep the weights until a collection of garbage.
            find_cause=partial(Engine._find_cause, proxy(self)),
            explain=partial(Engine._explained, proxy(self)),
            attempt=partial(Engine.attempt, proxy(self)),
        )

    # -- failures ----------------------------------------------------------------------------------

    @contextmanager
    def attempt(self, step: int | None = None, *, is_final: bool = False) -> Generator[None]:
        """Runs what one rank may fail at while others wait for it.

        A rank that fails closes its channels and tells its error. A rank that waits for it finds
        the channels closed, and reads the error. So all raise it. They meet anew and go on as
        before the step: buffers have their old values, gradients are dropped, and no weight was
        changed.

        Args:
            step: A step without a barrier. Its error is raised in the next call, since other ranks
                may have ended the step.
            is_final: Whether weights change in it, so that the ranks cannot go on after an error.
        """
        if self.store.generation != self.store.world.everyone.generation:
            self._renew()  # another pipeline of these ranks has failed
        try:
            yield
        except Exception as error:
            everyone = self.store.world.everyone
            self._undo()
            self._undo = _nothing
            self.drop_after_agreement()
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

    def drop_after_agreement(self) -> None:
        self.after_agreement = _nothing

    def _renew(self) -> None:
        """Takes note that the ranks have met anew."""
        self.programs.relower()
        self.store.renewed()
        self.pending.ring.drop()
        self.pending.reshaped()

    # -- training ----------------------------------------------------------------------------------

    def train(self, batch: StepBatch, settings: StepSettings) -> tuple[StepRecord, ...]:
        """Trains on one batch.

            programs.train    F, B and W. Ranks send messages. Gradients add up in `.grad`, and
                              replicas sum them.
            agree             All ranks share losses, norms and hashes: the barrier of a step.
            update            Clipping and optimizer, without messages but for shared parameters.
                              Weights change here alone. Then gradients are dropped.

        Under post-validation a step has no barrier at its end. The next step then begins before
        this one is final. `drain` waits for the last step, and so does every method that reads or
        changes the model.

        Returns:
            The results that have become final and were not returned before, in order. With a
            barrier the last is that of this step, and without one that of the step before.

        Raises:
            InputError: Ranks of a replica were given different batches. Nothing was updated.
            RunError: The loss or a gradient was not finite in `stop_after` steps in a row. Fewer
                such steps are skipped. Without a barrier an error is raised one step late.
        """
        settings.check()
        pending, end, step = self.pending, self.optimizer_step, settings.step
        pending.raise_failure()
        self._ran.pop(step - 2, None)
        validates, agreed, has_run = pending.validates, None, False
        if not validates:
            pending.settle()
        with self.attempt(step if validates else None):
            check_batch(self.store, batch, self.store.layout.microbatches)
            if validates:
                pending.begin()
            is_validated = pending.is_validated if pending.is_out else None
            # Nobody else may hold the executor when it fails (`attempt`).
            draw, scale = self._draw(batch, step), end.scaler.scale
            step_output = self.programs.train(batch, draw, scale, is_validated)
            if pending.has_skipped:
                # It ran on buffers that the skipped step has written, and drew as if it counted.
                step_output.undo()
                end.drop_all_gradients()
                pending.finish_skip()
                draw, scale = self._draw(batch, step), end.scaler.scale
                step_output = self.programs.train(batch, draw, scale)
            self._undo = step_output.undo
            self.before_update()
            if validates:
                pending.end(settings, step_output)
            else:
                agreed = *end.agree(settings, step_output), step_output.undo
            self._undo, has_run = _nothing, True
        if agreed is not None:
            record = self._end(settings, *agreed)
            return *pending.take_done(), record
        if has_run:  # or the error of this step is raised in the next call
            pending.raise_failure()
        return pending.take_done()

    def _draw(self, batch: StepBatch, step: int) -> int:
        """Returns the number of the random draws of a step: skipped steps do not count."""
        draw = step - self.optimizer_step.not_finite.count
        self._ran[step] = batch, draw
        return draw

    def _end(
        self,
        settings: StepSettings,
        record: StepRecord,
        obstacle: str | None,
        error: Exception | None,
        undo: Callable[[], None],
    ) -> StepRecord:
        """Ends a step with a barrier as the ranks have agreed.

        Args:
            obstacle: Why it cannot be a plain update. What is not finite skips the update. What is
                too large is clipped.
            error: Raised on all ranks. Nothing is updated then.
            undo: Gives buffers the values from before the step.
        """
        end = self.optimizer_step
        is_bad = error is None and obstacle == NON_FINITE and not end.is_overflow(record)
        if is_bad and end.not_finite.next_ends:
            error = end.error(record)
        if error is not None or is_bad:
            end.discard()
            undo()
        with self.attempt(is_final=True):
            self.after_agreement()
        if error is not None:
            raise self._explained(error)
        if is_bad:
            record = end.skip(record)
            with self.attempt():
                record = self._find_cause(record)
        else:
            with self.attempt(is_final=True):
                record = end.update(record, obstacle, settings)
        self._ran.clear()
        return self.pending.observed(record, obstacle)

    def drain(self) -> tuple[StepRecord, ...]:
        """Waits until the last step is final. Returns results not returned before."""
        return self.pending.drain()

    def _explained(self, error: Exception) -> Exception:
        """Says where a value is not finite first. Whoever saves does so before the error."""
        if isinstance(error, NotFiniteError):
            with self.attempt():
                cause = self._cause(error.step)
            error = error if cause is None else error.caused_by(cause)
            self.before_end()
        return error

    def _find_cause(self, record: StepRecord) -> StepRecord:
        """Adds the cause to the record of a step that was skipped."""
        assert record.not_finite is not None
        named = replace(record.not_finite, cause=self._cause(record.step))
        return replace(record, not_finite=named)

    def _cause(self, step: int) -> Cause | None:
        batch, draw = self._ran.pop(step, (None, 0))
        if batch is None:
            return None
        scale = self.optimizer_step.scaler.scale
        cause = find_cause(self.store, self.programs, batch, draw, scale)
        self.optimizer_step.drop_all_gradients()
        return cause

    def evaluate(
        self,
        batch: StepBatch,
        microbatches: int,
        *,
        shares: bool = False,
        outputs: dict[int, object] | None = None,
        observe: Callable[[Any, Any], None] | None = None,
    ) -> float:
        """Computes the mean loss over microbatches without training, alike on all ranks.

        Args:
            shares: Whether each replica has microbatches of its own. If not, the first replica's
                loss counts, because all have the same.
            outputs: Takes the model's output of each microbatch on the ranks of the last stage.
                These then need no targets, and the loss is NaN without.
            observe: Called with outputs and targets of each microbatch on these ranks.

        Raises:
            InputError: Ranks of a replica were given different batches, or no target counts.
        """
        assert microbatches > 0, "an evaluation has microbatches"
        store = self.pending.final
        with self.attempt():
            check_batch(store, batch, microbatches, outputs is None)
            hashes = hashes_to_compare(self.store.world, batch)
            own_losses = self.programs.evaluate(batch, microbatches, outputs, observe)
            losses, rows = self._shared(own_losses, hashes, shares)
        difference = find_difference("the evaluation", rows, self.store.world.replicas)
        if difference is not None:
            raise difference
        if outputs is None and not losses[1].any():
            raise InputError(
                "the evaluation: no target of the whole batch is counted (all labels are -100?)"
            )
        return joined(losses[0].reshape(-1), losses[1].reshape(-1).tolist(), self.model.sums)

    def _shared(self, own_losses: Tensor, hashes: Hashes, shares: bool) -> tuple[Tensor, list[Any]]:
        """Returns losses and counts of all replicas, and hashes of all ranks."""
        world, ranks = self.store.world, self.store.world.everyone.size
        replicas, microbatches = world.replicas if shares else 1, own_losses.shape[1]
        table = torch.zeros(2 * replicas * microbatches + len(hashes) * ranks, dtype=torch.float64)
        losses = table[: 2 * replicas * microbatches].view(2, replicas, microbatches)
        rows = table[losses.numel() :].view(-1, ranks)
        if shares or not world.replica:
            losses[:, world.replica] = own_losses
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

    def costs_of_halves(self, costs: tuple[LayerCost, ...]) -> tuple[tuple[LayerCost, ...], ...]:
        """Returns `costs` from the earlier and from the later readings alone.

        Empty if some time has one reading only.
        """
        return self.profiler.gather_halves(self.store.world, self.store.layers, costs)

    def digest(self) -> str:
        """Returns the SHA-256 of all weights, or raises RunError if replicas differ."""
        return weights_digest(self.pending.final)


def _nothing() -> None:
    pass
