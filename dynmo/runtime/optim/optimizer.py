"""The optimizer of one layer, and a gradient norm for any placement.

The norm does not depend on the placement. Each layer has its own optimizer object, so its state
travels with it. A frozen layer is simply not stepped: no decay, no moments.

    parameter  -- float32: itself -->  source  -- a share of it -->  piece (AdamW sees it)
               -- lower:  `master` ->

With ZeRO-1 a replica owns a share of each layer, cut at whole norm blocks. A parameter of lower
precision has a float32 master from the time that it trains. It keeps the master when it is frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from dynmo.kernels.torch_private import scale_all

# Elements of a norm block. A squared norm is summed over blocks, then over the blocks in order. So
# it has the same bits however a weight is sharded.
NORM_BLOCK = 1 << 14
_BLOCKS_AT_ONCE = 1 << 8
_MASTER = "master"


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of all optimizers of a run.

    Weight decay acts on matrices only (parameters of two or more dimensions). It is decoupled in
    AdamW and added to the gradient in SGD.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9

    @property
    def moments(self) -> int:
        """The number of state tensors of a parameter's size."""
        return 2 if self.name == "adamw" else int(self.momentum > 0)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.name == "sgd" else ("step", "exp_avg", "exp_avg_sq")


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
    """AdamW or SGD over one layer.

    A parameter that is not float32 is trained through a float32 master.

    Args:
        shared: Names of parameters that another layer owns and updates (tied weights).
        share: The part that is here.
        masters: First masters, by name. The default is the parameters' values, if they train.
        undivided: Names of parameters that are here whole, whatever the share (experts that are
            spread over the replicas).
    """

    def __init__(
        self,
        module: nn.Module,
        settings: OptimizerSettings,
        shared: frozenset[str] = frozenset(),
        share: Share = WHOLE,
        masters: Mapping[str, Tensor] | None = None,
        undivided: Collection[str] = (),
    ) -> None:
        self._settings = settings
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
        self._kept: dict[str, tuple[Tensor, dict[str, Tensor] | None]] | None = None
        # State of each piece that has been stepped, by moment.
        self._state: dict[str, dict[str, Tensor]] = {}

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

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Applies the gradients times `scale`. They stay, multiplied."""
        gradients = self._gradients()
        if not gradients:
            return
        if scale != 1.0:
            scale_all(list(gradients.values()), scale)
        self._fresh = frozenset(gradients) - self._state.keys()
        for decay in (True, False):
            # torch starts the momentum of all parameters that it is given, or of none.
            for fresh in (True, False):
                names = [
                    name
                    for name in gradients
                    if decays(self.parameters[name]) == decay and (name in self._fresh) == fresh
                ]
                if names:
                    self._apply(names, gradients, lr, self._settings.weight_decay if decay else 0.0)
        self._publish(gradients)

    def _apply(
        self, names: Sequence[str], gradients: Mapping[str, Tensor], lr: float, weight_decay: float
    ) -> None:
        """Applies torch's functions. Its optimizer classes take seconds to import."""
        s, pieces = self._settings, [self._pieces[name] for name in names]
        given = [gradients[name] for name in names]
        common: dict[str, Any] = {
            "fused": True,
            "lr": lr,
            "weight_decay": weight_decay,
            "maximize": False,
        }
        with torch.no_grad():
            if s.name == "sgd":
                # Without momentum, the buffers of an earlier run with momentum are dropped.
                buffers = [
                    self._state.get(name, {}).get("momentum_buffer") if s.momentum else None
                    for name in names
                ]
                sgd(
                    pieces,
                    given,
                    buffers,
                    momentum=s.momentum,
                    dampening=0.0,
                    nesterov=False,
                    **common,
                )
                for name, buffer in zip(names, buffers, strict=True):
                    self._state[name] = {} if buffer is None else {"momentum_buffer": buffer}
                return
            for name, piece in zip(names, pieces, strict=True):
                if name not in self._state:
                    moments = {
                        moment: torch.zeros_like(piece, requires_grad=False)
                        for moment in ("exp_avg", "exp_avg_sq")
                    }
                    self._state[name] = {"step": torch.zeros((), device=piece.device)} | moments
            steps, first, second = (
                [self._state[name][moment] for name in names] for moment in s.state_names
            )
            b1, b2 = s.betas
            adamw(
                pieces,
                given,
                first,
                second,
                [],
                steps,
                amsgrad=False,
                beta1=b1,
                beta2=b2,
                eps=s.eps,
                **common,
            )

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
            copy = None if state is None else {key: value.clone() for key, value in state.items()}
            self._kept[name] = self._pieces[name].detach().clone(), copy

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
        self._publish(self._kept)
        self._kept = None

    def invert(self, lr: float) -> None:
        """Takes back the last step by arithmetic (Zero Bubble, in-place rollback).

        It needs no copy, and does not give the same bits. The gradients must still be there. A
        moment whose b is 0 has no past, and becomes 0.

            AdamW  u = lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
                   p = (p + u) / (1 - lr wd)
                   v = (v - (1 - b2) g^2) / b2;  m = (m - (1 - b1) g) / b1;  t = t - 1
            SGD    p = p + lr b;  b = (b - g - wd p) / momentum
        """
        done = self._gradients()
        with torch.no_grad():
            for name, gradient in done.items():
                decay = self._settings.weight_decay if decays(self.parameters[name]) else 0.0
                self._invert(name, self._pieces[name], gradient, lr, decay)
        self._publish(done)

    def _invert(self, name: str, piece: Tensor, g: Tensor, lr: float, decay: float) -> None:
        s, state = self._settings, self._state[name]
        if s.name == "sgd":
            buffer = state.get("momentum_buffer")
            if buffer is None:  # no momentum: the step was lr * (g + wd p)
                piece.add_(g, alpha=lr).div_(1 - lr * decay)
                return
            piece.add_(buffer, alpha=lr)
            buffer.sub_(g).sub_(piece, alpha=decay).div_(s.momentum)
        else:
            first, second, t = state["exp_avg"], state["exp_avg_sq"], state["step"]
            b1, b2 = s.betas
            count = float(t)
            root = (second / (1 - b2**count)).sqrt_().add_(s.eps)
            piece.addcdiv_(first, root, value=lr / (1 - b1**count)).div_(1 - lr * decay)
            # Rounding may leave a negative square.
            second = (
                second.addcmul_(g, g, value=b2 - 1).div_(b2).clamp_(min=0) if b2 else second.zero_()
            )
            first = first.sub_(g, alpha=1 - b1).div_(b1) if b1 else first.zero_()
            t.sub_(1)
        if name in self._fresh:
            self._state.pop(name)

    # -- state that moves and is saved -------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Returns the state of this share, by `parameter/moment` and `parameter/master`.

        Only parameters that have been stepped have moments.
        """
        out = {
            f"{name}/{_MASTER}": master for name, master in self.masters.items() if master.numel()
        }
        return out | {
            f"{name}/{key}": value
            for name in self.parameters
            for key, value in self._state.get(name, {}).items()
        }

    @property
    def moments(self) -> tuple[str, ...]:
        """The names that `state` may hold for a parameter."""
        return (*self._settings.state_names, _MASTER)

    def knows(self, key: str) -> bool:
        """Returns whether `load` can take `parameter/moment`."""
        name, _, moment = key.rpartition("/")
        return (
            name in self.parameters
            and moment in self.moments
            and (moment != _MASTER or needs_master(self.parameters[name]))
        )

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes the tensors that `state` returned, on the device of their parameters."""
        for key, value in state.items():
            name, _, moment = key.rpartition("/")
            if moment == _MASTER:
                self._piece(name).copy_(value)
            else:
                self._state.setdefault(name, {})[moment] = value.to(self.parameters[name].device)

    @property
    def state_bytes(self) -> int:
        """The bytes kept for parameters that train, and state that frozen ones left."""
        held = sum(t.nbytes for t in self.state().values())
        training = [name for name, p in self.parameters.items() if p.requires_grad]
        waiting = sum(self._piece_bytes(name) for name in training if not self._state.get(name))
        thawed = sum(self._piece_bytes(name) for name in training if name not in self._pieces)
        return held + self._settings.moments * waiting + thawed

    @property
    def rollback_bytes(self) -> int:
        """The bytes that `keep` takes."""
        trained = sum(
            self._piece_bytes(name) for name, p in self.parameters.items() if p.requires_grad
        )
        return (1 + self._settings.moments) * trained


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
    flat = gradient.detach().reshape(-1).float()
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
