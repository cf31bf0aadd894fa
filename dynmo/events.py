"""The typed records of a run's log (`runs/<name>/events.jsonl`), one JSON object a line.

Shared by the runtime, the trainer and the reports. Floats are written so that they read back
exactly (Python's repr does).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, cast

from dynmo.errors import InputError, RunError


@dataclass(frozen=True)
class Event:
    """Base: what happened before step `step` was over, at `time` (seconds since the epoch)."""

    event: ClassVar[str] = ""
    step: int
    time: float


@dataclass(frozen=True)
class StepEvent(Event):
    """One optimizer step. `seconds` is its wall time; idle_ratio and imbalance are measured; layers
    is the placement."""

    event: ClassVar[str] = "step"
    loss: float
    tokens_per_s: float
    idle_ratio: float
    imbalance: float
    seconds: float
    gradient_norm: float | None
    learning_rate: float
    layers: tuple[int, ...]
    frozen: int


@dataclass(frozen=True)
class SkippedEvent(Event):
    """The step's gradients overflowed at `loss_scale`: nothing was updated, and the next step takes
    `next_scale`."""

    event: ClassVar[str] = "skipped"
    loss_scale: float
    next_scale: float


@dataclass(frozen=True)
class EvalEvent(Event):
    """An evaluation. If tokens exit early, it runs once more without exits, and `dense_loss` and
    `dense_tokens_per_s` are of that run. Older logs have the loss alone."""

    event: ClassVar[str] = "eval"
    loss: float
    tokens_per_s: float | None = None
    dense_loss: float | None = None
    dense_tokens_per_s: float | None = None


@dataclass(frozen=True)
class ChangeEvent(Event):
    """A dynamic case changed layers: which case, which global layer indices, in words what
    happened. The case "balance", and no layers: why the balancer can do nothing."""

    event: ClassVar[str] = "change"
    case: str
    layers: tuple[int, ...]
    what: str


@dataclass(frozen=True)
class TokensEvent(Event):
    """How many tokens some layers computed or let go, since the last such record: of the first
    replica (of all if they share experts), shares of all tokens by what is counted, one a layer."""

    event: ClassVar[str] = "tokens"
    case: str
    layers: tuple[int, ...]
    shares: Mapping[str, list[float]]


@dataclass(frozen=True)
class RebalanceEvent(Event):
    """`source` and `target` are written as `from` and `to`: layer counts per rank. Gathering the
    costs took `measure_seconds`; `seconds` is what came then: `decide_seconds` to find out where to
    and whether it pays, and the move."""

    event: ClassVar[str] = "rebalance"
    id: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    moved_bytes: int
    seconds: float
    predicted_gain: float
    reason: str
    measure_seconds: float = 0.0
    decide_seconds: float = 0.0


@dataclass(frozen=True)
class ScheduleEvent(Event):
    """The ranks' order of work was made anew from measured costs: the share of a step's time that
    the simulator says it saves."""

    event: ClassVar[str] = "schedule"
    name: str
    predicted_gain: float


@dataclass(frozen=True)
class RebalanceResultEvent(Event):
    """What rebalance `id` brought: the share of a step's time that it saved, measured (compare
    `predicted_gain`)."""

    event: ClassVar[str] = "rebalance_result"
    id: int
    measured_gain: float


@dataclass(frozen=True)
class ReshapeEvent(Event):
    """The same ranks became another mesh. `source` and `target` are written as `from` and `to`:
    ranks of a pipeline, and how many pipelines; layers: the new placement, in counts."""

    event: ClassVar[str] = "reshape"
    source: tuple[int, ...]
    target: tuple[int, ...]
    layers: tuple[int, ...]
    moved_bytes: int
    seconds: float


@dataclass(frozen=True)
class RepackEvent(Event):
    """The run goes on with fewer ranks.

    `rebalance_result` with the same id has the measured gain, which is negative for a slowdown.

    Attributes:
        id: Number of the change. Moves are counted with it.
        ranks_before: Ranks until now.
        ranks_after: Ranks from now on.
        source: Ranks of a pipeline, and how many pipelines, until now. Written as `from`.
        target: The same from now on. Written as `to`.
        layers: Layers on each stage from now on.
        moved_bytes: Bytes that all ranks received.
        seconds: How long the ranks stood still.
        predicted_slowdown: Share by which a step takes longer. None if nobody asked.
        reason: Why, in one line.
        left: The processes that went.
    """

    event: ClassVar[str] = "repack"
    id: int
    ranks_before: int
    ranks_after: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    layers: tuple[int, ...]
    moved_bytes: int
    seconds: float
    predicted_slowdown: float | None
    reason: str
    left: tuple[str, ...]


@dataclass(frozen=True)
class GrowEvent(Event):
    """The run goes on with more ranks. Most fields are those of `RepackEvent`.

    Attributes:
        predicted_gain: Share of a step that is saved. None if nobody asked.
        joined: The processes that came.
        gpu_seconds_returned: Of all ranks that were away, until now.
    """

    event: ClassVar[str] = "grow"
    id: int
    ranks_before: int
    ranks_after: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    layers: tuple[int, ...]
    moved_bytes: int
    seconds: float
    predicted_gain: float | None
    reason: str
    joined: tuple[str, ...]
    gpu_seconds_returned: float


@dataclass(frozen=True)
class ReleaseEvent(Event):
    """A resource manager has taken ranks back, or has started ranks that may join.

    Attributes:
        by: Its word in `elastic.releaser`, or "launcher".
        what: What it has done, in one line.
        ranks: How many ranks.
        seconds: How long it took.
    """

    event: ClassVar[str] = "release"
    by: str
    what: str
    ranks: int
    seconds: float


@dataclass(frozen=True)
class FaultEvent(Event):
    """Something failed that the run can do without. what: One line."""

    event: ClassVar[str] = "fault"
    what: str


@dataclass(frozen=True)
class RollbackEvent(Event):
    """With post-validation, step `step` was taken back. what: "non-finite" (and not made) or
    "clipped" (and made again, clipped). seconds: of rank 0's work that was thrown away."""

    event: ClassVar[str] = "rollback"
    what: str
    seconds: float


