"""The sides of torch.distributed.pipelining in `benchmarks.finetune`, with splits by search.

A stage has dynmo's layers. But where it has both halves of a block, it has the whole block instead,
as transformers runs it.

torch's stages tell each other which outputs need no gradient. So a frozen prefix has no backward,
and the stage behind it sends it nothing. Schedules that split the backward are an exception. torch
loses the gradients of a stage's weights there if the stage's input needs none. So the output of a
frozen stage becomes a leaf that needs one, at which the backward ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from benchmarks.ragged import Step
from benchmarks.torch_peer import PeerSchedule, TorchPeer
from dynmo.models.loss import causal_lm_loss, count_labels
from dynmo.models.model import Model
from dynmo.plan.bisection import exact
from dynmo.plan.chunks import chunked
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.meeting import Meeting

FUSED = (Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B)
"""torch's schedules that do not split the backward."""


class StepLoss:
    """The mean loss over the counted labels of a step, as a sum over its microbatches."""

    def __init__(self, step: Step, microbatches: int) -> None:
        self._total = sum(int(count_labels(labels)) for _, labels in step)
        self._parts = deque[Tensor](maxlen=microbatches)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        part = causal_lm_loss(logits, labels) * (count_labels(labels) / self._total)
        self._parts.append(part.detach())
        return part

    @property
    def value(self) -> float:
        """The loss of the last step. 0 on ranks without the last stage."""
        return sum(part.item() for part in self._parts)


class Stage(nn.Module):
    """Some of the layers, in order. Its output may always need a gradient."""

    def __init__(self, layers: Sequence[nn.Module], needs_gradient: bool) -> None:
        super().__init__()
        self.layers, self.needs_gradient = nn.ModuleList(layers), needs_gradient

    def forward(self, *carried: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(*carried)
            carried = out if isinstance(out, tuple) else (out,)
        (last,) = carried
        if self.needs_gradient and not last.requires_grad:
            return last.detach().requires_grad_()
        return last


class Stages:
    """Makes stages of one model. They share its layers, which this rank has all of.

    Args:
        model: The model whose blocks are halves.
        whole: The same with whole blocks.
    """

    def __init__(self, model: Model, whole: Model) -> None:
        self.model = model
        self._layers = model.build(range(model.layers))
        blocks = whole.build(range(whole.layers))
        at = {name: index for index, name in enumerate(model.names)}
        # The whole block by the index of its first half, which the other half follows.
        self._blocks = {
            at[f"{name}.attention"]: block
            for name, block in zip(whole.names, blocks, strict=True)
            if f"{name}.attention" in at
        }
        for index, block in self._blocks.items():
            halves = self._layers[index], self._layers[index + 1]
            block.load_state_dict(halves[0].state_dict() | halves[1].state_dict())

    def make(self, own: range, needs_gradient: bool) -> Stage:
        """Returns a stage of these layers of the model."""
        layers, index = list[nn.Module](), own.start
        while index < own.stop:
            is_whole = index in self._blocks and index + 1 in own
            layers.append(self._blocks[index] if is_whole else self._layers[index])
            index += 2 if is_whole else 1
        return Stage(layers, needs_gradient)


class TorchSide:
    """One of torch's schedules on one split.

    torch fixes the shapes at a schedule's first step, so each step has a schedule of its own.
    """

    def __init__(
        self,
        schedule: PeerSchedule,
        stages: Stages,
        cut: Partition,
        steps: Sequence[Step],
        microbatches: int,
    ) -> None:
        self.cut = cut
        splits = schedule.make not in FUSED

        def build(stage: int, _: int) -> nn.Module:
            return stages.make(cut.range_of(stage), needs_gradient=splits)

        self._losses = [StepLoss(step, microbatches) for step in steps]
        self._peers = [
            TorchPeer(
                schedule,
                microbatches,
                build,
                torch.cat([ids for ids, _ in step]),
                torch.cat([labels for _, labels in step]),
                loss,
                scale_grads=False,
            )
            for step, loss in zip(steps, self._losses, strict=True)
        ]

    def run(self) -> float:
        """Returns the seconds of all steps on the slowest rank."""
        return sum(peer.step() for peer in self._peers)

    def loss_and_norm(self, world: Meeting) -> tuple[float, float]:
        """Returns the loss and the gradient norm of the first step."""
        peer, loss = self._peers[0], self._losses[0]
        peer.step()
        gradients = [
            parameter.grad.double()
            for module in peer.modules
            for parameter in module.parameters()
            if parameter.grad is not None
        ]
        squares = sum(float(gradient.square().sum()) for gradient in gradients)
        table = world.gather(torch.tensor([loss.value, squares]).double(), "the first step")
        found, squared = cast("list[float]", table.sum(0).tolist())
        return found, squared**0.5


@dataclass(frozen=True)
class Search:
    """A search for the fastest split of each of torch's schedules.

    Every candidate is measured. Candidates are the splits that balance the ranks' work, those of
    dynmo, and splits with one boundary elsewhere.

    Attributes:
        weights: Seconds of each layer.
        others: Splits of dynmo.
        step: The step that is measured.
        ranks: Number of ranks.
        reach: Layers by which a boundary moves. At most one with two stages a rank.
    """

    stages: Stages
    weights: Sequence[float]
    others: Sequence[Partition]
    step: Step
    ranks: int
    reach: int

    def measured(self, schedule: PeerSchedule) -> dict[Partition, float]:
        """Returns the seconds of the step on each candidate, the same on every rank."""
        seconds = dict[Partition, float]()
        for cut in self._candidates(schedule):
            side = TorchSide(schedule, self.stages, cut, [self.step], len(self.step))
            side.run()  # torch's set-up
            seconds[cut] = min(side.run() for _ in range(3))
        return seconds

    def _candidates(self, schedule: PeerSchedule) -> Iterable[Partition]:
        count = self.ranks * schedule.stages_per_rank
        stage_ranks = [0] * count
        for rank in range(self.ranks):
            for stage in schedule.stages(self.ranks, rank):
                stage_ranks[stage] = rank
        starts = [exact(self.weights, count), chunked(self.weights, stage_ranks)]
        starts += [each for each in self.others if each.stages == count]
        reach = self.reach if schedule.stages_per_rank == 1 else min(1, self.reach)
        return dict.fromkeys(cut for start in starts for cut in (start, *_around(start, reach)))


def _around(cut: Partition, reach: int) -> Iterator[Partition]:
    """Yields the splits with one boundary moved by up to `reach` layers."""
    for boundary in range(1, cut.stages):
        for by in (*range(-reach, 0), *range(1, reach + 1)):
            bounds = list(cut.bounds)
            bounds[boundary] += by
            if all(start < stop for start, stop in pairwise(bounds)):
                yield Partition.from_bounds(bounds)
