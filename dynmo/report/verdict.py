"""Says where the time of a run's steps goes, and what would give some of it back.

Each cause has its price: the share of a step that would be saved without it. Prices come from the
log (waiting for data), from the costs of the layers (placement, schedule: both are simulated), or
from the speeds of ranks. They do not add up: a better placement may make a slow rank matter less.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from dynmo.change_events import ResizeEvent, SlowRankEvent
from dynmo.errors import DynmoError
from dynmo.plan.alternatives import choose_schedule
from dynmo.plan.best import plan_on
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.problem import Allowed
from dynmo.report.lines import busy_text
from dynmo.report.numbers import plus, show_share, show_size
from dynmo.report.run_record import RunRecord
from dynmo.schedule.catalogue import AUTO
from dynmo.schedule.memory import Limit

LEAST = 0.03  # share of a step from which on a cause is worth a line
_SLOW = 1.15  # times as long for the same layers from which on a rank is slow


@dataclass(frozen=True)
class Cause:
    """Why steps take longer than they must.

    Attributes:
        name: The cause in two or three words.
        share: Share of a step that it costs. 0 to 1.
        text: What was seen.
        remedy: What to do.
    """

    name: str
    share: float
    text: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """All causes of a run, the dearest first, and a sentence about it."""

    verdict: str
    causes: tuple[Cause, ...]


def diagnose(run: RunRecord) -> Diagnosis:
    """Finds the causes. It plans the run's layers anew, which takes up to a few seconds."""
    plan = _with_speeds(run)
    found = [*_data(run), *_slow_rank(run, plan), *_placement(run, plan), *_schedule(run, plan)]
    causes = tuple(sorted((x for x in found if x.share >= LEAST), key=lambda x: -x.share))
    phase, busy = run.summary.phases[-1], busy_text([run.summary])
    computes = f"the ranks compute {show_share(1 - phase.idle_ratio)} of a step"
    if causes:
        worst = causes[0]
        return Diagnosis(
            f"{worst.name} costs {show_share(worst.share)} of a step: {worst.text}. "
            f"{worst.remedy}.",
            causes,
        )
    inherent = phase.inherent_idle or 0.0  # older logs have none
    if phase.idle_ratio - inherent >= 2 * LEAST:
        why = busy or "the rest is messages, or other work on the machine"
        own = f"the schedule idles {show_share(inherent)} of it"
        unknown = plan is None and len(phase.layers) > 1
        return Diagnosis(
            f"Nothing to mend was found: {computes}, {own}, and {why}."
            + " The costs of the layers are unknown, so nothing was planned anew." * unknown,
            (),
        )
    return Diagnosis(f"This run is as fast as its schedule allows: {computes}.", ())


def _data(run: RunRecord) -> Iterator[Cause]:
    data = run.summary.data
    if data is not None:
        yield Cause(
            "Waiting for data",
            data.waited,
            f"rank 0 waits {show_share(data.waited)} of the steps' time for samples",
            "Tokenise ahead (dynmo data), or read from a faster disk",
        )


# -- ranks -----------------------------------------------------------------------------------------


def _slow_rank(run: RunRecord, plan: Plan | None) -> Iterator[Cause]:
    since = max((event.step for event in run.all(ResizeEvent)), default=0)
    told = {event.rank: event for event in run.all(SlowRankEvent) if event.step >= since}
    worst = max(told.values(), key=lambda event: event.factor, default=None)
    speeds = () if plan is None else plan.problem.speeds or ()
    if worst is not None and worst.factor > 1:
        rank, factor, who = worst.rank, worst.factor, f"rank {worst.rank} on {worst.machine}"
    elif speeds:
        rank = speeds.index(min(speeds))
        factor, who = _usual(speeds) / min(speeds), f"{_word(run)} {rank}"
    else:
        return
    if factor < _SLOW:
        return
    if plan is not None and speeds:
        even = tuple(max(speed, _usual(speeds)) for speed in speeds)
        alike = evaluate(replace(plan.problem, speeds=even), plan.choice)
        share = 1 - alike.step / plan.step
    else:  # it holds the step up as far as it is the busiest
        busy = _busy(run)
        others = [seconds for index, seconds in enumerate(busy) if index != rank]
        own = busy[rank] if rank < len(busy) else 0.0
        share = 1 - max(own / factor, *others, 0.0) / max(own, *others, 1e-12)
    yield Cause(
        "A slow rank",
        share,
        f"{who} takes {factor:.2f} times as long as the others for the same layers",
        "Look at what else runs there. A balancer gives it fewer layers, and elastic.repack gives "
        "it back",
    )


