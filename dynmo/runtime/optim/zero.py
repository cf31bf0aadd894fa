"""ZeRO-1: each replica keeps the optimizer state of its share of a layer.

The state is made whole when a layer is saved or goes elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dynmo.runtime.comm.headers import DTYPES, as_bytes
from dynmo.runtime.comm.world import World
from dynmo.runtime.optim.optimizer import LayerOptimizer
from dynmo.runtime.optim.spread_reduction import SpreadWeight

_BY_CODE = tuple(DTYPES.values())
_DIMS = 8  # most dimensions of a state that is not cut


def cut_state(optimizer: LayerOptimizer, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the part of a layer's whole state that is in the optimizer's share."""
    out: dict[str, Tensor] = {}
    for key, value in state.items():
        name, _, moment = key.rpartition("/")
        if name not in optimizer.pieces:
            continue  # of a weight that another replica holds
        low, high = optimizer.pieces[name].span
        if optimizer.whole:
            out[key] = value
        elif high > low or not optimizer.pieces[name].parameter.numel():
            is_cut = optimizer.is_cut(name, moment)
            out[key] = value.reshape(-1)[low:high].clone() if is_cut else value
    return out


def whole_state(
    peers: World, optimizer: LayerOptimizer, weights: Sequence[SpreadWeight] = ()
) -> dict[str, Tensor]:
    """Returns the whole state of a layer on all peers, which all call it."""
    own = optimizer.state()
    if optimizer.whole and not weights:
        return own
    what = "the optimizer's state"
    # The range that this replica gives of each parameter, and a tensor like the whole.
    spread = {weight.name: (weight.ranges[peers.rank], weight.parameter) for weight in weights}
    divided = {
        name: (piece.span, piece.parameter)
        for name, piece in optimizer.pieces.items()
        if not optimizer.whole and name not in spread
    }
    parts = divided | spread
    keys = [f"{name}/{moment}" for name in parts for moment in optimizer.moments(name)]
    if not keys:
        return own
    rows = torch.tensor([_header(own.get(key)) for key in keys]).reshape(-1)
    by_peer = peers.gather(rows, what).view(peers.size, len(keys), -1).transpose(0, 1).tolist()
    out = {key: value for key, value in own.items() if key.rpartition("/")[0] not in parts}
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
                whole.copy_(own[key])
        elif key in own:
            part = own[key].view(-1)
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


def whole_parameters(peers: World, weights: Sequence[SpreadWeight]) -> dict[str, Tensor]:
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
