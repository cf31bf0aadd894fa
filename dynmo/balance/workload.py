"""A workload that changes while it trains, replayed under a policy: what balancing would bring, on any number of ranks, without running it.

    moments of the workload   |  costs 0  |  costs 1  |  costs 2  | ...      each holds for some steps
    decisions                 ^     ^     ^     ^     ^     ^                every so many steps, from the costs of the step before

A decision is what a run would do: the balancer proposes, the simulator predicts, and layers move if that is worth it (`trigger`). Beside
the policy run two others: `static`, which leaves the layers where they started, evenly spread; and `perfect`, in which every stage has
the same part of every F, B and W, as if layers could be cut anywhere.

Replicas. After its last op a rank reduces the gradients of its layers with its r - 1 copies, on a ring:

    2 (r - 1) latency  +  2 (r - 1) / r * gradient bytes / bytes per second
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dynmo.balance.partition import Cost, Partition, uniform
from dynmo.balance.placed import frozen_stages
from dynmo.balance.planning import Job, Plan, attempt, judge
from dynmo.balance.trigger import FORCED, Decision, worth_moving
from dynmo.costs import Costs, LayerCost, LinkCost, StageCost
from dynmo.errors import InputError
from dynmo.profile_file import SIZES, TIMES, Profile
from dynmo.schedule.bound import Objective
from dynmo.schedule.catalogue import entry, make, placement_of
from dynmo.simulator import Timeline, simulate

_FREE = LinkCost(0.0, math.inf)


@dataclass(frozen=True)
class Policy:
    """Who decides, every how many steps, and what a move must bring: see `trigger`. seconds_per_byte: of a move; None: over the link."""

    balancer: str = "exact"
    cost: Cost = "time"
    every: int = 10
    margin: float = 1.0
    hysteresis: float = 0.02
    seconds_per_byte: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Workload:
    """`moments`: from which step on which layers cost what; the first is at step 0. link: between ranks; replica_link: between copies."""

    name: str
    moments: tuple[tuple[int, tuple[LayerCost, ...]], ...]
    names: tuple[str, ...]
    steps: int
    ranks: int
    microbatches: int
    replicas: int = 1
    schedule: str = "zb-h1"
    chunks: int | None = None
    objective: Objective = Objective.MAKESPAN
    memory_limit: int | None = None
    initial: tuple[int, ...] | None = None
    link: LinkCost = _FREE
    replica_link: LinkCost = _FREE
    policy: Policy = Policy()

    @property
    def layers(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Step:
    """Predicted seconds of one step, and the share of its time that ranks do not work."""

    seconds: float
    idle_ratio: float


@dataclass(frozen=True)
class Rebalance:
    """Before `step`. `moved`: whether it was done; seconds and bytes are what it takes or would take."""

    step: int
    moved: bool
    source: tuple[int, ...]
    target: tuple[int, ...]
    layers: int
    moved_bytes: int
    seconds: float
    predicted_gain: float
    reason: str


@dataclass(frozen=True)
class Phase:
    """Steps first..last, in which the costs stay: means over them. seconds, static, perfect: of a step, without moves."""

    first: int
    last: int
    seconds: float
    static: float
    perfect: float
    idle_ratio: float
    static_idle_ratio: float
    rebalances: int
    moved_layers: int
    moved_bytes: int
    move_seconds: float
    partition: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """Every step of the three, and what was decided. `bound`: placing whole layers cannot gain more over an even placement."""

    workload: Workload
    policy: tuple[Step, ...]
    static: tuple[Step, ...]
    perfect: tuple[Step, ...]
    rebalances: tuple[Rebalance, ...]
    partitions: tuple[tuple[int, ...], ...]

    @property
    def moves(self) -> tuple[Rebalance, ...]:
        return tuple(x for x in self.rebalances if x.moved)

    @property
    def bound(self) -> int:
        return -(-self.workload.layers // self.workload.ranks)

    @property
    def seconds(self) -> float:
        """Of all steps, and the moves between them."""
        return math.fsum(x.seconds for x in self.policy) + math.fsum(x.seconds for x in self.moves)

    @property
    def static_seconds(self) -> float:
        return math.fsum(x.seconds for x in self.static)

    @property
    def perfect_seconds(self) -> float:
        return math.fsum(x.seconds for x in self.perfect)

    @property
    def phases(self) -> tuple[Phase, ...]:
        starts = [start for start, _ in self.workload.moments]
        stops = [*starts[1:], self.workload.steps]
        return tuple(self._phase(start, stop) for start, stop in zip(starts, stops, strict=True))

    def _phase(self, start: int, stop: int) -> Phase:
        done = [x for x in self.moves if start <= x.step < stop]
        return Phase(
            start,
            stop - 1,
            _mean([x.seconds for x in self.policy[start:stop]]),
            _mean([x.seconds for x in self.static[start:stop]]),
            _mean([x.seconds for x in self.perfect[start:stop]]),
            _mean([x.idle_ratio for x in self.policy[start:stop]]),
            _mean([x.idle_ratio for x in self.static[start:stop]]),
            len(done),
            sum(x.layers for x in done),
            sum(x.moved_bytes for x in done),
            math.fsum(x.seconds for x in done),
            self.partitions[stop - 1],
        )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def replay(workload: Workload, listen: Callable[[int], None] | None = None) -> Outcome:
    """Raises InputError where the schedule cannot be made, or the placement does not fit the memory. listen: told of every step."""
    return _Replay(workload).run(listen)


@final
class _Replay:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.placement = placement_of(workload.schedule, workload.ranks, workload.chunks)
        self.from_costs = entry(workload.schedule).from_costs
        even = uniform(workload.layers, len(self.placement))
        self.even, self.start = even, even if workload.initial is None else Partition(workload.initial)
        if (self.start.layers, self.start.ranks) != (even.layers, even.ranks):
            raise InputError(
                f"policy.initial counts {self.start.layers} layers on {self.start.ranks} stages, but there are {even.layers} layers "
                f"on {even.ranks} stages"
            )
        self.plans: dict[tuple[int, tuple[int, ...]], Plan] = {}
        self.proposals: dict[tuple[int, tuple[int, ...]], Plan] = {}
        self.known: dict[tuple[int, int, tuple[int, ...]], Step] = {}
        self.move_seconds: float | None = None

    def run(self, listen: Callable[[int], None] | None) -> Outcome:
        workload, policy = self.workload, self.workload.policy
        current = self.start
        steps: dict[str, list[Step]] = {"policy": [], "static": [], "perfect": []}
        considered: list[Rebalance] = []
        partitions: list[tuple[int, ...]] = []
        perfect = [self.perfect(moment) for moment in range(len(workload.moments))]
        measured = 0  # the moment whose costs the schedule was last made from
        for step in range(workload.steps):
            moment = self.moment(step)
            if step and step % policy.every == 0:
                measured = self.moment(step - 1)
                found = None if policy.balancer == "none" else self.consider(step, measured, current)
                if found is not None:
                    considered.append(found)
                    if found.moved:
                        current, self.move_seconds = Partition(found.target), found.seconds
            steps["policy"].append(self.step(moment, measured, current))
            steps["static"].append(self.step(moment, measured, self.even))
            steps["perfect"].append(perfect[moment])
            partitions.append(current.counts)
            if listen is not None:
                listen(step + 1)
        policy_steps, static, ideal = (tuple(steps[name]) for name in ("policy", "static", "perfect"))
        return Outcome(workload, policy_steps, static, ideal, tuple(considered), tuple(partitions))

    def moment(self, step: int) -> int:
        return max(index for index, (start, _) in enumerate(self.workload.moments) if start <= step)

    def job(self, moment: int, current: Partition, step: int = 0) -> Job:
        workload = self.workload
        layers = workload.moments[moment][1]
        first = next((i for i, x in enumerate(layers) if x.b or x.w), len(layers) - 1)
        pairs = {(min(a, b), max(a, b)) for a, b in pairwise(self.placement) if a != b}
        links = tuple((pair, workload.link) for pair in sorted(pairs))
        profile = Profile(layers, workload.names, first, links, partition=current.counts, ranks=workload.ranks)
        return Job(
            profile,
            workload.ranks,
            workload.microbatches,
            workload.schedule,
            workload.policy.balancer,
            workload.chunks,
            workload.memory_limit,
            workload.objective,
            cost=workload.policy.cost,
            seed=workload.policy.seed,
            step=step,
        )

    # -- deciding, as a run does -----------------------------------------------------------------------------------------------------

    def consider(self, step: int, measured: int, current: Partition) -> Rebalance | None:
        policy = self.workload.policy
        proposed = self.propose(step, measured, current)
        if proposed.partition == current:
            return None
        before = self.plan(measured, current)
        left = self.workload.steps - step
        price = self.price(proposed)
        expected = price if self.move_seconds is None else self.move_seconds
        now, then = (self.finish(x.timeline, x).seconds for x in (before, proposed))
        decision: Decision = worth_moving(now, then, left, expected, policy.margin, policy.hysteresis)
        forced = policy.balancer in FORCED
        return Rebalance(
            step,
            decision.move or forced,
            current.counts,
            proposed.partition.counts,
            len(proposed.moves),
            proposed.moved_bytes,
            price,
            decision.predicted_gain,
            f"{policy.balancer}: forced" if forced else decision.reason,
        )

    def propose(self, step: int, measured: int, current: Partition) -> Plan:
        if self.workload.policy.balancer == "random":
            return attempt(self.job(measured, current, step))
        key = measured, current.counts
        if key not in self.proposals:
            self.proposals[key] = attempt(self.job(measured, current))
        return self.proposals[key]

    def price(self, plan: Plan) -> float:
        """Seconds of a move: its layers one after another."""
        rate, layers = self.workload.policy.seconds_per_byte, plan.job.profile.layers
        if rate is not None:
            return rate * plan.moved_bytes
        return math.fsum(self.workload.link.seconds(layers[move.layer].static_bytes) for move in plan.moves)

    # -- how long a step takes -------------------------------------------------------------------------------------------------------

    def plan(self, moment: int, partition: Partition) -> Plan:
        key = moment, partition.counts
        if key not in self.plans:
            self.plans[key] = judge(self.job(moment, partition), partition)
        return self.plans[key]

    def step(self, moment: int, measured: int, partition: Partition) -> Step:
        """Under the schedule made from what was measured last, where the schedule is made from costs at all."""
        if not self.from_costs:
            measured = moment
        key = moment, measured, partition.counts
        if key not in self.known:
            plan = self.plan(moment, partition)
            timeline = plan.timeline
            if measured != moment:
                made = self.plan(measured, partition).schedule
                # Another frozen prefix: then the order is made anew at once, for there are other ops.
                if made.first_trainable == plan.schedule.first_trainable:
                    timeline = simulate(made, plan.costs)
            self.known[key] = self.finish(timeline, plan)
        return self.known[key]

    def finish(self, timeline: Timeline, plan: Plan) -> Step:
        """The ops, and then every rank's gradients over its replicas."""
        held = [0] * self.workload.ranks
        for layer, cost in enumerate(plan.job.layers):
            held[self.placement[plan.partition.owner(layer)]] += cost.gradient_bytes if cost.w else 0
        return self.until(timeline, [self.reduce(x) for x in held])

    def until(self, timeline: Timeline, reduce: Sequence[float]) -> Step:
        begin = min(row[0].start for row in timeline.ranks)
        makespan = self.workload.objective is Objective.MAKESPAN
        ends = (row[-1].end + tail - (begin if makespan else row[0].start) for row, tail in zip(timeline.ranks, reduce, strict=True))
        seconds = max(ends)
        busy = math.fsum(timeline.busy) / len(timeline.busy)
        return Step(seconds, 1 - busy / seconds if seconds else 0.0)

    def reduce(self, size: float) -> float:
        copies, link = self.workload.replicas, self.workload.replica_link
        if copies == 1 or not size:
            return 0.0
        return 2 * (copies - 1) * link.latency + 2 * (copies - 1) / copies * size / link.bytes_per_second

    def perfect(self, moment: int) -> Step:
        """Every stage has the mean of F, B, W and gradients; the links are the even placement's."""
        workload, stages = self.workload, len(self.placement)
        even = self.plan(moment, self.even)
        layers = even.job.layers
        f, b, w = (math.fsum(getattr(x, key) for x in layers) / stages for key in TIMES)
        kept, stash = (math.fsum(getattr(x, key) for x in layers) / stages or 1.0 for key in ("activation_bytes", "stash_bytes"))
        costs = Costs((StageCost(f, b, w, kept, stash - kept, -stash),) * stages, even.costs.links)
        caps = (2.0 * stages * kept,) * workload.ranks
        made = make(
            workload.schedule,
            workload.ranks,
            workload.microbatches,
            costs=costs,
            chunks=workload.chunks,
            caps=caps,
            first_trainable=min(frozen_stages(costs), stages - 1),
            objective=workload.objective,
        )
        size = math.fsum(x.gradient_bytes for x in layers if x.w) / workload.ranks
        return self.until(simulate(made, costs), [self.reduce(size)] * workload.ranks)