def _word(run: RunRecord) -> str:
    """Returns what the ranks of a plan are. With replicas, each stands for several of the run."""
    return "rank" if run.replicas == 1 else "pipeline rank"


def _usual(speeds: Sequence[float]) -> float:
    """Returns the middle speed. Of two, that is the faster one."""
    return sorted(speeds)[len(speeds) // 2]


def _busy(run: RunRecord) -> tuple[float, ...]:
    """Returns the seconds that each rank computes in a step of the last phase."""
    last = run.summary.phases[-1]
    rows = [step.busy for step in run.steps if step.step >= last.first and step.busy]
    rows = [row for row in rows if len(row) == len(rows[-1])]
    return tuple(median(column) for column in zip(*rows, strict=True))


def _with_speeds(run: RunRecord) -> Plan | None:
    """Returns the run's plan. A rank whose layers all take longer than their like is slow in it."""
    plan = run.plan
    if plan is None or plan.problem.speeds is not None:
        return plan
    rank, factor = _slowest(plan)
    if factor < _SLOW:
        return plan
    own = {
        index
        for stage, holder in enumerate(plan.stage_ranks)
        if holder == rank
        for index in plan.partition.range_of(stage)
    }
    layers = tuple(
        replace(x, f=x.f / factor, b=x.b / factor, w=x.w / factor) if index in own else x
        for index, x in enumerate(plan.problem.layers)
    )
    profile = replace(plan.problem.profile, layers=layers)
    speeds = tuple(1 / factor if each == rank else 1.0 for each in range(plan.mesh.pipeline))
    return evaluate(replace(plan.problem, profile=profile, speeds=speeds), plan.choice)


def _slowest(plan: Plan) -> tuple[int, float]:
    """Returns the rank that takes longest for layers of the same kind, and how many times as long.

    Kinds are layers with the same name but for numbers, and with weights of the same size.
    """
    profile = plan.problem.profile
    kinds: dict[tuple[str, int, bool], dict[int, list[float]]] = {}
    for stage, rank in enumerate(plan.stage_ranks):
        for index in plan.partition.range_of(stage):
            layer = profile.layers[index]
            name = profile.names[index] if index < len(profile.names) else ""
            kind = re.sub(r"\d+", "", name), layer.parameters, index < profile.first_trainable
            kinds.setdefault(kind, {}).setdefault(rank, []).append(layer.seconds)
    ratios: dict[int, list[float]] = {}
    for ranks in kinds.values():
        for rank, seconds in ranks.items():
            others = [x for other, each in ranks.items() if other != rank for x in each]
            if others and median(others):
                ratios.setdefault(rank, []).append(median(seconds) / median(others))
    slow = {rank: median(each) for rank, each in ratios.items()}
    return max(slow.items(), key=lambda pair: pair[1], default=(0, 1.0))


# -- placement -------------------------------------------------------------------------------------


def _allowed(plan: Plan) -> Allowed:
    return Allowed(plan.mesh.gpus, plan.mesh.global_batch, schedules=(plan.mesh.schedule,))


def _best(plan: Plan) -> Plan:
    """Returns the best placement of the same layers under the same schedule."""
    try:
        best = plan_on(plan.problem, plan.mesh, _allowed(plan), plan.partition).check_room()
    except DynmoError:
        return plan
    return min(best, plan, key=lambda each: each.step)


def _placement(run: RunRecord, plan: Plan | None) -> Iterator[Cause]:
    if plan is None or plan.mesh.pipeline == 1:
        return
    best = _best(plan)
    yield from _heavy_layer(best)
    frozen, cost = plan.problem.profile.first_trainable, plan.rank_cost
    most, least = cost.index(max(cost)), cost.index(min(cost))
    yield Cause(
        "A frozen part that is not balanced" if frozen else "Uneven layers",
        1 - best.step / plan.step,
        f"{_word(run)} {most} has {cost[most] / max(cost[least], 1e-12):.1f} times the seconds of "
        f"{_word(run)} {least} with the layers {plus(plan.partition.counts)}"
        + (f", because layers 0 to {frozen - 1} are frozen" if frozen else "")
        + f"; {plus(best.partition.counts)} would be even",
        'Set balance.balancer = "exact"'
        if run.option("balance", "balancer") == "none"
        else "dynmo simulate decisions.jsonl says why the layers stayed",
    )


def _heavy_layer(best: Plan) -> Iterator[Cause]:
    """Yields a layer that is more than an even share, however layers are placed."""
    names, seconds = best.problem.profile.names, [layer.seconds for layer in best.layers]
    even = sum(seconds) / best.mesh.pipeline
    heaviest = max(seconds)
    if heaviest > even:
        index = seconds.index(heaviest)
        name = f"{names[index]} (layer {index})" if index < len(names) else f"layer {index}"
        yield Cause(
            "A heavy layer",
            1 - even / heaviest,
            f"{name} alone takes {heaviest / even:.1f} times an even share of the work, so no "
            "placement is even",
            "Use fewer ranks"
            if len(best.stage_ranks) > best.mesh.pipeline
            else "Use fewer ranks, or a V schedule, which gives its rank light layers beside it",
        )


# -- schedule --------------------------------------------------------------------------------------


def _schedule(run: RunRecord, plan: Plan | None) -> Iterator[Cause]:
    """Compares the schedule with the best one, and with the best one without a limit of memory."""
    if plan is None or plan.mesh.pipeline == 1:
        return
    now, limit = _best(plan), plan.problem.memory_limit
    best, free = (_scheduled(plan, x) for x in (limit, None))
    idle = f"{plan.mesh.schedule} leaves {show_share(now.timeline.idle_ratio)} of a step idle"
    yield Cause(
        "The schedule",
        1 - best.step / now.step,
        f"{idle}, {best.mesh.schedule} would leave {show_share(best.timeline.idle_ratio)}",
        f'Set pipeline.schedule = "{best.mesh.schedule}"',
    )
    if limit is not None:
        more = max(0, max(free.memory) - max(now.memory))
        yield Cause(
            "No memory for warm-up",
            1 - free.step / min(now.step, best.step),
            f"{idle} under pipeline.memory_limit; {free.mesh.schedule} starts more microbatches "
            f"before the first backward, with {show_size(more)} more on a rank",
            'Raise the limit, or save memory with train.recompute = "auto", parallel.zero = 1 or a '
            "smaller train.micro_batch",
        )
    inherent = run.summary.phases[-1].inherent_idle or 0.0
    yield Cause(
        "Few microbatches",
        inherent if plan.mesh.microbatches < 2 * plan.mesh.pipeline else 0.0,
        f"{plan.mesh.microbatches} microbatches leave {plan.mesh.pipeline} ranks idle for "
        f"{show_share(inherent)} of a step",
        "Use smaller microbatches, or a larger train.global_batch",
    )


def _scheduled(plan: Plan, limit: Limit) -> Plan:
    """Returns the fastest plan of any schedule within a limit, or the plan itself."""
    problem, allowed = replace(plan.problem, memory_limit=limit), _allowed(plan)
    plans = [plan]
    with contextlib.suppress(DynmoError):
        plans.append(choose_schedule(problem, replace(plan.mesh, schedule=AUTO), allowed)[0])
    with contextlib.suppress(DynmoError):
        plans.append(plan_on(problem, plan.mesh, allowed).check_room())
    return min(plans, key=lambda each: each.step)
