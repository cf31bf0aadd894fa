"""The published ways to use fewer ranks, as a running run can follow them.

They merge neighbouring ranks while the memory of both fits one (`balance.repack`). They do not ask
how long a step takes then, and never grow. `choose_ranks` is what dynmo does by itself.
"""

from __future__ import annotations

from dataclasses import replace

from dynmo.balance.repack import BASELINES
from dynmo.balance.trigger import Decision
from dynmo.errors import NoRoomError
from dynmo.planner.rank_choice import RankChoice, RankQuestion
from dynmo.planner.reshape import plan_as_now


def merge_ranks(question: RankQuestion, algorithm: str) -> RankChoice:
    """Merges ranks as a published algorithm does."""
    request, current, before = question.request, question.current, question.partition
    limit = request.memory_limit
    assert limit is not None, "merging goes by memory"
    sizes = [float(layer.static_bytes + layer.activation_bytes) for layer in request.profile.layers]
    least = -(-question.least // current.replicas)
    partition = BASELINES[algorithm](before, sizes, limit, least)
    mesh = replace(current, pipeline=partition.stages)
    now = plan_as_now(request, current, before)
    plan = now if partition == before else plan_as_now(request, mesh, partition)
    move = partition.stages < current.pipeline
    if move and max(plan.memory) > limit:
        need = max(plan.memory)
        raise NoRoomError(
            f"{algorithm} merges to {mesh.gpus} ranks, of which one needs {need} bytes, over "
            f"{limit}"
        )
    gain = 1 - plan.seconds / now.seconds if now.seconds else 0.0
    what = (
        f"{algorithm}: {mesh.gpus} of {current.gpus} ranks by memory"
        if move
        else f"stay: {algorithm} merges nothing"
    )
    return RankChoice(
        mesh=mesh,
        partition=partition,
        seconds=plan.seconds,
        seconds_now=now.seconds,
        seconds_best_now=now.seconds,
        moved_bytes=0,
        decision=Decision(move, gain, what),
    )
