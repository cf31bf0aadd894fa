"""`Config`, the whole configuration file. Its sections are the options of the rooms that use them.

Every key has a default, so that an empty file is a valid small run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

import tomli_w
from pydantic import AfterValidator, Field, create_model, model_serializer

from dynmo.cases import CASES
from dynmo.data.options import DataOptions, SourceName
from dynmo.models.options import ModelOptions
from dynmo.options import OWN, Count, Lax, NonNegative, Options, Positive, Seed, Whole, written
from dynmo.pipeline.case_options import CaseOptions, RunFacts
from dynmo.pipeline.optimizer_options import (
    SGD,
    AdamW,
    LearningRate,
    NamedOptimizer,
    OwnOptimizer,
    TorchOptimizer,
)
from dynmo.pipeline.option_checks import problems
from dynmo.pipeline.options import (
    MeshOptions,
    PipelineOptions,
    SaveOptions,
    StepScheduleOptions,
    TrainingOptions,
    WorldOptions,
    grouped,
)
from dynmo.plan.options import Balance, Elastic
from dynmo.plan.partition import nearest_divisors


def _check_unique(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise ValueError("a case is named twice; name each once")
    return value


# The name becomes a folder. It must not lead elsewhere or be hidden.
RunName: TypeAlias = Annotated[
    str,
    written(
        "[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}",
        "1 to 100 letters, digits, '.', '_' or '-', not starting with '.'",
    ),
]
_OWN_OPTIMIZERS: dict[str, type[AdamW | SGD]] = {"adamw": AdamW, "sgd": SGD}
OptimizerName: TypeAlias = Literal["adamw", "sgd", TorchOptimizer] | OwnOptimizer
if TYPE_CHECKING:
    CaseName: TypeAlias = str
else:
    CaseName = Literal[tuple(CASES)] | Annotated[str, written(OWN, "python:package.module:Class")]
Cases: TypeAlias = Annotated[tuple[CaseName, ...], Lax, AfterValidator(_check_unique)]


def _taken(options: type[Options], section: Options) -> dict[str, Any]:
    """Returns the values of a section that belong to some options."""
    return {key: getattr(section, key) for key in options.model_fields}


def _has_samples(source: str) -> bool:
    return source.startswith(("jsonl:", "parquet:", "hf:", "python:"))


class DataSection(DataOptions):
    """The text or the samples that the model is trained on."""

    source: Literal["stdlib"] | SourceName = "stdlib"
    """Text: `stdlib` (sources of the running Python), `file:PATH` or `tokens:PATH`. Samples, for a
    model of kind `hf`: `jsonl:PATH`, `parquet:PATH`, `hf:NAME` or `python:module:function`."""

    @property
    def has_samples(self) -> bool:
        return _has_samples(self.source)

    @property
    def sources(self) -> tuple[str, ...]:
        """`source`, and the source of held-out data if there is one."""
        other = self.held_out_source
        return (self.source,) if other is None else (self.source, other)

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        for key in DataOptions.model_fields:
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and not self.has_samples and key not in ("shuffle", "held_out"):
                yield (
                    f'data.{key} has no effect with data.source = "{self.source}", which has no '
                    "samples; leave it out"
                )
        other = self.held_out_source
        if other is not None and _has_samples(other) != self.has_samples:
            yield (
                f'data.held_out = "{other}" and data.source = "{self.source}": one has samples, '
                "and the other has text; use the same kind"
            )


class TrainSection(TrainingOptions, LearningRate, AdamW, SGD):
    """The training loop, the optimizer and the precision."""

    steps: Count = 100
    """Number of optimizer steps."""
    epochs: Positive | None = None
    """Passes over the data, instead of `steps`. A run prints their steps, and its config.toml has
    them. Not set: `steps` counts."""
    global_batch: Count = 32
    """Sequences in a step, over all replicas."""
    micro_batch: Count = 4
    """Sequences in a microbatch."""
    optimizer: OptimizerName = "adamw"
    """The optimizer: dynmo's `adamw` or `sgd`, a class of `torch.optim` in lower case, or
    `python:package.module:function`. The latter two get `lr`, and have their own defaults."""
    weight_decay: NonNegative | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Weight decay. Not set: 0.01 with `adamw`, 0 with `sgd`."""
    loss: Annotated[str, written(OWN, "python:package.module:function")] | None = None
    """For `hf`, `python:package.module:function` of logits and labels, as
    `huggingface.from_pretrained(loss=)` takes it. Not set: the cross entropy of the next token."""
    eval_every: Whole = 0
    """Steps between two evaluations. 0 never evaluates."""
    eval_batches: Count = 4
    """Microbatches in an evaluation, of `micro_batch` held-out sequences or samples each. Raise it
    to evaluate on all of them."""
    patience: Count | None = None
    """Evaluations in a row without a lower held-out loss after which the run ends. Not set: it has
    all its steps."""

    @model_serializer(mode="wrap")
    def _without_other_length(self, serialize: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        data = serialize(self)
        if self.epochs is not None:
            del data["steps"]
        return data

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.epochs is not None and "steps" in self.model_fields_set:
            yield f"train.epochs = {self.epochs:g} and train.steps = {self.steps}; give one of them"
        for key in ("weight_decay", "betas", "eps", "momentum"):
            is_own = self.optimizer in _OWN_OPTIMIZERS
            if not is_own and getattr(self, key) != type(self).model_fields[key].default:
                yield (
                    f'train.{key} has no effect with train.optimizer = "{self.optimizer}", '
                    "which has its own; leave it out, or name a function that sets it "
                    '(optimizer = "python:package.module:function")'
                )


class ParallelSection(WorldOptions, MeshOptions):
    """The mesh of ranks, and the devices that they use."""

    pipeline: Count = 1
    """Ranks of a pipeline."""


class _Dynamism(Options):
    """The dynamic cases of the run, and the options of each."""

    cases: Cases = Field(
        default=(),
        description=f"Cases that run: {', '.join(f'`{name}`' for name in CASES)}, or your own: "
        "`python:package.module:Class`.",
    )

    @property
    def named(self) -> dict[str, CaseOptions]:
        """Options of dynmo's cases that run, by name."""
        return {name: getattr(self, name) for name in CASES if name in self.cases}


_SECTIONS: dict[str, Any] = {
    name: (options, Field(default=options(), description=f"Options of the case `{name}`."))
    for name, options in CASES.items()
}
if TYPE_CHECKING:

    class DynamismSection(_Dynamism):
        def __getattr__(self, name: str) -> Any: ...

else:
    DynamismSection = create_model(
        "DynamismSection", __base__=_Dynamism, __doc__=_Dynamism.__doc__, **_SECTIONS
    )


class LaunchSection(Options):
    """How `dynmo train` starts the ranks."""

    restarts: Whole | None = None
    """How often a run that fails is started again, from its newest checkpoint. A fault that comes
    twice at one step ends it. torchrun has `--max-restarts`. Not set: 0, or 3 with
    `elastic.recover`."""


class CheckpointSection(SaveOptions):
    """When checkpoints are saved."""

    keep_best: bool = False
    """Whether to save after each evaluation with the lowest held-out loss so far, and to keep that
    checkpoint, too."""


class TraceSection(Options):
    """The steps that `trace.json` records."""

    steps: Whole = 3
    """Steps around each change that the trace has."""


class MetricsSection(Options):
    """The numbers of a run: where they are written, beside its log."""

    to: Annotated[
        tuple[
            Literal["csv", "tensorboard", "wandb", "opentelemetry"]
            | Annotated[
                str,
                written(OWN, "csv, tensorboard, wandb, opentelemetry or python:module:function"),
            ],
            ...,
        ],
        Lax,
    ] = ()
    """Some of `csv` (runs/NAME/numbers.csv), `tensorboard` (runs/NAME/tensorboard), `wandb`,
    `opentelemetry` (spans, to where `OTEL_*` variables say), `python:package.module:function`."""
    peak_flops: Positive | None = None
    """FLOP/s that a rank can do in `train.precision`, for the utilization of a step. Not set: the
    data sheet's figure if the GPU is a known one, without sparsity."""


class Config(Options):
    """A whole run. `runs/<name>/` is its folder.

    A problem of values that do not fit together is one line that names their keys.
    """

    name: RunName = "quickstart"
    """Name of the run. `runs/NAME` is its folder."""
    seed: Seed = 0
    """Seed of the weights, the data and dropout."""
    model: ModelOptions = ModelOptions()
    """The model that is trained."""
    data: DataSection = DataSection()
    """The text or the samples that the model is trained on."""
    train: TrainSection = TrainSection()
    """The training loop, the optimizer and the precision."""
    parallel: ParallelSection = ParallelSection()
    """The mesh of ranks, and the devices that they use."""
    pipeline: StepScheduleOptions = StepScheduleOptions()
    """The schedule of a step and its memory."""
    balance: Balance = Balance()
    """Decides where layers live: by which algorithm, by which cost and how often."""
    dynamism: DynamismSection = DynamismSection()
    """The dynamic cases of the run, and the options of each."""
    elastic: Elastic = Elastic()
    """Changes of the mesh while training."""
    launch: LaunchSection = LaunchSection()
    """How `dynmo train` starts the ranks."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When checkpoints are saved."""
    trace: TraceSection = TraceSection()
    """The steps that `trace.json` records."""
    metrics: MetricsSection = MetricsSection()
    """Where the numbers of a run are written, beside its log."""

    def _problems(self) -> Iterator[str]:
        """Yields why values do not fit together. A line may rely on those before it."""
        model, data, train, replicas = self.model, self.data, self.train, self.parallel.replicas
        if model.kind == "emulated" and train.precision != "float32":
            yield (
                f'train.precision = "{train.precision}", but emulated layers compute nothing but '
                "float32; leave it out"
            )
        if train.loss is not None and model.kind != "hf":
            yield (
                f'train.loss needs model.kind = "hf", not "{model.kind}"; a model of your own '
                "returns its layers and its loss"
            )
        batch, of_replica = "train.global_batch", train.global_batch // replicas
        for part, part_key, whole, whole_key in (
            (replicas, "parallel.replicas", train.global_batch, batch),
            (train.micro_batch, "train.micro_batch", of_replica, f"{batch} / parallel.replicas"),
        ):
            if whole % part:
                near = nearest_divisors(part, whole)
                wrong = f"{part_key} = {part} does not divide {whole_key} = {whole}"
                yield f"{wrong}; nearest that do: {near}"
        yield from problems(self.options, self.layer_count, model)
        facts = self.facts(self.layer_count, on_cuda=False)
        for case in CASES.values():
            yield from case.model_problems(facts)
        for key, is_set in (
            ("train.patience", train.patience is not None),
            ("checkpoint.keep_best", self.checkpoint.keep_best),
        ):
            if is_set and not train.eval_every:
                yield f"{key} needs held-out losses; set train.eval_every"
        if data.batching == "packed" and train.micro_batch == 1:
            yield (
                'data.batching = "packed" packs nothing with train.micro_batch = 1, one sample in '
                "each microbatch; use 2 or more"
            )
        if train.eval_every and data.held_out == 0:
            yield (
                "train.eval_every needs held-out data; leave out data.held_out = 0, or give a share"
            )
        # The data tells the steps of epochs, and what depends on them is checked then.
        endless = [*replace(facts, steps=sys.maxsize).problems()]
        for problem in facts.problems():
            if train.epochs is None or problem in endless:
                yield problem

    @property
    def restarts(self) -> int:
        """Restarts that a run may have."""
        if self.launch.restarts is not None:
            return self.launch.restarts
        return 3 if self.elastic.recover != "none" else 0

    @property
    def microbatches(self) -> int:
        """Microbatches per step of one replica: what a schedule calls m."""
        return self.all_microbatches // self.parallel.replicas

    @property
    def all_microbatches(self) -> int:
        """Microbatches per step of all replicas."""
        return self.train.global_batch // self.train.micro_batch

    @property
    def layer_count(self) -> int | None:
        """Number of layers as placements count them. None for the user's own model."""
        count = self.model.layer_count
        if count is None or not self.model.is_gpt:
            return count
        return count + sum(case.layers_added(self.model) for case in self.dynamism.named.values())

    @property
    def ranks(self) -> int:
        """The size of the world: pipeline x replicas. A pipeline of slices is one rank."""
        return (1 if self.parallel.slices else self.parallel.pipeline) * self.parallel.replicas

    @property
    def optimizer(self) -> AdamW | SGD | NamedOptimizer:
        """The optimizer that [train] names."""
        kind = _OWN_OPTIMIZERS.get(self.train.optimizer)
        if kind is None:
            return NamedOptimizer(name=self.train.optimizer, lr=self.train.lr)
        given = _taken(kind, self.train)
        return kind(**{key: value for key, value in given.items() if value is not None})

    def pipeline_arguments(self, **options: Any) -> dict[str, Any]:
        """Returns the arguments of `dynmo.Pipeline` for this run, but for the cases.

        Args:
            options: Other options than those of the file.
        """
        return grouped(self._pipeline_options() | options)

    def _pipeline_options(self) -> dict[str, Any]:
        train, parallel = self.train, self.parallel
        return {
            **_taken(StepScheduleOptions, self.pipeline),
            **_taken(MeshOptions, parallel),
            **_taken(TrainingOptions, train),
            "pipeline": parallel.pipeline,
            "microbatches": self.microbatches,
            "micro_batch": train.micro_batch,
            "steps": train.steps if train.epochs is None else None,
            "seed": self.seed,
            "optimizer": self.optimizer,
            "learning_rate": LearningRate(**_taken(LearningRate, train)),
            "balance": self.balance,
            "elastic": self.elastic,
            "peak_flops": self.metrics.peak_flops,
        }

    @property
    def options(self) -> PipelineOptions:
        """All options of the pipeline, with those of dynmo's own cases."""
        cases = tuple(self.dynamism.named.values())
        return PipelineOptions(**self._pipeline_options(), cases=cases)

    def facts(self, layers: int | None, on_cuda: bool) -> RunFacts:
        """Returns what dynamic cases may know of the run."""
        facts = self.options.facts(layers, self.model, on_cuda)
        return replace(facts, comes_again=self._comes_again)

    @property
    def _comes_again(self) -> bool | None:
        """Whether some microbatch comes again. None: the length of the data decides."""
        train, data = self.train, self.data
        if data.has_samples:
            return False
        if train.eval_every and train.epochs is not None:
            return None
        if train.eval_every and train.steps // train.eval_every > 1:
            return True
        return False if data.shuffle == "windows" and train.micro_batch > 1 else None

    def to_toml(self) -> str:
        """TOML that `load` reads back as the same config. A key that is None is left out."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))
