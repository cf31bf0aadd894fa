"""The race of `benchmarks.expert_parallel` on each of four ranks.

The ranks are two stages of two replicas that share the experts. The layers sleep, so that four
ranks keep two cores no busier than two would.

An attention half sleeps equally long for each microbatch, an expert equally long for each row. The
biases of the routers are fixed: each makes some experts hot, more so in later layers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.harness import OPTIMIZER
from dynmo.cases.experts.layers import ExpertsHalf
from dynmo.change_events import ChangeEvent, RebalanceEvent
from dynmo.config import parse
from dynmo.events import EndEvent, Event, StepResult
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.kernels.split import WeightTape
from dynmo.models.gpt import AttentionHalf
from dynmo.models.model import Model
from dynmo.pipeline.actions import Actions
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer

STAGES, REPLICAS, MICROBATCHES = 2, 2, 8
BLOCKS, EXPERTS, TOP_K, SEQUENCE = 6, 8, 2, 64
ATTENTION, PER_ROW = 5e-3, 60e-6
"""Seconds of F, of B and of W each.

The first is for an attention half, the second for a row in one of an expert's two linears.
"""
SKEW = 0.2
"""The largest difference of the biases, in the last layer. Scores differ by some 0.03."""

SIDES: dict[str, dict[str, Any]] = {
    "static": {},
    "experts placed": {"place_every": 4},
    "layers balanced": {"balancer": "exact"},
    "both": {"place_every": 4, "balancer": "exact"},
}


class Slept:
    """Counts the seconds that this rank's layers have slept.

    Also holds the factor of all sleeps.
    """

    seconds = 0.0
    scale = 1.0


def sleep(seconds: float) -> None:
    """Sleeps, and counts the seconds."""
    Slept.seconds += seconds * Slept.scale
    time.sleep(seconds * Slept.scale)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, tape: WeightTape | None) -> Tensor:
        ctx.seconds, ctx.tape = seconds, tape
        sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        seconds = ctx.seconds
        sleep(seconds)
        if ctx.tape is not None:
            ctx.tape.add(lambda: sleep(seconds))
        return gradients[0], None, None


class SlowExperts(GroupedLinear):
    """Sleeps for each row."""

    def forward(self, x: Tensor, counts: Any) -> Tensor:
        return cast(Tensor, _Sleep.apply(super().forward(x, counts), len(x) * PER_ROW, self.tape))


class SlowAttention(AttentionHalf):
    """Sleeps for each microbatch."""

    tape: WeightTape | None = None

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Sleep.apply(super().forward(x), ATTENTION, self.tape))


def slow(model: Model) -> Model:
    """Returns the model with layers that sleep, and routers that prefer some experts."""

    def build(owned: Collection[int]) -> list[nn.Module]:
        layers = model.build(owned)
        for index, layer in enumerate(layers):
            if type(layer) is AttentionHalf:
                layer.__class__ = SlowAttention
            for half in (x for x in layer.modules() if isinstance(x, ExpertsHalf)):
                half.gate_up.__class__ = half.down.__class__ = SlowExperts
                if index in owned:
                    half.router.bias.copy_(preference(index / len(layers)))
        return layers

    return replace(model, build=build)


def preference(depth: float) -> Tensor:
    """Returns the bias of each expert at a depth of 0 to 1.

    The hot experts lie side by side.
    """
    return torch.tensor([SKEW * depth / math.sqrt(1 + expert) for expert in range(EXPERTS)])


def settings(steps: int, place_every: int = 0, balancer: str = "none") -> dict[str, Any]:
    """Returns the config of a side."""
    model = {
        "kind": "moe",
        "blocks": BLOCKS,
        "hidden": 32,
        "heads": 2,
        "sequence": SEQUENCE,
        "experts": EXPERTS,
        "top_k": TOP_K,
    }
    return {
        "model": model | {"routing": "bias", "bias_rate": 0.0},
        "train": {
            **OPTIMIZER,
            "steps": steps,
            "global_batch": MICROBATCHES * REPLICAS,
            "micro_batch": 1,
            "lr": 1e-4,
            "decay": "constant",
        },
        "parallel": {"pipeline": STAGES, "replicas": REPLICAS, "expert": REPLICAS},
        "pipeline": {"schedule": "zb-h2"},
        "balance": {"balancer": balancer, "every": "auto"},
        "dynamism": {"cases": ["experts"], "experts": {"place_every": place_every, "redundant": 1}},
        "trace": {"steps": 0},
    }


def race(world: Meeting, steps: int, scale: float = 1.0) -> dict[str, Any]:
    """Runs on each rank: a step of every side in turn."""
    Slept.scale = scale
    trainers: dict[str, Trainer] = {}
    events: dict[str, list[Event]] = {name: [] for name in SIDES}
    for name, options in SIDES.items():
        config = parse(settings(steps, **options))
        trainers[name] = Trainer(
            config, world, slow(model_of(config)), None, listen=events[name].append
        )
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    slept = torch.zeros(len(SIDES), steps, world.size, dtype=torch.float64)
    names = list(SIDES)
    for step in range(steps):
        for place in range(len(names)):
            name = names[(step + place) % len(names)]
            world.barrier("the step to start")
            start, Slept.seconds = time.perf_counter(), 0.0
            trainers[name].turn()
            slept[names.index(name), step, world.rank] = Slept.seconds
            world.barrier("the step to end")
            seconds[name].append(time.perf_counter() - start)
    for name, trainer in trainers.items():
        trainer.finish(sum(seconds[name]))
        Actions(trainer.pipeline._engine).on_workload_change(())  # closes its channels
    world.sum(slept, "what the ranks slept")
    if world.rank:
        return {}  # events are told on rank 0
    return {
        name: _account(seconds[name], slept[i].tolist(), events[name])
        for i, name in enumerate(names)
    }


def _account(seconds: list[float], slept: list[list[float]], events: list[Event]) -> dict[str, Any]:
    end = next(event for event in events if isinstance(event, EndEvent))
    return {
        "seconds": seconds,
        "slept": slept,
        "idle": [event.idle_ratio for event in events if isinstance(event, StepResult)],
        "layers": [list(event.layers) for event in events if isinstance(event, StepResult)][-1],
        "moves": [
            [event.step, list(event.target)]
            for event in events
            if isinstance(event, RebalanceEvent)
        ],
        "changes": [[event.step, event.what] for event in events if isinstance(event, ChangeEvent)],
        "loss": end.loss,
        "digest": end.weights_digest,
    }
