"""Decisions before a step. Each is a pure function of a `Situation`.

decide_move       where the layers live
decide_schedule   the order of the ops
decide_mesh       pipeline x replicas
decide_ranks      on how many ranks the run goes on, by the rule that `elastic` names
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import NoRoomError, PartitionError, ScheduleError
from dynmo.plan.balance_request import BalanceRequest, balancer, is_forced
from dynmo.plan.best import handicap
from dynmo.plan.layout import moves_between_ranks
from dynmo.plan.mesh_plan import Mesh
from dynmo.plan.mesh_search import MeshRequest
from dynmo.plan.meshes import accumulation_problem, divisors
from dynmo.plan.partition import Partition
from dynmo.plan.rank_choice import RankChoice, RankQuestion, choose_ranks, confirmed_ranks
from dynmo.plan.rank_merging import merge_ranks
from dynmo.plan.reshape import Reshape, reshape
from dynmo.plan.situation import DecisionRecord, Layers, Situation
from dynmo.plan.stage_plan import plan_stages, schedule_for_balancers
from dynmo.plan.trigger import Decision, Outlook, confirmed, worth_moving_through
from dynmo.schedule.catalogue import SHAPES, entry, full_schedule
from dynmo.schedule.memory import least_limit, within
from dynmo.schedule.simulator import resident, simulate

# -- placement and schedule ------------------------------------------------------------------------


@dataclass(frozen=True)
class MoveChoice:
    """A possible move of layers, which take `on_the_way` seconds over the links.

    `schedule` is the name of another schedule that runs then. None if the present one stays.
    """

    target: Partition
    on_the_way: float
    decision: Decision
    schedule: str | None = None


def decide_move(now: Situation) -> MoveChoice | None:
    """Decides whether layers move. None if the balancer leaves them where they are.

    With several schedules to choose from, the one whose best placement is fastest is weighed first,
    and the next one if that does not pay.

    Raises:
        PartitionError: The balancer has no placement.
    """
    if now.balance.balancer == "none":
        return None
    if not now.schedules:
        return weigh_move(now, propose(now))
    best, is_patient = None, not is_forced(now.balance.balancer)
    for there, target in _proposals(now):
        choice = weigh_move(now, target, there)
        if choice is not None and (
            choice.decision.move or (is_patient and choice.decision.uncertain)
        ):
            return choice
        best = best or choice
    return best


def _proposals(now: Situation) -> list[tuple[Situation, Partition]]:
    """Returns the best placement under each schedule that is allowed, the fastest first.

    Raises:
        PartitionError: There is none under any schedule.
    """
    found: list[tuple[float, Situation, Partition]] = []
    failed: PartitionError | None = None
    for name in sorted({now.mesh.schedule, *now.schedules}, key=SHAPES.index):
        there = now.under(name)
        try:
            target = propose(there)
            if there is not now:
                _check_room(there, target)
        except PartitionError as error:
            failed = failed or error
            continue
        except ScheduleError:
            if there is now:
                raise
            continue
        seconds = there.seconds_of(now.layers, target)
        if there is now:
            seconds = min(seconds, now.seconds_of(now.layers, now.partition))
        found.append((seconds * handicap(name), there, target))
    if not found:
        assert failed is not None
        raise failed
    return [(there, target) for _, there, target in sorted(found, key=lambda each: each[0])]


def _check_room(there: Situation, target: Partition) -> None:
    """Raises NoRoomError if the memory does not hold a schedule that has never run."""
    limit = there.memory_limit
    if limit is None:
        return
    links, first = there.boundary_links, there.first_trainable
    needs = plan_stages(there.stages, there.layers, target, links, first).memory
    if not within(needs, limit):
        raise NoRoomError(f"{there.mesh.schedule} needs up to {max(needs)} bytes on a rank")


def propose(now: Situation) -> Partition:
    return balancer(now.balance.balancer)(balance_request(now, now.layers))


def weigh_move(
    now: Situation, target: Partition, there: Situation | None = None
) -> MoveChoice | None:
    """Decides whether a move to `target` repays itself. None if it is the present placement.

    `there` is the situation under the schedule that would run then. None: the present schedule.
    """
    balance, there = now.balance, there or now
    if there is now and target == now.partition:
        return None
    on_the_way = _on_the_way(now, target, there)

    def decide(layers: Layers) -> Decision:
        return worth_moving_through(
            _outlook(now, layers, target, there),
            on_the_way + now.fixed_seconds,
            balance.margin,
            balance.hysteresis * now.doubt,
        )

    decision = decide(now.layers)
    if is_forced(balance.balancer) and there is now:
        decision = Decision(True, decision.predicted_gain, f"{balance.balancer}: forced")
    elif decision.move:
        decision = confirmed(decision, list(map(decide, now.halves)), now.preempted)
    schedule = None if there is now else there.mesh.schedule
    return MoveChoice(target, on_the_way, decision, schedule)


def balance_request(now: Situation, layers: tuple[LayerCost, ...]) -> BalanceRequest:
    stages = now.stages
    # Each stage is given its rank's whole limit. A balancer that knows the placement adds up the
    # bytes of a rank's stages. Memory is that of all stages training, whatever is frozen.
    of_ranks = stages.limits
    limits = None if of_ranks is None else tuple(of_ranks[rank] for rank in stages.stage_ranks)
    full = full_schedule(stages.schedule, stages.ranks, stages.microbatches, stages.chunks)
    return BalanceRequest(
        layers,
        now.partition,
        now.balance.cost,
        resident(full),
        limits,
        now.seed,
        now.step,
        now.names,
        schedule_for_balancers(stages, layers),
        now.boundary_links,
        now.objective,
        now.first_trainable,
        now.speeds,
        stage_ranks=stages.stage_ranks,
    )


def _outlook(now: Situation, layers: Layers, target: Partition, there: Situation) -> list[Outlook]:
    """Returns the seconds of a step on both placements, from the next step to the run's end.

    The cases' actions before the next step itself are still to come, and were not measured.
    """

    def seconds(costs: Layers, partition: Partition, at: Situation) -> float:
        if costs == layers:
            return at.seconds_of(costs, partition)
        stages = at.stages.costs(costs, partition, at.boundary_links)
        make = schedule_for_balancers(at.stages, layers)
        return simulate(make(stages), stages).length(at.objective)

    return [
        Outlook(
            x.start,
            x.stop,
            seconds(x.layers, now.partition, now),
            seconds(x.layers, target, there),
        )
        for x in now.intervals(layers)
    ]


def _on_the_way(now: Situation, target: Partition, there: Situation) -> float:
    """Returns the seconds of a move's layers, in sequence, over the slowest link."""
    moves = moves_between_ranks(
        now.partition, target, now.stages.stage_ranks, there.stages.stage_ranks
    )
    sizes = [now.layers[move.layer].moved_bytes for move in moves]
    if now.seconds_per_byte is not None:
        return now.seconds_per_byte * sum(sizes)
    links = [link for _, link in now.links]
    return math.fsum(max((link.seconds(x) for link in links), default=0.0) for x in sizes)


