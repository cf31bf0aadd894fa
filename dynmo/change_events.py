"""Events of what changes while a run trains: layers, placements, schedules, ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dynmo.events import Event


@dataclass(frozen=True)
class ChangeEvent(Event):
    """A dynamic case changed layers.

    Attributes:
        case: Name of the case. "balance", without layers, says why the balancer can do nothing.
        layers: Global indices of the layers.
        what: The change, in words.
        options: Options of the case that it has measured.
    """

    event: ClassVar[str] = "change"
    case: str
    layers: tuple[int, ...]
    what: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class TokensEvent(Event):
    """Shares of tokens that layers computed or let go since the last such record.

    Attributes:
        case: Name of the case.
        layers: Global indices of the layers.
        shares: By what is counted: shares of all tokens, one a layer. They are of the first
            replica, or of all replicas if these share experts.
    """

    event: ClassVar[str] = "tokens"
    case: str
    layers: tuple[int, ...]
    shares: Mapping[str, list[float]]


@dataclass(frozen=True)
class RebalanceEvent(Event):
    """Layers moved to other ranks.

    Attributes:
        id: Number of the move.
        source: Layers per rank before. Written as `from`.
        target: Layers per rank after. Written as `to`.
        moved_bytes: Bytes that moved.
        seconds: Time after the costs were gathered: the decision and the move.
        predicted_gain: Share of a step's time that the move should save.
        reason: Why, in one line.
        measure_seconds: Time to gather the costs.
        decide_seconds: Part of `seconds` that the decision took: the target, and whether it pays.
        schedule: Name of another schedule that runs from now on. None if it stays.
    """

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
    schedule: str | None = None


@dataclass(frozen=True)
class SpeedsEvent(Event):
    """The measured speeds of the ranks have changed.

    Attributes:
        speeds: Speed of each rank of a pipeline. 1 is that of the middle rank.
    """

    event: ClassVar[str] = "speeds"
    speeds: tuple[float, ...]


@dataclass(frozen=True)
class SlowRankEvent(Event):
    """A rank has been slow for several windows of measurement, or is so no longer.

    Attributes:
        rank: Number of the rank in the whole mesh.
        factor: How many times as long it takes for equal work. 1 if it is slow no longer.
        machine: Name of its machine.
        twin: The rank with the same stages in another replica, with which it was compared. None:
            with the middle rank.
    """

    event: ClassVar[str] = "slow_rank"
    rank: int
    factor: float
    machine: str
    twin: int | None = None


@dataclass(frozen=True)
class ScheduleEvent(Event):
    """The ranks' order of work was made anew from measured costs.

    Attributes:
        name: Name of the schedule.
        predicted_gain: Share of a step's time that the simulator says it saves.
    """

    event: ClassVar[str] = "schedule"
    name: str
    predicted_gain: float


@dataclass(frozen=True)
class RebalanceResultEvent(Event):
    """The measured gain of a rebalance.

    Attributes:
        id: Number of the rebalance.
        measured_gain: Measured share of a step's time that it saved. Compare `predicted_gain`.
    """

    event: ClassVar[str] = "rebalance_result"
    id: int
    measured_gain: float


@dataclass(frozen=True)
class ReshapeEvent(Event):
    """The same ranks became another mesh.

    Attributes:
        source: Ranks of a pipeline, and how many pipelines, before. Written as `from`.
        target: The same after. Written as `to`.
        layers: The new placement, in counts.
        moved_bytes: Bytes that moved.
        seconds: How long the change took.
    """

    event: ClassVar[str] = "reshape"
    source: tuple[int, ...]
    target: tuple[int, ...]
    layers: tuple[int, ...]
    moved_bytes: int
    seconds: float


@dataclass(frozen=True)
class ResizeEvent(Event):
    """Base of the events after which a run goes on with fewer or more ranks.

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
        micro_batch: Samples of a microbatch until now, and from now on. Empty in older logs.
    """

    id: int
    ranks_before: int
    ranks_after: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    layers: tuple[int, ...]
    moved_bytes: int
    seconds: float
    micro_batch: tuple[int, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class RecoverEvent(Event):
    """The run goes on without ranks that are gone, from copies in memory before step `step`.

    Attributes:
        lost: Where these ranks ran.
        why: The error by which another rank has noticed it.
        seconds: Seconds from the error until the run trains again.
        repeated: Steps that were done and are trained again.
        ranks_before: Number of ranks before.
        ranks_after: Number of ranks after.
        source: Mesh before: ranks of a pipeline, and replicas. Written as `from`.
        target: Mesh after. Written as `to`.
        layers: Layers on each stage from now on.
    """

    event: ClassVar[str] = "recover"
    lost: tuple[str, ...]
    why: str
    seconds: float
    repeated: int
    ranks_before: int
    ranks_after: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    layers: tuple[int, ...]

    @property
    def text(self) -> str:
        return (
            f"went on with {self.ranks_after} of {self.ranks_before} ranks "
            f"({self.seconds:.1f} s, {self.repeated} steps repeated): {self.why}"
        )


@dataclass(frozen=True)
class RepackEvent(ResizeEvent):
    """The run goes on with fewer ranks.

    Attributes:
        predicted_slowdown: Share by which a step takes longer. None if nobody asked.
        reason: Why, in one line.
        left: The processes that went.
    """

    event: ClassVar[str] = "repack"
    predicted_slowdown: float | None
    reason: str
    left: tuple[str, ...]


@dataclass(frozen=True)
class GrowEvent(ResizeEvent):
    """The run goes on with more ranks.

    Attributes:
        predicted_gain: Share of a step that is saved. None if nobody asked.
        reason: Why, in one line.
        joined: The processes that came.
        gpu_seconds_returned: GPU seconds of all ranks that were away, until now.
    """

    event: ClassVar[str] = "grow"
    predicted_gain: float | None
    reason: str
    joined: tuple[str, ...]
    gpu_seconds_returned: float


@dataclass(frozen=True)
class ReleaseEvent(Event):
    """A resource manager has taken ranks back, or has started ranks that may join.

    Attributes:
        by: Its name in `elastic.releaser`, or "launcher".
        what: The action, in one line.
        ranks: How many ranks.
        seconds: How long it took.
    """

    event: ClassVar[str] = "release"
    by: str
    what: str
    ranks: int
    seconds: float