# -- reading -----------------------------------------------------------------------------------------------------------------------

_Time = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Whole = Annotated[int, Field(ge=0, le=1 << 60)]
_Sizes = _Whole | list[_Whole]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Link(_Section):
    latency: _Time = 0.0
    bytes_per_second: _Positive | None = None

    def made(self) -> LinkCost:
        return LinkCost(self.latency, math.inf if self.bytes_per_second is None else self.bytes_per_second)


class _Moment(_Section):
    step: _Whole
    f: list[_Time]
    b: list[_Time]
    w: list[_Time]


class _Layers(_Section):
    trace: str | None = None
    moments: list[_Moment] | None = None
    unit: _Positive = 1.0
    names: list[str] | None = None
    parameters: _Sizes = 0
    weight_bytes: _Sizes = 0
    gradient_bytes: _Sizes = 0
    optimizer_bytes: _Sizes = 0
    activation_bytes: _Sizes = 0
    stash_bytes: _Sizes = 0
    output_bytes: _Sizes = 0
    workspace_bytes: _Sizes = 0


class _Policy(_Section):
    balancer: str = "exact"
    cost: Literal["time", "parameters"] = "time"
    every: _Count = 10
    margin: _Time = 1.0
    hysteresis: _Time = 0.02
    initial: list[_Count] | None = None
    seconds_per_byte: _Time | None = None
    seed: _Whole = 0


