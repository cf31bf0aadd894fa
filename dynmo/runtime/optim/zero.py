"""ZeRO-1: each replica keeps the optimizer state of its share of a layer.

The state is made whole when a layer is saved or goes elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dynmo.runtime.comm.headers import as_bytes
from dynmo.runtime.comm.world import World
from dynmo.runtime.optim.expert_reduction import SharedExpert
from dynmo.runtime.optim.optimizer import LayerOptimizer

# The moment that is one number per parameter, whatever its share.
_COUNTER = "step"


def cut_state(optimizer: LayerOptimizer, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the part of a layer's whole state that is in the optimizer's share."""
    out: dict[str, Tensor] = {}
    for key, value in state.items():
        name, _, moment = key.rpartition("/")
        if name not in optimizer.ranges:
            continue  # of an expert that another replica holds
        low, high = optimizer.ranges[name]
        if optimizer.whole:
            out[key] = value
        elif high > low or not optimizer.parameters[name].numel():
            out[key] = value if moment == _COUNTER else value.reshape(-1)[low:high].clone()
    return out


def whole_state(
    peers: World, optimizer: LayerOptimizer, experts: Sequence[SharedExpert] = ()
) -> dict[str, Tensor]:
    """Returns the whole state of a layer on all peers, which all call it."""
    own = optimizer.state()
    if optimizer.whole and not experts:
        return own
    what = "the optimizer's state"
    # The range that this replica gives of each parameter, and a tensor like the whole.
    spread = {expert.name: (expert.ranges[peers.rank], expert.parameter) for expert in experts}
    divided = {
        name: (given, optimizer.parameters[name])
        for name, given in optimizer.ranges.items()
        if not optimizer.whole and name not in spread
    }
    parts = divided | spread
    keys = [f"{name}/{moment}" for name in parts for moment in optimizer.moments]
    has = torch.tensor([int(key in own) for key in keys])
    holders = peers.gather(has, what).T.tolist()
    out = {key: value for key, value in own.items() if key.rpartition("/")[0] not in parts}
    for key, by_peer in zip(keys, holders, strict=True):
        if not any(by_peer):
            continue
        name, _, moment = key.rpartition("/")
        (low, high), like = parts[name]
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        whole = torch.zeros(like.shape, dtype=dtype, device=peers.device)
        if moment == _COUNTER:
            whole = torch.zeros((), device=peers.device)
            if peers.rank == by_peer.index(1):
                whole.copy_(own[key])
        elif key in own:
            part = own[key].view(-1)
            whole.view(-1)[low:high] = part[low:high] if name in spread else part
        # Summed as bytes, of which one peer gives each and the others 0. A sum of floats would
        # lose the minus of a zero.
        peers.sum(as_bytes(whole), what)
        out[key] = whole
    return out


def whole_parameters(peers: World, experts: Sequence[SharedExpert]) -> dict[str, Tensor]:
    """Returns the whole weights of spread experts on all peers, which all call it."""
    out: dict[str, Tensor] = {}
    for expert in experts:
        whole = torch.zeros_like(expert.parameter, requires_grad=False)
        low, high = expert.ranges[peers.rank]
        if high > low:
            whole.view(-1)[low:high] = expert.parameter.detach().view(-1)[low:high]
        out[expert.name] = whole
        peers.sum(as_bytes(whole), "the weights of experts")
    return out