def decide_schedule(now: Situation, partition: Partition) -> float | None:
    """Decides whether the schedule of a placement is made anew from the present costs.

    One reading alone proves nothing. It must save a quarter of `balance.hysteresis`.

    Returns:
        The predicted share of a step that is saved. None if the schedule stays.
    """
    if not now.halves or not entry(now.mesh.schedule).from_costs:
        return None
    costs = now.stages.costs(now.layers, partition, now.boundary_links)
    then = replace(now, speeds=now.scheduled_speeds)
    before, after = (
        simulate(known.schedule_on(partition, layers), costs).length(now.objective)
        for known, layers in ((then, now.scheduled), (now, now.layers))
    )
    gain = 1 - after / before if before else 0.0
    if now.is_measured and gain <= now.balance.hysteresis / 4:
        return None
    return max(0.0, gain)


def move_answer(choice: MoveChoice | None) -> dict[str, Any]:
    if choice is None:
        return {"move": False}
    decision = choice.decision
    answer = {
        "move": decision.move,
        "to": list(choice.target.counts),
        "uncertain": decision.uncertain,
    }
    return answer if choice.schedule is None else answer | {"schedule": choice.schedule}


def schedule_answer(partition: Partition, gain: float | None) -> dict[str, Any]:
    return {"partition": list(partition.counts), "change": gain is not None}


