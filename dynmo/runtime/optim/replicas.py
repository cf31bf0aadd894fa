"""Exchange between the replicas of a pipeline, which have the same layers.

They sum their gradients and, with ZeRO-1, exchange updated parameters. Both travel layer by layer
while the rank goes on (`gradient_reduction.py`). With ZeRO-1 each replica keeps the optimizer state
of its share of a layer. The state is made whole when the layer is saved or goes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dynmo.models.tied import Pair
from dynmo.runtime.comm.headers import DTYPES, as_bytes
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.optim.gradient_reduction import (
    Reducer,
    ReplicatedWeight,
    drop_missing,
    gather_parameters,
    reduce_gradients,
    replicated_weights,
    squared_norms,
)
from dynmo.runtime.optim.optimizer import WHOLE, LayerOptimizer, Share


class Replicas:
    """This rank's side of the exchange.

    Args:
        tied: Weights that two layers share.
        sharded: Whether each replica keeps a share of the optimizer's state (ZeRO-1).
    """

    def __init__(self, world: RankGroup, tied: Sequence[Pair], sharded: bool) -> None:
        self._tied, self._sharded = tied, sharded
        self.renew(world)
        # Those of each own layer, in the order of its parameters.
        self._weights: dict[int, list[ReplicatedWeight]] = {}

    @property
    def share(self) -> Share:
        """The part of every layer's optimizer that is here."""
        return Share(self._world.replica, self._world.replicas) if self._sharded else WHOLE

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of collectives over the replicas, and those that no work hid."""
        return (0.0, 0.0) if self._reducer is None else (self._reducer.worked, self._reducer.waited)

    def adopt(
        self,
        index: int,
        module: nn.Module,
        shared: frozenset[str],
        weights: Sequence[ReplicatedWeight] = (),
    ) -> None:
        """Takes note that this rank has a layer.

        Args:
            shared: Names of parameters that another layer owns.
            weights: Weights of the layer that are spread over the replicas.
        """
        all_weights = [*weights]
        if self._reducer is not None:
            spread = {weight.name for weight in weights}
            all_weights += replicated_weights(module, shared, self._world.replicas, spread)
        # Of spread weights, this replica may hold none.
        names = [
            f"{path}.{key}".lstrip(".")
            for path, part in module.named_modules()
            for key in part._parameters
        ]
        self._weights[index] = sorted(all_weights, key=lambda weight: names.index(weight.name))

    def drop(self, index: int) -> None:
        del self._weights[index]

    def spread(self, index: int) -> list[ReplicatedWeight]:
        """Returns the weights of an own layer that are spread over the replicas."""
        return [weight for weight in self._weights[index] if weight.is_spread]

    def _divided(self, index: int) -> list[ReplicatedWeight]:
        return [weight for weight in self._weights[index] if not weight.is_spread]

    def reduction(self, index: int) -> Callable[[], None] | None:
        """Returns the function to call when the layer's last W has run, or None."""
        return None if self._reducer is None else partial(self._reduce_layer, index)

    def _reduce_layer(self, index: int) -> None:
        """Sends a layer's gradients to the other replicas while this rank goes on."""
        assert self._reducer is not None
        # The sum of tied weights is made before it is cut.
        tied = any(index in (owner, user) for (owner, _), (user, _) in self._tied)
        everywhere = tied or not self._sharded
        divided, spread = self._divided(index), self.spread(index)

        def work() -> Callable[[], None]:
            missing = reduce_gradients(self._world.peers, index, spread)
            missing += reduce_gradients(self._world.peers, index, divided, everywhere)
            return partial(drop_missing, missing)

        self._reducer.submit(work)

    def squared_norms(self) -> dict[int, float] | None:
        """Returns the squared norms of this rank's layers, or None if all are whole."""
        if self._reducer is None or not (self._sharded or any(map(self.spread, self._weights))):
            return None
        return squared_norms(self._world.peers, dict(sorted(self._weights.items())))

    def send_parameters(self, index: int) -> None:
        """Exchanges shares of a layer's parameters meanwhile, with ZeRO-1."""
        if self._reducer is not None and self._sharded:
            self._reducer.submit(
                partial(gather_parameters, self._world.peers, index, self._divided(index))
            )

    def finish(self, what: str) -> None:
        """Waits until all that was sent to the other replicas has arrived."""
        if self._reducer is not None:
            self._reducer.finish(what)

    def renew(self, world: RankGroup) -> None:
        """Goes on with the same replicas, which have met anew."""
        self._world = world
        # There is one if there are other replicas.
        self._reducer = Reducer(world.peers) if world.replicas > 1 else None

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()


