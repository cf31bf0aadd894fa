"""`Pipeline` trains one model over a world. The trainer of `dynmo train` uses it like a user.

parts      how it starts, resumes and joins
changes    what changes before a step: ranks, mesh, places of layers, cases
steps      the batch is cut, the engine trains on it, the result is made and told
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynmo.errors import ConfigError, InputError, RunError
from dynmo.events import StepResult
from dynmo.models.model import Model
from dynmo.pipeline.batch import Batch
from dynmo.pipeline.case import Dynamism
from dynmo.pipeline.case_options import CaseOptions
from dynmo.pipeline.changes import Changes
from dynmo.pipeline.journal import Part, surviving
from dynmo.pipeline.optimizer_options import SGD, AdamW, LearningRate, NamedOptimizer
from dynmo.pipeline.options import Checkpoints, Log, Parallel, PipelineOptions, Precision, Training
from dynmo.pipeline.parts import Parts
from dynmo.pipeline.recovery import Recovery
from dynmo.pipeline.results import Evaluation, Metrics
from dynmo.pipeline.start import World
from dynmo.pipeline.user_calls import check_kinds, former_member, former_read, public, whole_numbers
from dynmo.pipeline.views import CaseView, Measured, MeshView
from dynmo.pipeline.whole_model import WholeModel
from dynmo.plan.options import Balance, BalancerName, Elastic
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.optim.trial import Make
from dynmo.runtime.state.exact_state import buffers_digest
from dynmo.schedule.catalogue import ScheduleName

if TYPE_CHECKING:
    from dynmo.pipeline.sampler import ReplicaSampler

_DEFAULT = PipelineOptions(microbatches=1)
_PARALLEL, _TRAINING, _LOG = Parallel(), Training(), Log()


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
        schedule: Order of F, B and W on each rank, such as "1f1b", "zb-h1" or "zb-v". "auto"
            chooses the fastest that fits, together with the placement, and may change it later.
        memory_limit: Bytes of each rank, or a size such as "40GiB". A list has one for each rank of
            a pipeline. None means the memory of the device on CUDA, and no limit on CPU.
        replicas: Number of pipelines that train side by side. It must divide the ranks.
        precision: "float32", "bfloat16" or "float16". Weights have a float32 master.
        resume: Folder of checkpoints to go on from, as `save` wrote them. The placement and the
            mesh are then those of the checkpoint, if the options allow them.
        checkpoint: Where to save by itself, and how often. None saves only if `save` is called.
        parallel: Ranks and stages of a pipeline, and what replicas share.
        training: Clipping, loss scale, recomputation, post-validation and the like.
        log: Who listens, and what is recorded.

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

    @former_read
    @public
    def __init__(  # noqa: PLR0913
        self,
        model: Model,
        world: World,
        *,
        microbatches: int,
        optimizer: AdamW | SGD | NamedOptimizer | Make = _DEFAULT.optimizer,
        learning_rate: LearningRate | None = _DEFAULT.learning_rate,
        balance: Balance | BalancerName = _DEFAULT.balance,
        cases: Sequence[CaseOptions | Dynamism] = (),
        elastic: Elastic | None = None,
        steps: int | None = _DEFAULT.steps,
        seed: int = _DEFAULT.seed,
        schedule: ScheduleName = _DEFAULT.schedule,
        memory_limit: int | str | Sequence[int | str] | None = None,
        replicas: int = _DEFAULT.replicas,
        precision: Precision = _DEFAULT.precision,
        resume: str | Path | None = None,
        checkpoint: Checkpoints | None = None,
        parallel: Parallel = _PARALLEL,
        training: Training = _TRAINING,
        log: Log = _LOG,
    ) -> None:
        ranks = check_kinds(locals())
        given = locals() | dict(parallel) | dict(training) | dict(log)
        given = {key: given[key] for key in PipelineOptions.model_fields if key in given}
        given["cases"] = tuple(each for each in cases if isinstance(each, CaseOptions))
        given["elastic"] = Elastic() if elastic is None else elastic
        given["pipeline"] = parallel.pipeline or 1
        options = PipelineOptions(**given)
        if parallel.pipeline is None:
            options = options.model_copy(update={"pipeline": max(1, world.size // replicas)})
        if not ranks.is_outside and options.world_size != world.size:
            raise ConfigError(
                f"{options.pipeline} ranks of a pipeline and {replicas} replicas need "
                f"{options.world_size} ranks, but the world has {world.size}"
            )
        checks, watches = training.check_memory, elastic is not None
        self._parts = Parts(model, ranks, options, cases, log, checkpoint, checks, watches)
        if options.elastic.recover == "memory":
            self._parts.recovery = Recovery(self._parts)
        if not ranks.is_outside:
            self._parts.start(resume)
        self.extra = self._parts.extra

    def __repr__(self) -> str:
        if self.left:
            return f"Pipeline({self._parts.model.layers} layers, no rank of the training)"
        ranks, replicas = self.mesh.shape
        where = f"{ranks} rank{'s' * (ranks > 1)}" + (
            f" x {replicas} replicas" if replicas > 1 else ""
        )
        return (
            f"Pipeline({self._parts.model.layers} layers on {where}, {self.options.schedule}, "
            f"{self.mesh.microbatches} microbatches, step {self.steps})"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return former_member(self, name)

    @property
    def _world(self) -> Meeting:
        return self._parts.world

    @property
    def _engine(self) -> Engine:
        return self._parts.engine

    @property
    def _changes(self) -> Changes:
        return self._parts.changes

    # -- training ----------------------------------------------------------------------------------

    @public
    def step(
        self,
        inputs: Batch | None = None,
        targets: Tensor | list[Tensor] | None = None,
        *,
        samples: Sequence[Hashable] | None = None,
        stop: bool = False,
        adapt: bool = True,
        reread: Callable[[], tuple[Any, Any, Any]] | None = None,
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
            reread: Returns inputs, targets and samples of this step for the present mesh. With
                `Elastic(recover="memory")` it is called if a fault has taken a whole replica.

        Returns:
            The loss, the gradient norm before clipping, and the work of each rank. The loss is the
            mean over all counted targets of all microbatches and replicas (`Sequential(count=)`).
            If it or a gradient is not finite, nothing was updated, and `skipped` is true.

        After an error in a layer, the loss or the batch, all ranks raise it and can go on. Weights
        and buffers are as before the step. After an error in the optimizer they cannot.

        Raises:
            InputError: The batch is missing or cannot be cut, a name is unknown or missing, no
                target counts, or ranks of one replica pass different batches. No weight was
                changed.
            RunError: The loss or a gradient was not finite in `stop_after` steps in a row, or this
                process is no rank of the training (`left`).
        """
        given = Part(inputs, targets, samples)
        results = () if self.left else self._parts.train(given, stop, adapt, reread)
        if self.left:
            raise RunError(
                "this rank has left the training; call adapt() before a step. If pipeline.left is "
                "true then, stop or call join()"
            )
        return (results + self.drain())[-1]

    @public
    def advance(
        self,
        inputs: Batch | None = None,
        targets: Tensor | list[Tensor] | None = None,
        *,
        samples: Sequence[Hashable] | None = None,
        stop: bool = False,
        adapt: bool = True,
        reread: Callable[[], tuple[Any, Any, Any]] | None = None,
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
            reread: Reads the batch again, like that of `step`.

        Returns:
            The results that have become final and were not returned before, in order. With a
            barrier the last is that of this step, and without one that of the step before.

        Raises:
            InputError: Like that of `step`. Without a barrier it is raised one step late.
            RunError: Like that of `step`. Without a barrier it is raised one step late, and nothing
                was updated.
        """
        given = Part(inputs, targets, samples)
        return () if self.left else self._parts.train(given, stop, adapt, reread)

    @public
    @surviving
    def drain(self) -> tuple[StepResult, ...]:
        """Waits until the last step is final, if `advance` has not.

        Returns:
            The results that were not returned before.
        """
        return self._parts.steps.drain()

    @public
    @surviving
    def adapt(self) -> tuple[StepResult, ...]:
        """Changes what is to be changed before the next step. `step` calls it by itself.

        The order is: ranks leave or join, the mesh changes, layers move, dynamic cases act. A loop
        whose mesh may change calls it before it chooses the batch of its replica.

        Returns:
            The results of steps that had to become final before.
        """
        return () if self._parts.outside is not None else self._parts.steps.adapt()

    @public
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
    ) -> Evaluation:
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
            The mean loss over all counted targets of all replicas, the same on every rank. It has
            the outputs and the sums, if they are asked for.

        Raises:
            InputError: The batch is missing or cannot be cut, a name is unknown or missing, or
                ranks of one replica pass different batches.
            RunError: The outputs of the microbatches cannot be concatenated.
        """
        count = self.mesh.microbatches if microbatches is None else microbatches
        if not isinstance(count, int) or count < 1:
            raise InputError(f"microbatches = {count!r}; an evaluation needs 1 or more")
        if metrics is not None and not callable(metrics):
            raise InputError(f"metrics = {metrics!r}; give a function of outputs and targets")
        recovery, part = self._parts.recovery, Part(inputs, targets, samples)
        options: dict[str, Any] = {"dense": dense, "outputs": outputs, "metrics": metrics}
        if recovery is not None:
            return recovery.evaluate(part, count, shared, **options)
        return self._parts.steps.evaluate(
            inputs, targets, count, shared=shared, samples=samples, **options
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Holds the groups of parameters for torch's schedulers.

        They take it as in `LambdaLR(pipeline.optimizer, ...)`. The options in `param_groups` are
        those of the next step. Change them alike on all ranks.
        """
        return self._parts.optimizer

    @property
    def options(self) -> PipelineOptions:
        """All options, as they are now."""
        return self._changes.options

    @property
    def mesh(self) -> MeshView:
        """The ranks, and where the layers are."""
        return MeshView(self._parts)

    @property
    def measured(self) -> Measured:
        """Costs of the layers, decisions and what they have brought."""
        return Measured(self._parts)

    @property
    def cases(self) -> CaseView:
        """What the dynamic cases tell."""
        return CaseView(self._parts)

    @property
    def steps(self) -> int:
        """Number of steps that are done, those of a loaded checkpoint included."""
        outside = self._parts.outside
        return self._parts.steps.done if outside is None else outside

    @property
    def left(self) -> bool:
        """True if this process is no rank of the training, which goes on without it.

        It has left (`adapt`), or has not joined yet. `join` waits until it is a rank.
        """
        return self._parts.outside is not None or self._changes.left

    @public
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
        if not self.left:
            raise RunError("this process is a rank already; call join() if pipeline.left is true")
        joined = self._parts.join(stopping or (lambda: False))
        self.extra = self._parts.extra
        return joined

    # -- ranks and places of layers ----------------------------------------------------------------

    @property
    def needs_data(self) -> bool:
        """True if this rank holds the first or the last stage, and so needs batches.

        `adapt` may change it, with `schedule="auto"` or another mesh.
        """
        store = self._engine.store
        is_end = store.layout.sliced or store.world.rank in self.mesh.ends
        return is_end or self._parts.recovery is not None  # after a fault it may be one

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

        place = lambda: (self.mesh.replica, self.mesh.shape[1])  # noqa: E731
        return ReplicaSampler(dataset, batch, place, shuffle=shuffle, seed=seed)

    @public
    @surviving
    def move(
        self,
        partition: Partition | Sequence[int] | None = None,
        schedule: ScheduleName | None = None,
    ) -> bool:
        """Moves layers, with gradients and optimizer state.

        Args:
            partition: Number of layers on each stage, first stage first. None decides now, by the
                measured costs: layers move if that repays itself within `steps`. With a
                schedule, None leaves the layers where they are.
            schedule: With `schedule="auto"`, the schedule of the next steps: "zb-auto" or
                "interleaved-1f1b", say. None keeps the present one.

        Returns:
            Whether the placement is another one now.

        Raises:
            ConfigError: The schedule cannot be changed, or `partition` has no whole numbers.
            PartitionError: The placement has another number of layers or stages.
            RunError: Nothing was measured that a decision could rest on.
        """
        if partition is not None and not isinstance(partition, Partition):
            partition = Partition(whole_numbers("partition", partition))
        return self._changes.move(self.steps, partition, schedule)

    # -- trained layers ----------------------------------------------------------------------------

    @public
    @surviving
    def freeze(self, layers: Collection[int]) -> None:
        """Stops training these layers. Their optimizer state stays.

        Args:
            layers: Indices in the model. A frozen prefix of the model runs no backward.

        Raises:
            PartitionError: There is no such layer, or none would train.
        """
        self._changes.freeze(self.steps, whole_numbers("layers", layers))

    @public
    @surviving
    def unfreeze(self, layers: Collection[int]) -> None:
        """Trains frozen layers again, from the optimizer state that they had.

        Args:
            layers: Indices in the model.

        Raises:
            PartitionError: There is no such layer.
        """
        self._changes.unfreeze(self.steps, whole_numbers("layers", layers))

    # -- saving ------------------------------------------------------------------------------------

    @public
    @surviving
    def save(
        self,
        folder: str | Path,
        keep: int = 2,
        extra: Mapping[str, Any] | None = None,
        best: int | None = None,
        *,
        wait: bool = True,
    ) -> Path:
        """Saves weights, optimizer state and the loop's own state.

        All ranks share the folder.

        Args:
            folder: Holds the checkpoints of this training, each in a folder `step-N`.
            keep: Number of checkpoints that stay, this one included.
            extra: More to keep, as JSON, such as the `state_dict` of a `Loader` or of a scheduler
                of the learning rate. That of rank 0 counts. `Pipeline.extra` has it after `load`.
            best: Step of a checkpoint that stays beside the newest ones, such as the best so far.
            wait: Whether to wait until the checkpoint is complete. If not, a process beside each
                rank writes it, one of the next steps completes it, and `finish` at the latest. The
                event of the checkpoint, or of its failure, tells when.

        Returns:
            The folder of this checkpoint.

        Raises:
            RunError: A rank could not write its part. Older checkpoints are untouched.
        """
        saves = self._parts.saves
        path = saves.begin(Path(folder), keep, extra or {}, best, behind=not wait)
        if wait:
            saves.complete(raises=True)
        return path

    @public
    @surviving
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
        self._parts.saves.complete()
        self._parts.load(Path(folder))
        self.extra = self._parts.extra
        return self.steps

    @surviving
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

    @public
    @surviving
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

    @surviving
    def digest(self, *, buffers: bool = False) -> str:
        """Returns the SHA-256 of all weights. It is equal exactly if all weights are.

        Args:
            buffers: Whether to take the persistent buffers instead, such as running means.
        """
        return buffers_digest(self._engine.pending.final) if buffers else self._engine.digest()

    # -- end ---------------------------------------------------------------------------------------

    @surviving
    def finish(self) -> tuple[StepResult, ...]:
        """Waits for the last step, saves (`checkpoint`), and ends the measurement of the last move.

        Returns:
            The results that were not returned before.
        """
        results, saves = self.drain(), self._parts.saves
        if not self.left:
            saves.if_due(self.steps, at_end=True)
            saves.complete()
        saves.close()
        self._parts.tell(self._changes.rebalancer.close_measurement(self.steps))
        return results

    def close(self) -> None:
        """Tells processes that wait to join that the training is over."""
        self._parts.saves.close()
        if self._parts.outside is None and self._changes.elastic is not None:
            self._changes.elastic.close()