# -- mesh ------------------------------------------------------------------------------------------

# Bytes per second between ranks, if there is one rank and nothing to measure.
_UNKNOWN_LINK = 1e9


@dataclass(frozen=True)
class MeshChoice:
    """The mesh and the placement with which the same ranks go on. No mesh: it stays."""

    mesh: Mesh | None
    partition: Partition
    decision: Decision

    @property
    def answer(self) -> dict[str, Any]:
        if self.mesh is None:
            return {"move": False, "uncertain": self.decision.uncertain}
        return {
            "move": True,
            "to": [self.mesh.pipeline, self.mesh.replicas],
            "partition": list(self.partition.counts),
        }


def decide_mesh(now: Situation) -> MeshChoice:
    """Decides whether another mesh of the same ranks repays its reshape."""
    request = mesh_request(now, tuple(replicas for _, replicas in now.shapes))

    def best(layers: Layers) -> Reshape:
        return reshape(
            replace(request, profile=now.profile(layers)),
            now.mesh,
            now.partition,
            horizon_steps=now.end - now.step,
            seconds_per_byte=1 / request.bandwidth,
            margin=now.balance.margin,
            hysteresis=now.balance.hysteresis,
        )

    try:
        answer = best(now.layers)
        decision, target = answer.decision, answer.plan.mesh
        if decision.move and target != now.mesh:
            parts = [best(layers).decision for layers in now.halves]
            decision = confirmed(decision, parts, now.preempted)
            if decision.move:
                return MeshChoice(target, answer.plan.plan.partition, decision)
    except NoRoomError as error:  # the mesh stays, because it trains
        decision = Decision(False, 0.0, f"stay: {error}")
    return MeshChoice(None, now.partition, decision)


def mesh_request(now: Situation, replicas: tuple[int, ...]) -> MeshRequest:
    """Returns the request for a search for another mesh.

    Links between replicas count like links between stages: as the slowest measured link.
    """
    profile = now.profile(now.layers)
    rates = [link.bytes_per_second for _, link in profile.links]
    return MeshRequest(
        profile,
        gpus=now.mesh.gpus,
        global_batch=now.mesh.global_batch,
        micro_batches=(now.mesh.micro_batch,),
        schedules=(now.mesh.schedule,),
        chunks=now.chunks,
        memory_limit=least_limit(now.memory_limit),
        zero=now.zero,
        bandwidth=min(rates, default=_UNKNOWN_LINK),
        objective=now.objective,
        replicas=replicas,
        accumulation_groups=now.accumulation_groups,
    )


# -- ranks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankWish:
    """The choice for the present ranks, and what the run would like.

    Attributes:
        ranks: Number of ranks that the run would like.
        reference: Seconds that a step took at first. A step may take the tolerance longer.
    """

    choice: RankChoice
    ranks: int
    reference: float

    @property
    def answer(self) -> dict[str, Any]:
        mesh, decision = self.choice.mesh, self.choice.decision
        return {
            "move": decision.move,
            "ranks": self.ranks,
            "to": [mesh.pipeline, mesh.replicas, mesh.microbatches],
            "partition": list(self.choice.partition.counts),
            "uncertain": decision.uncertain,
        }


