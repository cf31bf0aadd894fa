"""The parts of a pipeline: how it starts, resumes from a checkpoint and joins a training."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import ConfigError, RunError
from dynmo.events import Event, StepResult
from dynmo.models.identity import Identity
from dynmo.models.model import Model
from dynmo.models.sequential import Sequential
from dynmo.pipeline.assembly import (
    check_own_rules,
    first_partition,
    first_schedule,
    first_shape,
    join_engine,
    make_engine,
    rank_memory_limit,
)
from dynmo.pipeline.autosave import AutoSave
from dynmo.pipeline.case import Dynamism
from dynmo.pipeline.case_options import CaseOptions
from dynmo.pipeline.cases import Cases, agree_on_cases, make_cases
from dynmo.pipeline.changes import Changes
from dynmo.pipeline.journal import Part, Reread, Survivor
from dynmo.pipeline.optimizers import OptimizerHandle, settings_of
from dynmo.pipeline.option_checks import problems
from dynmo.pipeline.options import Checkpoints, Log, PipelineOptions
from dynmo.pipeline.rebalance import Rebalancer
from dynmo.pipeline.saving import (
    SavedPipeline,
    begin_save,
    check_saved,
    check_settings,
    find_checkpoint,
    restore_engine,
    state_of,
)
from dynmo.pipeline.steps import Steps
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.agreement import first_difference
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.waits import ranks_text
from dynmo.runtime.comm.worker import said_while
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.optim.parameter_groups import ParameterGroups
from dynmo.runtime.state.save import Save
from dynmo.schedule.catalogue import make
from dynmo.schedule.op import validate

if TYPE_CHECKING:
    from dynmo.elastic.newcomer import NewcomerState
    from dynmo.pipeline.dry_run import RunPlan
    from dynmo.pipeline.trace import Tracer

_logger = logging.getLogger(__name__)


class Parts:
    """What a pipeline consists of. A load or a join makes some parts anew.

    A process that is no rank of the training has no engine, no changes and no shapes.

    Attributes:
        tell: Hands events to the listener.
        options: Options as they were when the engine was made. Those of `changes` are the present
            ones.
        cases: The dynamic cases.
        optimizer: The groups of parameters, for torch's schedulers.
        engine: Holds this rank's layers and runs steps.
        changes: Changes ranks, placement and layers between steps.
        steps: Trains and evaluates.
        shapes: Bytes of each layer by its shapes. None if unknown.
        extra: What the loop has kept in the checkpoint.
        saves: Saves when it is time to.
        recovery: Goes on after a fault. None if that is not wanted.
        outside: Steps of the time before this process was outside. None while it is a rank.
    """

    engine: Engine
    changes: Changes
    steps: Steps
    shapes: tuple[LayerCost, ...] | None

    def __init__(
        self,
        model: Model,
        world: Meeting,
        options: PipelineOptions,
        cases: Sequence[CaseOptions | Dynamism],
        log: Log,
        checkpoint: Checkpoints | None,
        checks_memory: bool,
        watches_ranks: bool,
    ) -> None:
        for problem in problems(options, model.layers, model.options):
            raise ConfigError(problem)
        if options.learning_rate is not None and options.steps is None:
            raise ConfigError("learning_rate needs the steps of the training; give steps")
        on_cuda = world.device.type == "cuda"
        if options.deterministic and on_cuda:
            torch.use_deterministic_algorithms(True)  # CPU kernels are, with fixed threads
        check_own_rules(options)
        facts = options.facts(model.layers, model.options, on_cuda)
        self._make_cases = partial(make_cases, cases, facts)
        self.cases = self._make_cases()
        self._checks_memory = checks_memory and options.memory_limit is not None
        limit = rank_memory_limit(options, world)
        self.options = options.model_copy(update={"memory_limit": limit})
        self.model, self.world = model, world
        self._listens, self.tell = log.listen is not None, partial(_tell, log.listen)
        self._trace = log.trace
        self._watches_ranks = watches_ranks
        self._plan: RunPlan | None = None
        self.extra: dict[str, Any] = {}
        self.saves = AutoSave(checkpoint, world, self.begin_save, self.tell)
        self.outside: int | None = None
        self.recovery: Survivor | None = None
        if world.is_outside:
            self.outside = 0
            groups = ParameterGroups(settings_of(options), model, model.build(()), world.device)
            self.optimizer = OptimizerHandle(groups)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("engine", "changes", "steps", "shapes"):
                raise RunError(
                    "this process is no rank of the training; call join(), and go on if it "
                    "returns True"
                )
            raise AttributeError(name)

    @property
    def identity(self) -> Identity:
        """What decides the numbers of the training: versions, code, layers."""
        if self.outside is None:
            return self.engine.store.identity.with_code(self.cases)
        from dynmo.models.identity import identity_of

        code = [*self.cases, *self.optimizer.code]
        return identity_of(self.model, self.model.build(())).with_code(code)

    # -- start -------------------------------------------------------------------------------------

    @property
    def train(self) -> Callable[[Part, bool, bool, Reread | None], tuple[StepResult, ...]]:
        """Trains on a batch. A property, since a call less lies between a loop and its layers."""
        return self.steps.train if self.recovery is None else self.recovery.train

    def start(self, resume: str | Path | None) -> None:
        """Starts a training, or resumes that of a checkpoint."""
        with said_while(self.world.rank, "makes its layers"):
            saved = None
            if resume is not None:
                saved = find_checkpoint(Path(resume), self.world)
                check_saved(saved, self.model)
            elif isinstance(self.model, Sequential):
                _agree_on_modules(self.model, self.world)
            self._make(saved)
            if saved is None:
                self.begin_at(0)
            else:
                self.resume(saved)
            self._watch(None if saved is None else saved.state.reference)

    def _make(self, saved: SavedPipeline | None) -> None:
        """Makes the engine, with the mesh and the placement of a checkpoint or the first ones."""
        world, model, options = self.world, self.model, self.options
        self.shapes = self._known_shapes(is_new=saved is None)
        pipeline, replicas = first_shape(options, model.layers, saved)
        schedule = first_schedule(options, model.layers, (pipeline, replicas), saved)
        if saved is None and self._plan is not None and pipeline == options.pipeline:
            schedule = self._plan.schedule
        partition = first_partition(options, model.layers, pipeline, schedule)
        if saved is not None and len(saved.state.partition) == partition.stages:
            partition = Partition(tuple(saved.state.partition))
        mesh = arrange(world, replicas)
        self.engine = make_engine(options, mesh, model, partition, schedule=schedule)
        store = self.engine.store
        self.optimizer = OptimizerHandle(store.groups)
        for case in self.cases:
            if case.divides_parameters:
                store.groups.check_is_elementwise(f"dynamism.{case.name}")
        copies = options.post_validation and options.rollback == "in-place"
        if copies and not store.groups.inverts and world.everyone.rank == 0:
            _logger.warning(
                f'pipeline.rollback = "in-place": no inverse of {store.groups.name} is known, so '
                "copies are kept to take a step back"
            )
        if self._watches_ranks or (world.everyone.size > 1 and options.balance.balancer != "none"):
            store.check_names(range(model.layers))
        agree_on_cases(world, self.cases)

    def _known_shapes(self, is_new: bool) -> tuple[LayerCost, ...] | None:
        """Returns the layers' bytes by shapes, if a memory limits them."""
        model, options = self.model, self.options
        if options.memory_limit is None or options.micro_batch is None or model.options is None:
            return None  # nothing limits the memory, or no shapes are known
        from dynmo.pipeline.dry_run import check_later_ranks, first_plan
        from dynmo.pipeline.shape_costs import known_costs

        costs, unknown = known_costs(options, model)
        if unknown is not None and self.world.everyone.rank == 0:
            _logger.warning(unknown)
        if is_new and self._checks_memory:
            check_later_ranks(options, model, costs)
            self._plan = first_plan(options, model, costs, unknown)
        return costs if unknown is None else None

    # -- resume and join ---------------------------------------------------------------------------

    def resume(self, saved: SavedPipeline) -> None:
        """Goes on from a checkpoint with the present engine."""
        check_settings(saved, self.engine)
        restore_engine(self.engine, saved, self.cases)
        state = saved.state
        self.extra = state.extra
        self.begin_at(saved.step, math.nan if state.loss is None else state.loss, state.moves)
        if self.options.learning_rate is None:
            # Older checkpoints have the learning rate alone.
            older = [] if state.lr is None else [{"lr": state.lr}]
            self.optimizer.restore(older if state.groups is None else state.groups)

    def load(self, folder: Path) -> None:
        """Goes on from a checkpoint in place of the present state."""
        before, saved = self.changes, find_checkpoint(folder, self.world)
        check_saved(saved, self.engine.model)
        self.options = before.options
        self.resume(saved)
        after = self.changes
        after.tracer, after.elastic = before.tracer, before.elastic
        after.cases.skipped = before.cases.skipped
        if before.elastic is not None:
            before.elastic.go_on(after.rebalancer, saved.state.reference)

    def begin_save(
        self,
        folder: Path,
        keep: int,
        extra: Mapping[str, Any] | None,
        best: int | None,
        *,
        behind: bool,
    ) -> Save:
        """Begins a checkpoint of the present state, once the last step is final."""
        engine, changes = self.engine, self.changes
        self.steps.settle()
        known: dict[str, Any] = {
            "extra": self.extra if extra is None else extra,
            "groups": self.optimizer.saved(),
            "reference": None if changes.elastic is None else changes.elastic.reference,
        }
        with engine.attempt():
            engine.pending.final.check_names()
            known["identity"] = self.identity.model_dump()
            moves = changes.rebalancer.moves
            state = state_of(engine, self.cases, loss=changes.loss, moves=moves, extra=known)
            return begin_save(engine, folder, self.steps.done, keep, state, best, behind=behind)

    def join(self, stopping: Callable[[], bool]) -> bool:
        """Drops what this process has, and waits until it is a rank. False: the run is over."""
        from dynmo.elastic.newcomer import join

        identity = self.identity
        if self.outside is None:
            self.outside = self.steps.done
            if self.recovery is not None:
                self.recovery.forget()
            self.saves.close()  # a signal has nothing to save here
            del self.engine, self.changes, self.steps
            gc.collect()
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
        validate(make("1f1b", 2, 2))  # all ranks would wait while its loops are loaded
        return join(self.world, identity, self.take_up, stopping)

    def take_up(self, text: str) -> None:
        """Becomes a rank of a running training, by rank 0's message."""
        from dynmo.elastic.newcomer import state_from

        newcomer = state_from(text)
        state = newcomer.state
        self.cases = self._make_cases()
        if newcomer.microbatches != self.options.all_microbatches:
            self.options = self.options.with_microbatches(newcomer.microbatches)
        # First, because all other ranks wait while this one joins.
        self.shapes = self._known_shapes(is_new=False)
        self.engine = join_engine(self.options, self.world, self.model, self.cases, newcomer)
        self.extra = state["extra"]
        self.begin_at(newcomer.step, state["loss"], state["moves"], joined=True)
        if self.options.learning_rate is None:
            self.optimizer.restore(state["groups"])
        self.outside = None
        self._watch(newcomer.reference, newcomer)
        if self.changes.tracer is not None:
            self.changes.tracer.keep_around()

    def begin_at(
        self, step: int, loss: float = math.nan, moves: int = 0, joined: bool = False
    ) -> None:
        """Makes what leads from step to step, before this step."""
        options, engine = self.options, self.engine
        cases = Cases(self.cases, engine)
        rebalancer = Rebalancer(options, engine, cases, self.shapes, moves)
        self.changes = Changes(
            options,
            engine,
            cases,
            rebalancer,
            self.tell,
            partial(_own_state, self.optimizer, self.extra),
            loss,
            step if joined else None,
        )
        if self.recovery is not None:
            self.changes.before_acting = self.recovery.before_acting
        self.saves.step = step
        self.steps = Steps(
            engine,
            self.changes,
            self.optimizer,
            self.saves,
            self.tell,
            self._listens,
            step,
            self.recovery,
        )
        cases.take_over(engine)
        engine.pending.take_failed()  # an earlier training may have left it
        self.changes.tell_barrier(step)

    def _watch(self, reference: float | None, newcomer: NewcomerState | None = None) -> None:
        """Watches ranks and ops, if that is wanted."""
        changes, engine = self.changes, self.engine
        if self._watches_ranks:
            from dynmo.pipeline.elasticity import Elasticity

            changes.elastic = Elasticity(
                changes.options, engine, changes.rebalancer, self.identity, reference, newcomer
            )
        if self._trace:
            changes.tracer = self.new_tracer()

    def new_tracer(self) -> Tracer:
        """Begins to watch ops. All ranks call it together."""
        from dynmo.pipeline.trace import Tracer

        return Tracer(self.world.everyone, self.engine.clock, self._trace)


def _own_state(optimizer: OptimizerHandle, extra: dict[str, Any]) -> dict[str, Any]:
    return {"groups": optimizer.saved(), "extra": extra}


def _tell(listen: Callable[[Event], None] | None, *events: Event | None) -> None:
    for event in events:
        if event is not None and listen is not None:
            listen(event)


def _agree_on_modules(model: Sequential, world: Meeting) -> None:
    """Raises ConfigError on every rank if some rank has made other modules."""
    differs = first_difference(world, model.fingerprints(), "all ranks to make the model")
    if differs is not None:
        index, others = differs
        were_used = torch.tensor([int(model.were_used)])
        if int(world.everyone.largest(were_used, "whether layers were used before")):
            raise ConfigError(
                "these layers belong to a pipeline already, and each rank has trained its own; "
                "make new layers, and give the new pipeline the weights: "
                "second.load_state_dict(first.state_dict())"
            )
        raise ConfigError(
            f"layer {index} has other shapes or weights on rank 0 than on {ranks_text(others)}; "
            "make the same modules on all ranks, after torch.manual_seed with one number"
        )
