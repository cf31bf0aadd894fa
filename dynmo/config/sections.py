"""The sections about ranks and balancing, and `Config`, the whole configuration.

Every key has a default, so that an empty file is a valid small run.
"""

from __future__ import annotations

from typing import Annotated

import tomli_w
from pydantic import Field

from dynmo.config.section import Section
from dynmo.config.sections_dynamism import DynamismSection
from dynmo.config.sections_training import DataSection, ModelSection, TrainSection
from dynmo.config.values import (
    Count,
    Every,
    Lax,
    MemoryLimit,
    NonNegative,
    RunName,
    ShapesAt,
    Threads,
    Timeout,
    Whole,
    word,
)
from dynmo.schedule.catalogue import SCHEDULES, chunks_of


class ParallelSection(Section):
    """The mesh of ranks, and the devices that they use."""

    pipeline: Count = 1
    """Ranks of a pipeline."""
    data: Count = 1
    """Replicas of the pipeline."""
    expert: Count = 1
    """Replicas that share one set of experts. It divides `data`, and the experts."""
    zero: Annotated[int, Field(ge=0, le=1)] = 0
    """1 shards the optimizer state over the replicas (ZeRO-1)."""
    slices: bool = False
    """Whether the ranks of a pipeline are slices of one GPU, in one process."""
    threads: Threads = 1
    """Threads of one rank on CPU."""
    timeout: Timeout = 120.0
    """Seconds after which a wait fails."""
    device: Annotated[str, word(("auto", "cpu", "cuda"))] = "auto"
    """The device of the ranks. `auto` takes CUDA if there is a GPU."""
    backend: Annotated[str, word(("auto", "gloo"))] = "auto"
    """`auto` is NCCL between CUDA ranks and gloo between CPU ranks. `gloo` sends through host
    memory, which is slower but lets ranks share a GPU."""

    @property
    def staged(self) -> bool:
        """True if all messages pass through host memory."""
        return self.backend == "gloo"


class PipelineSection(Section):
    """The schedule of a step and its memory."""

    schedule: Annotated[str, word(SCHEDULES)] = "zb-h1"
    """Order of F, B and W on each rank."""
    post_validation: bool = False
    """Whether a step ends without a barrier. A step that overflows or must be clipped is then
    taken back."""
    rollback: Annotated[str, word(("exact", "in-place"))] = "exact"
    """How a step is taken back: `exact` restores saved copies bit for bit. `in-place` inverts the
    update without copies and is approximate."""
    chunks: Count | None = None
    """Stages per rank. Not set: the number that the schedule has."""
    memory_limit: MemoryLimit = None
    """Memory of a rank: bytes, or a size such as `"40GiB"`. Not set: the memory of the device on
    CUDA, no limit on CPU."""
    w_granularity: Annotated[str, word(("whole", "linear"))] = "whole"
    """`whole` runs each W where the schedule has it. `linear` may run it earlier, one linear layer
    at a time, while a message is late."""


# The names in dynmo/balance/balancers.py. This package may not import that one, so a test compares
# the two.
BALANCERS = (
    "none",
    "uniform",
    "exact",
    "schedule-aware",
    "diffusion",
    "random",
    "deepspeed-uniform",
    "deepspeed-parameters",
    "deepspeed-time",
    "megatron-uniform",
    "megatron-embedding-loss",
    "algorithm-3",
)


class Balance(Section):
    """Decides where layers live: by which algorithm, by which cost and how often."""

    balancer: Annotated[str, word(BALANCERS)] = "exact"
    """Algorithm that places the layers."""
    cost: Annotated[str, word(("time", "parameters"))] = "time"
    """Cost of a layer: its measured seconds, or its number of parameters."""
    every: Every = 10
    """Steps between two decisions, or `auto`: decide when the work or the imbalance of the ranks
    has changed."""
    initial: Annotated[tuple[Count, ...] | None, Lax] = None
    """First placement: number of layers on each stage. Not set: as even as possible."""
    margin: NonNegative = 1.0
    """A move must save this many times the seconds that it takes."""
    hysteresis: NonNegative = 0.02
    """A move must save at least this share of a step."""


# "fewest" is dynmo's own. The others are the names in dynmo/balance/repack.py.
RANK_ALGORITHMS = ("fewest", "first-fit", "best-fit", "round-robin", "halving")
RELEASERS = ("auto", "none", "command", "kubernetes")


