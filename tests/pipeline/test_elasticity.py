"""The machines that a run gives back, and the ranks that come in place of lost ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from dynmo.elastic.manager import RankPlace
from dynmo.pipeline.elasticity import Elasticity, _nodes
from dynmo.pipeline.options import PipelineOptions
from dynmo.pipeline.resizing import NextMesh
from dynmo.plan.options import Elastic
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore


def test_machine_on_which_the_store_depends_has_no_name() -> None:
    """Under dynmo's launcher, ranks that a user has started do not outlive the others."""
    first, second = RankPlace(0, "a", 1, "a", 0), RankPlace(1, "b", 2, "b", 1)
    by_hand, beside = RankPlace(1, "b", 2, "b"), RankPlace(1, "b", 2, "b", 1, stays=True)
    assert _nodes([first, second]) == ["a", "b"]
    assert _nodes([first, by_hand]) == ["", "b"]
    assert _nodes([first, beside, RankPlace(2, "b", 3, "b", 2)]) == ["a", "", ""]


def engine(ranks: int) -> Any:
    """What elasticity needs of the engine of rank 1."""
    store = SignedStore(dist.HashStore())
    world = Meeting(1, ranks, torch.device("cpu"), 1.0, 0, store, home=store)
    return SimpleNamespace(store=SimpleNamespace(world=world))


def mesh(ranks: int) -> NextMesh:
    return NextMesh(ranks, 1, Partition((1,) * ranks), 4, "back")


def test_a_run_goes_back_to_the_mesh_before_the_first_of_several_faults() -> None:
    options = PipelineOptions(
        microbatches=4, pipeline=4, elastic=Elastic(recover="memory", reshape_at=((5, 2, 2),))
    )
    nothing: Any = None
    elasticity = Elasticity(options, engine(4), nothing, nothing)
    elasticity.grown, elasticity._stops = 3, True
    for left in (3, 2):
        elasticity.recovered(engine(left), nothing, options, (), (), mesh(left + 1))
        lost = elasticity._lost_mesh
        assert lost is not None
        assert (lost.ranks, elasticity.grown, elasticity._stops) == (4, 0, False)
    assert not elasticity.acts(0), "the planned mesh waits for the missing ranks, too"
    told: Any = SimpleNamespace(former=(4, 1, (1, 1, 1, 1), 4, "back"), postponed=(2, 2))
    newcomer = Elasticity(options, engine(3), nothing, nothing, newcomer=told)
    assert (newcomer._lost_mesh, newcomer.acts(5)) == (lost, False)
    assert Elasticity(options, engine(4), nothing, nothing, newcomer=told)._lost_mesh is None
