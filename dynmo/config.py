"""The configuration of a run: one frozen model, read from TOML and `--set section.key=value`. Pure: no torch.

Every key has a default, so an empty file is a valid small run. Defaults < TOML < `--set`. A key or value of the contract that this
version cannot serve yet is an error that says so: it is never ignored, and never taken for a typing mistake.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from dynmo.errors import ConfigError, ScheduleError
from dynmo.schedule.catalogue import SCHEDULES, check_microbatches, chunks_of

NOT_SERVED = "known but not served by this version"
_LARGEST = 2**31 - 1  # of any count: a slip of the keyboard should not become an endless loop
_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base ** (i + 1) for suffix, base in (("iB", 1024), ("B", 1000)) for i, letter in enumerate("KMGT")
}


def parse_bytes(text: str) -> int:
    """Bytes from "40GiB", "1.5 GB" or "4096" (KiB, MiB, GiB, TiB are powers of 1024, KB to TB of 1000). Raises ValueError."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise ValueError('not a size; write bytes, or a number and one of KiB, MiB, GiB, TiB, KB, MB, GB, TB, like "40GiB"')
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


# What a value may be. Each helper makes one validator whose message says what was wrong and what to write instead.


def _quoted(words: Collection[str]) -> str:
    return ", ".join(f'"{word}"' for word in words)


def _check_word(value: str, served: Collection[str], planned: Collection[str]) -> str:
    if value in served:
        return value
    choices = f"choose one of {_quoted(served)}" if len(served) > 1 else f"use {_quoted(served)}"
    if value in planned:
        raise ValueError(f"{NOT_SERVED}; {choices}")
    near = difflib.get_close_matches(value, served, 1) if len(served) > 1 else ()
    raise ValueError(f'unknown; did you mean "{near[0]}"? {choices}' if near else f"unknown; {choices}")


def _word(served: Collection[str], planned: Collection[str] = ()) -> AfterValidator:
    def check(value: str) -> str:
        return _check_word(value, served, planned)

    return AfterValidator(check)


def _only(served: bool | int) -> AfterValidator:
    def check(value: bool | int) -> bool | int:
        if value != served:
            raise ValueError(f"{NOT_SERVED}; use {_toml(served)}")
        return value

    return AfterValidator(check)


def _nothing_yet(value: object) -> object:
    if value is not None:
        raise ValueError(f"{NOT_SERVED}; leave it out")
    return value


def _check_name(value: str) -> str:
    # The name becomes a folder: nothing that a path could read as "elsewhere" or hide.
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", value):
        raise ValueError("must be 1 to 100 letters, digits, '.', '_' or '-', not starting with '.'")
    return value


