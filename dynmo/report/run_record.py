"""A run's folder, read whole: its events, config, costs and trace."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, FiniteFloat, TypeAdapter

from dynmo.change_events import (
    RebalanceEvent,
    RecoverEvent,
    ReshapeEvent,
    ResizeEvent,
    SpeedsEvent,
)
from dynmo.config import without_unused_keys
from dynmo.cost.costs_file import IN_RUN, Profile
from dynmo.cost.costs_file import read as read_costs
from dynmo.errors import DynmoError, InputError
from dynmo.event_log import read
from dynmo.events import CheckpointEvent, EndEvent, Event, StepResult
from dynmo.files import parse_json, parse_toml, read_text
from dynmo.options import parse_bytes
from dynmo.plan.decide import DECISIONS, read_records
from dynmo.plan.evaluate import Plan, Replica, evaluate
from dynmo.plan.problem import Choice, Problem, Work
from dynmo.report.summary import Summary, lasting, summarize
from dynmo.schedule.bounds import Objective
from dynmo.schedule.op import Kind as OpKind

Kind = TypeVar("Kind", bound=Event)


class _Place(BaseModel):
    step: int
    microbatch: int


class Span(BaseModel):
    """A pass of a rank, as a trace has it. Times are in microseconds."""

    cat: str
    tid: int
    ts: FiniteFloat
    dur: FiniteFloat
    args: _Place


_MOST = 1e15  # of seconds, bytes and steps
_SPANS = TypeAdapter(list[Span])
_PASSES = frozenset([*OpKind, *(f"planned {kind}" for kind in OpKind)])


def _is_sound(step: StepResult) -> bool:
    """Returns whether pictures can be drawn of a step. Losses may be any number."""
    shares = step.idle_ratio, step.imbalance, step.inherent_idle or 0.0
    counts = step.step, step.frozen, *step.layers, *step.busy, *step.memory
    numbers = step.time, step.seconds, step.tokens_per_s, *shares, *counts
    is_bounded = all(abs(number) < _MOST for number in numbers)
    return is_bounded and step.seconds > 0 and sum(step.layers) > 0 and min(counts) >= 0


@dataclass(frozen=True)
class Goodput:
    """Where the seconds between a run's first and last event went.

    Attributes:
        seconds: All of them, by the clock.
        parts: Seconds by what they went into. The first part is steps that count.
    """

    seconds: float
    parts: Mapping[str, float]

    @property
    def share(self) -> float:
        """Share of the time that went into steps that count."""
        return next(iter(self.parts.values())) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run, as its folder has it.

    Attributes:
        written: All events, in the order of the log. A resumed run has some steps twice.
        events: The events that count.
    """

    folder: Path
    written: tuple[Event, ...]
    events: tuple[Event, ...]
    summary: Summary

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Raises InputError if the folder is no run, or has no steps yet."""
        log = folder / "events.jsonl"
        if not log.is_file():
            raise InputError(f"{folder} is no run: it has no events.jsonl; give runs/NAME")
        written = tuple(read(log))
        for event in written:
            if isinstance(event, StepResult) and not _is_sound(event):
                raise InputError(f"{log}: step {event.step} has a number that no run has")
        summary = summarize(written)
        if not summary.phases:
            raise InputError(f"{log} has no steps yet")
        return cls(folder, written, tuple(lasting(written)[0]), summary)

    @property
    def name(self) -> str:
        return self.folder.resolve().name.encode(errors="replace").decode()

    @property
    def steps(self) -> tuple[StepResult, ...]:
        return self.summary.done

    def all(self, kind: type[Kind]) -> list[Kind]:
        """Returns the events of a kind that count."""
        return [event for event in self.events if isinstance(event, kind)]

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The recorded config. None if it cannot be read."""
        text = self.config_text
        return without_unused_keys(parse_toml(text)) if text else None

    @cached_property
    def config_text(self) -> str:
        """The config as it is written. Empty if it is no TOML: a link may lead to any file."""
        try:
            text = read_text(self.folder / "config.toml")
            parse_toml(text)
        except (OSError, ValueError):
            return ""
        return text

    def option(self, section: str, key: str) -> Any:
        """Returns a key of the config. None if it is not set, or unknown."""
        part = (self.config or {}).get(section)
        return cast(dict[str, Any], part).get(key) if isinstance(part, dict) else None

    @property
    def replicas(self) -> int:
        found = self.option("parallel", "replicas")
        return found if isinstance(found, int) and found > 0 else 1

    @cached_property
    def memory_limit(self) -> tuple[int, ...] | int | None:
        """Bytes that a rank may use, or each. None if no limit is set."""
        limit = self.option("pipeline", "memory_limit")
        try:
            if isinstance(limit, list):
                return tuple(parse_bytes(str(x)) for x in cast(list[Any], limit))
            return None if limit is None else parse_bytes(str(limit))
        except ValueError:
            return None

    @cached_property
    def profile(self) -> Profile | None:
        """Costs of the layers: of the run's end, or of its last decision. None if unknown."""
        found, last = self._recorded, self.steps[-1]
        ranks = len(last.busy) // self.replicas
        if found is None or len(found.layers) != sum(last.layers):
            return None
        if found.ranks not in (None, ranks or found.ranks):
            return None  # an earlier process of the run had other ranks
        return replace(found, partition=last.layers)

    @cached_property
    def _recorded(self) -> Profile | None:
        with suppress(DynmoError):
            if (self.folder / IN_RUN).is_file():
                return read_costs(self.folder / IN_RUN)
            records = [*read_records(self.folder / DECISIONS)]
            if records:
                record = records[-1]
                mesh = record.now.mesh
                return replace(
                    record.problem.profile,
                    ranks=mesh.pipeline,
                    microbatches=mesh.microbatches,
                    schedule=mesh.schedule,
                )
        return None

    @cached_property
    def problem(self) -> Problem | None:
        """The run as planning sees it: its costs, and the limit of its memory."""
        if self.profile is None or not self.profile.ranks or not self.profile.microbatches:
            return None
        barrier = not self.option("pipeline", "post_validation")
        work = Work(Objective.MAKESPAN if barrier else Objective.SPAN)
        speeds = next((event.speeds for event in reversed(self.all(SpeedsEvent))), None)
        if speeds is not None and len(speeds) != self.profile.ranks:
            speeds = None
        return Problem(self.profile, work, self.memory_limit, speeds)

    @cached_property
    def plan(self) -> Plan | None:
        """The plan of the run's last placement. None if its costs are unknown."""
        problem = self.problem
        if problem is None or self.profile is None:
            return None
        ranks, count = self.profile.ranks, self.profile.microbatches
        assert ranks is not None
        assert count is not None
        try:
            mesh = problem.mesh(ranks, count, self.profile.schedule or "zb-auto")
            return evaluate(problem, Choice(mesh, Replica(problem, mesh).current))
        except DynmoError:
            return None

    @cached_property
    def why_none_moved(self) -> str | None:
        """Why the first decision on placement has moved no layer. None if there is none."""
        path = self.folder / DECISIONS
        with suppress(DynmoError):  # of an earlier version, or of a balancer that is gone
            for record in read_records(path) if path.is_file() else ():
                if record.rules.kind == "placement":
                    step, reason = record.problem.work.step, record.again().verdict.reason
                    return f"no layer moved: step {step}: {reason} (dynmo simulate {path})"
        return None

    @cached_property
    def trace(self) -> list[Span]:
        """The passes in the run's trace. Empty if there is none, or it cannot be read."""
        try:
            trace = cast(Any, parse_json(read_text(self.folder / "trace.json")))
            events = trace["traceEvents"]
            return _SPANS.validate_python([x for x in events if x.get("cat") in _PASSES])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []

    @cached_property
    def goodput(self) -> Goodput:
        steps = [event for event in self.written if isinstance(event, StepResult)]
        first, last = self.written[0], self.written[-1]
        begin = min(first.time, steps[0].time - steps[0].seconds)
        counted = sum(step.seconds for step in self.steps if not step.skipped)
        saved = [e for e in self.written if isinstance(e, CheckpointEvent)]
        parts = {
            "steps that count": counted,
            "steps done again or skipped": sum(step.seconds for step in steps) - counted,
            "saving, while training waits": sum(e.waited or 0.0 for e in saved),
            "measuring, deciding, moving": self._changing(),
            "going on after faults": sum(e.seconds for e in self.all(RecoverEvent)),
        }
        seconds = max(last.time - begin, sum(parts.values()))
        rest = seconds - sum(parts.values())
        return Goodput(seconds, parts | {"between steps: start, data, evaluations, stops": rest})

    def _changing(self) -> float:
        """Returns the seconds of changes. A process that was cut off has told those of its events.

        The end of a process has the seconds of its events, too, and of decisions that changed
        nothing.
        """
        whole, own, last = 0.0, 0.0, -1
        for event in self.written:
            match event:
                case StepResult():
                    if event.step <= last:
                        whole, own = whole + own, 0.0
                    last = event.step
                case RebalanceEvent():
                    own += event.measure_seconds + event.seconds
                case ReshapeEvent() | ResizeEvent():
                    own += event.seconds
                case EndEvent():
                    told = event.measure_seconds + event.decide_seconds + event.move_seconds
                    whole, own = whole + max(own, told), 0.0
                case _:
                    pass
        return whole + own