class _File(_Section):
    name: str | None = None
    steps: _Count
    ranks: _Count
    microbatches: _Count
    replicas: _Count = 1
    schedule: str = "zb-h1"
    chunks: _Count | None = None
    objective: Literal["span", "makespan"] = "makespan"
    memory_limit: _Count | str | None = None
    layers: _Layers
    policy: _Policy = _Policy()
    link: _Link = _Link()
    replica_link: _Link | None = None


class _Trace(BaseModel):
    """Further keys say where a trace is from."""

    model_config = ConfigDict(extra="ignore", strict=True)

    f: list[list[_Time]]
    b: list[list[_Time]]
    w: list[list[_Time]]


def read(path: Path) -> Workload:
    """Reads and checks a workload, and the trace it names (from its own folder). Raises InputError, one line: file, key, what would do."""
    try:
        data = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"workload {path}: not TOML: {error}") from None
    try:
        return parse(data, path.parent, path.stem)
    except InputError as error:
        raise InputError(f"workload {path}: {error}") from None


def parse(data: dict[str, Any], folder: Path, name: str = "workload") -> Workload:
    """The same for data that is already read; `folder` is where the trace's name starts from."""
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(error)) from None
    moments = _moments(file, folder)
    count = len(moments[0][1][0])
    sizes = [_sizes(file.layers, key, count) for key in SIZES]
    unit, names = file.layers.unit, file.layers.names
    if names is not None and len(names) != count:
        raise InputError(f"layers.names has {len(names)} entries, but there are {count} layers; give one per layer, or none")
    costs = tuple(
        (step, tuple(LayerCost(f * unit, b * unit, w * unit, *size) for f, b, w, *size in zip(*times, *sizes, strict=True)))
        for step, times in moments
    )
    policy = file.policy
    return Workload(
        file.name or name,
        costs,
        tuple(names or (f"layer {i}" for i in range(count))),
        file.steps,
        file.ranks,
        file.microbatches,
        file.replicas,
        file.schedule,
        file.chunks,
        Objective(file.objective),
        _limit(file.memory_limit),
        None if policy.initial is None else tuple(policy.initial),
        file.link.made(),
        (file.replica_link or file.link).made(),
        Policy(policy.balancer, policy.cost, policy.every, policy.margin, policy.hysteresis, policy.seconds_per_byte, policy.seed),
    )


