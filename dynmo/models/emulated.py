"""Emulated layers: they sleep for given F, B and W seconds and carry given bytes, so that 24 ranks can be tried on a laptop.

Each is a true layer all the same, y = x (1 + a / 1000) with one weight a, so that losses, gradients and digests mean something.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dynmo.config import Config
from dynmo.kernels.split import WeightTape
from dynmo.models.model import Model, from_factories


def precise_timers() -> None:
    """Asks Linux to wake this process on time: the default slack of 50 microseconds adds up over thousands of short sleeps."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, nanoseconds


# Waking up takes some 50 to 100 microseconds; the end of a sleep is spun away instead.
_SPIN = 1e-4


def sleep_until(deadline: float) -> None:
    """Sleeps to a moment of time.perf_counter, so that what was computed meanwhile counts as part of the sleep."""
    remaining = deadline - time.perf_counter()
    if remaining > _SPIN:
        time.sleep(remaining - _SPIN)
    while time.perf_counter() < deadline:
        pass


class _Scale(torch.autograd.Function):
    """y = x (1 + a / 1000); the backward takes `b` seconds, the weight's part `w` seconds on the tape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: nn.Parameter, b: float, w: float, tape: WeightTape | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.a, ctx.b, ctx.w, ctx.tape = a, b, w, tape
        # One call: where many ranks share a core, what an emulated op computes holds up the others.
        return torch.addcmul(x, x, a, value=1e-3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        deadline = time.perf_counter() + ctx.b
        x = ctx.saved_tensors[0].detach()
        gy, a = gradients[0], ctx.a
        gx = torch.addcmul(gy, gy, a, value=1e-3) if ctx.needs_input_grad[0] else None
        sleep_until(deadline)
        if not a.requires_grad:
            return gx, None, None, None, None
        work = partial(_weight_work, a, x, gy, ctx.w)
        if ctx.tape is None:
            work()
        else:
            ctx.tape.add(work, x, gy)
        return gx, None, None, None, None


def _weight_work(a: nn.Parameter, x: Tensor, gy: Tensor, w: float) -> None:
    deadline = time.perf_counter() + w
    with torch.no_grad():
        gradient = (gy * x).sum()
        if a.grad is None:
            a.grad = torch.zeros_like(a)
        a.grad.add_(gradient, alpha=1e-3)
    sleep_until(deadline)


class EmulatedLayer(nn.Module):
    """Sleeps f, b, w seconds for one microbatch. The first layer turns token ids into a message of `size` float32 numbers."""

    tape: WeightTape | None

    def __init__(self, f: float, b: float, w: float, size: int) -> None:
        super().__init__()
        self.tape = None
        self.f, self.b, self.w, self.size = f, b, w, size
        self.a = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        deadline = time.perf_counter() + self.f
        if not x.is_floating_point():
            x = ((x.float().mean() + 1) / 256).expand(self.size).contiguous()
        y = cast(Tensor, _Scale.apply(x, self.a, self.b, self.w, self.tape))
        sleep_until(deadline)
        return y


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Emulated layers have no vocabulary: the loss is the mean of what comes out."""
    del targets
    return output.mean()


def make_layers(f: Sequence[float], b: Sequence[float], w: Sequence[float], size: int, seed: int = 0) -> Model:
    """One layer per entry of the lists (seconds); messages of `size` float32 numbers."""
    precise_timers()
    factories = [partial(EmulatedLayer, *times, size) for times in zip(f, b, w, strict=True)]
    return from_factories([f"emulated.{i}" for i in range(len(factories))], factories, seed, mean_loss)


def make(config: Config) -> Model:
    m = config.model
    lists = [list(x) if isinstance(x, Sequence) else [x] * m.layers for x in (m.f, m.b, m.w)]
    return make_layers(*lists, size=max(1, m.bytes // 4), seed=config.seed)
