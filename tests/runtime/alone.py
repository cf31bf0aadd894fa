"""A pipeline of one rank in the test's own process: no process group, no pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynmo.config import parse
from dynmo.models.emulated import make_layers
from dynmo.models.loss import next_token_loss
from dynmo.models.model import Model, from_factories
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.engine.batch_check import Inputs, StepBatch, StepSettings, Targets
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.executor import StepOutput
from dynmo.runtime.engine.step_reduction import StepRecord
from dynmo.runtime.optim.parameter_groups import Rates
from dynmo.runtime.options import EngineOptions
from dynmo.train.setup import model_of

MICROBATCHES = 3
GPT = {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 8}


def alone() -> Meeting:
    return Meeting(0, 1, torch.device("cpu"), 5.0, 0, SignedStore(dist.HashStore()))


def pipeline(model: Model, schedule: str = "zb-h1", **options: Any) -> Engine:
    how = EngineOptions(schedule, microbatches=MICROBATCHES, **options)
    return Engine(alone(), model, Partition((model.layers,)), how)


def around(*middle: Callable[[], nn.Module]) -> Model:
    """A model of an embedding, these layers and a head."""
    factories = [partial(nn.Embedding, 256, 8), *middle, partial(nn.Linear, 8, 256)]
    names = ["tokens", *(f"middle.{i}" for i in range(len(middle))), "head"]
    return from_factories(names, factories, 0, next_token_loss)


def gpt(**model: Any) -> Engine:
    return pipeline(model_of(parse({"model": GPT | model})))


def emulated(f: Sequence[float], b: Sequence[float], w: Sequence[float]) -> Engine:
    """Seconds of F, B and W are one number per layer."""
    return pipeline(make_layers(f, b, w, size=64))


def advance(
    engine: Engine,
    step: int,
    inputs: Inputs,
    targets: Targets,
    *,
    lr: Rates,
    max_norm: float = 0.0,
    flag: int = 0,
    work: float = 0.0,
) -> tuple[StepRecord, ...]:
    """Trains on a batch, and returns the results that are final."""
    return engine.train(StepBatch(inputs, targets, work), StepSettings(step, lr, max_norm, flag))


def run_step(engine: Engine, step: int, inputs: Inputs, targets: Targets, **how: Any) -> StepRecord:
    """Trains on a batch, and waits until the step is final."""
    return (advance(engine, step, inputs, targets, **how) + engine.drain())[-1]


def run_half(engine: Engine, step: int, inputs: Inputs, targets: Targets) -> StepOutput:
    """Runs forward and backward, without the end of the step."""
    return engine.programs.train(StepBatch(inputs, targets), step, 1.0)


def end_step(
    engine: Engine, step: int, output: StepOutput, *, lr: Rates, max_norm: float = 0.0
) -> StepRecord:
    """Ends the step that `run_half` has begun."""
    settings, end = StepSettings(step, lr, max_norm), engine.optimizer_step
    record, failed, error = end.agree(settings, output)
    assert error is None
    return end.update(record, failed, settings)


def ids() -> Tensor:
    return torch.zeros(MICROBATCHES, 1, dtype=torch.int64)


def tokens(step: int, sequence: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and targets [MICROBATCHES, 2, sequence]. Targets are the next tokens."""
    text = torch.randint(
        256, (MICROBATCHES, 2, sequence + 1), generator=torch.Generator().manual_seed(step)
    )
    return text[..., :-1], text[..., 1:]
