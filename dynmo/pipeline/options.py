"""Options of `dynmo.Pipeline`. A configuration file has them in several sections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from dynmo.models.options import ModelOptions
from dynmo.options import (
    LARGEST,
    Count,
    Lax,
    MemoryLimit,
    NonNegative,
    Options,
    Positive,
    Seed,
    Threads,
    Timeout,
    Whole,
)
from dynmo.pipeline.case_options import CaseOptions, RunFacts
from dynmo.pipeline.optimizer_options import SGD, AdamW, LearningRate, NamedOptimizer
from dynmo.plan.options import Balance, Elastic
from dynmo.plan.partition import MeshRule
from dynmo.schedule.catalogue import AUTO, ScheduleName, chunks_of, shapes_of


def _check_power_of_two(value: float) -> float:
    if math.frexp(value)[0] != 0.5:
        raise ValueError("must be a power of two: others would round the gradients")
    return value


def _ascending(value: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(value)))


def _by_name(value: object) -> object:
    return Balance(balancer=value) if isinstance(value, str) else value


LossScale: TypeAlias = (
    Literal["dynamic"]
    | Annotated[float, Field(ge=1, le=2**64), AfterValidator(_check_power_of_two)]
    | None
)
Recompute: TypeAlias = (
    Literal["none", "all", "auto"] | Annotated[tuple[Whole, ...], Lax, AfterValidator(_ascending)]
)
Rollback: TypeAlias = Literal["exact", "in-place"]
ClipScope: TypeAlias = Literal["global", "local"]
Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
Backend: TypeAlias = Literal["auto", "gloo"]


class WorldOptions(Options):
    """How ranks meet, and the devices that they use: the options of `dynmo.init`."""

    of: ClassVar[str] = "init"

    threads: Threads = 1
    """Threads of one rank on CPU."""
    timeout: Timeout = 120.0
    """Seconds after which a rank that gives no sign of life is taken for dead, and ranks that only
    wait for one another end. A rank that works is waited for."""
    work_timeout: Timeout = 1800.0
    """Seconds for work that shows no progress: reading data, an evaluation, a checkpoint, a move.
    Limit of all waits until the first step is done. At least `timeout`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the ranks. `auto` takes CUDA if there is a GPU."""
    backend: Backend = "auto"
    """`auto` is NCCL between CUDA ranks and gloo between CPU ranks. `gloo` sends through host
    memory, which is slower but lets ranks share a GPU."""

    @property
    def staged(self) -> bool:
        """True if all messages pass through host memory."""
        return self.backend == "gloo"


class _Sharing(Options):
    expert: Count = 1
    """Replicas that share one set of experts. It divides `replicas`, and the experts."""
    zero: Annotated[int, Field(ge=0, le=1)] = 0
    """1 shards the optimizer state over the replicas (ZeRO-1)."""
    slices: bool = False
    """Whether the ranks of a pipeline are slices of one GPU, in one process."""


class MeshOptions(_Sharing):
    """Replicas of the pipeline, and what they share."""

    replicas: Count = 1
    """Pipelines that train side by side."""


class _Stages(Options):
    chunks: Count | None = None
    """Stages per rank. Not set: the number that the schedule has."""


class _Slots(Options):
    reduction_slots: Count | None = None
    """Number of groups in which gradients are summed. With an equal number, any number of replicas
    gives the same bits. Not set: one per replica."""


class _Validation(Options):
    post_validation: bool = False
    """Whether a step ends without a barrier. A step that overflows or must be clipped is then
    taken back."""
    rollback: Rollback = "exact"
    """How a step is taken back: `exact` restores saved copies bit for bit. `in-place` inverts the
    update without copies and is approximate."""


class StepScheduleOptions(_Validation, _Stages):
    """The schedule of a step and its memory."""

    schedule: ScheduleName = "zb-auto"
    """Order of F, B and W on each rank. `auto` chooses the fastest of `zb-auto`, `v-auto` and
    `interleaved-1f1b` that fits, and may change it while training."""
    memory_limit: MemoryLimit = None
    """Memory of a rank: bytes, or a size such as `"40GiB"`. A list has one for each rank of a
    pipeline. Not set: the device's memory on CUDA, no limit on CPU."""


