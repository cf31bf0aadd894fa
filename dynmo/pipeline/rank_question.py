"""Asks the planner for a running engine: on how many ranks should it go on?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynmo.balance.meshes import accumulation_problem, divisors
from dynmo.balance.trigger import ForecastInterval
from dynmo.cost.layer_cost import LayerCost
from dynmo.pipeline.mesh_question import current_mesh, mesh_request, with_costs
from dynmo.pipeline.options import PipelineOptions
from dynmo.planner.rank_baselines import merge_ranks
from dynmo.planner.rank_choice import RankChoice, RankQuestion, choose_ranks, confirmed_ranks
from dynmo.runtime.engine.engine import Engine


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


@dataclass(frozen=True)
class RankLimits:
    """The number of ranks that there are and may be.

    Attributes:
        nodes: Name of the machine of each rank.
        there: Number of present ranks, newcomers included.
        most: The largest number of ranks that the run has had.
    """

    nodes: Sequence[str]
    there: int
    most: int


def _sizes(options: PipelineOptions, replicas: Sequence[int]) -> tuple[int, ...]:
    """Returns sizes of a microbatch that the accumulation groups allow.

    Candidates are the present size, its halves and its doubles.
    """
    size, batch = options.samples, options.global_batch
    near = {size // 4, size // 2, size, 2 * size, 4 * size}
    whole = [each for each in sorted(near) if each and batch % each == 0]
    return tuple(
        each
        for each in whole
        if all(
            not accumulation_problem(options.accumulation_groups, r, batch // each)
            for r in replicas
        )
    )


@dataclass(frozen=True)
class RankSituation:
    """The measurements and limits that the decision rests on. They are the same on every rank.

    Attributes:
        options: Options of the pipeline.
        engine: Holds the layers.
        limits: Number of ranks that there are and may be.
        forecast: Intervals from the next step to the run's end. The first interval has the
            measured costs.
        halves: Costs from the earlier and from the later readings alone.
        preempted: Share of the ops' time that other processes take.
        pause: Seconds that a change takes beyond its bytes.
        memory_limit: Bytes of a rank. None means unlimited.
    """

    options: PipelineOptions
    engine: Engine
    limits: RankLimits
    forecast: tuple[ForecastInterval, ...]
    halves: tuple[tuple[LayerCost, ...], ...]
    preempted: float
    pause: float
    memory_limit: int | None

    def question(self) -> RankQuestion:
        """Returns a question that allows the present number of ranks alone."""
        options, engine = self.options, self.engine
        size, replicas = engine.store.world.everyone.size, self._replicas()
        request = mesh_request(
            options, engine, self.forecast[0].layers, self.memory_limit, replicas
        )
        if options.elastic.retune:
            request = replace(request, micro_batches=_sizes(options, replicas))
        return RankQuestion(
            request,
            current_mesh(options, engine),
            engine.store.layout.partition,
            least=size,
            most=size,
            limit_seconds=float("inf"),
            steps_left=options.end - self.forecast[0].start,
            replicas=replicas,
            seconds_per_byte=1 / request.bandwidth,
            fixed_seconds=self.pause,
            margin=options.balance.margin,
            hysteresis=options.balance.hysteresis,
            forecast=tuple(
                replace(x, layers=with_costs(request, options, engine, x.layers).profile.layers)
                for x in self.forecast
            ),
            nodes=tuple(self.limits.nodes),
        )

    def _replicas(self) -> tuple[int, ...]:
        """The numbers of replicas that are allowed.

        A model may not allow more replicas than now. Replicas that share experts stay together.
        """
        options, now = self.options, self.engine.store.world.replicas
        batch, groups = options.all_microbatches, options.accumulation_groups
        fewer = [each for each in divisors(batch) if each <= now]
        allowed = fewer if options.expert == 1 else [now]
        return tuple(each for each in allowed if not accumulation_problem(groups, each, batch))

    def decide(self, question: RankQuestion) -> RankChoice:
        """Answers a question. Both halves of the readings must support a change."""
        choice = choose_ranks(question)
        if not choice.decision.move:
            return choice
        requests = [
            with_costs(question.request, self.options, self.engine, layers)
            for layers in self.halves
        ]
        parts = [choose_ranks(replace(question, request=each, forecast=())) for each in requests]
        return confirmed_ranks(question, choice, parts, self.preempted)


def ask_ranks(now: RankSituation, reference: float | None) -> RankWish:
    """Asks the planner. All ranks call it together, and get the same answer.

    Args:
        now: What is known.
        reference: Seconds that a step took at first. None takes the best predicted seconds of
            now.

    Raises:
        NoRoomError: `elastic.target_ranks`, or the ranks that a published algorithm merges, cannot
            hold the model.
    """
    elastic, limits, question = now.options.elastic, now.limits, now.question()
    size = question.current.gpus
    if reference is None:
        reference = choose_ranks(question).seconds_best_now
    if elastic.target_ranks is not None:
        most = max(limits.there, size)
        question = replace(question, least=1, most=most, target=elastic.target_ranks)
        return RankWish(choose_ranks(question), elastic.target_ranks, reference)
    least = min(elastic.min_ranks, size)
    if elastic.algorithm != "fewest":
        choice = merge_ranks(replace(question, least=least), elastic.algorithm)
        return RankWish(choice, choice.mesh.gpus, reference)
    if elastic.repack:
        limit, most = reference * (1 + elastic.tolerance), max(limits.most, limits.there)
        question = replace(question, least=least, most=most, limit_seconds=limit)
    else:  # the fastest
        question = replace(question, most=limits.there, limit_seconds=0.0)
    choice = now.decide(question)
    wanted = choice.mesh.gpus
    if wanted > limits.there:
        choice = now.decide(replace(question, most=limits.there))
    return RankWish(choice, wanted, reference)