def decide_ranks(now: Situation) -> RankWish:
    """Decides on how many ranks the run goes on.

    Raises:
        NoRoomError: `elastic.target_ranks`, or the ranks that a published algorithm merges, cannot
            hold the model.
    """
    elastic, question, size = now.elastic, _question(now), now.mesh.gpus
    reference = now.reference
    if reference is None:
        reference = choose_ranks(question).seconds_best_now
    if elastic.target_ranks is not None:
        most = max(now.there, size)
        question = replace(question, least=1, most=most, target=elastic.target_ranks)
        return RankWish(choose_ranks(question), elastic.target_ranks, reference)
    least = min(elastic.min_ranks, size)
    if elastic.algorithm != "fewest":
        choice = merge_ranks(replace(question, least=least), elastic.algorithm)
        return RankWish(choice, choice.mesh.gpus, reference)
    if elastic.repack:
        limit, most = reference * (1 + elastic.tolerance), max(now.most, now.there)
        question = replace(question, least=least, most=most, limit_seconds=limit)
    else:  # the fastest
        question = replace(question, most=now.there, limit_seconds=0.0)
    choice = _confirmed_choice(now, question)
    wanted = choice.mesh.gpus
    if wanted > now.there:
        choice = _confirmed_choice(now, replace(question, most=now.there))
    return RankWish(choice, wanted, reference)


def _confirmed_choice(now: Situation, question: RankQuestion) -> RankChoice:
    """Answers a question. Both halves of the readings must support a change."""
    choice = choose_ranks(question)
    if not choice.decision.move:
        return choice
    requests = [replace(question.request, profile=now.profile(layers)) for layers in now.halves]
    parts = [choose_ranks(replace(question, request=each, forecast=())) for each in requests]
    return confirmed_ranks(question, choice, parts, now.preempted)


def _question(now: Situation) -> RankQuestion:
    replicas, size = _replicas(now), now.mesh.gpus
    request = mesh_request(now, replicas)
    if now.elastic.retune:
        request = replace(request, micro_batches=_sizes(now, replicas))
    return RankQuestion(
        request,
        now.mesh,
        now.partition,
        least=size,
        most=size,
        limit_seconds=float("inf"),
        steps_left=now.end - now.step,
        seconds_per_byte=1 / request.bandwidth,
        fixed_seconds=now.pause,
        margin=now.balance.margin,
        hysteresis=now.balance.hysteresis,
        forecast=tuple(
            replace(x, layers=now.profile(x.layers).layers) for x in now.intervals(now.layers)
        ),
        nodes=now.nodes,
    )


def _replicas(now: Situation) -> tuple[int, ...]:
    """Returns the numbers of replicas that are allowed.

    A model may not allow more replicas than now. Replicas that share experts stay together.
    """
    batch, groups = now.mesh.replicas * now.mesh.microbatches, now.accumulation_groups
    fewer = [each for each in divisors(batch) if each <= now.mesh.replicas]
    allowed = fewer if now.expert == 1 else [now.mesh.replicas]
    return tuple(each for each in allowed if not accumulation_problem(groups, each, batch))


def _sizes(now: Situation, replicas: Sequence[int]) -> tuple[int, ...]:
    """Returns sizes of a microbatch that the accumulation groups allow.

    Candidates are the present size, its halves and its doubles.
    """
    size, batch = now.mesh.micro_batch, now.mesh.global_batch
    near = (size // 4, size // 2, size, 2 * size, 4 * size)
    return tuple(
        each
        for each in sorted(set(near) - {0})
        if batch % each == 0
        and all(
            not accumulation_problem(now.accumulation_groups, r, batch // each) for r in replicas
        )
    )


# -- decisions of a run, again ---------------------------------------------------------------------


def ask_again(record: DecisionRecord) -> tuple[dict[str, Any], str]:
    """Decides again from what a run had known. Returns the answer, and its reason in one line."""
    now = record.situation
    if record.kind == "mesh":
        mesh = decide_mesh(now)
        return mesh.answer, mesh.decision.reason
    if record.kind == "ranks":
        try:
            wish = decide_ranks(now)
        except PartitionError as error:
            return {"move": False}, str(error)
        return wish.answer, wish.choice.decision.reason
    if record.kind == "schedule":
        partition = Partition(tuple(record.answer["partition"]))
        gain = decide_schedule(now, partition)
        reason = "the schedule stays" if gain is None else f"another schedule saves {gain:.2%}"
        return schedule_answer(partition, gain), reason
    try:
        choice = decide_move(now)
    except PartitionError as error:
        return {"move": False}, f"layers stay where they are: {error}"
    reason = "the layers are where they belong" if choice is None else choice.decision.reason
    return move_answer(choice), reason
