"""A workload that changes while it trains, and what balancing would bring to it.

    moments    |  costs 0  |  costs 1  |  costs 2  | ...      each holds for some steps
    decisions  ^     ^     ^     ^     ^     ^                every so many steps

Nothing is run. A decision is that of a run: `decide` is asked with what a run would know, the
readings of the newest steps before it. If a dynamic case announces that costs change, readings that
no longer hold are dropped. Costs that differ with the tokens of each step are not announced.

Two others run beside the policy. `static` leaves the layers where they started, evenly spread. In
`perfect` every stage has the same part of every F, B and W, as if layers could be cut anywhere. If
`static` or the policy takes less time, `perfect` takes that time: a frozen prefix by itself needs
no backward of its stages.

After its last op, a rank reduces the gradients of its layers with its r - 1 copies (r replicas), on
a ring:

    2 (r - 1) latency  +  2 (r - 1) / r * gradient bytes / bytes per second
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar, cast, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from dynmo.cost.input_file import Link, read_json, read_text, unknown_key
from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import AT_MOST, SIZES, TIMES, Profile, alias
from dynmo.cost.readings import WINDOW, Times
from dynmo.cost.readings import Readings as Window
from dynmo.errors import InputError, one_line
from dynmo.files import parse_toml
from dynmo.options import Count, Lax, Listed, MemoryLimit, Options, Whole, problems_of
from dynmo.plan.best import plan_on
from dynmo.plan.decide import DecisionRecord
from dynmo.plan.evaluate import Plan, evaluate, even_costs, frozen_stages, roomy_caps
from dynmo.plan.options import Balance
from dynmo.plan.partition import Partition, moves_between_ranks, uniform
from dynmo.plan.problem import Allowed, Choice, Layers, Mesh, Problem, Readings, Rules, Work
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import chunks_of, entry, stage_ranks_of
from dynmo.schedule.simulator import Timeline, simulate

# -- the file --------------------------------------------------------------------------------------

Time = Annotated[float, Field(ge=0, le=1e30)]
Factor = Annotated[float, Field(gt=0, le=1e30)]
Size = Annotated[int, Field(ge=0, le=1 << 60)]
Sizes = Size | Listed[Size]

_size_fields: dict[str, Any] = {
    key: (Sizes | None, Field(None, validation_alias=alias(key))) for key in SIZES
}
_Sized = create_model("_Sized", __base__=Options, **_size_fields)


def _wrong_lengths(lists: Iterable[tuple[str, Any]], count: int, unit: str) -> Iterator[str]:
    for key, values in lists:
        if not isinstance(values, int | None) and len(values) != count:
            yield f"{key} has {len(values)} entries for {count} {unit}s; give one per {unit}"


class Moment(_Sized):
    """Costs from a step on: seconds of each layer, and sizes that differ from those of [layers]."""

    step: Whole
    f: Listed[Time]
    b: Listed[Time]
    w: Listed[Time]

    @classmethod
    def of(cls, step: int, layers: Sequence[LayerCost]) -> Self:
        return cls(step=step, **{key: [getattr(x, key) for x in layers] for key in TIMES + SIZES})


class LayerSection(_Sized):
    """The section [layers]. Each size is one number, or one per layer."""

    trace: str | None = None
    """File that has the moments instead."""
    moments: Listed[Moment] = ()
    unit: Factor = 1.0
    """Seconds of one unit of F, B and W."""
    names: Listed[str] | None = None

    def _problems(self) -> Iterator[str]:
        if not self.moments:
            yield _NO_MOMENTS
        where = "layers.moments" if self.trace is None else f"trace {self.trace}: moments"
        count = len(self.moments[0].f)
        if not count:
            yield f"{where}[0].f is empty; give one number per layer"
        lists = [
            (f"{where}[{index}].{key}", getattr(moment, key))
            for index, moment in enumerate(self.moments)
            for key in TIMES + SIZES
        ]
        lists += [(f"layers.{key}", getattr(self, key)) for key in (*SIZES, "names")]
        yield from _wrong_lengths(lists, count, "layer")
        for index, moment in enumerate(self.moments):
            if not any((*moment.b, *moment.w)):
                yield f"{where}[{index}]: b and w are 0 for every layer, so nothing trains"

    def costs(self, moment: Moment) -> Layers:
        count, columns = len(moment.f), list[Sequence[int]]()
        for key in SIZES:
            given = [
                getattr(at, name) for name in (key, AT_MOST.get(key, key)) for at in (moment, self)
            ]
            size: Any = next((x for x in given if x is not None), 0)
            columns.append((size,) * count if isinstance(size, int) else size)
        return tuple(
            LayerCost(f * self.unit, b * self.unit, w * self.unit, *sizes)
            for f, b, w, *sizes in zip(moment.f, moment.b, moment.w, *columns, strict=True)
        )


_NO_MOMENTS = "[layers] needs either trace = FILE or [[layers.moments]] with step, f, b, w"


class Policy(Balance):
    """The balancer, its frequency, and what a move must bring."""

    every: Count = 10
    """Steps from one decision to the next."""
    seconds_per_byte: Time | None = None
    """Seconds per byte of a move. Not set: as long as the link takes."""
    seed: Whole = 0


class Workload(Options):
    """A workload that changes while it trains. The file has these keys."""

    name: str = "workload"
    steps: Annotated[int, Field(ge=1, le=10**7)]
    ranks: Count
    microbatches: Count
    """Microbatches of a step of one replica."""
    replicas: Count = 1
    """Number of pipelines that sum their gradients."""
    schedule: str = "zb-h1"
    chunks: Count | None = None
    """Stages per rank. Not set: the schedule's own number."""
    objective: Annotated[Objective, Lax] = Objective.MAKESPAN
    memory_limit: MemoryLimit = None
    speeds: Listed[Factor] | None = None
    """Speed of each rank. Not set: all are 1."""
    announced: bool = True
    """Whether a dynamic case announces that the costs change."""
    layers: LayerSection
    policy: Policy = Policy()
    link: Link = Link()
    """Between ranks."""
    replica_link: Link | None = None
    """Between copies. Not set: as between ranks."""

    def _problems(self) -> Iterator[str]:
        of_ranks = [("memory_limit", self.memory_limit), ("speeds", self.speeds)]
        yield from _wrong_lengths(of_ranks, self.ranks, "rank")
        steps = [moment.step for moment in self.layers.moments]
        if steps[0] != 0 or any(b <= a for a, b in pairwise(steps)):
            yield (
                f"layers.moments begin at the steps {steps}; the first begins at 0, and each later "
                "than the one before"
            )
        if steps[-1] >= self.steps:
            yield (
                f"layers.moments: the last begins at step {steps[-1]}, but there are {self.steps} "
                "steps"
            )

    @property
    def moments(self) -> tuple[tuple[int, Layers], ...]:
        """First step and costs of each moment."""
        return tuple((x.step, self.layers.costs(x)) for x in self.layers.moments)

    @property
    def names(self) -> tuple[str, ...]:
        count = len(self.layers.moments[0].f)
        return tuple(self.layers.names or (f"layer {i}" for i in range(count)))