_BY_CODE = tuple(DTYPES.values())
_DIMS = 8  # most dimensions of a state that is not cut


def cut_state(optimizer: LayerOptimizer, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the part of a layer's whole state that is in the optimizer's share."""
    out: dict[str, Tensor] = {}
    for key, value in state.items():
        name, _, moment = key.rpartition("/")
        if name not in optimizer.shares:
            continue  # of a weight that another replica holds
        low, high = optimizer.shares[name].extent
        if optimizer.whole:
            out[key] = value
        elif high > low or not optimizer.shares[name].parameter.numel():
            is_cut = optimizer.is_cut(name, moment)
            out[key] = value.reshape(-1)[low:high].clone() if is_cut else value
    return out


def whole_state(
    peers: RankGroup, optimizer: LayerOptimizer, weights: Sequence[ReplicatedWeight] = ()
) -> dict[str, Tensor]:
    """Returns the whole state of a layer on all peers, which all call it."""
    state = optimizer.state()
    if optimizer.whole and not weights:
        return state
    what = "the optimizer's state"
    # The range that this replica gives of each parameter, and a tensor like the whole.
    spread = {weight.name: (weight.ranges[peers.rank], weight.parameter) for weight in weights}
    divided = {
        name: (share.extent, share.parameter)
        for name, share in optimizer.shares.items()
        if not optimizer.whole and name not in spread
    }
    parts = divided | spread
    keys = [f"{name}/{moment}" for name in parts for moment in optimizer.moments(name)]
    if not keys:
        return state
    rows = torch.tensor([_header(state.get(key)) for key in keys]).reshape(-1)
    by_peer = peers.gather(rows, what).view(peers.size, len(keys), -1).transpose(0, 1).tolist()
    out = {key: value for key, value in state.items() if key.rpartition("/")[0] not in parts}
    for key, headers in zip(keys, by_peer, strict=True):
        holder = next((peer for peer, header in enumerate(headers) if header[0]), None)
        if holder is None:
            continue
        name, _, moment = key.rpartition("/")
        (low, high), like = parts[name]
        code, count, *sizes = headers[holder]
        is_cut = optimizer.is_cut(name, moment)
        shape = like.shape if is_cut else sizes[:count]
        whole = torch.zeros(shape, dtype=_BY_CODE[code - 1], device=peers.device)
        if not is_cut:
            if peers.rank == holder:
                whole.copy_(state[key])
        elif key in state:
            part = state[key].view(-1)
            whole.view(-1)[low:high] = part[low:high] if name in spread else part
        # Summed as bytes, of which one peer gives each and the others 0. A sum of floats would
        # lose the minus of a zero.
        peers.sum(as_bytes(whole), what)
        out[key] = whole
    return out


def _header(tensor: Tensor | None) -> list[int]:
    """Returns dtype and shape of a tensor, and zeros for None."""
    if tensor is None:
        return [0] * (2 + _DIMS)
    padding = [0] * (_DIMS - tensor.dim())
    return [1 + _BY_CODE.index(tensor.dtype), tensor.dim(), *tensor.shape, *padding]


def whole_parameters(peers: RankGroup, weights: Sequence[ReplicatedWeight]) -> dict[str, Tensor]:
    """Returns the spread weights whole on all peers, which all call it."""
    out: dict[str, Tensor] = {}
    for weight in weights:
        whole = torch.zeros_like(weight.parameter, requires_grad=False)
        low, high = weight.ranges[peers.rank]
        if high > low:
            whole.view(-1)[low:high] = weight.parameter.detach().view(-1)[low:high]
        out[weight.name] = whole
        peers.sum(as_bytes(whole), "the spread weights")
    return out