@dataclass(frozen=True)
class PostValidationEvent(Event):
    """From the step after this one on, steps end without a barrier (`on`), or with one: too many
    were taken back, or what the model is asks for it (then from this step on)."""

    event: ClassVar[str] = "post_validation"
    on: bool
    reason: str


@dataclass(frozen=True)
class CheckpointEvent(Event):
    event: ClassVar[str] = "checkpoint"
    path: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class EndEvent(Event):
    """`weights_digest` and `buffers_digest` are those of `LayerStates.digest` and
    `LayerStates.buffers_digest`; older logs lack the second. `reason` is "done", or "interrupted"
    when a signal ended the run early. What balancing took of all `seconds`, moves or not:
    `measure_seconds` to condense and gather the layers' costs, `decide_seconds`, `move_seconds`. Of
    the caches of a frozen prefix's outputs, on all ranks: `spared_forwards`, the F's of single
    layers that need not run, and `cached_bytes` at the end. `gpu_seconds_returned`: of the ranks that
    the run did without."""

    event: ClassVar[str] = "end"
    loss: float
    weights_digest: str
    seconds: float
    reason: str
    measure_seconds: float = 0.0
    decide_seconds: float = 0.0
    move_seconds: float = 0.0
    spared_forwards: int = 0
    cached_bytes: int = 0
    buffers_digest: str | None = None
    gpu_seconds_returned: float = 0.0


_KINDS: dict[str, type[Event]] = {
    kind.event: kind
    for kind in (
        StepEvent,
        SkippedEvent,
        EvalEvent,
        ChangeEvent,
        TokensEvent,
        RebalanceEvent,
        ScheduleEvent,
        RebalanceResultEvent,
        ReshapeEvent,
        RepackEvent,
        GrowEvent,
        ReleaseEvent,
        FaultEvent,
        RollbackEvent,
        PostValidationEvent,
        CheckpointEvent,
        EndEvent,
    )
}
_WORDS = {"source": "from", "target": "to"}


def to_json(event: Event) -> dict[str, Any]:
    return {
        "event": event.event,
        **{_WORDS.get(key, key): value for key, value in vars(event).items()},
    }


def from_json(record: dict[str, Any]) -> Event:
    """Raises InputError for a record of an unknown kind or with fields missing (but those with a
    default: an older version did not write them); keys that it does not know are left out."""
    kind = _KINDS.get(str(record.get("event")))
    if kind is None:
        raise InputError(f"unknown event {record.get('event')!r}")
    values: dict[str, Any] = {}
    for field in fields(kind):
        key = field.name
        word = _WORDS.get(key, key)
        if word not in record:
            if field.default is not MISSING:
                continue
            raise InputError(f"event {kind.event!r} lacks {word!r}")
        value = record[word]
        values[key] = tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return kind(**values)


class EventLog:
    """Appends events to a file, a line each, flushed at once so that a run can be watched.

    A torn last line (an earlier run was cut off) is dropped: what follows must start a line of its
    own.
    """

    def __init__(self, path: Path) -> None:
        """Raises InputError if the file cannot be opened."""
        self._path = path
        try:
            if path.exists():
                whole = path.read_bytes().rfind(b"\n") + 1
                os.truncate(path, whole)
            # Without a buffer: on a full disk, `close` would try to write its content again.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None

    def write(self, event: Event) -> None:
        """Raises RunError if the file cannot be written."""
        line = (json.dumps(to_json(event)) + "\n").encode()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            advice = "mend this; --resume goes on from the newest checkpoint"
            raise RunError(f"{self._path} cannot be written: {error.strerror}; {advice}") from None

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Event]:
    """The events of a log. A torn last line (the run was cut off) is left out; any other bad line
    raises InputError with its number."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                return
            raise InputError(f"{path}:{number}: not a line of JSON") from None
        try:
            if not isinstance(record, dict):
                raise InputError("not an event")
            yield from_json(cast(dict[str, Any], record))
        except InputError as error:
            raise InputError(f"{path}:{number}: {error}") from None


def now() -> float:
    return time.time()
