"""`Pipeline` trains one model over a world. The trainer of `dynmo train` uses it like a user."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from dynmo.cost.layer_cost import LayerCost
from dynmo.counterparts import names_checked
from dynmo.errors import ConfigError, InputError, RunError
from dynmo.events import CheckpointEvent, Event
from dynmo.models.identity import Identity
from dynmo.models.model import Model
from dynmo.models.sequential import Sequential
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.assembly import join_engine, make_engine
from dynmo.pipeline.batch import Batch, BatchCutter, Cut
from dynmo.pipeline.case import Dynamism, TokenShares
from dynmo.pipeline.case_context import agree_on_cases
from dynmo.pipeline.case_options import CaseOptions
from dynmo.pipeline.case_registry import make_cases
from dynmo.pipeline.cases import Cases
from dynmo.pipeline.loop import Loop
from dynmo.pipeline.model_flops import ModelFlops, device_peak_flops
from dynmo.pipeline.optimizers import OptimizerHandle, settings_of
from dynmo.pipeline.option_checks import problems
from dynmo.pipeline.options import (
    SGD,
    AdamW,
    ClipScope,
    LearningRate,
    NamedOptimizer,
    PipelineOptions,
    Precision,
    Rollback,
)
from dynmo.pipeline.placing import (
    check_own_rules,
    first_partition,
    first_schedule,
    first_shape,
    rank_memory_limit,
)
from dynmo.pipeline.rebalance import Rebalancer
from dynmo.pipeline.saving import (
    SavedPipeline,
    check_saved,
    check_settings,
    find_checkpoint,
    kept_settings,
    restore_engine,
    save_engine,
)
from dynmo.pipeline.start import World
from dynmo.pipeline.step_result import StepResult
from dynmo.pipeline.torch_modes import in_own_modes
from dynmo.pipeline.whole_model import WholeModel
from dynmo.plan.options import Balance, BalancerName, Elastic
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.agreement import first_difference
from dynmo.runtime.comm.error_text import ranks_text
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.setup_lines import said_while
from dynmo.runtime.layer.precision import PRECISIONS
from dynmo.runtime.optim.parameter_groups import GroupRule, ParameterGroups
from dynmo.runtime.optim.trial import Make
from dynmo.runtime.state.digest import buffers_digest
from dynmo.schedule.catalogue import ScheduleName
from dynmo.schedule.op import Schedule

if TYPE_CHECKING:
    from dynmo.cost.profile_file import Profile
    from dynmo.pipeline.dry_run import RunPlan
    from dynmo.pipeline.metrics import Metrics
    from dynmo.pipeline.sampler import ReplicaSampler
    from dynmo.plan.decide import DecisionRecord

_logger = logging.getLogger(__name__)
_DEFAULT = PipelineOptions(microbatches=1)


@dataclass(frozen=True)
class Account:
    """The time that a pipeline has spent on changes so far, and the work that it has saved.

    Attributes:
        measure_seconds: Seconds that measuring took on this rank.
        decide_seconds: Seconds that decisions took on this rank.
        move_seconds: Seconds that moves took on this rank.
        spared_forwards: F's of single frozen layers that a case has skipped, on all ranks.
        gpu_seconds_returned: GPU-seconds of ranks that the run did without.
    """

    measure_seconds: float
    decide_seconds: float
    move_seconds: float
    spared_forwards: int
    gpu_seconds_returned: float


class Pipeline:
    """Trains one model over the ranks of a world.

    All ranks call every method together, with equal arguments. Batches are the exception. A rank
    that holds neither the first nor the last stage may leave out inputs and targets.

    Args:
        model: The model to train, such as `dynmo.Sequential`.
        world: The ranks, from `dynmo.init`.
        microbatches: Number of microbatches of a step, on each replica.
        optimizer: `dynmo.AdamW` or `dynmo.SGD`. Or a function from groups of parameters to one of
            torch's optimizers, such as `functools.partial(torch.optim.RAdam, lr=1e-3)`. Each rank
            updates its own layers, so the update of a parameter may not read another's.
        groups: Takes the name of a parameter, as in `state_dict`, and the parameter without values.
            Returns a dict of the options that it has of its own, such as `{"weight_decay": 0.0}`,
            or None. The key "optimizer" gives it another function.
        learning_rate: How the rate changes over `steps`. None leaves it to torch's schedulers, on
            `pipeline.optimizer`.
        balance: `dynmo.Balance`, or the name of a balancer: "exact" moves layers between ranks when
            the work has become uneven and a move repays itself. "none" leaves them where they are.
        cases: Dynamic cases that act before each step: `dynmo.Freezing` and the like, or cases of
            your own (`dynmo.Dynamism`).
        elastic: Other meshes and numbers of ranks. None keeps the ranks as they are.
        steps: Steps of the whole training. A move must repay itself within them. None means that
            the training has no known end.
        seed: Seeds the random numbers of layers while training, such as dropout.
        micro_batch: Samples in a microbatch, to know the memory of a step before the first one.
        schedule: Order of F, B and W on each rank, such as "1f1b", "zb-h1" or "zb-v". "auto"
            chooses the fastest that fits, together with the placement, and may change it later.
        post_validation: Whether a step ends without a barrier. See `advance`.
        rollback: How a step is taken back: "exact" or "in-place".
        chunks: Stages per rank. None means the schedule's own number.
        memory_limit: Bytes of each rank, or a size such as "40GiB". A list has one for each rank of
            a pipeline. None means the memory of the device on CUDA, and no limit on CPU.
        pipeline: Ranks of a pipeline. None means the world's ranks over `replicas`. With `slices`
            it is the number of slices.
        replicas: Number of pipelines that train side by side. It must divide the ranks.
        expert: Number of replicas that share one set of experts. It must divide the replicas.
        zero: 1 shards the optimizer state over the replicas (ZeRO-1).
        slices: Whether the ranks of a pipeline are slices of one GPU, in one process.
        max_grad_norm: Gradients are clipped to this norm over all layers. 0 does not clip.
        clip_scope: "global", or "local": each layer is clipped by its own norm.
        precision: "float32", "bfloat16" or "float16". Weights have a float32 master.
        loss_scale: A power of two, or "dynamic". None means "dynamic" for float16 alone.
        loss_scale_window: Good steps after which a dynamic loss scale doubles.
        recompute: Layers whose activations are recomputed in B: "none", "all", "auto" or indices.
        head_tokens: Most tokens whose logits exist at once. The output layer and the loss then run
            a piece of the sequence at a time, all in B. None means all tokens of a microbatch.
        reduction_slots: Number of groups in which gradients are summed. With an equal number, any
            number of replicas gives the same bits. None means one per replica.
        compile: Whether torch.compile runs the parts of a layer between its linear layers.
        deterministic: On CUDA, whether to use only kernels that give the same bits in each run.
        listen: Called on every rank with each event: steps, moves, changes, rollbacks, faults. Give
            `dynmo.Csv(path)` and the like on rank 0 alone.
        trace: Steps around each change that `save_trace` writes. 0 records nothing.
        peak_flops: FLOP/s that a rank can do, for `StepResult.utilization`. None means those of the
            GPU's data sheet, if dynmo knows it.
        check_memory: Whether the first placement must fit `memory_limit`.
        resume: Folder of checkpoints to go on from, as `save` wrote them. The placement and the
            mesh are then those of the checkpoint, if the options allow them.

    Raises:
        ConfigError: An option is wrong, or the ranks have different modules or code.

    Example:
        >>> import torch
        >>> import dynmo
        >>> with dynmo.init() as world:
        ...     layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        ...     model = dynmo.Sequential(layers, loss=torch.nn.functional.mse_loss)
        ...     pipeline = dynmo.Pipeline(model, world, schedule="1f1b", microbatches=2)
        ...     result = pipeline.step(torch.ones(8, 4), torch.zeros(8, 4))
        >>> result.loss > 0
        True
    """

    @names_checked
    @in_own_modes
    def __init__(  # noqa: PLR0913
        self,
        model: Model,
        world: World,
        *,
        microbatches: int,
        optimizer: AdamW | SGD | NamedOptimizer | Make = _DEFAULT.optimizer,
        groups: GroupRule | None = _DEFAULT.groups,
        learning_rate: LearningRate | None = _DEFAULT.learning_rate,
        balance: Balance | BalancerName = _DEFAULT.balance,
        cases: Sequence[CaseOptions | Dynamism] = (),
        elastic: Elastic | None = None,
        steps: int | None = _DEFAULT.steps,
        seed: int = _DEFAULT.seed,
        micro_batch: int | None = _DEFAULT.micro_batch,
        schedule: ScheduleName = _DEFAULT.schedule,
        post_validation: bool = _DEFAULT.post_validation,
        rollback: Rollback = _DEFAULT.rollback,
        chunks: int | None = _DEFAULT.chunks,
        memory_limit: int | str | Sequence[int | str] | None = None,
        pipeline: int | None = None,
        replicas: int = _DEFAULT.replicas,
        expert: int = _DEFAULT.expert,
        zero: int = _DEFAULT.zero,
        slices: bool = _DEFAULT.slices,
        max_grad_norm: float = _DEFAULT.max_grad_norm,
        clip_scope: ClipScope = _DEFAULT.clip_scope,
        precision: Precision = _DEFAULT.precision,
        loss_scale: float | Literal["dynamic"] | None = _DEFAULT.loss_scale,
        loss_scale_window: int = _DEFAULT.loss_scale_window,
        recompute: Literal["none", "all", "auto"] | Collection[int] = _DEFAULT.recompute,
        head_tokens: int | None = _DEFAULT.head_tokens,
        reduction_slots: int | None = _DEFAULT.reduction_slots,
        compile: bool = _DEFAULT.compile,
        deterministic: bool = _DEFAULT.deterministic,
        listen: Callable[[Event], None] | None = None,
        trace: int = 0,
        peak_flops: float | None = _DEFAULT.peak_flops,
        check_memory: bool = True,
        resume: str | Path | None = None,
    ) -> None:
        keys = PipelineOptions.model_fields
        given = {key: value for key, value in locals().items() if key in keys}
        ranks = _check_kinds(model, world, optimizer, learning_rate)
        if not isinstance(cases, Sequence):
            raise ConfigError(f"cases is {_kind(cases)}; give a list of cases")
        given["cases"] = tuple(each for each in cases if isinstance(each, CaseOptions))
        given["elastic"] = Elastic() if elastic is None else elastic
        given["pipeline"] = 1 if pipeline is None else pipeline
        options = PipelineOptions(**given)
        if pipeline is None:
            options = options.model_copy(update={"pipeline": max(1, world.size // replicas)})
        outside = ranks.is_outside
        if not outside and options.world_size != world.size and not world.size % replicas:
            raise ConfigError(
                f"{options.pipeline} ranks of a pipeline and {replicas} replicas need "
                f"{options.world_size} ranks, but the world has {world.size}"
            )
        for problem in problems(options, model.layers, model.options):
            raise ConfigError(problem)
        if learning_rate is not None and steps is None:
            raise ConfigError("learning_rate needs the steps of the training; give steps")
        if deterministic and world.device.type == "cuda":
            torch.use_deterministic_algorithms(True)  # CPU kernels are, with fixed threads
        on_cuda = world.device.type == "cuda"
        facts = options.facts(model.layers, model.options, on_cuda)
        check_own_rules(options)
        self._make_cases = partial(make_cases, cases, facts)
        self._cases = self._make_cases()
        self._world = ranks
        self.extra: dict[str, Any] = {}
        self._model, self._options, self._listen = model, options, listen
        self._check_memory, self._trace = check_memory, trace
        self._watches_ranks = elastic is not None
        self._memory_limit = rank_memory_limit(options, ranks)
        self._plan: RunPlan | None = None
        self._model_flops = ModelFlops(model)
        # Steps and loss of the time before this process was outside. None while it is a rank.
        self._before: tuple[int, float] | None = (0, math.nan) if outside else None
        if outside:
            self._optimizer = OptimizerHandle(
                ParameterGroups(settings_of(options), model, model.build(()), world.device)
            )
        else:
            with said_while(ranks.rank, "makes its layers"):
                self._watch(self._start(resume))

    def _start(self, resume: str | Path | None) -> float | None:
        """Makes the parts of a pipeline that starts or resumes."""
        world, model, options, saved = self._world, self._model, self._options, None
        if isinstance(model, Sequential) and resume is None:
            _agree_on_modules(model, world)
        if resume is not None:
            saved = find_checkpoint(Path(resume), world)
            check_saved(saved, model)
        self._shapes = self._known_shapes(is_new=saved is None)
        pipeline, replicas = first_shape(options, model.layers, saved)
        schedule = first_schedule(options, model.layers, (pipeline, replicas), saved)
        if saved is None and self._plan is not None and pipeline == options.pipeline:
            schedule = self._plan.schedule
        partition = first_partition(options, model.layers, pipeline, schedule)
        if saved is not None and len(saved.state.partition) == partition.stages:
            partition = Partition(tuple(saved.state.partition))
        self._engine = make_engine(
            options,
            arrange(world, replicas),
            model,
            partition,
            self._memory_limit,
            schedule=schedule,
        )
        self._optimizer = OptimizerHandle(self._engine.store.groups)
        self._check_optimizer()
        if self._watches_ranks or (world.everyone.size > 1 and options.balance.balancer != "none"):
            self._engine.store.check_names(range(model.layers))
        agree_on_cases(world, self._cases)
        if saved is None:
            self._loop = self._make_loop()
            return None
        self._go_on(saved)
        return saved.state.reference

    def _check_optimizer(self) -> None:
        """Refuses what a user's optimizer cannot do, and says what it does otherwise."""
        options, groups = self._options, self._engine.store.groups
        for case in self._cases:
            if case.divides_parameters:
                groups.check_is_elementwise(f"dynamism.{case.name}")
        keeps = options.post_validation and options.rollback == "in-place" and not groups.inverts
        if keeps and self._world.everyone.rank == 0:
            _logger.warning(
                f'pipeline.rollback = "in-place": no inverse of {groups.name} is known, so copies '
                "are kept to take a step back"
            )

    def _go_on(self, saved: SavedPipeline) -> None:
        """Restores a checkpoint, and makes the loop that goes on from it."""
        check_settings(saved, self._engine)
        restore_engine(self._engine, saved.path, saved.raw, self._cases)
        state = saved.state
        self.extra = state.extra
        loss = math.nan if state.loss is None else state.loss
        self._loop = self._make_loop(saved.step, loss, state.moves)
        if self._options.learning_rate is None:
            # Older checkpoints have the learning rate alone.
            older = [] if state.lr is None else [{"lr": state.lr}]
            self._optimizer.restore(older if state.groups is None else state.groups)

    def _take_up(self, text: str) -> None:
        """Becomes a rank of a running training, by rank 0's message."""
        from dynmo.elastic.newcomer import state_from

        newcomer = state_from(text)
        state = newcomer.state
        self._cases = self._make_cases()
        if newcomer.microbatches != self._options.all_microbatches:
            self._options = self._options.with_microbatches(newcomer.microbatches)
        # First, because all other ranks wait while this one joins.
        self._shapes = self._known_shapes(is_new=False)
        self._engine = join_engine(
            self._options, self._world, self._model, self._cases, newcomer, self._memory_limit
        )
        self._loop = self._make_loop(newcomer.step, state["loss"], state["moves"], joined=True)
        if self._options.learning_rate is None:
            self._optimizer.restore(state["groups"])
        self._before = None
        self._watch(newcomer.reference)

    def __repr__(self) -> str:
        if "_loop" not in vars(self) or self._loop.left:
            return f"Pipeline({self._model.layers} layers, no rank of the training)"
        ranks, replicas = self.shape
        where = f"{ranks} rank{'s' * (ranks > 1)}" + (
            f" x {replicas} replicas" if replicas > 1 else ""
        )
        return (
            f"Pipeline({self._model.layers} layers on {where}, {self.options.schedule}, "
            f"{self.microbatches} microbatches, step {self.steps})"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("_engine", "_loop", "_shapes"):
                raise RunError(
                    "this process is no rank of the training; call join(), and go on if it "
                    "returns True"
                )
            raise AttributeError(name)

    def _make_loop(
        self, step: int = 0, loss: float = math.nan, moves: int = 0, joined: bool = False
    ) -> Loop:
        options, engine = self._options, self._engine
        cases = Cases(self._cases, engine)
        rebalancer = Rebalancer(options, engine, cases, self._shapes, moves, self._memory_limit)
        loop = Loop(
            options, engine, cases, rebalancer, self._listen, step=step, loss=loss, joined=joined
        )
        cases.take_over(engine)
        loop.groups = self._optimizer.saved
        loop.peak_flops = options.peak_flops or device_peak_flops(
            self._world.device, options.precision
        )
        return loop

    def _watch(self, reference: float | None) -> None:
        """Watches ranks and ops, if that is wanted."""
        loop, engine = self._loop, self._engine
        if self._watches_ranks:
            from dynmo.elastic.newcomers import Newcomers
            from dynmo.pipeline.elasticity import Elasticity

            opens = self._world.rank == 0 and self._world.home is not None
            newcomers = (
                Newcomers(loop.options.elastic, self._world, self.identity) if opens else None
            )
            loop.elastic = Elasticity(loop.options, engine, loop.rebalancer, newcomers, reference)
        if self._trace:
            from dynmo.pipeline.trace import Tracer

            layout = engine.store.layout
            of_slices = layout.stage_ranks if layout.sliced else None
            loop.tracer = Tracer(self._world.everyone, engine.clock, self._trace, of_slices)

    def _known_shapes(self, is_new: bool) -> tuple[LayerCost, ...] | None:
        """Returns the layers' bytes by shapes, if a memory limits them."""
        limit, model, options = self._memory_limit, self._model, self._options
        if limit is None or options.micro_batch is None or model.options is None:
            return None  # nothing limits the memory, or no shapes are known
        from dynmo.pipeline.dry_run import check_later_ranks, first_plan
        from dynmo.pipeline.shape_costs import known_costs

        costs, unknown = known_costs(options, model)
        if unknown is not None and self._world.everyone.rank == 0:
            _logger.warning(unknown)
        if options.memory_limit is not None and is_new and self._check_memory:
            check_later_ranks(options, model, costs, limit)
            self._plan = first_plan(options, model, costs, limit, unknown)
        return costs if unknown is None else None

    # -- training ----------------------------------------------------------------------------------

    @names_checked
    def step(
        self,
        inputs: Batch | None = None,
        targets: Tensor | list[Tensor] | None = None,
        *,
        samples: Sequence[Hashable] | None = None,
        stop: bool = False,
        adapt: bool = True,
    ) -> StepResult:
        """Trains on one batch: forward, backward, clipping, optimizer.

        Dynamic cases act before the step, and layers move if balancing decides so (`adapt`).

        Args:
            inputs: This replica's batch. A tensor [batch, ...] is cut evenly along its first
                dimension. A dictionary of such tensors, like {"input_ids": ..., "labels": ...}, has
                the targets too. The model says which names are its inputs and its targets. A list
                of tensors or dictionaries holds the microbatches themselves, of any shapes. Only
                the rank of the first stage needs inputs. Floats are converted to `precision`, or to
                float64 if all weights are.
            targets: Targets of the loss, [batch, ...] or a list, if `inputs` has none. Only the
                rank of the last stage needs them. All ranks of a replica that pass a batch pass the
                same one.
            samples: The samples of each microbatch on every rank, such as their numbers, for
                `dynmo.Freezing(cache_bytes=...)`. Two microbatches of equal samples have equal
                inputs. None if no microbatch comes again.
            stop: Whether this rank wants to stop. Every rank sees it in `StepResult.stop`.
            adapt: Whether cases, balancer and mesh may change something before the step.

        Returns:
            The loss, the gradient norm before clipping, and the work of each rank. The loss is the
            mean over all counted targets of all microbatches and replicas (`Sequential(count=)`).

        After an error in a layer, the loss or the batch, all ranks raise it and can go on. Weights
        and buffers are as before the step. After an error in the optimizer they cannot.

        Raises:
            InputError: The batch is missing or cannot be cut, a name is unknown or missing, no
                target counts, or ranks of one replica pass different batches. No weight was
                changed.
            RunError: The loss or a gradient is not finite, or this process is no rank of the
                training (`left`).
        """
        results = self.advance(inputs, targets, samples=samples, stop=stop, adapt=adapt)
        if self.left:
            raise RunError(
                "this rank has left the training; call adapt() before a step. If pipeline.left is "
                "true then, stop or call join()"
            )
        return (results + self.drain())[-1]

    @names_checked
    @in_own_modes
    def advance(
        self,
        inputs: Batch | None = None,
        targets: Tensor | list[Tensor] | None = None,
        *,
        samples: Sequence[Hashable] | None = None,
        stop: bool = False,
        adapt: bool = True,
    ) -> tuple[StepResult, ...]:
        """Trains like `step`, but without a barrier at its end under `post_validation`.

        The next step then begins before this one is final. `drain` waits for the last step, and so
        does every method that reads or changes the model.

        Args:
            inputs: This replica's batch, like that of `step`.
            targets: Targets of the loss, like those of `step`.
            samples: The samples of each microbatch, like those of `step`.
            stop: Whether this rank wants to stop.
            adapt: Whether something may change before the step.

        Returns:
            The results that have become final and were not returned before, in order. With a
            barrier the last is that of this step, and without one that of the step before.

        Raises:
            InputError: Like that of `step`. Without a barrier it is raised one step late.
            RunError: Like that of `step`. Without a barrier it is raised one step late, and nothing
                was updated.
        """
        before = self.adapt() if adapt else ()
        if self.left:
            return before

        def cut() -> tuple[Cut, Cut, Tensor | float]:
            self._loop.cases.take_samples(samples, self.microbatches)
            return *self._cut(inputs, targets), self._model_flops.of(inputs)

        with (
            said_while(self._world.rank, "is in its first step", not self._loop.is_set_up),
            self._loop.cases.dropping_samples(),
        ):
            results = self._loop.advance(cut, self._rates(), stop)
        self._optimizer.step()
        return before + results

    @in_own_modes
    def drain(self) -> tuple[StepResult, ...]:
        """Waits until the last step is final, if `advance` has not.

        Returns:
            The results that were not returned before.
        """
        return self._loop.drain()

    @in_own_modes
    def adapt(self) -> tuple[StepResult, ...]:
        """Changes what is to be changed before the next step. `step` calls it by itself.

        The order is: ranks leave or join, the mesh changes, layers move, dynamic cases act. A loop
        whose mesh may change calls it before it chooses the batch of its replica.

        Returns:
            The results of steps that had to become final before.
        """
        return self._loop.adapt() if self._before is None else ()

    @property
    def decisions(self) -> tuple[DecisionRecord, ...]:
        """What `adapt` decided last, each with the measurements that it rests on.

        `DecisionRecord.to_text` is a line for a file that `dynmo simulate` reads.
        """
        return tuple(self._loop.rebalancer.records)

    def _rates(self) -> tuple[dict[str, Any], ...]:
        """Returns the options of each group of parameters in the next step."""
        rule, end = self._loop.options.learning_rate, self._loop.options.end
        return self._optimizer.options(None if rule is None else partial(rule.at, self.steps, end))

    @overload
    def evaluate(
        self,
        inputs: Batch | None = None,
        targets: Tensor | list[Tensor] | None = None,
        *,
        dense: bool = False,
        outputs: Literal[False] = False,
        microbatches: int | None = None,
        shared: bool = False,
        samples: Sequence[Hashable] | None = None,
        metrics: None = None,
    ) -> float: ...

    @overload
    def evaluate(
        self,
        inputs: Batch | None = None,
        targets: Tensor | list[Tensor] | None = None,
        *,
        dense: bool = False,
        outputs: Literal[True],
        microbatches: int | None = None,
        shared: bool = False,
        samples: Sequence[Hashable] | None = None,
        metrics: None = None,
    ) -> tuple[float, Tensor | tuple[Tensor, ...] | None]: ...

    @overload
    def evaluate(
        self,
        inputs: Batch | None = None,
        targets: Tensor | list[Tensor] | None = None,
        *,
        dense: bool = False,
        outputs: Literal[False] = False,
        microbatches: int | None = None,
        shared: bool = False,
        samples: Sequence[Hashable] | None = None,
        metrics: Metrics,
    ) -> tuple[float, dict[str, float]]: ...

    @names_checked
    @in_own_modes
    def evaluate(
        self,
        inputs: Batch | None = None,
        targets: Tensor | list[Tensor] | None = None,
        *,
        dense: bool = False,
        outputs: bool = False,
        microbatches: int | None = None,
        shared: bool = False,
        samples: Sequence[Hashable] | None = None,
        metrics: Metrics | None = None,
    ) -> float | tuple[float, Tensor | tuple[Tensor, ...] | dict[str, float] | None]:
        """Computes the mean loss of one batch without training.

        Args:
            inputs: This replica's batch, like that of `step`.
            targets: Targets of the loss, like those of `step`.
            dense: Whether cases compute everything, such as tokens that they would let go.
            outputs: Whether to return the model's outputs too. Targets may then be left out on all
                ranks, and the loss is NaN.
            microbatches: Number of microbatches of the batch. The default is that of a step.
            shared: Whether all replicas pass the same batch. The first one's loss then counts.
            samples: The samples of each microbatch, like those of `step`.
            metrics: Takes outputs and targets of a microbatch, and returns sums by name, such as
                {"correct": 17, "tokens": 32}. The rank of the last stage calls it.

        Returns:
            The mean loss over all counted targets of all replicas, the same on every rank. With
            `outputs=True`, this loss and the last layer's outputs for this replica's batch,
            [batch, ...]. The outputs are None on ranks without the last stage. With `metrics`, the
            loss and the sums over all microbatches and replicas, on every rank.

        Raises:
            InputError: The batch is missing or cannot be cut, a name is unknown or missing, or
                ranks of one replica pass different batches.
            RunError: The outputs of the microbatches cannot be concatenated.
        """
        count = self.microbatches if microbatches is None else microbatches
        if not isinstance(count, int) or count < 1:
            raise InputError(f"microbatches = {count!r}; an evaluation needs 1 or more")
        self._loop.settle()
        with self._engine.attempt():
            cut_inputs, cut_targets = self._cut(inputs, targets, count)
            # Outputs that were kept are those of an evaluation that is not dense.
            self._loop.cases.take_samples(None if dense else samples, count)
        if outputs and metrics is not None:
            raise InputError("evaluate returns outputs or metrics; call it once for each")
        collected = dict[int, object]() if outputs else None
        sums = None
        if metrics is not None:
            from dynmo.pipeline.metrics import MetricSums

            sums = MetricSums(metrics)
        with ExitStack() as off:
            for context in self._loop.cases.dense() if dense else ():
                off.enter_context(context)
            off.enter_context(self._loop.cases.dropping_samples())
            loss = self._engine.evaluate(
                cut_inputs,
                cut_targets,
                count,
                shares=not shared,
                outputs=collected,
                observe=sums,
            )
        if sums is not None:
            return loss, sums.over(self._engine.store.world, shares=not shared)
        if collected is None:
            return loss
        from dynmo.pipeline.whole_model import join_outputs

        return loss, join_outputs(self._engine.store.world, collected)

    @property
    def has_dense(self) -> bool:
        """Whether some case can be switched off for an evaluation (`dense`)."""
        return next(self._loop.cases.dense(), None) is not None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Holds the groups of parameters for torch's schedulers.

        They take it as in `LambdaLR(pipeline.optimizer, ...)`. The options in `param_groups` are
        those of the next step. Change them alike on all ranks.
        """
        return self._optimizer

    @property
    def options(self) -> PipelineOptions:
        """All options, as they are now."""
        return self._loop.options

    @property
    def steps(self) -> int:
        """Number of steps that are done, those of a loaded checkpoint included."""
        return self._loop.step if self._before is None else self._before[0]

    @property
    def loss(self) -> float:
        """Loss of the last final step. NaN before the first."""
        return self._loop.loss if self._before is None else self._before[1]

    @property
    def left(self) -> bool:
        """True if this process is no rank of the training, which goes on without it.

        It has left (`adapt`), or has not joined yet. `join` waits until it is a rank.
        """
        return self._before is not None or self._loop.left

    @in_own_modes
    def join(self, stopping: Callable[[], bool] | None = None) -> bool:
        """Waits until the training needs this process, and becomes a rank of it (again).

        For a process whose pipeline has `left`: it has left, or `dynmo.init(join=True)` made its
        world. Its parts of the model and of the optimizer are dropped. It then gets the layers and
        the state of the running training, and goes on at step `steps`.

        Args:
            stopping: Returns whether this process shall end instead.

        Returns:
            True if this process is a rank now. False if the training is over.

        Raises:
            ConfigError: This process differs from the training in its model, code or versions.
            WaitTimeout: Rank 0 gives no sign of life.
        """
        from dynmo.elastic.newcomer import join

        if not self.left:
            raise RunError("this process is a rank already; call join() if pipeline.left is true")
        identity = self.identity
        if self._before is None:
            self._before = self.steps, self.loss
            del self._engine, self._loop
            gc.collect()
            if self._world.device.type == "cuda":
                torch.cuda.empty_cache()
        return join(self._world, identity, self._take_up, stopping or (lambda: False))

    @property
    def token_shares(self) -> Mapping[str, TokenShares]:
        """The last counts of each case by its name, such as the load of experts.

        Cases count at the start of the next step.
        """
        return self._loop.token_shares

    # -- ranks and places of layers ----------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """The mesh: ranks (or slices) of a pipeline, and number of replicas."""
        return self._engine.store.layout.shape

    @property
    def replica(self) -> int:
        """Number of this rank's replica."""
        return self._engine.store.world.replica

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each replica."""
        return self._loop.options.all_microbatches // self._engine.store.world.replicas

    @property
    def ends(self) -> tuple[int, int]:
        """Ranks (or slices) of a pipeline that hold the first and the last stage."""
        stage_ranks = self._engine.store.layout.stage_ranks
        return stage_ranks[0], stage_ranks[-1]

    @property
    def needs_data(self) -> bool:
        """True if this rank holds the first or the last stage, and so needs batches.

        `adapt` may change it, with `schedule="auto"` or another mesh.
        """
        store = self._engine.store
        return store.layout.sliced or store.world.rank in self.ends

    def sampler(
        self, dataset: Sized, batch: int, *, shuffle: bool = True, seed: int = 0
    ) -> ReplicaSampler:
        """Returns a sampler with the part of each batch that belongs to this rank's replica.

        For `torch.utils.data.DataLoader(dataset, batch_sampler=...)`. The ranks of a replica get
        equal indices. Any number of replicas gets the same batches. Rows that fill no whole batch
        are left out. `set_epoch(n)` of the sampler shuffles anew.

        Args:
            dataset: Has a length.
            batch: Samples of a step over all replicas.
            shuffle: Whether the order is random.
            seed: Seeds this order.

        Raises:
            InputError: The replicas do not divide the batch, or the dataset is smaller than it.
        """
        from dynmo.pipeline.sampler import ReplicaSampler

        replicas = self.shape[1]
        if batch < 1 or batch % replicas or batch > len(dataset):
            raise InputError(
                f"batch = {batch}: give a multiple of {replicas} replicas, of at most "
                f"{len(dataset)} samples of the dataset"
            )
        place = lambda: (self.replica, self.shape[1])  # noqa: E731
        return ReplicaSampler(dataset, batch, place, shuffle=shuffle, seed=seed)

    @property
    def wants_samples(self) -> bool:
        """Whether a case asks for the samples of each microbatch (`step(samples=...)`)."""
        return any(case.wants_samples for case in self._cases)

    @property
    def partition(self) -> Partition:
        """Number of layers on each stage."""
        return self._engine.store.layout.partition

    @property
    def schedule(self) -> Schedule:
        """The schedule of the next step."""
        return self._engine.schedule_keeper.on(self._engine.store.layout.partition)

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """The layers that this rank holds, by their index in the model.

        A move changes them.
        """
        return {index: self._engine.store.modules[index] for index in self._engine.store.own}

    def costs(self) -> tuple[LayerCost, ...]:
        """Returns the measured cost of every layer: seconds per microbatch, and bytes."""
        from dynmo.pipeline.gathering import measured_costs

        return measured_costs(self._engine, self._shapes)

    def forget_costs(self) -> None:
        """Drops all measurements. The next step measures anew."""
        self._engine.profiler.forget(range(self._engine.model.layers))

    def profile(
        self, steps: int | None = None, costs: Sequence[LayerCost] | None = None
    ) -> Profile:
        """Returns the layers' costs as a costs file has them, for `dynmo plan` and `simulate`.

        Args:
            steps: Number of steps that the costs were measured over.
            costs: Cost of each layer. The default is `costs()`.
        """
        from dynmo.pipeline.gathering import profile_of
        from dynmo.pipeline.shape_costs import shapes_of, with_workspace

        measured = tuple(self.costs() if costs is None else costs)
        if self._shapes is None:
            level = logging.INFO if self._world.everyone.rank else logging.WARNING
            shapes = (
                None
                if self.options.micro_batch is None
                else shapes_of(self.options, self._engine.model, level=level)
            )
            measured = with_workspace(measured, shapes, self._engine.store.layout.recomputed)
        return profile_of(self.options, self._engine, measured, steps)

    @in_own_modes
    def rebalance(self) -> bool:
        """Decides now on the placement of layers, and moves them if that repays itself.

        A move must repay itself within `steps`.

        Returns:
            True if layers have moved.

        Raises:
            RunError: No step has been measured yet.
        """
        if not self._loop.rebalancer.measured:
            raise RunError(
                "rebalance was called before a step was measured; train at least one step first"
            )
        before = self._engine.store.layout.partition
        self._loop.consider()
        return self._engine.store.layout.partition != before

    @in_own_modes
    def move(
        self, partition: Partition | Sequence[int], schedule: ScheduleName | None = None
    ) -> None:
        """Moves layers to `partition`, with gradients and optimizer state.

        Args:
            partition: Number of layers on each stage, first stage first.
            schedule: With `schedule="auto"`, the schedule of the next steps: "zb-auto" or
                "interleaved-1f1b", say. None keeps the present one.

        Raises:
            ConfigError: The schedule cannot be changed.
            PartitionError: The placement has another number of layers or stages.
        """
        Actions(self._engine).move(
            partition if isinstance(partition, Partition) else Partition(tuple(partition)),
            schedule,
        )

    # -- trained layers ----------------------------------------------------------------------------

    @in_own_modes
    def freeze(self, layers: Collection[int]) -> None:
        """Stops training these layers. Their optimizer state stays.

        Args:
            layers: Indices in the model. A frozen prefix of the model runs no backward.

        Raises:
            PartitionError: There is no such layer, or none would train.
        """
        Actions(self._engine).freeze(layers)
        self._loop.emit(self._loop.rebalancer.on_workload_change(self.steps))

    @in_own_modes
    def unfreeze(self, layers: Collection[int]) -> None:
        """Trains frozen layers again, from the optimizer state that they had.

        Args:
            layers: Indices in the model.

        Raises:
            PartitionError: There is no such layer.
        """
        Actions(self._engine).unfreeze(layers)
        self._loop.emit(self._loop.rebalancer.on_workload_change(self.steps))

    # -- saving ------------------------------------------------------------------------------------

    @in_own_modes
    def save(
        self,
        folder: str | Path,
        keep: int = 2,
        extra: Mapping[str, Any] | None = None,
        best: int | None = None,
    ) -> Path:
        """Saves weights, optimizer state and the loop's own state.

        All ranks share the folder.

        Args:
            folder: Holds the checkpoints of this training, each in a folder `step-N`.
            keep: Number of checkpoints that stay, this one included.
            extra: More to keep, as JSON, such as the `state_dict` of a `Loader` or of a scheduler
                of the learning rate. That of rank 0 counts. `Pipeline.extra` has it after `load`.
            best: Step of a checkpoint that stays beside the newest ones, such as the best so far.

        Returns:
            The folder of this checkpoint.

        Raises:
            RunError: A rank could not write its part. Older checkpoints are untouched.
        """
        loop, engine = self._loop, self._engine
        loop.settle()
        state = kept_settings(engine) | {
            "extra": extra or {},
            "groups": self._optimizer.saved(),
            "shape": list(engine.store.layout.shape),
            "reference": None if loop.elastic is None else loop.elastic.reference,
        }
        with engine.attempt():
            saved = save_engine(
                engine,
                Path(folder),
                self.steps,
                keep,
                self._cases,
                loss=loop.loss,
                moves=loop.rebalancer.moves,
                extra=state,
                best=best,
            )
        path = str(saved.path)
        loop.emit(CheckpointEvent(self.steps - 1, path, saved.bytes, saved.seconds))
        return saved.path

    @in_own_modes
    def load(self, folder: str | Path) -> int:
        """Goes on from the newest complete checkpoint in `folder`.

        The checkpoint may be of any placement. A warning names the model's code that has changed
        since. `extra` becomes what `save` was given.

        Args:
            folder: Folder that `save` was given.

        Returns:
            The number of steps that are done.

        Raises:
            CheckpointError: There is no complete checkpoint, or it is of another model or
                optimizer.
        """
        self.drain()
        before, saved = self._loop, find_checkpoint(Path(folder), self._world)
        check_saved(saved, self._engine.model)
        self._options = before.options
        self._go_on(saved)
        self._loop.tracer, self._loop.elastic = before.tracer, before.elastic
        self._loop.cases.skipped = before.cases.skipped
        if before.elastic is not None:
            before.elastic.go_on(self._loop.rebalancer, saved.state.reference)
        return self.steps

    def state_dict(self, *, everywhere: bool = False) -> dict[str, Tensor]:
        """Gathers the weights and persistent buffers of all layers.

        The keys are those of `torch.nn.Sequential(*layers).state_dict()`, such as "0.weight". A
        model of dynmo's own has the names of its layers in place of the indices. Weights of low
        precision are the float32 masters. Packed weights are dense.

        Args:
            everywhere: Whether every rank gets the weights. If not, only rank 0 does.

        Returns:
            Tensors on the CPU. Empty on ranks that get nothing.
        """
        return WholeModel(self._engine).state_dict(everywhere)

    @in_own_modes
    def load_state_dict(self, state: Mapping[str, Tensor] | None = None) -> None:
        """Replaces the weights and persistent buffers of all layers.

        Number of steps, learning rate and optimizer state stay as they are, except for the float32
        masters. A packed weight keeps its form: what is 0 by it stays 0.

        Args:
            state: What `state_dict` returned, or the state of `torch.nn.Sequential(*layers)`.
                The one of rank 0 counts. Other ranks may leave it out.

        Raises:
            CheckpointError: A key is missing or unknown, or a tensor has another shape. Every rank
                raises it, and nothing has changed.
        """
        WholeModel(self._engine).load_state_dict(state)

    def digest(self) -> str:
        """Returns the SHA-256 of all weights. It is equal exactly if all weights are."""
        return self._engine.digest()

    def buffers_digest(self) -> str:
        """Returns the SHA-256 of all persistent buffers, such as running means."""
        return buffers_digest(self._engine.pending.final)

    @property
    def identity(self) -> Identity:
        """What decides the numbers of the training: versions, code, layers."""
        if self._before is None:
            return self._engine.store.identity.with_code(self._cases)
        code = [*self._cases, *self._optimizer.code]
        from dynmo.models.identity import identity_of

        return identity_of(self._model, self._model.build(())).with_code(code)

    # -- end ---------------------------------------------------------------------------------------

    def account(self) -> Account:
        """Returns what changes have cost and saved so far. All ranks call it together."""
        engine, elastic = self._engine, self._loop.elastic
        overhead, everyone = self._loop.rebalancer.overhead, engine.store.world.everyone
        skipped = torch.tensor(self._loop.cases.skipped)
        return Account(
            engine.profiler.spent + overhead.measure,
            overhead.decide,
            overhead.move,
            int(everyone.sum(skipped, "what cases have skipped")),
            0.0 if elastic is None else elastic.gpu_seconds_returned,
        )

    def finish(self) -> tuple[StepResult, ...]:
        """Waits for the last step, and ends the measurement of the last move.

        Returns:
            The results that were not returned before.
        """
        results = self.drain()
        self._loop.emit(self._loop.rebalancer.close_measurement(self.steps))
        return results

    def save_trace(self, path: str | Path | None) -> None:
        """Writes the recorded ops of all ranks, on rank 0. See `trace`.

        Open the file at ui.perfetto.dev. All ranks call it together.

        Args:
            path: The file. None writes nothing.
        """
        if self._loop.tracer is not None:
            self._loop.tracer.finish(None if path is None else Path(path))

    def close(self) -> None:
        """Tells processes that wait to join that the training is over."""
        if self._before is None and self._loop.elastic is not None:
            self._loop.elastic.close()

    # -- helpers -----------------------------------------------------------------------------------

    def _cut(self, batch: object, targets: object, count: int | None = None) -> tuple[Cut, Cut]:
        engine = self._engine
        dtype = torch.float64 if engine.store.is_double else PRECISIONS[self.options.precision]
        cutter = BatchCutter(engine.model, engine.store.modules[0], dtype, self._world.device)
        return cutter.cut(batch, targets, count or self.microbatches)


def _check_kinds(model: Any, world: Any, optimizer: Any, rate: Any) -> Meeting:
    """Raises ConfigError if an argument is another kind of thing, such as torch's optimizer."""
    if not isinstance(model, Model):
        advice = "wrap the list of its layers in dynmo.Sequential([...])"
        if hasattr(model, "save_pretrained"):
            advice = "give dynmo.huggingface.from_pretrained(folder), the folder that it comes from"
        raise ConfigError(f"model is {_kind(model)}; {advice}")
    if not isinstance(world, Meeting):
        raise ConfigError(f"world is {_kind(world)}; give what dynmo.init() returns")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is {_kind(optimizer)}, which has parameters of its own; give a function, "
            f"such as functools.partial({type(optimizer).__name__}, lr=...), from which each rank "
            "makes the optimizers of its layers"
        )
    if not isinstance(optimizer, AdamW | SGD | NamedOptimizer) and not callable(optimizer):
        raise ConfigError(
            f"optimizer is {_kind(optimizer)}; give dynmo.AdamW(lr=...), or a function such as "
            "functools.partial(torch.optim.SGD, lr=...)"
        )
    if not isinstance(rate, LearningRate | None):
        raise ConfigError(
            f"learning_rate is {_kind(rate)}; give dynmo.LearningRate(warmup=..., decay=...), and "
            "the peak to the optimizer, such as dynmo.AdamW(lr=...)"
        )
    return world


def _kind(given: object) -> str:
    of = given if isinstance(given, type) else type(given)
    name = f"{of.__module__}.{of.__qualname__}".removeprefix("builtins.")
    return f"the class {name}" if of is given else f"an object of {name}"


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