def _limit(value: int | str | None) -> int | None:
    if not isinstance(value, str):
        return value
    from dynmo.config import parse_bytes

    try:
        return parse_bytes(value)
    except ValueError as error:
        raise InputError(f"memory_limit = {value!r}: {error}") from None


def _sizes(layers: _Layers, key: str, count: int) -> list[int]:
    value = cast("int | list[int]", getattr(layers, key))
    if isinstance(value, int):
        return [value] * count
    if len(value) != count:
        raise InputError(f"layers.{key} has {len(value)} entries, but there are {count} layers; give one number, or one per layer")
    return value


_Times = tuple[list[float], list[float], list[float]]


def _moments(file: _File, folder: Path) -> list[tuple[int, _Times]]:
    layers = file.layers
    if (layers.trace is None) == (layers.moments is None):
        raise InputError("[layers] needs either trace = FILE or [[layers.moments]] with step, f, b, w")
    if layers.trace is not None:
        found = _read_trace(folder / layers.trace)
        count = len(found)
        # Evenly over the steps; with fewer steps than moments some are left out.
        starts = {index * file.steps // count: times for index, times in reversed(list(enumerate(found)))}
        moments, where = sorted(starts.items()), f"trace {layers.trace}: moment"
    else:
        assert layers.moments is not None
        moments, where = [(x.step, (x.f, x.b, x.w)) for x in layers.moments], "layers.moments"
        steps = [step for step, _ in moments]
        if not steps or steps[0] != 0 or any(b <= a for a, b in pairwise(steps)):
            raise InputError(f"layers.moments begin at the steps {steps}; the first begins at 0, and each later than the one before")
        if steps[-1] >= file.steps:
            raise InputError(f"layers.moments: the last begins at step {steps[-1]}, but there are {file.steps} steps")
    _check_lengths(moments, where)
    return moments


def _check_lengths(moments: Sequence[tuple[int, _Times]], where: str) -> None:
    count = len(moments[0][1][0])
    if not count:
        raise InputError(f"{where} 0: f is empty; give one number per layer")
    for index, (_, times) in enumerate(moments):
        for key, values in zip(TIMES, times, strict=True):
            if len(values) != count:
                raise InputError(f"{where} {index}: {key} has {len(values)} entries, but f of moment 0 has {count}; give one per layer")
        if not any(times[1]) and not any(times[2]):
            raise InputError(f"{where} {index}: b and w are 0 for every layer, so nothing trains")


def _read_trace(path: Path) -> list[_Times]:
    try:
        data: object = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"trace {path}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"trace {path}: not JSON that can be read: {error}") from None
    try:
        trace = _Trace.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, *rest = first["loc"] or ("it",)
        rule = "f, b and w are lists of moments, each with one number of at least 0 per layer"
        if first["type"] == "missing":
            raise InputError(f"trace {path}: key {key!r} is missing; {rule}") from None
        where = "".join(f"{word} {index}: " for word, index in zip(("moment", "layer"), rest, strict=False))
        raise InputError(f"trace {path}: {where}{key} is {_short(first['input'])}; {rule}") from None
    lengths = [len(trace.f), len(trace.b), len(trace.w)]
    if not lengths[0] or len(set(lengths)) > 1:
        raise InputError(f"trace {path}: f, b and w have {lengths} moments; all have as many, and at least one")
    return list(zip(trace.f, trace.b, trace.w, strict=True))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InputError(f"{path} cannot be read: {reason}") from None


_SECTIONS: dict[str, type[BaseModel]] = {"layers": _Layers, "policy": _Policy, "link": _Link, "replica_link": _Link}


def _explain(error: ValidationError) -> str:
    """Pydantic's first finding; a mistyped key before the key that is missing for it, an entry of a list before "it is no number"."""
    first = min(error.errors(include_url=False), key=lambda found: (found["type"] != "extra_forbidden", -len(found["loc"])))
    location = [part for part in first["loc"] if part not in ("int", "str") and not str(part).startswith(("list[", "constrained"))]
    words = ".".join(part for part in location if isinstance(part, str))
    indices = [part for part in location if isinstance(part, int)]
    if location[:2] == ["layers", "moments"] and indices:
        words = f"layers.moments {indices.pop(0)}: " + ".".join(str(part) for part in location[3:] if isinstance(part, str))
    if first["type"] == "extra_forbidden":
        *section, key = (part for part in location if isinstance(part, str))
        keys = (_SECTIONS.get(section[0], _File) if section else _File).model_fields
        keys = _Moment.model_fields if section[1:] == ["moments"] else keys
        near = get_close_matches(key.lower(), keys, n=1)
        return f"unknown key {words!r}" + (f"; did you mean {near[0]!r}?" if near else f"; the keys there are {', '.join(keys)}")
    if first["type"] == "missing":
        return f"key {words!r} is missing"
    where = f"layer {indices[0]}: " if indices else ""
    return f"{where}{words} = {_short(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _short(value: object) -> str:
    text = "NaN" if isinstance(value, float) and math.isnan(value) else json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
