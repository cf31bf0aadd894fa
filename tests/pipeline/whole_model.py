"""Jobs of the ranks of `test_whole_model.py`. Each returns JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynmo
from dynmo.config import parse
from dynmo.errors import CheckpointError
from dynmo.models.model import Model
from dynmo.pipeline.whole_model import WholeModel
from dynmo.plan.partition import uniform
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from dynmo.train.setup import model_of
from tests.pipeline.jobs import batch, make
from tests.runtime.alone import advance, alone, run_step, tokens

MICROBATCHES = 2
SMALL: dict[str, Any] = {"blocks": 1, "hidden": 8, "heads": 2, "sequence": 8}


class Block(nn.Module):
    """A module under two names, a persistent buffer, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("shift", torch.tensor(0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale + self.shift


def layers(
    seed: int = 0, replicas: int = 1, precision: str = "float32", **_: Any
) -> list[nn.Module]:
    """Layers with running statistics, where replicas and precision allow that."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(8) if (replicas, precision) == (1, "float32") else nn.LayerNorm(8)
    return [nn.Linear(4, 8), norm, Block(), nn.Sequential(nn.Tanh(), nn.Linear(8, 3))]


def trained(
    world: Meeting, modules: list[nn.Module], steps: int = 2, **options: Any
) -> dynmo.Pipeline:
    given = {"microbatches": MICROBATCHES, "optimizer": dynmo.AdamW(lr=0.01)}
    pipeline = make(world, modules, **given | options)
    for step in range(steps):
        pipeline.step(*own_batch(world, step, options.get("replicas", 1)))
    return pipeline


def own_batch(world: Meeting, step: int, replicas: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(step)
    replica = world.rank % replicas
    return inputs.chunk(replicas)[replica], targets.chunk(replicas)[replica]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """True if keys, their order, dtypes and values are equal."""
    return list(a) == list(b) and all(
        a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a
    )


def own_is(pipeline: dynmo.Pipeline, state: Mapping[str, Tensor]) -> bool:
    """True if this rank's modules have the values of `state`, rounded to their precision."""
    return all(
        torch.equal(state[f"{index}.{name}"].to(value.dtype), value)
        for index, module in pipeline.mesh.modules.items()
        for name, value in module.state_dict().items()
    )


def gathered(world: Meeting, **options: Any) -> dict[str, bool]:
    """Gathers a trained model on rank 0, and everywhere."""
    pipeline = trained(world, layers(**options), **options)
    state, some = pipeline.state_dict(everywhere=True), pipeline.state_dict()
    plain = nn.Sequential(*layers(**options))
    plain.load_state_dict(state)
    replicas = options.get("replicas", 1)
    by_itself = trained(
        alone(), layers(**options), **options | {"schedule": "1f1b", "replicas": 1}
    ).state_dict()
    return {
        "keys": list(state) == list(plain.state_dict()),
        "own": own_is(pipeline, state),
        "rank 0": same(some, {} if world.rank else state),
        "alone": replicas > 1 or same(state, by_itself),
        "float32": all(value.dtype == torch.float32 for key, value in state.items() if "w" in key),
    }


def loaded(world: Meeting, replicas: int = 1, **options: Any) -> dict[str, bool]:
    """Loads a state that rank 0 alone has, and trains on."""
    pipeline = trained(world, layers(replicas=replicas, **options), replicas=replicas, **options)
    engine = pipeline._engine
    plain = nn.Sequential(*layers(7, replicas, **options)).eval()
    wanted = plain.state_dict()
    before = {
        key: value.clone()
        for _, optimizer in engine.store.own.values()
        for key, value in optimizer.state().items()
        if not key.endswith("/master")
    }
    pipeline.load_state_dict(wanted if world.rank == 0 else None)
    after = {
        key: value for _, own in engine.store.own.values() for key, value in own.state().items()
    }
    seen = {
        "own": own_is(pipeline, wanted),
        "state": same(pipeline.state_dict(everywhere=True), wanted),
        "moments": bool(before) and same(before, {key: after[key] for key in before}),
    }
    given = own_batch(world, 2, replicas)
    loss = pipeline.evaluate(*given, outputs=True)
    inputs, targets = batch(2)
    expected = nn.functional.mse_loss(plain(inputs), targets).item()
    rounded = options.get("precision", "float32") != "float32"
    seen["loss"] = math.isclose(loss, expected, rel_tol=0.05 if rounded else 1e-5)
    pipeline.step(*given)
    pipeline.digest()  # raises if replicas differ
    return seen


def refused(world: Meeting) -> list[Any]:
    """Returns the errors of states that do not fit, each with whether the weights stayed."""
    pipeline = trained(world, layers(), 0)
    before = pipeline.digest()
    good = nn.Sequential(*layers(7)).state_dict()
    key = "2.first.bias"
    seen: list[Any] = []
    for wrong in (
        {name: value for name, value in good.items() if name != key},
        {**good, "4.weight": torch.zeros(1)},
        {**good, key: torch.zeros(9)},
        {**good, key: [0.0] * 8},
        None,
    ):
        given: Any = good if world.rank else wrong
        with pytest.raises(CheckpointError) as error:
            pipeline.load_state_dict(given)
        seen.append([str(error.value), pipeline.digest() == before])
    return seen


def outputs(world: Meeting, schedule: str = "zb-h1", replicas: int = 1) -> dict[str, Any]:
    """Evaluates with outputs, and without targets."""
    modules = layers(replicas=replicas)
    pipeline = trained(world, modules, 1, schedule=schedule, replicas=replicas, balance="none")
    plain = nn.Sequential(*layers(replicas=replicas)).eval()
    plain.load_state_dict(pipeline.state_dict(everywhere=True))
    inputs, targets = own_batch(world, 5, replicas)
    loss = pipeline.evaluate(inputs, targets, outputs=True)
    unknown = pipeline.evaluate(inputs, outputs=True)
    out, other = loss.outputs, unknown.outputs
    expected = torch.cat([plain(x) for x in inputs.chunk(MICROBATCHES)])
    last = len(modules) - 1 in pipeline.mesh.modules
    return {
        "last": last,
        "loss": loss == pipeline.evaluate(inputs, targets),
        "equal": all(
            isinstance(y, Tensor) and torch.equal(y, expected) and not y.requires_grad
            if last
            else y is None
            for y in (out, other)
        ),
        "unknown": math.isnan(unknown),
    }


def without_batch(world: Meeting) -> list[float]:
    """The middle rank calls `step` and `evaluate` without arguments."""
    pipeline = trained(world, layers(), 0)
    given = batch(0) if world.rank != 1 else ()
    return [pipeline.step(*given).loss, pipeline.evaluate(*given)]


def odd_outputs(world: Meeting) -> list[Any]:
    """Outputs that are a pair of tensors, and outputs that cannot be concatenated."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y, 2 * y

    class Sum(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).sum()

    torch.manual_seed(0)
    seen: list[Any] = []
    for last in (Pair(), Sum(4, 3)):
        model = dynmo.Sequential(
            [nn.Linear(4, 4), last], loss=lambda y, t: (y[0] if isinstance(y, tuple) else y).mean()
        )
        pipeline = dynmo.Pipeline(model, world, microbatches=MICROBATCHES)
        try:
            out = pipeline.evaluate(*batch(0), outputs=True).outputs
            seen.append(out and [torch.equal(out[1], 2 * out[0]), list(out[0].shape)])
        except dynmo.DynmoError as error:
            seen.append(str(error))
    return seen


# -- engines with other options --------------------------------------------------------------------


def engine(
    world: Meeting, model: Model, replicas: int = 1, post: bool = False, **sharing: Any
) -> Engine:
    """An engine in bfloat16 that has trained two steps.

    The last one clips. With `post` it is pending, and its update did not clip.
    """
    mesh = arrange(world, replicas)
    built = Engine(
        mesh,
        model,
        uniform(model.layers, mesh.size),
        EngineOptions(
            "1f1b", microbatches=3, post_validation=post, dtype=torch.bfloat16, **sharing
        ),
    )
    for step in range(2):
        advance(built, step, *tokens(2 * step + mesh.replica), lr=0.01, max_norm=0.1 * step)
    return built


def special(world: Meeting, kind: str) -> dict[str, Any]:
    """Gathers and loads with tied weights, ZeRO-1, spread experts, or a pending step."""
    mixture = {"model": {**SMALL, "kind": "moe", "experts": 4}, "dynamism": {"cases": ["experts"]}}
    config = parse(mixture if kind == "experts" else {"model": {**SMALL, "tied": kind == "tied"}})
    model = model_of(config)
    options: dict[str, Any] = {
        "tied": {},
        "zero": {"replicas": 2, "zero": 1},
        "experts": {"replicas": 2, "expert": 2},
        "pending": {"post": True},
    }[kind]
    ours = engine(world, model, **options)
    state = WholeModel(ours).state_dict(everywhere=True)
    plain = {"replicas": options["replicas"]} if "replicas" in options else {}
    expected = engine(world if plain else alone(), model, **plain)
    added = {key: value + 1 for key, value in state.items()}
    seen: dict[str, Any] = {
        "state": same(state, WholeModel(expected).state_dict(everywhere=True)),
        "keys": list(state),
    }
    WholeModel(ours).load_state_dict(added if world.rank == 0 else None)
    seen["loaded"] = same(WholeModel(ours).state_dict(everywhere=True), added)
    seen["weights"] = all(
        torch.equal(weight, added[f"{model.names[index]}.{name}"].to(weight.dtype))
        for index, (module, _) in ours.store.own.items()
        for name, weight in module.named_parameters()
    )
    run_step(ours, 2, *tokens(world.rank if plain else 0), lr=0.01)
    ours.digest()
    if kind == "tied":
        key = "head.logits.weight"
        with pytest.raises(CheckpointError) as error:
            WholeModel(ours).load_state_dict({**added, key: added[key] + 1})
        seen["error"] = str(error.value)
    return seen
