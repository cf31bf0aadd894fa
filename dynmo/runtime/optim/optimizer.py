"""The optimizer of one layer, and a gradient norm for any placement.

The norm does not depend on the placement. Each layer has its own optimizer object, so its state
travels with it. A frozen layer is simply not stepped: no decay, no moments.

    parameter  -- float32: itself -->  source  -- a share of it -->  piece (the update sees it)
               -- lower:  `master` ->

With ZeRO-1 a replica owns a share of each layer, cut at whole norm blocks. A parameter of lower
precision has a float32 master from the time that it trains. It keeps the master when it is frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dynmo.kernels.torch_private import scale_all
from dynmo.runtime.optim.own_update import OwnUpdate, State
from dynmo.runtime.optim.parameter_groups import LayerGroups, OptimizerSettings, Rates, Settings
from dynmo.runtime.optim.state_form import NUMBER

if TYPE_CHECKING:
    from dynmo.runtime.optim.torch_update import TorchUpdate

# Elements of a norm block. A squared norm is summed over blocks, then over the blocks in order. So
# it has the same bits however a weight is sharded.
NORM_BLOCK = 1 << 14
_BLOCKS_AT_ONCE = 1 << 8
_MASTER = "master"
# Types of the tensors that stand for Python numbers.
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Share:
    """One of `count` equal parts of every layer's optimizer (ZeRO-1)."""

    index: int = 0
    count: int = 1


WHOLE = Share()


def needs_master(parameter: Tensor) -> bool:
    """Returns whether a parameter is trained through a float32 master."""
    return parameter.dtype not in (torch.float32, torch.float64)


def decays(parameter: Tensor) -> bool:
    return parameter.dim() >= 2


def cut(sizes: Sequence[int], share: Share) -> list[tuple[int, int]]:
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


