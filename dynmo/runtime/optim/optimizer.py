"""The parameters of one layer with their optimizer state, and a gradient norm for any placement.

The norm does not depend on the placement. State is kept by parameter, so it travels with the layer.
A frozen layer is simply not stepped: no decay, no moments.

    parameter  -- float32: itself -->  source  -- cut -->  share (the update sees it)
               -- lower:  `master` ->

With ZeRO-1 a replica owns a share of each layer, cut at whole norm blocks. A parameter of lower
precision has a float32 master from the time that it trains. It keeps the master when it is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.runtime.optim.parameter_groups import Group
from dynmo.runtime.optim.trial import NUMBER

# Elements of a norm block. A squared norm is summed over blocks, then over the blocks in order. So
# it has the same bits however a weight is sharded.
NORM_BLOCK = 1 << 14
_BLOCKS_AT_ONCE = 1 << 8
_MASTER = "master"


@dataclass(frozen=True)
class Share:
    """One of `count` equal parts of every layer's optimizer (ZeRO-1)."""

    index: int = 0
    count: int = 1


WHOLE = Share()


def needs_master(parameter: Tensor) -> bool:
    """Returns whether a parameter is trained through a float32 master."""
    return parameter.dtype not in (torch.float32, torch.float64)


def share_ranges(sizes: Sequence[int], share: Share) -> list[tuple[int, int]]:
    """Returns first element and end of each parameter's range in a share.

    The ranges are contiguous over all parameters and consist of whole norm blocks.
    """
    blocks = [-(-size // NORM_BLOCK) for size in sizes]
    total = sum(blocks)
    first, last = (total * i // share.count for i in (share.index, share.index + 1))
    out: list[tuple[int, int]] = []
    start = 0
    for size, count in zip(sizes, blocks, strict=True):
        low, high = (min(size, NORM_BLOCK * max(0, end - start)) for end in (first, last))
        out.append((low, high))
        start += count
    return out


class ParameterShare:
    """A parameter, or this replica's share of it, with its optimizer state.

    Attributes:
        extent: First element and end of the share.
        tensor: The tensor that the update sees. None for a parameter of lower precision that has
            not trained yet.
        state: Empty before the first step.
        is_fresh: Whether the last step made the state.
    """

    def __init__(
        self, parameter: nn.Parameter, group: Group, extent: tuple[int, int], is_whole: bool
    ) -> None:
        self.parameter, self.group, self.extent, self._is_whole = parameter, group, extent, is_whole
        self.tensor: Tensor | None = None
        self.state: dict[str, Any] = {}
        self.is_fresh = False
        self._backup: tuple[Tensor, dict[str, Any]] | None = None

    @property
    def dims(self) -> int:
        return self.parameter.dim() if self._is_whole else 1

    @property
    def master(self) -> Tensor | None:
        return self.tensor if needs_master(self.parameter) else None

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns this share's part of a tensor of the parameter's shape, as a view."""
        return tensor if self._is_whole else tensor.reshape(-1)[slice(*self.extent)]

    def made(self, values: Tensor | None = None) -> Tensor:
        """Returns `tensor`, which is made if the parameter trains for the first time."""
        if self.tensor is None:
            p = self.parameter
            if needs_master(p):
                given = (p if values is None else values).detach().to(p.device, torch.float32)
                self.tensor = self.cut(given.contiguous()).clone()
            else:
                self.tensor = p if self._is_whole else self.cut(p.detach())
        return self.tensor

    def gradient(self) -> Tensor | None:
        """Returns the gradient in the dtype of `tensor`, or None."""
        if self.parameter.grad is None or not self.made().numel():
            return None
        return self.cut(self.parameter.grad).to(self.made().dtype)

    def publish(self) -> None:
        """Rounds the master into the parameter of lower precision, in this share's range."""
        if self.master is not None:
            self.cut(self.parameter.detach()).copy_(self.master)

    def keep(self) -> None:
        """Copies everything that the next step will change."""
        if self.gradient() is not None:
            state = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in self.state.items()
            }
            self._backup = self.made().detach().clone(), state

    def restore(self) -> None:
        if self._backup is not None:
            with torch.no_grad():
                self.made().copy_(self._backup[0])
            self.state = self._backup[1]
            self.publish()
            self.forget()

    def forget(self) -> None:
        self._backup = None

    @property
    def bytes(self) -> int:
        low, high = self.extent
        return (high - low) * self._element

    @property
    def new_bytes(self) -> int:
        """The bytes of the state that the first step makes, as the optimizer's trial has shown."""
        low, high = self.extent
        shape = self.parameter.shape if self._is_whole else (high - low,)
        return self.group.state_bytes(shape, self._element)

    @property
    def _element(self) -> int:
        return 4 if needs_master(self.parameter) else self.parameter.element_size()


class LayerOptimizer:
    """The optimizer state of one layer, which `Update` steps.

    A parameter that is not float32 is trained through a float32 master.

    Args:
        group: Returns the group of a parameter by its name.
        shared: Names of parameters that another layer owns and updates (tied weights).
        share: The part that is here.
        masters: First masters, by name. The default is the parameters' values, if they train.
        undivided: Names of parameters that are here whole, whatever the share (experts that are
            spread over the replicas).
    """

    def __init__(
        self,
        module: nn.Module,
        group: Callable[[str], Group],
        shared: frozenset[str] = frozenset(),
        share: Share = WHOLE,
        masters: Mapping[str, Tensor] | None = None,
        undivided: Collection[str] = (),
    ) -> None:
        named = {name: p for name, p in module.named_parameters() if name not in shared}
        divided = [name for name in named if name not in undivided]
        extents = dict(
            zip(divided, share_ranges([named[x].numel() for x in divided], share), strict=True)
        )
        self._group = group
        self.whole = share.count == 1
        self.shares = {
            name: ParameterShare(p, group(name), extents.get(name, (0, p.numel())), self.whole)
            for name, p in named.items()
        }
        for name, own in self.shares.items():
            if own.parameter.requires_grad or not needs_master(own.parameter):
                own.made((masters or {}).get(name))

    @property
    def masters(self) -> dict[str, Tensor]:
        pairs = ((name, share.master) for name, share in self.shares.items())
        return {name: master for name, master in pairs if master is not None}

    def drop_gradients(self) -> None:
        for share in self.shares.values():
            share.parameter.grad = None

    # -- state that moves and is saved -------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Returns the state of this share, by `parameter/moment` and `parameter/master`.

        Only parameters that have been stepped have moments. All are on the parameters' device.
        """
        masters = self.masters.items()
        out = {f"{name}/{_MASTER}": master for name, master in masters if master.numel()}
        for name, share in self.shares.items():
            device = share.parameter.device
            for key, value in share.state.items():
                if isinstance(value, Tensor):
                    out[f"{name}/{key}"] = value.to(device).contiguous()
                elif value is not None:
                    dtype = torch.float64 if isinstance(value, float) else None
                    out[f"{name}/{key}{NUMBER}"] = torch.tensor(value, dtype=dtype, device=device)
        return out

    def moments(self, name: str) -> tuple[str, ...]:
        """Returns the names that `state` may hold for a parameter."""
        return (*self._group(name).moments(self._dims(name)), _MASTER)

    def is_cut(self, name: str, moment: str) -> bool:
        """Returns whether a moment has an element for each of the parameter's, in this share."""
        return moment == _MASTER or self._group(name).is_cut(moment, self._dims(name))

    def _dims(self, name: str) -> int:
        """A weight that only other replicas hold is a matrix, of which each holder has a part."""
        if name in self.shares:
            return self.shares[name].dims
        return 2 if self.whole else 1

    def knows(self, key: str) -> bool:
        """Returns whether `load` can take `parameter/moment`."""
        name, _, moment = key.rpartition("/")
        return name in self.shares and (
            needs_master(self.shares[name].parameter)
            if moment == _MASTER
            else moment in self.moments(name)
        )

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes the tensors that `state` returned."""
        for key, value in state.items():
            name, _, moment = key.rpartition("/")
            share = self.shares[name]
            if moment == _MASTER:
                share.made().copy_(value)
            elif moment.endswith(NUMBER):
                share.state[moment.removesuffix(NUMBER)] = value.item()
            else:
                tried = share.group.state(share.dims).get(moment)
                like = tried if isinstance(tried, Tensor) else share.parameter
                share.state[moment] = value.to(like.device)

    @property
    def state_bytes(self) -> int:
        """The bytes kept for parameters that train, and state that frozen ones left."""
        held = sum(t.nbytes for t in self.state().values())
        training = [share for share in self.shares.values() if share.parameter.requires_grad]
        waiting = sum(share.new_bytes for share in training if not share.state)
        thawed = sum(share.bytes for share in training if share.tensor is None)
        return held + waiting + thawed

    @property
    def rollback_bytes(self) -> int:
        """The bytes of the copies that take a step back."""
        training = (share for share in self.shares.values() if share.parameter.requires_grad)
        return sum(share.bytes + share.new_bytes for share in training)


def shares_in(layers: Iterable[LayerOptimizer]) -> Iterator[ParameterShare]:
    return (share for layer in layers for share in layer.shares.values())


def squared_norm(gradients: Iterable[Tensor | None]) -> float:
    """Returns the sum of squares in float64 over fixed blocks, in the order given."""
    return fold_blocks(block_sums(*(each for each in gradients if each is not None)))


def fold_blocks(blocks: Iterable[float]) -> float:
    """Adds the sums of blocks one by one, however many there are."""
    total = 0.0
    for block in blocks:
        total += block
    return total


def block_sums(*gradients: Tensor) -> list[float]:
    """Returns the sum of squares of each norm block of gradients or parts of them."""
    sums = [s for gradient in gradients for s in _sums_of(gradient)]
    return torch.cat(sums).tolist() if sums else []


def _sums_of(gradient: Tensor) -> list[Tensor]:
    flat = gradient.detach().reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    whole = flat.numel() // NORM_BLOCK * NORM_BLOCK
    # Not all at once: the squares of a large gradient would take as much memory as it does.
    sums = (
        [
            blocks.square().sum(1)
            for blocks in flat[:whole].view(-1, NORM_BLOCK).split(_BLOCKS_AT_ONCE)
        ]
        if whole
        else []
    )
    if whole < flat.numel():
        sums.append(flat[whole:].square().sum().reshape(1))
    return sums


def clip_factor(norm: float, limit: float) -> float:
    """Returns the factor of gradients that limits their norm. 0 is no limit."""
    return limit / (norm + 1e-6) if limit and norm > limit else 1.0