def _check_kind(value: str) -> str:
    if not value.startswith("python:"):
        return _check_word(value, ("gpt", "emulated"), ("moe", "hf"))
    if not re.fullmatch(r"python:[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise ValueError('a model of your own is written "python:package.module:function"')
    return value


def _check_case(value: str) -> str:
    if not value.startswith("python:"):
        return _check_word(value, _CASES, _PLANNED_CASES)
    if not re.fullmatch(r"python:[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise ValueError('a case of your own is written "python:package.module:Class"')
    return value


def _check_source(value: str) -> str:
    if value.startswith("hf:"):
        raise ValueError(f'{NOT_SERVED}; use "stdlib" or "file:PATH"')
    if value != "stdlib" and (not value.startswith("file:") or value == "file:"):
        raise ValueError('unknown; use "stdlib" or "file:PATH"')
    return value


def _check_seconds(value: object) -> float | tuple[float, ...]:
    # By hand: for a union pydantic would report one error per alternative.
    if isinstance(value, list | tuple):
        return tuple(_check_one_time(item) for item in cast(Sequence[object], value))
    return _check_one_time(value)


def _check_one_time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
        raise ValueError("must be seconds, 0 or more: a number, or a list of one number per layer")
    return float(value)


def _check_dense_below(value: object) -> float | str:
    if value == "measured":
        return "measured"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError('must be a share from 0 to 1, or "measured"')
    return float(value)


def _check_loss_scale(value: object) -> float | str | None:
    if value is None or value == "dynamic":
        return cast("str | None", value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 2**64 or math.frexp(value)[0] != 0.5:
        raise ValueError('must be "dynamic" or a power of two from 1 to 2^64: others would round the gradients')
    return float(value)


def _check_recompute(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return _check_word(value, ("none", "all", "auto"), ())
    items = cast(Sequence[object], value) if isinstance(value, list | tuple) else [None]
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in items):
        raise ValueError('must be "none", "all", "auto", or a list of layer indices from 0 on')
    return tuple(sorted({cast(int, x) for x in items}))


def _check_every(value: object) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise ValueError('must be a number of steps greater than or equal to 1, or "auto"')
    return value


def _check_memory(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


def _check_unique(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise ValueError("a case is named twice; name each once")
    return value


def _check_pairs(value: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    for (step, layers), (next_step, next_layers) in itertools.pairwise(value):
        if next_step <= step or next_layers < layers:
            raise ValueError(f"[{next_step}, {next_layers}] after [{step}, {layers}]: steps must ascend, and frozen layers never be fewer")
    return value


Count: TypeAlias = Annotated[int, Field(ge=1, le=_LARGEST)]
Whole: TypeAlias = Annotated[int, Field(ge=0, le=_LARGEST)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
BelowOne: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Seconds: TypeAlias = Annotated[float | tuple[float, ...], PlainValidator(_check_seconds)]
# TOML has lists only, and strict pydantic takes no list for a tuple: so tuples (frozen, hashable) are lax, their items are not.
Lax = Field(strict=False)


class Section(BaseModel):
    """Frozen; unknown keys, strings for numbers, and infinities are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Model(Section):
    """What is trained. `sequence` counts tokens. `layers`, `f`, `b`, `w` (seconds, one number or one per layer) and `bytes` (of an
    activation message) belong to the emulated kind, `blocks` to `init_std` to the gpt."""

    kind: Annotated[str, AfterValidator(_check_kind)] = "gpt"
    blocks: Count = 8
    hidden: Count = 256
    heads: Count = 4
    vocab: Count = 256
    sequence: Count = 256
    dropout: BelowOne = 0.0
    tied: bool = False
    init_std: Positive = 0.02
    layers: Count = 8
    f: Seconds = 0.01
    b: Seconds = 0.01
    w: Seconds = 0.01
    bytes: Count = 65536

    @property
    def layer_count(self) -> int | None:
        """The number of layers as placements count them; None where only the user's own function knows."""
        if self.kind == "gpt":
            return 2 * self.blocks + 2  # embedding, an attention and a feed-forward half per block, head
        return self.layers if self.kind == "emulated" else None


class Data(Section):
    """Where the bytes come from: "stdlib" (the running Python's own sources) or "file:PATH"."""

    source: Annotated[str, AfterValidator(_check_source)] = "stdlib"


class Train(Section):
    """`global_batch` and `micro_batch` are sequences per step (over all replicas) and per microbatch; `max_grad_norm` 0 clips nothing,
    by the norm of all layers, or with clip_scope "local" each layer by its own; `betas` and `eps` are AdamW's, `momentum` is SGD's;
    `eval_every` 0 never evaluates; `warmup` counts steps; `compile`: torch.compile runs the layers between their linears;
    `deterministic`: on CUDA only kernels that give the same bits in every run. Gradients are added up in `reduction_slots` parts (None:
    one per replica): at equally many, any number of replicas gives the same bits. precision "bfloat16" and "float16" keep float32 masters
    and gradients. loss_scale: a power of two, or "dynamic": halved where gradients overflow, whose step is skipped, doubled after
    `loss_scale_window` good steps (None: dynamic for float16, else none). recompute: the layers whose activations are not kept but computed
    again in B: "none", "all", a list of their indices, or "auto": as many as the memory limit makes necessary."""

    steps: Count = 100
    global_batch: Count = 32
    micro_batch: Count = 4
    optimizer: Annotated[str, _word(("adamw", "sgd"), ("adam", "muon"))] = "adamw"
    lr: NonNegative = 3e-4
    warmup: Whole = 0
    decay: Annotated[str, _word(("cosine", "linear", "constant"))] = "cosine"
    min_lr_ratio: Share = 0.1
    weight_decay: NonNegative = 0.1
    betas: Annotated[tuple[BelowOne, BelowOne], Lax] = (0.9, 0.95)
    eps: Positive = 1e-8
    momentum: BelowOne = 0.9
    max_grad_norm: NonNegative = 1.0
    clip_scope: Annotated[str, _word(("global", "local"))] = "global"
    precision: Annotated[str, _word(("float32", "bfloat16", "float16"))] = "float32"
    loss_scale: Annotated[float | str | None, PlainValidator(_check_loss_scale)] = None
    loss_scale_window: Count = 2000
    recompute: Annotated[str | tuple[int, ...], PlainValidator(_check_recompute)] = "none"
    reduction_slots: Count | None = None
    compile: bool = False
    deterministic: bool = False
    eval_every: Whole = 0
    eval_batches: Count = 4


class Parallel(Section):
    """Sizes of the mesh: `data` replicas of a pipeline of `pipeline` ranks; `zero` 1 shards the optimizer's state over the replicas;
    `threads` of one rank on CPU; `timeout` in seconds is the limit of every wait."""

    pipeline: Count = 1
    data: Count = 1
    expert: Annotated[Count, _only(1)] = 1
    zero: Annotated[int, Field(ge=0, le=1)] = 0
    threads: Count = 1
    timeout: Positive = 120.0
    device: Annotated[str, _word(("auto", "cpu", "cuda"))] = "auto"


class Pipeline(Section):
    """The schedule; `chunks` is stages per rank (None: the schedule's own), `memory_limit` in bytes per rank (None: the device's).
    `post_validation`: no barrier at a step's end; a step that overflows or must be clipped is taken back, and `rollback` says how: "exact"
    keeps a copy of weights and optimizer state for as long, "in-place" inverts the update, which is not quite bit for bit."""

    schedule: Annotated[str, _word(SCHEDULES)] = "zb-h1"
    post_validation: bool = False
    rollback: Annotated[str, _word(("exact", "in-place"))] = "exact"
    chunks: Count | None = None
    memory_limit: Annotated[int | None, Field(ge=1), BeforeValidator(_check_memory)] = None


# The words of dynmo/balance/balancers.py, a floor above this file; a test holds the two together.
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
    """Who decides where layers live, from which cost, every how many steps ("auto": when the work or the ranks' imbalance has changed).
    `initial` is the first placement, in layer counts (None: the balancer's). A move must gain `margin` times its cost, and at least
    `hysteresis` of the step (a share)."""

    balancer: Annotated[str, _word(BALANCERS)] = "exact"
    cost: Annotated[str, _word(("time", "parameters"))] = "time"
    every: Annotated[int | str, PlainValidator(_check_every)] = 10
    initial: Annotated[tuple[Count, ...] | None, Lax] = None
    margin: NonNegative = 1.0
    hysteresis: NonNegative = 0.02


class Freezing(Section):
    """Leading layers stop training. policy "schedule": `schedule` lists [step, layers], from that step on so many leading layers are
    frozen. policies "autofreeze" and "egeria": decided every `every` steps from step `start` on, by halves or whole blocks (`unit`), at
    most `max_layers` (None: all but the last). Egeria compares with a reference of up to `refresh` steps ago; it freezes what has changed
    less than `tolerance` times as fast as at first for `window` readings, one each `every` steps, and unfreezes all when the learning rate
    falls to `thaw` times what it was. The policy is "schedule" where a schedule is given and no policy named."""

    policy: Annotated[str, _word(("schedule", "autofreeze", "egeria"))] = "autofreeze"
    schedule: Annotated[tuple[Annotated[tuple[Whole, Whole], Lax], ...], Lax, AfterValidator(_check_pairs)] = ()
    every: Count = 10
    start: Whole = 0
    max_layers: Count | None = None
    unit: Annotated[str, _word(("half", "block"))] = "half"
    window: Annotated[int, Field(ge=2, le=1000)] = 5
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.2
    refresh: Count = 200
    thaw: BelowOne = 0.1

    @model_validator(mode="before")
    @classmethod
    def _policy_of_a_schedule(cls, data: object) -> object:
        if isinstance(data, dict) and cast(dict[str, object], data).get("schedule"):
            return {"policy": "schedule", **cast(dict[str, object], data)}
        return cast(object, data)


class Pruning(Section):
    """Weights of least magnitude leave, until `final_sparsity` of them are gone: at step `start`, every `every` steps, and at `end`, by a
    cubic schedule (where not given: from 30 % to 70 % of the run, in four intervals). criterion "global" compares the weights of all
    layers, "local" those of each. A matrix that has lost less than the share `dense_below` stays dense, which saves nothing; "measured":
    timed once per shape as the run first prunes, and kept in its checkpoints (another run may then measure, and round, differently)."""

    criterion: Annotated[str, _word(("global", "local"))] = "global"
    initial_sparsity: BelowOne = 0.0
    final_sparsity: BelowOne = 0.9
    start: Whole | None = None
    end: Whole | None = None
    every: Count | None = None
    dense_below: Annotated[float | str, PlainValidator(_check_dense_below)] = 0.6

    def steps_of(self, steps: int) -> tuple[int, int, int]:
        """start, end, every in a run of so many steps."""
        start = 3 * steps // 10 if self.start is None else self.start
        end = min(steps - 1, max(start, 7 * steps // 10)) if self.end is None else self.end
        return start, end, max(1, (end - start) // 4) if self.every is None else self.every


def _check_blocks(value: tuple[tuple[int, tuple[int, ...]], ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    for (step, _), (next_step, _) in itertools.pairwise(value):
        if next_step <= step:
            raise ValueError(f"step {next_step} after step {step}: steps must ascend")
    return value


def _check_even(value: int) -> int:
    if value % 2:
        raise ValueError(f"must be even, for a direction and its opposite are two buckets; use {value + 1}")
    return value


_Blocks: TypeAlias = Annotated[tuple[Whole, ...], Lax]


class SparseAttention(Section):
    """Attention computes only a part of the pairs. kind "hash": those in one of `buckets` hash buckets; "drop": those of the queries and
    keys that stay when the share `drop` of each is dropped. From step `start` on in these `blocks` (None: all), dense before. Or by
    `schedule`, [step, [block, ...]]: from that step on these blocks are sparse and the others dense. `tile`: queries computed together."""

    kind: Annotated[str, _word(("hash", "drop"))] = "hash"
    start: Whole = 0
    blocks: Annotated[tuple[Whole, ...] | None, Lax] = None
    schedule: Annotated[tuple[Annotated[tuple[Whole, _Blocks], Lax], ...], Lax, AfterValidator(_check_blocks)] = ()
    buckets: Annotated[Count, AfterValidator(_check_even)] = 16
    drop: BelowOne = 0.5
    tile: Annotated[int, Field(ge=1, le=65536)] = 32


_CASES = ("freezing", "pruning", "sparse_attention")
_PLANNED_CASES = ("early_exit", "moe", "mixture_of_depths")


class Dynamism(Section):
    """Which dynamic cases run ("python:package.module:Class" is one of your own), and the options of each."""

    cases: Annotated[tuple[Annotated[str, AfterValidator(_check_case)], ...], Lax, AfterValidator(_check_unique)] = ()
    freezing: Freezing = Freezing()
    pruning: Pruning = Pruning()
    sparse_attention: SparseAttention = SparseAttention()


def _check_shapes(value: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    for (step, *_), (next_step, *_) in itertools.pairwise(value):
        if next_step <= step:
            raise ValueError(f"step {next_step} after step {step}: steps must ascend")
    return value


class Elastic(Section):
    """Fewer or more ranks while training. `reshape_at` lists [step, pipeline, data]: from that step on the same ranks are a mesh of these
    sizes."""

    repack: Annotated[bool, _only(False)] = False
    reshape: Annotated[bool, _only(False)] = False
    reshape_at: Annotated[tuple[Annotated[tuple[Count, Count, Count], Lax], ...], Lax, AfterValidator(_check_shapes)] = ()
    min_ranks: Count = 1
    target_ranks: Annotated[int | None, AfterValidator(_nothing_yet)] = None


class Checkpoint(Section):
    """Save every so many steps (0: never), and keep so many."""

    every: Whole = 0
    keep: Count = 2


class Trace(Section):
    """How many recent steps the trace keeps around each change."""

    steps: Whole = 3


class Config(Section):
    """A whole run. `runs/<name>/` is its folder."""

    name: Annotated[str, AfterValidator(_check_name)] = "quickstart"
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    parallel: Parallel = Parallel()
    pipeline: Pipeline = Pipeline()
    balance: Balance = Balance()
    dynamism: Dynamism = Dynamism()
    elastic: Elastic = Elastic()
    checkpoint: Checkpoint = Checkpoint()
    trace: Trace = Trace()

    @property
    def microbatches(self) -> int:
        """Microbatches per step of one replica: what a schedule calls m."""
        return self.train.global_batch // (self.train.micro_batch * self.parallel.data)

    @property
    def all_microbatches(self) -> int:
        """Microbatches per step of all replicas."""
        return self.train.global_batch // self.train.micro_batch

    @property
    def slots(self) -> int:
        """In how many parts a step's gradients are added up."""
        return self.train.reduction_slots or self.parallel.data

    def shape_at(self, step: int) -> tuple[int, int]:
        """The mesh at this step: ranks of a pipeline, and how many pipelines."""
        shapes = [(pipeline, data) for at, pipeline, data in self.elastic.reshape_at if at <= step]
        return shapes[-1] if shapes else (self.parallel.pipeline, self.parallel.data)

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return chunks_of(self.pipeline.schedule, self.pipeline.chunks)

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.parallel.pipeline * self.chunks

    @property
    def ranks(self) -> int:
        """The size of the world: pipeline x data x expert."""
        return self.parallel.pipeline * self.parallel.data * self.parallel.expert

    @model_validator(mode="after")
    def _hangs_together(self) -> Config:
        for problem in _problems(self):
            raise ValueError(problem)
        return self


def _problems(config: Config) -> Iterator[str]:
    """What no single key can know. Each problem names its keys."""
    model, train, parallel, layers = config.model, config.train, config.parallel, config.model.layer_count
    if model.kind == "gpt":
        if model.hidden % model.heads:
            near = _nearest_divisors(model.heads, model.hidden)
            yield f"model.heads = {model.heads} does not divide model.hidden = {model.hidden}; nearest that do: {near}"
        elif model.hidden // model.heads % 2:
            yield (
                f"model.hidden / model.heads = {model.hidden // model.heads} is odd, but rotary positions turn pairs; "
                f"use hidden = {model.hidden + model.heads}, or other heads"
            )
    if model.kind == "emulated":
        for key, times in (("f", model.f), ("b", model.b), ("w", model.w)):
            if isinstance(times, tuple) and len(times) != model.layers:
                yield f"model.{key} lists {len(times)} layers, model.layers = {model.layers}; give one number, or one per layer"

    if train.global_batch % parallel.data:
        yield f"parallel.data = {parallel.data} does not divide train.global_batch = {train.global_batch}"
    share = train.global_batch // parallel.data
    if share % train.micro_batch:
        near = _nearest_divisors(train.micro_batch, share)
        wrong = f"train.micro_batch = {train.micro_batch} does not divide train.global_batch / parallel.data = {share}"
        yield f"{wrong}; nearest that do: {near}"
    if train.precision == "float16" and train.loss_scale == 1:
        yield 'train.loss_scale = 1 with train.precision = "float16": small gradients vanish; use "dynamic", or precision = "bfloat16"'
    chosen = train.recompute if isinstance(train.recompute, tuple) else ()
    if layers is not None and max(chosen, default=0) >= layers:
        yield f"train.recompute names layer {max(chosen)}, but the model has {layers}, from 0 to {layers - 1}"
    yield from _slot_problems(config)

    name = config.pipeline.schedule
    try:
        chunks = chunks_of(name, config.pipeline.chunks)
    except ScheduleError as error:
        yield f"pipeline.chunks: {error}"
        return
    try:
        check_microbatches(name, parallel.pipeline, max(1, share // train.micro_batch))
    except ScheduleError as error:
        yield f"pipeline.schedule: {error} (train.global_batch / train.micro_batch / parallel.data)"
    stages = parallel.pipeline * chunks
    initial = config.balance.initial
    if initial is not None and len(initial) != stages:
        if chunks == 1:
            yield f"balance.initial has {len(initial)} entries, parallel.pipeline = {parallel.pipeline}; give one layer count per rank"
        else:
            yield f"balance.initial has {len(initial)} entries, but {name} has {stages} stages; give one layer count per stage"
    if layers is not None:
        if stages > layers:
            held = f" x {chunks} stages a rank" if chunks > 1 else ""
            yield f"parallel.pipeline = {parallel.pipeline}{held} is more than the model's {layers} layers; use fewer ranks or more layers"
        if initial is not None and sum(initial) != layers:
            yield f"balance.initial sums to {sum(initial)}, but the model has {layers} layers; make it sum to {layers}"

    yield from _reshape_problems(config)

    if "sparse_attention" in config.dynamism.cases:
        yield from _sparse_attention_problems(config)
    if "pruning" in config.dynamism.cases:
        yield from _pruning_problems(config)
    if "freezing" in config.dynamism.cases:
        freezing = config.dynamism.freezing
        if freezing.policy == "schedule" and not freezing.schedule:
            yield 'dynamism.freezing.schedule is empty, so nothing would freeze; give [[step, layers], ...] or policy = "autofreeze"'
        by_schedule = freezing.policy == "schedule"
        most = max((count for _, count in freezing.schedule), default=0) if by_schedule else freezing.max_layers or 0
        if layers is not None and most >= layers:
            key = "dynamism.freezing.schedule" if by_schedule else "dynamism.freezing.max_layers"
            yield f"{key} freezes {most} of the model's {layers} layers; the last must train, so freeze at most {layers - 1}"
        yield from _freezing_problems(freezing, train.steps)


def slots_fit(slots: int, replicas: int, microbatches: int) -> str | None:
    """What is wrong with so many reduction slots, for so many replicas and microbatches (of all replicas); None if they fit."""
    if microbatches % slots:
        return f"does not divide the {microbatches} microbatches of a step"
    each, rest = divmod(slots, replicas)
    if rest or (replicas > 1 and each & (each - 1)):
        return f"is not {replicas} (replicas) times a power of two"
    return None


def _slot_problems(config: Config) -> Iterator[str]:
    parallel, slots = config.parallel, config.slots
    problem = slots_fit(slots, parallel.data, config.all_microbatches)
    if problem:
        yield f"train.reduction_slots = {slots} {problem}; leave it out for one per replica, or use {_fitting(config, (parallel.data,))}"


def _fitting(config: Config, replicas: Collection[int]) -> str:
    """Numbers of slots that fit any of these numbers of replicas."""
    every = config.all_microbatches
    found = [str(n) for n in range(1, every + 1) if every % n == 0 and not any(slots_fit(n, r, every) for r in replicas)]
    return " or ".join(found[:4]) if found else "another train.global_batch"


def _reshape_problems(config: Config) -> Iterator[str]:
    """Every mesh that the run will be must hold together as the first one does."""
    parallel, layers, every = config.parallel, config.model.layer_count, config.all_microbatches
    replicas = (parallel.data, *(data for _, _, data in config.elastic.reshape_at))
    for step, pipeline, data in config.elastic.reshape_at:
        key = f"elastic.reshape_at: [{step}, {pipeline}, {data}]"
        if step >= config.train.steps:
            yield f"{key} is at step {step}, but the run has {config.train.steps} steps; reshape sooner"
        if pipeline * data * parallel.expert != config.ranks:
            yield f"{key} is {pipeline} x {data} ranks, but the run has {config.ranks}; a reshape keeps them all, so change the sizes"
        if every % data:
            yield f"{key}: {data} replicas do not divide the {every} microbatches of a step"
        problem = slots_fit(config.slots, data, every)
        if problem:
            yield f"{key}: train.reduction_slots = {config.slots} {problem}; use {_fitting(config, replicas)}"
        stages = pipeline * config.chunks
        if layers is not None and stages > layers:
            yield f"{key} has {stages} stages, more than the model's {layers} layers; use fewer ranks in a pipeline"
        try:
            check_microbatches(config.pipeline.schedule, pipeline, every // data)
        except ScheduleError as error:
            yield f"{key}: {error} (train.global_batch / train.micro_batch / data)"


def _sparse_attention_problems(config: Config) -> Iterator[str]:
    sparse, model, steps, key = config.dynamism.sparse_attention, config.model, config.train.steps, "dynamism.sparse_attention"
    if model.kind == "emulated":
        yield f'{key}: model.kind = "emulated" has no attention; use "gpt" or a model of your own'
    if sparse.schedule and (sparse.start or sparse.blocks is not None):
        yield f"{key}.schedule says when and where, and so do start and blocks; leave them out"
    known = not model.kind.startswith("python:")
    named = {block for _, blocks in sparse.schedule for block in blocks} | set(sparse.blocks or ())
    if known and max(named, default=0) >= model.blocks:
        where = "schedule" if sparse.schedule else "blocks"
        yield f"{key}.{where} names block {max(named)}, but the model has {model.blocks}, from 0 to {model.blocks - 1}"
    if not named and (sparse.schedule or sparse.blocks is not None):
        yield f"{key} names no block, so all attention would stay dense; name one, or leave blocks out to mean all"
    first = sparse.schedule[0][0] if sparse.schedule else sparse.start
    if first >= steps:
        yield f"{key} starts at step {first}, but the run has {steps} steps, so all attention would stay dense; start sooner"
    if known and sparse.kind == "hash" and sparse.buckets > model.sequence:
        most = model.sequence // 2 * 2
        yield f"{key}.buckets = {sparse.buckets} is more than model.sequence = {model.sequence} tokens; use {most} or fewer"


def _pruning_problems(config: Config) -> Iterator[str]:
    pruning, steps = config.dynamism.pruning, config.train.steps
    start, end, every = pruning.steps_of(steps)
    key = "dynamism.pruning"
    if config.model.kind == "emulated":
        yield f'{key}: an emulated model has no weights to prune; use model.kind = "gpt", or leave the case out'
    if pruning.initial_sparsity > pruning.final_sparsity:
        over = f"{key}.initial_sparsity = {pruning.initial_sparsity} is over final_sparsity = {pruning.final_sparsity}"
        yield f"{over}; pruned weights do not return, so use at most that"
    late = [(name, step) for name, step in (("start", start), ("end", end)) if step >= steps]
    if late:
        name, step = late[0]
        yield f"{key}.{name} = {step}: the run has {steps} steps, so it would not prune to the end; use at most {steps - 1}"
    elif start > end:
        yield f"{key}.start = {start} is after end = {end}; prune from start to end"
    elif every > max(1, end - start):
        yield f"{key}.every = {every} is more than the {end - start} steps from start = {start} to end = {end}; use a smaller one"


def _freezing_problems(freezing: Freezing, steps: int) -> Iterator[str]:
    key, every, window = "dynamism.freezing", freezing.every, freezing.window
    if freezing.policy == "autofreeze" and freezing.start + 2 * every >= steps:
        needs = f"{freezing.start} + 2 x {every}"
        yield f"{key}: two intervals end at step {needs}, but the run has {steps} steps, so nothing would freeze; lower start or every"
    if freezing.policy == "egeria":
        if freezing.refresh < window * every:
            yield (
                f"{key}.refresh = {freezing.refresh}: a reference must last a window of {window} readings, one each {every} steps; use "
                f"refresh = {window * every} or more"
            )
        if freezing.start + (2 * window - 1) * every >= steps:
            yield (
                f"{key}.window = {window}: two windows of readings, one each {every} steps from step {freezing.start} on, are longer than "
                f"the run of {steps} steps, so nothing would freeze; lower window, every or start"
            )


def _nearest_divisors(value: int, total: int) -> str:
    divisors = {d for i in range(1, math.isqrt(total) + 1) if total % i == 0 for d in (i, total // i)}
    below, above = [d for d in divisors if d < value], [d for d in divisors if d > value]
    return ", ".join(str(d) for d in ([max(below)] if below else []) + ([min(above)] if above else []))


# Reading.


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config of the TOML file at `path` (None: the defaults), changed by `section.key=value` overrides, the last of a key winning.

    A value is in TOML syntax; a string may go without quotes. Raises ConfigError, one line: file, key, what was wrong, what to do.
    """
    data = {} if path is None else _read(Path(path))
    for text in overrides:
        _override(data, text)
    where = "defaults" if path is None else str(path)
    return parse(data, where, frozenset(text.partition("=")[0].strip() for text in overrides))


def parse(data: Mapping[str, Any], where: str = "config", overridden: Collection[str] = ()) -> Config:
    """The config of nested dicts. `where` is named in errors, but for the `overridden` keys `--set` is. Raises ConfigError."""
    try:
        return Config.model_validate(dict(data))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # One line tells one problem, and of several the one most likely at the root: a key that nobody knows.
        problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
        parts = tuple(str(part) for part in problem["loc"] if not isinstance(part, int))
        if not parts:
            where = f"{where} and --set" if overridden else where
        elif ".".join(parts) in overridden:
            where = "--set"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise _error(f"{where}: {_explain(dict(problem), parts)}{more}") from None


def to_toml(config: Config) -> str:
    """TOML that `load` reads back as the same config. A key that is None is left out."""
    return "\n".join(_tables(config.model_dump(), ())) + "\n"


def _error(message: str) -> ConfigError:
    """One printable line, whatever keys and values it quotes."""
    return ConfigError("".join(c if c.isprintable() else "?" for c in " ".join(message.split())))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise _error(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise _error(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (ValueError, RecursionError) as error:  # tomllib's own error, but also an integer of thousands of digits
        raise _error(f"{path}: not valid TOML: {error}") from None


def _override(data: dict[str, Any], text: str) -> None:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise _error(f"--set {text}: no '='; write section.key=value")
    parts = tuple(key.split("."))
    fields = _fields(parts[:-1])
    if fields is None or parts[-1] not in fields:
        raise _error(f"--set: {_unknown(parts)}")
    if _fields(parts) is not None:
        raise _error(f"--set: {key} is a section; set its keys one by one, like {key}.{next(iter(_fields(parts) or ()))}=...")
    node = data
    for part in parts[:-1]:
        inner: object = node.setdefault(part, {})
        if not isinstance(inner, dict):
            raise _error(f"--set {text}: {part} must be a section in the file; write [{part}] there")
        node = cast(dict[str, Any], inner)
    node[parts[-1]] = _value(text, value, plain=fields[parts[-1]] is str)


def _value(text: str, value: str, plain: bool) -> Any:
    """An override's value: TOML, or else a bare string. A `plain` key is a string, so that a run may be called 2024."""
    try:
        table = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError) as error:
        if value.startswith(("'", '"', "[", "{")):  # meant as TOML
            raise _error(f"--set {text}: not a TOML value: {error}") from None
        return value
    if len(table) > 1 or (plain and not isinstance(table["value"], str)):
        return value
    return table["value"]


# Naming what was wrong.


def _fields(parts: Sequence[str]) -> dict[str, Any] | None:
    """Key -> type of the section at `parts`; None if that is no section."""
    section: Any = Config
    for part in parts:
        section = section.model_fields[part].annotation if part in section.model_fields else None
        if not (isinstance(section, type) and issubclass(section, Section)):
            return None
    return {key: field.annotation for key, field in cast(type[Section], section).model_fields.items()}


def _keys(parts: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key in _fields(parts) or ():
        yield (*parts, key)
        yield from _keys((*parts, key))


def _unknown(parts: tuple[str, ...]) -> str:
    """An unknown key, and the nearest: in its own section, else the same word elsewhere; or of an unknown section, the whole path."""
    key, section = ".".join(parts), parts[:-1]
    if section == ("dynamism",) and parts[-1] in _PLANNED_CASES:
        return f"{key} is {NOT_SERVED}; the cases served are {', '.join(_CASES)}"
    siblings, known = _fields(section), [".".join(path) for path in _keys()]
    near = [".".join((*section, word)) for word in difflib.get_close_matches(parts[-1], siblings or (), 1)]
    near = near or [path for path in known if path.endswith(f".{parts[-1]}")]
    if siblings is None:
        near = near or difflib.get_close_matches(key, known, 1)
    if near:
        return f"unknown key {key}; did you mean {near[0]}?"
    if siblings and section:
        return f"unknown key {key}; [{'.'.join(section)}] has {', '.join(siblings)}"
    return f"unknown key {key}; known at the top are {', '.join(_fields(()) or ())}"


_SAY = {"tuple_type": "must be a list, like [1, 2]", "missing": "missing; the list is too short", "too_long": "the list is too long"}


def _explain(problem: dict[str, Any], parts: tuple[str, ...]) -> str:
    """One of pydantic's problems in the words of a TOML file."""
    kind, value = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return _unknown(parts)
    if kind == "model_type":
        return f"{'.'.join(parts)} must be a section: write [{'.'.join(parts)}]"
    if kind == "value_error":
        what = str(problem["ctx"]["error"])
        if not parts:
            return what
    else:
        what = _SAY.get(kind) or str(problem["msg"]).replace("Input should be", "must be")
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    shown = "" if kind == "missing" else f" = {_short(value)}"
    return f"{key}{shown}: {what}"


def _short(value: object) -> str:
    try:
        text = _toml(value)
    except RecursionError:  # lists in lists, deeper than anything here is
        text = "[[..."
    return text if len(text) <= 60 else text[:57] + "..."


# Writing. A config holds strings, numbers, booleans and lists of them only: no need for a library.


def _tables(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"\n[{'.'.join(path)}]"
    for key, value in table.items():
        if value is not None and not isinstance(value, dict):
            yield f"{key} = {_toml(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _tables(cast(dict[str, Any], value), (*path, key))


def _toml(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's, but TOML forbids a bare DEL
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in cast(Sequence[object], value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(item)}' for key, item in cast(dict[str, object], value).items())}}}"
    return str(value)  # an int, or a float's shortest digits that read back exactly