class LayerOptimizer:
    """The optimizer of one layer: dynmo's own, or a user's.

    A parameter that is not float32 is trained through a float32 master.

    Args:
        shared: Names of parameters that another layer owns and updates (tied weights).
        share: The part that is here.
        masters: First masters, by name. The default is the parameters' values, if they train.
        undivided: Names of parameters that are here whole, whatever the share (experts that are
            spread over the replicas).
        groups: Groups of the parameters. The default is one.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        shared: frozenset[str] = frozenset(),
        share: Share = WHOLE,
        masters: Mapping[str, Tensor] | None = None,
        undivided: Collection[str] = (),
        groups: LayerGroups | None = None,
    ) -> None:
        self.parameters = {name: p for name, p in module.named_parameters() if name not in shared}
        divided = [name for name in self.parameters if name not in undivided]
        ranges = dict(
            zip(
                divided,
                cut([self.parameters[name].numel() for name in divided], share),
                strict=True,
            )
        )
        self.ranges = {
            name: ranges.get(name, (0, p.numel())) for name, p in self.parameters.items()
        }
        self.whole = share.count == 1
        self.masters: dict[str, Tensor] = {}
        self._pieces: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            if p.requires_grad or not needs_master(p):
                self._make_piece(name, (masters or {}).get(name, p))
        # Parameters whose state the last step made. Taking that step back drops their state.
        self._fresh: frozenset[str] = frozenset()
        self._kept: dict[str, tuple[Tensor, dict[str, Any] | None]] | None = None
        self._state: State = {}
        matrices = {name for name, p in self.parameters.items() if decays(p)}
        self._update = _make_update(settings, groups or LayerGroups(), matrices)

    def _make_piece(self, name: str, values: Tensor) -> None:
        p = self.parameters[name]
        if needs_master(p):
            given = values.detach().to(p.device, torch.float32).contiguous()
            self.masters[name] = self._pieces[name] = self._slice(name, given).clone()
        else:
            self._pieces[name] = p if self.whole else self._slice(name, p.detach())

    def _piece(self, name: str) -> Tensor:
        """Returns what the optimizer updates. A thawed parameter gets its master now."""
        if name not in self._pieces:
            self._make_piece(name, self.parameters[name])
        return self._pieces[name]

    def _piece_bytes(self, name: str) -> int:
        low, high = self.ranges[name]
        p = self.parameters[name]
        return (high - low) * (4 if needs_master(p) else p.element_size())

    def _slice(self, name: str, tensor: Tensor) -> Tensor:
        """Returns this share's part of a tensor of the parameter's shape, as a view."""
        if self.whole:
            return tensor
        low, high = self.ranges[name]
        return tensor.reshape(-1)[low:high]

    # -- a step ------------------------------------------------------------------------------------

    def _gradients(self) -> dict[str, Tensor]:
        """Returns the gradient of each piece that has one, in the dtype of the piece."""
        out: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            if p.grad is not None and self._piece(name).numel():
                out[name] = self._slice(name, p.grad).to(self._pieces[name].dtype)
        return out

    def step(self, rates: Rates, scale: float = 1.0) -> None:
        """Applies the gradients times `scale`. They stay, multiplied."""
        gradients = self._gradients()
        if not gradients:
            return
        if scale != 1.0:
            scale_all(list(gradients.values()), scale)
        self._fresh = frozenset(gradients) - self._state.keys()
        pieces = {name: self._pieces[name] for name in gradients}
        self._update.step(pieces, gradients, self._state, rates)
        self._publish(gradients)

    def _publish(self, names: Iterable[str]) -> None:
        """Rounds the masters into parameters of lower precision, in this share's range."""
        for name in names:
            master = self.masters.get(name)
            if master is not None:
                self._slice(name, self.parameters[name].detach()).copy_(master)

    def drop_gradients(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    # -- taking it back (Zero Bubble, post-validation) ---------------------------------------------

    def keep(self) -> None:
        """Copies everything that the next `step` will change, for `restore`."""
        self._kept = {}
        for name in self._gradients():
            state = self._state.get(name)
            self._kept[name] = (
                self._pieces[name].detach().clone(),
                None if state is None else {key: _copy(value) for key, value in state.items()},
            )

    def forget(self) -> None:
        self._kept = None

    def restore(self) -> None:
        """Takes back the step since `keep`: the same bits as before it."""
        assert self._kept is not None, "nothing was kept"
        with torch.no_grad():
            for name, (piece, state) in self._kept.items():
                self._pieces[name].copy_(piece)
                if state is None:
                    self._state.pop(name, None)
                else:
                    self._state[name] = state
        self._update.forget()
        self._publish(self._kept)
        self._kept = None

    def invert(self, rates: Rates) -> None:
        """Takes back the last step by arithmetic (Zero Bubble, in-place rollback).

        It needs no copy, and does not give the same bits. The gradients must still be there. Only
        dynmo's own optimizers can.
        """
        assert isinstance(self._update, OwnUpdate), "others keep copies"
        done = self._gradients()
        with torch.no_grad():
            for name, gradient in done.items():
                self._update.invert(name, self._pieces[name], gradient, self._state[name], rates)
                if name in self._fresh:
                    self._state.pop(name)
        self._publish(done)

    # -- state that moves and is saved -------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Returns the state of this share, by `parameter/moment` and `parameter/master`.

        Only parameters that have been stepped have moments. All are on the parameters' device.
        """
        out = {
            f"{name}/{_MASTER}": master for name, master in self.masters.items() if master.numel()
        }
        for name, parameter in self.parameters.items():
            for key, value in self._state.get(name, {}).items():
                if isinstance(value, Tensor):
                    out[f"{name}/{key}"] = value.to(parameter.device).contiguous()
                elif value is not None:
                    out[f"{name}/{key}{NUMBER}"] = torch.tensor(
                        value, dtype=_NUMBERS.get(type(value)), device=parameter.device
                    )
        return out

    def moments(self, name: str) -> tuple[str, ...]:
        """Returns the names that `state` may hold for a parameter."""
        return (*self._update.moments(name, self._dims(name)), _MASTER)

    def is_cut(self, name: str, moment: str) -> bool:
        """Returns whether a moment has an element for each of the parameter's, in this share."""
        return moment == _MASTER or self._update.is_cut(name, moment, self._dims(name))

    def _dims(self, name: str) -> int:
        if not self.whole:
            return 1
        return self.parameters[name].dim() if name in self.parameters else 2

    def knows(self, key: str) -> bool:
        """Returns whether `load` can take `parameter/moment`."""
        name, _, moment = key.rpartition("/")
        return name in self.parameters and (
            needs_master(self.parameters[name])
            if moment == _MASTER
            else moment in self.moments(name)
        )

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes the tensors that `state` returned."""
        for key, value in state.items():
            name, _, moment = key.rpartition("/")
            if moment == _MASTER:
                self._piece(name).copy_(value)
                continue
            own = self._state.setdefault(name, {})
            if moment.endswith(NUMBER):
                own[moment.removesuffix(NUMBER)] = value.item()
            elif self._update.on_cpu(name, moment, self._dims(name)):
                own[moment] = value.cpu()
            else:
                own[moment] = value.to(self.parameters[name].device)

    @property
    def state_bytes(self) -> int:
        """The bytes kept for parameters that train, and state that frozen ones left.

        State that the first step will make counts as the optimizer's trial has shown.
        """
        held = sum(t.nbytes for t in self.state().values())
        training = [name for name, p in self.parameters.items() if p.requires_grad]
        waiting = sum(self._new_bytes(name) for name in training if not self._state.get(name))
        thawed = sum(self._piece_bytes(name) for name in training if name not in self._pieces)
        return held + waiting + thawed

    def _new_bytes(self, name: str) -> int:
        low, high = self.ranges[name]
        shape = self.parameters[name].shape if self.whole else (high - low,)
        return self._update.state_bytes(name, shape, self._piece_bytes(name) // max(1, high - low))

    @property
    def rollback_bytes(self) -> int:
        """The bytes that `keep` takes."""
        trained = (name for name, p in self.parameters.items() if p.requires_grad)
        return sum(self._piece_bytes(name) + self._new_bytes(name) for name in trained)


def _make_update(
    settings: Settings, groups: LayerGroups, matrices: Collection[str]
) -> OwnUpdate | TorchUpdate:
    if isinstance(settings, OptimizerSettings):
        return OwnUpdate(settings, groups, matrices)
    from dynmo.runtime.optim.torch_update import TorchUpdate

    return TorchUpdate(groups)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def squared_norm(gradients: Iterable[Tensor | None]) -> float:
    """Returns the sum of squares in float64 over fixed blocks, in the order given."""
    return fold_blocks(
        block for gradient in gradients if gradient is not None for block in block_sums(gradient)
    )


def fold_blocks(blocks: Iterable[float]) -> float:
    """Adds the sums of blocks one by one, however many there are."""
    total = 0.0
    for block in blocks:
        total += block
    return total


def block_sums(gradient: Tensor) -> list[float]:
    """Returns the sum of squares of each norm block of a gradient or a part of it."""
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
    return torch.cat(sums).tolist() if sums else []


def clip_factor(norm: float, limit: float) -> float:
    """Returns the factor of gradients that limits their norm. 0 is no limit."""
    return limit / (norm + 1e-6) if limit and norm > limit else 1.0