class _Trace(Options):
    """The costs of a trace at its moments. Further keys say where a trace is from."""

    model_config = ConfigDict(extra="ignore")

    f: Listed[Listed[Time]]
    b: Listed[Listed[Time]]
    w: Listed[Listed[Time]]

    def _problems(self) -> Iterator[str]:
        lengths = [len(self.f), len(self.b), len(self.w)]
        if not lengths[0] or len(set(lengths)) > 1:
            yield f"f, b and w have {lengths} moments; all have as many, and at least one"


def read(path: Path) -> Workload:
    """Reads and checks a workload, and the trace that it names (from its own folder)."""
    text = read_text(path, f"workload {path}")
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise InputError(f"workload {path}: not TOML: {error}") from None
    try:
        return parse({"name": path.stem} | data, path.parent)
    except InputError as error:
        raise InputError(f"workload {path}: {error}") from None


def parse(data: Mapping[str, Any], folder: Path) -> Workload:
    """Checks a workload that is already read, and reads the trace that it names."""
    layers, steps = _table(data.get("layers")), data.get("steps")
    trace = layers.get("trace")
    if isinstance(trace, str) and "moments" in layers:
        raise InputError(_NO_MOMENTS)
    if isinstance(trace, str) and isinstance(steps, int):
        data = {**data, "layers": layers | {"moments": _moments(folder / trace, steps)}}
    return _checked(Workload, data)


