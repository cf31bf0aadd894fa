"""Weights that two layers share (embedding and head), on any ranks.

    one rank      the user's parameter is the owner's memory
    two ranks     a step:  gradients ──┐                      ┌─> the owner's new weight
                           user's rank └─> owner's rank: sum, norm, optimizer

Each use keeps a gradient of its own until the step's end. The weight's gradient is the user's sum
plus the owner's sum, in that order. That holds even if both are on one rank. Only the owner's layer
has optimizer state, so a layer moves as any other does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from dynmo.kernels.split import zero_gradient
from dynmo.models.tied import Pair
from dynmo.runtime.comm.headers import TAG_TIED
from dynmo.runtime.comm.rank_group import RankGroup


class TiedWeights:
    """The shared weights of one model. Each method is called on every rank alike.

    Args:
        rank_of: Returns the rank that holds a layer.
        modules: All layers.
    """

    def __init__(
        self,
        world: RankGroup,
        pairs: Sequence[Pair],
        rank_of: Callable[[int], int],
        modules: Sequence[nn.Module],
    ) -> None:
        self._world, self._pairs, self._rank_of, self._modules = world, pairs, rank_of, modules

    @property
    def spans_ranks(self) -> bool:
        """Whether some weight lives on two ranks, which wait for each other each step."""
        return any(source != target for source, target, *_ in self._uses())

    def _uses(self) -> Iterator[tuple[int, int, nn.Parameter, nn.Parameter]]:
        """Yields the ranks of each weight's owner and user, and the parameters there."""
        for (owner, owner_name), (user, name) in self._pairs:
            owned = self._modules[owner].get_parameter(owner_name)
            used = self._modules[user].get_parameter(name)
            yield self._rank_of(owner), self._rank_of(user), owned, used

    def join(self) -> None:
        """Lets both uses on one rank share one memory, after layers came or went."""
        ends = {(a, b) for a, b, *_ in self._uses()}
        self._world.open_channels(
            sorted((TAG_TIED, *way) for a, b in ends if a != b for way in ((a, b), (b, a)))
        )
        for source, target, owned, used in self._uses():
            if source == target == self._world.rank:
                used.data = owned.data

    def merge(self) -> None:
        """Adds the user's gradient to the owner's, and drops it. Precedes the norm."""
        here = self._world.rank
        for index, (target, source, owned, used) in enumerate(self._uses()):
            if not owned.requires_grad:
                continue
            given = used.grad
            if source != target and here in (source, target):
                given = self._pass_gradient(
                    used if here == source else owned, source, target, index
                )
            if here == target and given is not None:
                owned.grad = given if owned.grad is None else given + owned.grad
            used.grad = None

    def publish(self, frozen: Collection[int]) -> None:
        """Sends the owner's weight to a user on another rank, unless the owner is frozen."""
        here = self._world.rank
        for index, (source, target, owned, used) in enumerate(self._uses()):
            (owner, _), _ = self._pairs[index]
            if source != target and owner not in frozen and here in (source, target):
                weight = owned if here == source else used
                self._pass(weight.detach(), source, target, index, "weight")

    def _pass_gradient(
        self, weight: nn.Parameter, source: int, target: int, index: int
    ) -> Tensor | None:
        """Sends the user's gradient to the owner's rank, if there is one."""
        sends = self._world.rank == source
        is_there = torch.tensor([sends and weight.grad is not None], device=weight.device)
        if not self._pass(is_there, source, target, index, "gradient"):
            return None
        gradient = weight.grad if sends else zero_gradient(weight)
        assert gradient is not None
        return self._pass(gradient, source, target, index, "gradient")

    def _pass(self, tensor: Tensor, source: int, target: int, index: int, what: str) -> Tensor:
        """Sends a tensor from one rank to the other. Returns it, filled where it arrives."""
        world, what = self._world, f"the {what} of tied weight {index}"
        if world.rank == source:
            sent = world.send(tensor.contiguous(), target, TAG_TIED)
            world.wait(sent, target, f"room to send {what}")
        else:
            world.wait(world.receive(tensor, source, TAG_TIED), source, what)
        world.settle()
        return tensor