class _Numerics(Options):
    max_grad_norm: NonNegative = 1.0
    """Largest norm of the gradients. Larger gradients are clipped to it. 0 never clips."""
    clip_scope: ClipScope = "global"
    """The norm that clips: `global` takes the norm over all layers, `local` clips each layer by its
    own norm."""
    loss_scale: LossScale = None
    """A power of two, or `dynamic`: halved after an overflow, whose step is skipped. Not set:
    `dynamic` for `float16`, otherwise none."""
    loss_scale_window: Count = 2000
    """Good steps after which a dynamic loss scale doubles."""
    stop_after: Count = 10
    """Steps in a row without a finite loss and gradient that end the run, after a checkpoint. Fewer
    are skipped: they change nothing. Overflows under a dynamic loss scale do not count."""
    recompute: Recompute = "none"
    """Layers that recompute their activations in B: `none`, `all`, a list of layer indices, or
    `auto` (as many as the memory limit needs)."""
    head_tokens: Count | None = None
    """Most tokens whose logits exist at once. The output layer and the loss then run a piece of the
    sequence at a time, all in B. Not set: all tokens of a microbatch."""
    compile: bool = False
    """Whether torch.compile runs the parts of a layer between its linear layers."""
    deterministic: bool = False
    """On CUDA, whether to use only kernels that give the same bits in each run."""


class TrainingOptions(_Numerics, _Slots):
    """Numbers of a step: clipping, precision, and the order of sums."""

    precision: Precision = "float32"
    """Number format of F, B and W. `bfloat16` and `float16` keep float32 master weights and
    gradients."""

    def _problems(self) -> Iterator[str]:
        if self.precision == "float16" and self.loss_scale == 1:
            yield (
                'train.loss_scale = 1 with train.precision = "float16": small gradients vanish; '
                'use "dynamic", or precision = "bfloat16"'
            )


class Parallel(_Sharing, _Stages, _Slots):
    """The mesh of a `Pipeline`, beside its replicas."""

    pipeline: Count | None = None
    """Ranks of a pipeline. Not set: the world's ranks over `replicas`. With `slices` it is the
    number of slices."""


class Training(_Numerics, _Validation):
    """How a `Pipeline` computes a step, and what it keeps for it."""

    micro_batch: Count | None = None
    """Samples of a microbatch, to know the memory of a step before the first one."""
    groups: Callable[..., Any] | None = None
    """Takes the name of a parameter, as in `state_dict`, and the parameter without values. Returns
    a dict of the options that it has of its own, such as `{"weight_decay": 0.0}`, or None. The key
    "optimizer" gives it another function."""
    check_memory: bool = True
    """Whether the first placement must fit `memory_limit`."""


class Log(Options):
    """What a `Pipeline` tells."""

    listen: Callable[..., Any] | None = None
    """Called on every rank with each event: steps, moves, changes, rollbacks, faults. Give
    `dynmo.Csv(path)` and the like on rank 0 alone."""
    trace: Whole = 0
    """Steps around each change that `measured.save_trace` writes. 0 records nothing."""
    peak_flops: Positive | None = None
    """FLOP/s that a rank can do, for `StepResult.utilization`. Not set: those of the GPU's data
    sheet, if dynmo knows it."""


class SaveOptions(Options):
    """When checkpoints are saved."""

    every: Literal["auto"] | Whole = "auto"
    """Steps between two checkpoints. `auto` saves every ten minutes. Either also saves at the end,
    and when a signal asks: SIGTERM and Ctrl-C to stop, SIGUSR1 to go on. 0 never saves."""
    keep: Count = 2
    """Number of newest checkpoints that are kept."""


class Checkpoints(SaveOptions):
    """Where a `Pipeline` saves by itself, and how often.

    A step waits for the copy to memory alone. A process beside each rank writes.
    """

    folder: str | Path
    """Holds the checkpoints, each in a folder `step-N`. All ranks share it."""
    extra: Callable[[], Mapping[str, Any]] | None = None
    """Returns what else to keep, as `Pipeline.save(extra=)` takes it. Not set: `Pipeline.extra`."""


