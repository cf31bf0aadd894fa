"""The mesh: pipelines of equal placement that train side by side on different microbatches
(replicas).

    8 ranks, 2 replicas         pipeline rank   0      1      2      3
                                 replica 0    rank 0 rank 2 rank 4 rank 6      the pipelines: activations, gradients of inputs
                                 replica 1    rank 1 rank 3 rank 5 rank 7
                                               peers                           same layers: gradients of weights are summed

    global rank = pipeline rank * replicas + replica

Peers are neighbours: what they exchange, all gradients of a step, is more than what passes between
stages.
"""

from __future__ import annotations

from torch import Tensor

from dynmo.errors import ConfigError
from dynmo.runtime.comm.world import World


def arrange(world: World, replicas: int) -> World:
    """This rank's pipeline in a mesh of so many replicas over all of the world's ranks; `peers` and
    `everyone` lead to the others.

    Called on all ranks; again, for another shape of the same ranks, once nothing is under way.
    Raises ConfigError if replicas do not divide the ranks.
    """
    everyone = world.everyone
    if everyone.size % replicas:
        raise ConfigError(
            f"{everyone.size} ranks cannot be {replicas} replicas of one pipeline; take a number of replicas that divides them"
        )
    everyone.reshaped(replicas)
    if replicas == 1:
        return everyone
    pipelines = [tuple(range(replica, everyone.size, replicas)) for replica in range(replicas)]
    positions = [
        tuple(range(first, first + replicas)) for first in range(0, everyone.size, replicas)
    ]
    what = f"the groups of {replicas} replicas"
    return everyone.view(pipelines, what).with_peers(everyone.view(positions, what))


class FirstReplica:
    """Sums over the ranks of one pipeline, the first replica's, for all: what every replica must
    know alike though each could measure it differently (on other data, or in time)."""

    def __init__(self, world: World) -> None:
        self._world = world

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """As `World.sum`; what other replicas give does not count."""
        return self._world.everyone.sum(tensor.zero_() if self._world.replica else tensor, what)

    def sum_all(self, tensor: Tensor, what: str) -> Tensor:
        """As `World.sum` over all replicas, each of which has its own microbatches."""
        return self._world.everyone.sum(tensor, what)
