"""Asks the planner for a running engine: on how many ranks should it go on?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dynmo.balance.trigger import ForecastInterval
from dynmo.config import Config, accumulation_problem
from dynmo.config.shapes import divisors
from dynmo.cost.layer_cost import LayerCost
from dynmo.pipeline.engine import Engine
from dynmo.pipeline.mesh_question import current_mesh, mesh_request, with_costs
from dynmo.planner.rank_baselines import merge_ranks
from dynmo.planner.rank_choice import RankChoice, RankQuestion, choose_ranks, confirmed_ranks


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


def _sizes(config: Config, replicas: Sequence[int]) -> tuple[int, ...]:
    """Returns sizes of a microbatch that the accumulation groups allow.

    Candidates are the present size, its halves and its doubles.
    """
    size, batch = config.train.micro_batch, config.train.global_batch
    near = {size // 4, size // 2, size, 2 * size, 4 * size}
    whole = [each for each in sorted(near) if each and batch % each == 0]
    return tuple(
        each
        for each in whole
        if all(
            not accumulation_problem(config.accumulation_groups, r, batch // each) for r in replicas
        )
    )


def ask_ranks(
    config: Config,
    engine: Engine,
    limits: RankLimits,
    forecast: tuple[ForecastInterval, ...],
    memory_limit: int | None,
    pause: float,
    reference: float | None,
    halves: Callable[[], tuple[tuple[LayerCost, ...], ...]],
    preempted: float,
) -> RankWish:
    """Asks the planner. All ranks call it together, and get the same answer.

    Args:
        config: Config of the run.
        engine: Holds the layers.
        limits: Number of ranks that there are and may be.
        forecast: Intervals from the next step to the run's end. The first interval has the
            measured costs.
        memory_limit: Bytes of a rank. None means unlimited.
        pause: Seconds that a change takes beyond its bytes.
        reference: Seconds that a step took at first. None takes the best predicted seconds of
            now.
        halves: Returns the costs from the earlier and from the later readings alone.
        preempted: Share of the ops' time that other processes take.

    Raises:
        NoRoomError: `elastic.target_ranks`, or the ranks that a published algorithm merges, cannot
            hold the model.
    """
    elastic, size, costs = config.elastic, engine.world.everyone.size, forecast[0].layers
    batch, groups = config.all_microbatches, config.accumulation_groups
    # A model may not allow more replicas than now. Replicas that share experts stay together.
    fewer = (
        [each for each in divisors(batch) if each <= engine.world.replicas]
        if config.parallel.expert == 1
        else [engine.world.replicas]
    )
    replicas = tuple(each for each in fewer if not accumulation_problem(groups, each, batch))
    request = mesh_request(config, engine, costs, memory_limit, replicas)
    if elastic.retune:
        request = replace(request, micro_batches=_sizes(config, replicas))
    question = RankQuestion(
        request,
        current_mesh(config, engine),
        engine.partition,
        least=size,
        most=size,
        limit_seconds=float("inf"),
        steps_left=config.train.steps - forecast[0].start,
        replicas=replicas,
        seconds_per_byte=1 / request.bandwidth,
        fixed_seconds=pause,
        margin=config.balance.margin,
        hysteresis=config.balance.hysteresis,
        forecast=tuple(
            replace(x, layers=with_costs(request, config, engine, x.layers).profile.layers)
            for x in forecast
        ),
        nodes=tuple(limits.nodes),
    )
    if reference is None:
        reference = choose_ranks(question).seconds_best_now
    if elastic.target_ranks is not None:
        question = replace(
            question, least=1, most=max(limits.there, size), target=elastic.target_ranks
        )
        return RankWish(choose_ranks(question), elastic.target_ranks, reference)
    if elastic.algorithm != "fewest":
        choice = merge_ranks(
            replace(question, least=min(elastic.min_ranks, size)), elastic.algorithm
        )
        return RankWish(choice, choice.mesh.gpus, reference)
    if elastic.repack:
        limit = reference * (1 + elastic.tolerance)
        question = replace(
            question,
            least=min(elastic.min_ranks, size),
            most=max(limits.most, limits.there),
            limit_seconds=limit,
        )
    else:
        question = replace(question, most=limits.there, limit_seconds=0.0)  # the fastest

    def decide(question: RankQuestion) -> RankChoice:
        choice = choose_ranks(question)
        if not choice.decision.move:
            return choice
        parts = [
            choose_ranks(
                replace(question, request=with_costs(request, config, engine, layers), forecast=())
            )
            for layers in halves()
        ]
        return confirmed_ranks(question, choice, parts, preempted)

    choice = decide(question)
    wanted = choice.mesh.gpus
    if wanted > limits.there:
        choice = decide(replace(question, most=limits.there))
    return RankWish(choice, wanted, reference)
