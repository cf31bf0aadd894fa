"""The mesh: pipelines of equal placement that train side by side (replicas).

Each replica trains on different microbatches.

    8 ranks, 2 replicas         pipeline rank   0      1      2      3
                                 replica 0    rank 0 rank 2 rank 4 rank 6
                                 replica 1    rank 1 rank 3 rank 5 rank 7

    row      a pipeline: activations, and gradients of inputs
    column   peers, which hold the same layers: gradients of weights are summed

    global rank = pipeline rank * replicas + replica

Peers are neighbours. They exchange all gradients of a step, which is more than the messages between
stages.
"""

from __future__ import annotations

from torch import Tensor

from dynmo.errors import ConfigError
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.comm.world import World


def arrange(world: World, replicas: int) -> World:
    """Returns this rank's pipeline in a mesh of `replicas` replicas over all ranks.

    All ranks call it. They may call it again for another shape once nothing is under way. `peers`
    and `everyone` of the pipeline lead to the other ranks.

    Raises:
        ConfigError: The replicas do not divide the ranks.
    """
    everyone = meeting_of(world)
    if everyone.size % replicas:
        raise ConfigError(
            f"{everyone.size} ranks cannot be {replicas} replicas of one pipeline; take a number "
            "of replicas that divides them"
        )
    everyone.shape = replicas
    if replicas == 1:
        return everyone
    pipelines = [tuple(range(replica, everyone.size, replicas)) for replica in range(replicas)]
    positions = [
        tuple(range(first, first + replicas)) for first in range(0, everyone.size, replicas)
    ]
    what = f"the groups of {replicas} replicas"
    return everyone.view(pipelines, what).with_peers(everyone.view(positions, what))


class FirstReplica:
    """Sums over the ranks of the first replica, for values that must be alike."""

    def __init__(self, world: World) -> None:
        self._world = world

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Adds a tensor up like `World.sum`. It is set to zero on other replicas."""
        return self._world.everyone.sum(tensor.zero_() if self._world.replica else tensor, what)

    def sum_all(self, tensor: Tensor, what: str) -> Tensor:
        """Adds a tensor up over all replicas, each of which has its own microbatches."""
        return self._world.everyone.sum(tensor, what)