class ElasticSection(Section):
    """Changes of the mesh and of the number of ranks while training."""

    repack: bool = False
    """Whether the run leaves ranks that it does not need, and takes them back when it does."""
    tolerance: NonNegative = 0.05
    """With `repack`: share by which a step may take longer than the first measured steps did."""
    algorithm: Annotated[str, word(RANK_ALGORITHMS)] = "fewest"
    """How `repack` chooses: the `fewest` ranks that are fast enough. The others merge ranks by
    memory alone: DynMo's algorithm 4 is `first-fit`, PipeTransformer's is `halving`."""
    min_ranks: Count = 1
    """Fewest ranks that `repack` may leave."""
    target_ranks: Count | None = None
    """Ranks that the run goes to as soon as it can. Not set: `repack` decides."""
    retune: bool = False
    """Whether a change of ranks may also change `train.micro_batch`, at the same global batch. The
    numbers are then no longer those of one process."""
    reshape: bool = False
    """Whether the run may choose another mesh of the same ranks when the work has changed."""
    reshape_at: ShapesAt = ()
    """`[[step, pipeline, data], ...]`: from each step on, the mesh has these sizes. With fewer
    ranks the others leave. With more ranks the run waits for newcomers."""
    releaser: Annotated[str, word(RELEASERS)] = "auto"
    """Who takes ranks back and gives others. `auto` is dynmo's launcher if it started the ranks,
    and `none` otherwise."""
    release_command: Annotated[tuple[str, ...], Lax] = ()
    """With `releaser = "command"`: program and arguments that give ranks back."""
    grow_command: Annotated[tuple[str, ...], Lax] = ()
    """With `releaser = "command"`: program and arguments that start `dynmo train --join`."""
    park: bool = False
    """Whether ranks that leave wait, without tensors, until they are called back. If not, their
    processes end."""
    job_options: Annotated[tuple[str, ...], Lax] = ()
    """Options of `srun` for ranks that are Slurm jobs of their own, such as `--partition=p`."""
    join_timeout: Timeout = 60.0
    """Seconds that the run waits for ranks that it needs. It then goes on without them."""

    @property
    def changes_ranks(self) -> bool:
        """True if the run decides how many ranks it has."""
        return self.repack or self.target_ranks is not None


class CheckpointSection(Section):
    """When checkpoints are saved."""

    every: Whole = 0
    """Steps between two checkpoints. 0 never saves."""
    keep: Count = 2
    """Number of newest checkpoints that are kept."""


class TraceSection(Section):
    """The steps that `trace.json` records."""

    steps: Whole = 3
    """Steps around each change that the trace has."""


class Config(Section):
    """A whole run. `runs/<name>/` is its folder.

    Each value is valid by itself. `load` and `parse` also check that the values fit together.
    """

    name: RunName = "quickstart"
    """Name of the run. `runs/NAME` is its folder."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of the weights, the data and dropout."""
    model: ModelSection = ModelSection()
    """The model that is trained."""
    data: DataSection = DataSection()
    """The text that the model is trained on."""
    train: TrainSection = TrainSection()
    """The training loop, the optimizer and the precision."""
    parallel: ParallelSection = ParallelSection()
    """The mesh of ranks, and the devices that they use."""
    pipeline: PipelineSection = PipelineSection()
    """The schedule of a step and its memory."""
    balance: Balance = Balance()
    """Decides where layers live: by which algorithm, by which cost and how often."""
    dynamism: DynamismSection = DynamismSection()
    """The dynamic cases of the run, and the options of each."""
    elastic: ElasticSection = ElasticSection()
    """Changes of the mesh while training."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When checkpoints are saved."""
    trace: TraceSection = TraceSection()
    """The steps that `trace.json` records."""

    @property
    def microbatches(self) -> int:
        """Microbatches per step of one replica: what a schedule calls m."""
        return self.train.global_batch // (self.train.micro_batch * self.parallel.data)

    @property
    def all_microbatches(self) -> int:
        """Microbatches per step of all replicas."""
        return self.train.global_batch // self.train.micro_batch

    @property
    def layer_count(self) -> int | None:
        """Number of layers as placements count them. None for the user's own model."""
        exits = self.dynamism.early_exit.exits_of(self.model.blocks)
        has_exits = self.model.is_gpt and "early_exit" in self.dynamism.cases
        count = self.model.layer_count
        return count + len(exits) if has_exits and count is not None else count

    @property
    def accumulation_groups(self) -> int:
        """Number of groups in which a step's gradients are summed, over all replicas."""
        return self.train.reduction_slots or self.parallel.data

    def shape_at(self, step: int) -> tuple[int, int]:
        """The mesh at this step: ranks of a pipeline, and number of pipelines."""
        shapes = [(pipeline, data) for at, pipeline, data in self.elastic.reshape_at if at <= step]
        return shapes[-1] if shapes else (self.parallel.pipeline, self.parallel.data)

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return chunks_of(self.pipeline.schedule, self.pipeline.chunks)

    @property
    def slices(self) -> int | None:
        """Number of slices of each GPU. None if GPUs are not cut."""
        return self.parallel.pipeline if self.parallel.slices else None

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.parallel.pipeline * self.chunks

    @property
    def ranks(self) -> int:
        """The size of the world: pipeline x data. A pipeline of slices is one rank."""
        return (1 if self.parallel.slices else self.parallel.pipeline) * self.parallel.data

    def to_toml(self) -> str:
        """TOML that `load` reads back as the same config. A key that is None is left out."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))
