"""The peer: torch.distributed.pipelining's schedules, timed on dynmo's work.

A `TorchPeer` is one rank's part of such a pipeline. Its `step()` runs one whole training step and
returns its seconds. A step is all microbatches forward and backward, with gradients zeroed before
and no optimizer. Make all peers first, then alternate their steps with those of the executor they
are compared with, so that both meet the same machine. Both see the same gloo, threads, batch and
loss.

The stages are real modules, or emulated ones that sleep instead of computing (`emulated_peer`).
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from benchmarks.harness import start_together
from dynmo.models.emulated import precise_timers, sleep_until


@dataclass(frozen=True, slots=True)
class PeerSchedule:
    """One of torch's schedules and how the model is cut for it.

    With two stages on a rank a stage is half as large. A rank's work stays the same, its messages
    double.
    """

    make: Callable[..., Any]
    stages_per_rank: int = 1
    v_shape: bool = False  # rank r holds stages r and 2p-1-r, instead of r and p+r

    def stages(self, ranks: int, rank: int) -> list[int]:
        """Returns the indices of the stages that `rank` holds."""
        if self.v_shape:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + chunk * ranks for chunk in range(self.stages_per_rank)]

    def build(self, stages: list[Any], microbatches: int, **options: Any) -> Any:
        """Makes torch's schedule over this rank's stages."""
        has_one = self.make in (Schedule1F1B, ScheduleGPipe)
        return self.make(stages[0] if has_one else stages, microbatches, **options)


# Each schedule is at its defaults. Comparisons take the fastest, measured in the same run. Fewer
# stages on a rank cost less Python and fewer messages, more stages leave a smaller bubble. The
# winner depends on how long an op is. Ideal step time over work, at 8 ranks, 32 microbatches and
# f = b = w: 1.22, 1.11, 1.07, 1.04, 1.04. Some variants were slower or the same: shapes given
# beforehand (used in the first step only), `defer_pp_recv`, 1F1B's order in the runtime of the
# others, four stages on a rank.
PEERS = {
    "1f1b": PeerSchedule(Schedule1F1B),
    "interleaved-1f1b": PeerSchedule(ScheduleInterleaved1F1B, stages_per_rank=2),
    "zero-bubble": PeerSchedule(ScheduleInterleavedZeroBubble),
    "interleaved-zero-bubble": PeerSchedule(ScheduleInterleavedZeroBubble, stages_per_rank=2),
    "zbv": PeerSchedule(ScheduleZBVZeroBubble, stages_per_rank=2, v_shape=True),
}

GPIPE = PeerSchedule(ScheduleGPipe)
"""The only one of torch's schedules that runs fewer microbatches than there are stages."""


class TorchPeer:
    """One rank of a torch.distributed.pipelining run over the default process group.

    The group's size is the number of ranks. All ranks make the peer, and step it, together. The
    first step is also torch's set-up, which infers the shapes by a forward and a backward of its
    own. Run at least one step before any that counts. The caller sets the threads, for everything
    that it compares.
    """

    def __init__(
        self,
        schedule: str | PeerSchedule,
        microbatches: int,
        build_stage: Callable[[int, int], nn.Module],
        inputs: torch.Tensor,
        targets: torch.Tensor,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        scale_grads: bool = True,
    ) -> None:
        """Makes this rank's part, on the device of `inputs`.

        `scale_grads` divides the gradients by the number of microbatches, whose losses are means.
        """
        kind = PEERS[schedule] if isinstance(schedule, str) else schedule
        ranks, rank = dist.get_world_size(), dist.get_rank()
        count = ranks * kind.stages_per_rank
        indices = kind.stages(ranks, rank)
        self.modules = [build_stage(index, count) for index in indices]
        stages = [
            PipelineStage(module, index, count, inputs.device)
            for module, index in zip(self.modules, indices, strict=True)
        ]
        if ranks == 1:
            # torch 2.11 opens connections by messages, also between stages of one rank. gloo cannot
            # send to itself.
            for stage in stages:
                stage._get_init_p2p_neighbors_ops = list
        self._schedule = kind.build(stages, microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
        self._inputs = (inputs,) if 0 in indices else ()
        self._targets = targets if count - 1 in indices else None
        self._device = inputs.device

    def step(self) -> float:
        """Runs one step and returns the seconds of the slowest rank.

        They count from a start together to the end of the rank's last op. All ranks return the
        same.

        Outputs are not gathered (`return_outputs=False`), since nobody asks for them. Zeroing
        gradients is not timed.
        """
        for module in self.modules:
            module.zero_grad()
        self._settle()
        start = start_together()
        self._schedule.step(*self._inputs, target=self._targets, return_outputs=False)
        self._settle()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class EmulatedStage(nn.Module):
    """A stage that adds a one-element weight to its input, and sleeps.

    It takes `f` seconds forward, `b` for the input's gradient and `w` for the weight's.

    torch splits a backward by walking the autograd graph. The path between output and input belongs
    to the input's gradient. The nodes that hang off it belong to the weight's. torch cannot split
    one node, so the two sleeps are two nodes. One graph of three nodes for a whole stage is the
    least that torch can have to walk:

        input ── _InputPath ──┐
                              add ── output
        weight ─ _WeightPath ─┘

    The stage that `ends` the model gives the mean, the loss, within its F. `slept` counts the
    sleeps of each kind.
    """

    def __init__(self, f: float, b: float, w: float, ends: bool = False) -> None:
        super().__init__()
        self.ends = ends
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = {"F": f, "B": b, "W": w}
        self.slept: Counter[str] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        # A batch needs no gradient. A first stage of several layers still does: all of its
        # layers but the first pass one on.
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = _InputPath.apply(x, self) + _WeightPath.apply(self.weight, x.shape, self)
        y = y.mean() if self.ends else y
        self.sleep("F", start)
        return y

    def sleep(self, kind: str, start: float) -> None:
        """Sleeps until the op has taken its seconds since `start`.

        Arithmetic is part of these seconds, as in dynmo's own emulated layers.
        """
        sleep_until(start + self.seconds[kind])
        self.slept[kind] += 1


class _InputPath(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: EmulatedStage) -> torch.Tensor:
        ctx.stage = stage
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.stage.sleep("B", time.perf_counter())
        return grads[0], None


class _WeightPath(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, shape: torch.Size, stage: EmulatedStage
    ) -> torch.Tensor:
        ctx.stage = stage
        return weight.expand(shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        start = time.perf_counter()
        grad = grads[0].sum().reshape(1)
        ctx.stage.sleep("W", start)
        return grad, None, None


def emulated_peer(
    schedule: str, microbatches: int, f: float, b: float, w: float, message_bytes: int
) -> TorchPeer:
    """Makes a peer whose ranks sleep for each microbatch.

    Each of two stages on a rank sleeps half of a rank's time. The loss is the mean of the output,
    so each weight's gradient is 1.
    """
    precise_timers()
    share = 1 / PEERS[schedule].stages_per_rank
    batch = torch.zeros(microbatches, message_bytes // 4)

    def build(stage: int, stages: int) -> nn.Module:
        return EmulatedStage(f * share, b * share, w * share, stage == stages - 1)

    return TorchPeer(schedule, microbatches, build, batch, batch, lambda output, _target: output)