def _table(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _moments(trace: Path, steps: int) -> list[Moment]:
    """Spreads the moments of a trace evenly over the steps. With fewer steps, some are left out."""
    where = f"trace {trace}"
    costs = _checked(_Trace, _table(read_json(trace, where)), f"{where}: ")
    count = len(costs.f)
    starts = {
        index * steps // count: times
        for index, times in reversed(list(enumerate(zip(costs.f, costs.b, costs.w, strict=True))))
    }
    return [Moment(step=step, f=f, b=b, w=w) for step, (f, b, w) in sorted(starts.items())]


_Checked = TypeVar("_Checked", bound=Options)
_SECTIONS: dict[str, type[BaseModel]] = {
    "layers": LayerSection,
    "moments": Moment,
    "policy": Policy,
    "link": Link,
    "replica_link": Link,
}


def _checked(kind: type[_Checked], data: Mapping[str, Any], where: str = "") -> _Checked:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # A mistyped key comes before the key that is missing for it.
        first = min(problems_of(error, data), key=lambda problem: not problem.is_unknown)
        text = first.text
        if first.is_unknown:
            *section, key = (part for part in first.place if isinstance(part, str))
            keys = _SECTIONS[section[-1]] if section else kind
            text = unknown_key(key, keys.model_fields, ".".join([*section, key]))
        raise InputError(one_line(where + text)) from None


# -- the replay ------------------------------------------------------------------------------------


class StepTime(NamedTuple):
    """Predicted seconds of one step, and the share of them that ranks do not work."""

    seconds: float
    idle_ratio: float


@dataclass(frozen=True)
class Rebalance:
    """A decision before `step`. The numbers are those of the move, made or not.

    Attributes:
        source: Layers on each stage before.
        target: Layers on each stage that the balancer proposes.
        layers: Number of layers that change ranks.
        predicted_gain: Share of a step's time that the move is predicted to save.
    """

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
class ReplayResult:
    """Every step of the policy, of `static` and of `perfect`, and the decisions.

    `partitions` are the layers on each stage in each step.
    """

    workload: Workload
    policy: tuple[StepTime, ...]
    static: tuple[StepTime, ...]
    perfect: tuple[StepTime, ...]
    rebalances: tuple[Rebalance, ...]
    partitions: tuple[tuple[int, ...], ...]

    @property
    def moves(self) -> tuple[Rebalance, ...]:
        return tuple(x for x in self.rebalances if x.moved)

    @property
    def seconds(self) -> float:
        """Seconds of all steps, and of the moves between them."""
        return math.fsum(x.seconds for x in (*self.policy, *self.moves))


def replay(workload: Workload) -> ReplayResult:
    """Replays a workload.

    Raises:
        InputError: The schedule cannot be made, or the placement does not fit the memory.
    """
    policy, steps = workload.policy, _Steps(workload)
    moments = dict(workload.moments)
    layers = known = moments[0]
    even = uniform(len(layers), len(steps.stage_ranks))
    current = even if policy.initial is None else Partition(tuple(policy.initial))
    if (current.layers, current.stages) != (even.layers, even.stages):
        raise InputError(
            f"policy.initial counts {current.layers} layers on {current.stages} stages, but there "
            f"are {even.layers} layers on {even.stages} stages"
        )
    readings = [Window() for _ in layers]
    rows = list[tuple[StepTime, StepTime, StepTime, tuple[int, ...]]]()
    considered, asked, decided = list[Rebalance](), None, None
    least = -math.inf if policy.balancer.startswith("python:") else policy.hysteresis
    cuts = sorted({*moments, *range(0, workload.steps, policy.every)})
    for start, stop in pairwise([*cuts, workload.steps]):  # costs and placement stay until `stop`
        if start and start % policy.every == 0:
            known, halves = _condensed(readings, layers)
            facts = known, halves, current
            # Whether a gain is too small does not depend on the steps that are left.
            if facts != asked or (decided and decided.predicted_gain >= least):
                decided = _decide(question(workload, start, *facts))
            asked = facts
            if decided:
                considered.append(replace(decided, step=start))
            if decided and decided.moved:
                target = Partition(decided.target)
                for move in moves_between_ranks(current, target, steps.stage_ranks):
                    readings[move.layer] = Window()
                current = target
        before, layers = layers, moments.get(start, layers)
        for index, (old, new) in enumerate(zip(before, layers, strict=True)):
            if workload.announced and old != new:
                readings[index] = Window()
        count = stop - start
        for reading, layer in list(zip(readings, layers, strict=True)) * min(count, WINDOW):
            reading.add_alike(Times(layer.f, layer.b, layer.w), workload.announced)
        each = steps.time(layers, known, current), steps.time(layers, known, even)
        # Even stages share a frozen prefix's work, so that all of them run backwards. A placement
        # may therefore do better than even stages.
        ideal = min(steps.perfect(layers, even), *each, key=lambda x: x.seconds)
        rows += [(*each, ideal, current.counts)] * count
    mine, static, perfect, partitions = zip(*rows, strict=True)
    return ReplayResult(workload, mine, static, perfect, tuple(considered), partitions)


def _condensed(readings: Sequence[Window], layers: Layers) -> tuple[Layers, tuple[Layers, ...]]:
    """Returns costs by all readings, and by the earlier and by the later ones alone.

    The latter are missing if some layer has one reading only.
    """
    times = [(x.seconds, *(x.halves or ())) for x in readings]
    known, *halves = (
        tuple(
            layer if (layer.f, layer.b, layer.w) == x else replace(layer, f=x.f, b=x.b, w=x.w)
            for layer, x in zip(layers, column, strict=True)
        )
        for column in zip(*times, strict=False)
    )
    return known, tuple(halves)


def question(
    workload: Workload, step: int, layers: Layers, halves: tuple[Layers, ...], current: Partition
) -> DecisionRecord:
    """Returns what a run would decide on before a step."""
    policy, (problem, mesh) = workload.policy, _known(workload, layers)
    work = replace(problem.work, seed=policy.seed, step=step, end=workload.steps)
    readings = Readings(halves, seconds_per_byte=policy.seconds_per_byte)
    problem, rules = replace(problem, work=work), Rules(balance=policy)
    return DecisionRecord(problem, Choice(mesh, current), rules, readings, {})


def _decide(asked: DecisionRecord) -> Rebalance | None:
    """Decides if layers move, by the function that a run calls. None: they are in place."""
    decision, now = asked.again(), asked.now.partition
    plan, verdict = decision.plan, decision.verdict
    if plan.partition == now:
        return None
    moves = moves_between_ranks(now, plan.partition, plan.stage_ranks)
    return Rebalance(
        asked.problem.work.step,
        verdict.pays,
        now.counts,
        plan.partition.counts,
        len(moves),
        sum(asked.problem.layers[move.layer].moved_bytes for move in moves),
        verdict.price,
        verdict.gain,
        verdict.reason,
    )


def _known(workload: Workload, layers: Layers) -> tuple[Problem, Mesh]:
    stage_ranks = stage_ranks_of(workload.schedule, workload.ranks, workload.chunks)
    pairs = {(min(a, b), max(a, b)) for a, b in pairwise(stage_ranks) if a != b}
    links = tuple((pair, workload.link.to_link_cost()) for pair in sorted(pairs))
    trained = next((index for index, x in enumerate(layers) if x.b or x.w), len(layers) - 1)
    profile = Profile(layers, workload.names, trained, links, microbatch=1)
    work = Work(workload.objective, chunks=workload.chunks, cost=workload.policy.cost)
    speeds = None if workload.speeds is None else tuple(workload.speeds)
    problem, count = Problem(profile, work, workload.memory_limit, speeds), workload.microbatches
    return problem, problem.mesh(workload.ranks, count, workload.schedule, workload.replicas)


@final
class _Steps:
    """Predicts the steps of a workload."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.stage_ranks = stage_ranks_of(workload.schedule, workload.ranks, workload.chunks)
        self.plan = cache(self._plan)
        self.time = cache(self._time)
        self.perfect = cache(self._perfect)

    def _plan(self, layers: Layers, partition: Partition) -> Plan:
        problem, mesh = _known(self.workload, layers)
        return evaluate(problem, Choice(mesh, partition)).check_room()

    def _time(self, layers: Layers, known: Layers, partition: Partition) -> StepTime:
        """Time of a step under the schedule made from the costs that were known last."""
        plan = made = self.plan(layers, partition)
        if entry(self.workload.schedule).from_costs:
            made = self.plan(known, partition)
            # With another frozen prefix there are other ops, so the order is made anew at once.
            if made.schedule.first_trainable != plan.schedule.first_trainable:
                made = plan
        return self.with_reductions(simulate(made.schedule, plan.costs), plan)

    def with_reductions(self, timeline: Timeline, plan: Plan) -> StepTime:
        held = [0] * self.workload.ranks
        for index, layer in enumerate(plan.layers):
            rank = self.stage_ranks[plan.partition.owner(index)]
            held[rank] += layer.gradient_bytes if layer.w else 0
        return self.until(timeline, held)

    def until(self, timeline: Timeline, held: Sequence[float]) -> StepTime:
        """Time of a step: the ops, then the reduction of every rank's bytes of gradients."""
        workload = self.workload
        link = (workload.replica_link or workload.link).to_link_cost()
        begin = min(row[0].start for row in timeline.ranks)
        barrier = workload.objective is Objective.MAKESPAN
        seconds = max(
            row[-1].end
            + 2 * link.ring_seconds(size, workload.replicas)
            - (begin if barrier else row[0].start)
            for row, size in zip(timeline.ranks, held, strict=True)
        )
        busy = math.fsum(timeline.busy) / len(timeline.busy)
        return StepTime(seconds, 1 - busy / seconds if seconds else 0.0)

    def _perfect(self, layers: Layers, even: Partition) -> StepTime:
        """Time of a step if every stage has the mean of F, B, W and gradients.

        The links are those of the even placement.
        """
        workload, plan = self.workload, self.plan(layers, even)
        speeds = workload.speeds or (1.0,)
        shares = even.stages * math.fsum(speeds) / len(speeds)
        times = (math.fsum(getattr(x, key) for x in plan.layers) / shares for key in TIMES)
        costs = replace(even_costs(plan.layers, even.stages, *times), links=plan.costs.links)
        caps, frozen = roomy_caps(costs, self.stage_ranks), frozen_stages(costs)
        schedule = plan.replica.make(costs, caps, min(frozen, even.stages - 1))
        size = math.fsum(x.gradient_bytes for x in plan.layers if x.w) / workload.ranks
        return self.until(simulate(schedule, costs), [size] * workload.ranks)


# -- fewest ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RanksNeeded:
    """The fewest ranks that are fast enough in the steps first .. last. All, if none are.

    Attributes:
        seconds: Seconds of a step on these ranks.
        layers: Layers on each stage.
    """

    first: int
    last: int
    ranks: int
    seconds: float
    layers: tuple[int, ...]


def ranks_needed(workload: Workload, tolerance: float) -> tuple[RanksNeeded, ...]:
    """Finds the fewest ranks for each moment of a workload.

    The costs are known at once, and moves are free. The microbatches stay. A step may take
    `tolerance` longer, as a share, than that of the first moment on all ranks.

    Raises:
        InputError: The first moment does not fit all ranks.
    """
    if workload.speeds is not None or isinstance(workload.memory_limit, tuple):
        key = "memory_limit" if workload.speeds is None else "speeds"
        raise InputError(
            f"{key} names single ranks, but --fewest-ranks searches their number; leave one of the "
            "two out"
        )
    moments, all_ranks = workload.moments, workload.ranks
    stops = [*(start for start, _ in moments[1:]), workload.steps]
    most = min(all_ranks, len(workload.names) // chunks_of(workload.schedule, workload.chunks))
    limit = (1 + tolerance) * _on(all_ranks, workload, moments[0][1])[0]
    rows = list[RanksNeeded]()
    for (start, layers), stop in zip(moments, stops, strict=True):
        for ranks in range(1, most + 1):
            with suppress(InputError):  # it does not fit, or the schedule needs more ranks
                found = _on(ranks, workload, layers)
                if found[0] <= limit:
                    break
        else:
            ranks, found = all_ranks, _on(all_ranks, workload, layers)
        rows.append(RanksNeeded(start, stop - 1, ranks, *found))
    return tuple(rows)


def _on(ranks: int, workload: Workload, layers: Layers) -> tuple[float, tuple[int, ...]]:
    """The seconds of a step on so many ranks, and the placement that the balancer proposes."""
    workload = workload.model_copy(update={"ranks": ranks})
    (problem, mesh), name = _known(workload, layers), workload.policy.balancer
    allowed = Allowed(ranks, workload.microbatches, balancer="exact" if name == "none" else name)
    plan = plan_on(problem, mesh, allowed).check_room()
    return _Steps(workload).with_reductions(plan.timeline, plan).seconds, plan.partition.counts


def mean_ranks(rows: Sequence[RanksNeeded]) -> float:
    """The mean number of ranks over the steps."""
    steps = [row.last - row.first + 1 for row in rows]
    return sum(row.ranks * x for row, x in zip(rows, steps, strict=True)) / sum(steps)
