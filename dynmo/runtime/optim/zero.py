"""ZeRO-1: each replica keeps the optimizer state of its share of a layer. It is made whole where a
layer is saved or goes elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dynmo.runtime.comm.world import World
from dynmo.runtime.optim.optimizer import LayerOptimizer

# A moment that is one number per parameter, whatever its share.
_COUNTER = "step"


def cut_state(optimizer: LayerOptimizer, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a whole layer's optimizer state (`parameter/moment` -> tensor of the parameter's shape),
    what is in the optimizer's share."""
    if optimizer.whole:
        return dict(state)
    out: dict[str, Tensor] = {}
    for key, value in state.items():
        name, _, moment = key.rpartition("/")
        low, high = optimizer.ranges[name]
        if high > low or not optimizer.shapes[name].numel():
            out[key] = value if moment == _COUNTER else value.reshape(-1)[low:high].clone()
    return out


def whole_state(peers: World, optimizer: LayerOptimizer) -> dict[str, Tensor]:
    """The state of a layer of which every peer has a share, on all of them. The inverse of
    `cut_state`."""
    own = optimizer.state()
    if optimizer.whole:
        return own
    what = "the optimizer's state"
    keys = [f"{name}/{moment}" for name in optimizer.ranges for moment in optimizer.moments]
    has = torch.zeros(peers.size, len(keys), dtype=torch.int64)
    has[peers.rank] = torch.tensor([key in own for key in keys])
    holders = peers.sum(has, what).T.tolist()
    out: dict[str, Tensor] = {}
    for key, by_peer in zip(keys, holders, strict=True):
        if not any(by_peer):
            continue
        name, _, moment = key.rpartition("/")
        counter = moment == _COUNTER
        shape = torch.Size(()) if counter else optimizer.shapes[name]
        whole = torch.zeros(shape, dtype=torch.float32 if counter else optimizer.moment_dtype(name), device=peers.device)
        if counter:
            if peers.rank == by_peer.index(1):
                whole.copy_(own[key])
        elif key in own:
            whole.view(-1)[slice(*optimizer.ranges[name])] = own[key].view(-1)
        if whole.numel():
            # As bytes, of which one peer gives each and the others 0: a sum of floats would lose
            # the minus of a zero.
            peers.sum(whole.view(-1).view(torch.uint8), what)
        out[key] = whole
    return out
