"""Emulated layers sleep for given F, B and W seconds, and carry given bytes.

Each is a true layer all the same, y = x (1 + a / 1000) with one weight a. Losses, gradients and
digests therefore mean something.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dynmo.kernels.split import WeightTape
from dynmo.models.model import Model, from_factories
from dynmo.models.options import ModelOptions


def precise_timers() -> None:
    """Asks Linux to wake this process on time.

    The default slack of 50 microseconds adds up over thousands of short sleeps.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, nanoseconds


# Waking up takes some 50 to 100 microseconds, so the end of a sleep is spun away instead. The rest
# is not: if ranks share cores, a rank that spins holds up one that should wake.
_SPIN = 5e-5


def sleep_until(deadline: float) -> None:
    """Sleeps to a moment of time.perf_counter."""
    remaining = deadline - time.perf_counter()
    if remaining > _SPIN:
        time.sleep(remaining - _SPIN)
    while time.perf_counter() < deadline:
        pass


@dataclass
class Pace:
    """The speed of the process that emulates layers. It may change between steps.

    A process of speed 0.5 takes twice the seconds of its layers.
    """

    speed: float = 1.0


class _Scale(torch.autograd.Function):
    """y = x (1 + a / 1000), or its mean in the last layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: nn.Parameter, layer: EmulatedLayer) -> Tensor:
        ctx.save_for_backward(x)
        ctx.a, ctx.layer, ctx.tape = a, layer, layer.tape or WeightTape()
        # One call only: if many ranks share a core, the computation of an emulated op holds up
        # the others.
        y = torch.addcmul(x, x, a, value=1e-3)
        return y.mean() if layer.ends else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        a, layer, tape = ctx.a, ctx.layer, ctx.tape
        deadline = time.perf_counter() + layer.b / layer.pace.speed
        x = ctx.saved_tensors[0].detach()
        gy = (gradients[0] / x.numel()).expand_as(x) if layer.ends else gradients[0]
        gx = torch.addcmul(gy, gy, a, value=1e-3) if ctx.needs_input_grad[0] else None
        work = partial(_weight_work, a, x, gy, layer.w / layer.pace.speed)
        if a.requires_grad and tape.deferred:
            tape.add(work, x, gy)
        sleep_until(deadline)
        if a.requires_grad and not tape.deferred:
            tape.add(work, x, gy)
        return gx, None, None


def _weight_work(a: nn.Parameter, x: Tensor, gy: Tensor, w: float) -> None:
    deadline = time.perf_counter() + w
    gradient = (gy * x).sum()
    if a.grad is None:
        a.grad = torch.zeros_like(a)
    a.grad.add_(gradient, alpha=1e-3)
    sleep_until(deadline)


class EmulatedLayer(nn.Module):
    """Sleeps for `f`, `b` and `w` seconds for each microbatch.

    The first layer turns token ids into a message of `size` float32 numbers. The last layer returns
    the mean of its message, which is the loss.
    """

    tape: WeightTape | None = None

    def __init__(
        self,
        f: float,
        b: float,
        w: float,
        size: int,
        ends: bool = False,
        pace: Pace | None = None,
    ) -> None:
        super().__init__()
        self.pace = pace or Pace()
        self.f, self.b, self.w, self.size, self.ends = f, b, w, size, ends
        self.a = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        deadline = time.perf_counter() + self.f / self.pace.speed
        if not x.is_floating_point():
            x = ((x.float().mean() + 1) / 256).expand(self.size).contiguous()
        y = cast(Tensor, _Scale.apply(x, self.a, self))
        sleep_until(deadline)
        return y


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of the output: emulated layers have no vocabulary."""
    del targets
    return output.mean() if output.dim() else output


def make_layers(
    f: Sequence[float],
    b: Sequence[float],
    w: Sequence[float],
    size: int,
    seed: int = 0,
    pace: Pace | None = None,
) -> Model:
    """Makes a model with one layer per entry of the lists of seconds.

    Args:
        pace: The speed of this process. None: 1.
    """
    precise_timers()
    times = list(zip(f, b, w, strict=True))
    factories = [
        partial(EmulatedLayer, *each, size, i == len(f) - 1, pace) for i, each in enumerate(times)
    ]
    names = [f"emulated.{i}" for i in range(len(factories))]
    return replace(from_factories(names, factories, seed, mean_loss), work=tuple(times))


def make(options: ModelOptions, seed: int, cases: Iterable[Any]) -> Model:
    """Makes the emulated model that options ask for. No case needs other layers."""
    del cases
    given, count = (options.f, options.b, options.w), options.layers
    seconds = [list(x) if isinstance(x, Sequence) else [x] * count for x in given]
    pace = Pace(dict(enumerate(options.speeds)).get(int(os.environ.get("RANK", "0")), 1.0))
    return make_layers(*seconds, size=max(1, options.bytes // 4), seed=seed, pace=pace)