RECORDS: dict[str, type[Options]] = {"parallel": Parallel, "training": Training, "log": Log}
"""Arguments of `Pipeline` that hold several options."""


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options as `Pipeline` takes them: some in records."""
    given = dict(options)
    for name, record in RECORDS.items():
        own = {key: given.pop(key) for key in record.model_fields if key in given}
        if own:
            given[name] = record(**own)
    return given


class PipelineOptions(StepScheduleOptions, MeshOptions, TrainingOptions):
    """All options of a pipeline."""

    of: ClassVar[str] = "Pipeline"

    pipeline: Count = 1
    """Ranks (or slices) of a pipeline."""
    microbatches: Count
    """Microbatches of a step, on each replica at first."""
    micro_batch: Count | None = None
    """Samples of a microbatch, if known before the first step."""
    steps: Count | None = None
    """Steps of the run. Not set: the run has no known end."""
    seed: Seed = 0
    """Seed of the layers' random numbers while training, such as dropout."""
    optimizer: AdamW | SGD | NamedOptimizer | Callable[..., Any] = AdamW()
    """Optimizer and its options, or a function that makes one of torch's."""
    groups: Callable[..., Any] | None = None
    """Options of single parameters. Not set: all have the same."""
    learning_rate: LearningRate | None = None
    """How the learning rate changes. Not set: by torch's schedulers on `Pipeline.optimizer`."""
    balance: Annotated[Balance, BeforeValidator(_by_name)] = Balance()
    """Where layers live, or the name of a balancer."""
    elastic: Elastic = Elastic()
    """Changes of the mesh."""
    cases: Annotated[tuple[CaseOptions, ...], Lax] = ()
    """Options of dynmo's own dynamic cases."""
    peak_flops: Positive | None = None
    """FLOP/s that a rank can do. Not set: those of a known GPU."""
    total_microbatches: Count | None = None
    """Microbatches of all replicas, if the batch is cut otherwise than at first."""

    @property
    def world_size(self) -> int:
        """Processes of the mesh. A pipeline of slices is one."""
        return (1 if self.slices else self.pipeline) * self.replicas

    @property
    def end(self) -> int:
        """Number of steps of the run. Without a known end, a number that no run reaches."""
        return self.steps or LARGEST

    @property
    def all_microbatches(self) -> int:
        """Microbatches per step of all replicas."""
        return self.total_microbatches or self.microbatches * self.replicas

    @property
    def accumulation_groups(self) -> int:
        """Number of groups in which a step's gradients are summed, over all replicas."""
        return self.reduction_slots or self.replicas

    @property
    def stages_per_rank(self) -> int:
        """Stages of a rank. With "auto" the fewest."""
        return chunks_of(self.schedule, self.chunks)

    def first_shapes(self, layers: int) -> tuple[str, ...]:
        """Returns the schedules that can be the first, the one to prefer first.

        With "auto" they are those that have as many stages as `balance.initial`.
        """
        names = shapes_of(self.schedule, self.pipeline, self.microbatches, layers)
        initial = self.balance.initial
        if initial is None or self.schedule != AUTO:
            return names
        return tuple(x for x in names if self.pipeline * chunks_of(x) == len(initial))

    @property
    def samples(self) -> int:
        """Samples of a microbatch. Decisions count in microbatches if their size is unknown."""
        return self.micro_batch or 1

    @property
    def global_batch(self) -> int:
        """Samples of a step of all replicas."""
        return self.samples * self.all_microbatches

    def with_microbatches(self, count: int) -> PipelineOptions:
        """Returns the options with so many microbatches of all replicas, and the same batch."""
        return self.model_copy(
            update={"total_microbatches": count, "micro_batch": self.global_batch // count}
        )

    def shape_at(self, step: int) -> tuple[int, int]:
        """The mesh at this step: ranks of a pipeline, and number of pipelines."""
        return self.elastic.shape_at(step) or (self.pipeline, self.replicas)

    def mesh_rule(self, layers: int | None) -> MeshRule:
        """Returns what every mesh must fit."""
        return MeshRule(
            self.schedule, self.chunks, self.all_microbatches, self.accumulation_groups, layers
        )

    def facts(self, layers: int | None, model: ModelOptions | None, on_cuda: bool) -> RunFacts:
        """Returns what dynamic cases may know of the run."""
        return RunFacts(
            layers,
            self.steps,
            self.seed,
            model,
            self.micro_batch,
            self.expert,
            on_cuda,
            self.compile,
            cases={case.name: case for case in self.cases},
        )
