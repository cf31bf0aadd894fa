"""Decides on how many ranks a run goes on, by the rule that `elastic` names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynmo.balance.meshes import accumulation_problem, divisors
from dynmo.planner.decide_mesh import mesh_request
from dynmo.planner.rank_baselines import merge_ranks
from dynmo.planner.rank_choice import RankChoice, RankQuestion, choose_ranks, confirmed_ranks
from dynmo.planner.situation import Situation


@dataclass(frozen=True)
class RankWish:
    """The planner's answer.

    Attributes:
        choice: Choice for the present ranks.
        ranks: Number of ranks that the run would like.
        reference: Seconds that a step took at first. A step may take the tolerance longer.
    """

    choice: RankChoice
    ranks: int
    reference: float

    @property
    def answer(self) -> dict[str, Any]:
        """The choice as JSON."""
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
    """Returns a question that allows the present number of ranks alone."""
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
        replicas=replicas,
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
    near = {size // 4, size // 2, size, 2 * size, 4 * size}
    whole = [each for each in sorted(near) if each and batch % each == 0]
    return tuple(
        each
        for each in whole
        if all(
            not accumulation_problem(now.accumulation_groups, r, batch // each) for r in replicas
        )
    )
