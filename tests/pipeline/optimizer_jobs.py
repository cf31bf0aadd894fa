"""Optimizers of torch, and jobs of the ranks of `test_optimizers.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dynmo
from tests.pipeline import jobs

BATCH, MICROBATCHES, STEPS = 12, 4, 5
NO_CLIPPING = 0.0


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Linear(4, 6),
        nn.Sequential(nn.Tanh(), nn.LayerNorm(6)),
        nn.Linear(6, 6),
        nn.Linear(6, 3),
    ]


batch = partial(jobs.batch, rows=BATCH)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MUON = partial(torch.optim.Muon, lr=1e-2, weight_decay=0.05)


def muon_on_matrices(name: str, p: nn.Parameter) -> dict[str, Any] | None:
    return {"optimizer": MUON} if p.dim() == 2 else {"lr": 3e-3}


def decay_of_matrices(name: str, p: nn.Parameter) -> dict[str, Any] | None:
    return {"lr": 1e-3} if name == "0.weight" else {"weight_decay": 0.0} if p.dim() < 2 else None


class Counting(torch.optim.Optimizer):
    """Its state is a number, a tensor of another shape and dtype, and one on the CPU."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    signs = torch.sign(p.grad).sum().reshape(1).to(torch.int32)
                    state["signs"] = state.get("signs", torch.zeros_like(signs)) + signs
                    change = p.grad / state["count"] + state["signs"].clamp(-1, 1) * 0.1
                    p.data.add_(change, alpha=-group["lr"])


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": ADAMW, "groups": decay_of_matrices},
    "nesterov": {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)},
    "adafactor": {"optimizer": partial(torch.optim.Adafactor, lr=0.05)},
    "radam": {"optimizer": partial(torch.optim.RAdam, lr=1e-2)},
    "adagrad": {"optimizer": partial(torch.optim.Adagrad, lr=1e-2, lr_decay=0.1)},
    "muon": {"optimizer": ADAMW, "groups": muon_on_matrices},
    "counting": {"optimizer": Counting},
}


def schedulers(name: str, optimizer: torch.optim.Optimizer) -> list[Any]:
    """OneCycleLR moves the momentum, too."""
    if name in ("nesterov", "radam"):
        return [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)]
    return [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))]


def reference(name: str) -> dict[str, Tensor]:
    """Trains the whole model with torch's optimizers in one process."""
    model = nn.Sequential(*layers())
    make, rule = OPTIMIZERS[name]["optimizer"], OPTIMIZERS[name].get("groups")
    by_make: dict[Any, list[dict[str, Any]]] = {}
    for key, p in model.named_parameters():
        options = dict((rule(key, p) if rule else None) or {})
        by_make.setdefault(options.pop("optimizer", make), []).append({"params": [p], **options})
    optimizers = [own(groups) for own, groups in by_make.items()]
    changing = [each for optimizer in optimizers for each in schedulers(name, optimizer)]
    for step in range(STEPS):
        inputs, targets = batch(step)
        model.zero_grad()
        for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            nn.functional.mse_loss(model(x), y).backward(torch.tensor(1 / MICROBATCHES))
        for each in (*optimizers, *changing):
            each.step()
    return model.state_dict()


def make(world: dynmo.World, name: str, **options: Any) -> dynmo.Pipeline:
    given = {"microbatches": MICROBATCHES, "max_grad_norm": NO_CLIPPING} | OPTIMIZERS[name]
    return jobs.make(world, layers(), **given | options)


def train(
    world: dynmo.World, names: Sequence[str], folder: str, resumes: bool, **options: Any
) -> list[dict[str, Any]]:
    """Trains with each optimizer. Layers move at step 2, and step 3 is saved or resumed."""
    out: list[dict[str, Any]] = []
    last = world.size - 1
    for name in names:
        path = f"{folder}/{name}"
        pipeline = make(world, name, **options)
        changing = schedulers(name, pipeline.optimizer)
        if resumes:
            pipeline.load(path)
            for each in changing:
                each.load_state_dict(torch.load(f"{path}/scheduler.pt"))
        for step in range(pipeline.steps, STEPS):
            if step == 2 and last and options.get("replicas", 1) == 1:
                pipeline.move([1] * last + [4 - last])
            if step == 3 and not resumes:
                pipeline.save(path)
                if world.rank == 0:
                    torch.save(changing[0].state_dict(), f"{path}/scheduler.pt")
            replicas = options.get("replicas", 1)
            pipeline.step(*(x.chunk(replicas)[world.rank % replicas] for x in batch(step)))
            for each in changing:
                each.step()
        state = pipeline.state_dict()
        expected = reference(name) if world.rank == 0 else {}
        apart = [float((state[key] - expected[key]).abs().max()) for key in expected]
        told = {"name": name, "weights": pipeline.digest(), "difference": max(apart, default=0.0)}
        out.append(told | {"bytes": [cost.optimizer_bytes for cost in pipeline.measured.costs()]})
    return out


def advance(world: dynmo.World, names: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """Trains without a barrier, and with the changes of `train` before step 2."""
    out: list[dict[str, Any]] = []
    for name in names:
        pipeline = make(world, name, post_validation=True, **options)
        changing = schedulers(name, pipeline.optimizer)
        results: list[dynmo.StepResult] = []
        for step in range(STEPS):
            if step == 2:
                results += pipeline.drain()
                pipeline.move([1, 3])
            results += pipeline.advance(*batch(step))
            for each in changing:
                each.step()
        results += pipeline.drain()
        rollbacks = sum(result.rolled_back for result in results)
        out.append({"name": name, "weights": pipeline.digest(), "rollbacks": rollbacks})
    return out


def sharded(world: dynmo.World, names: Sequence[str]) -> dict[str, str]:
    """Returns the error of each optimizer with ZeRO-1, or an empty string."""
    classes = {each.lower(): getattr(torch.optim, each) for each in dir(torch.optim)}
    out: dict[str, str] = {}
    for name in names:
        given = OPTIMIZERS.get(name) or {"optimizer": classes[name]}
        try:
            jobs.make(world, layers(), microbatches=2, replicas=2, zero=1, **given)
            out[name] = ""
        except dynmo.DynmoError as error:
            out[name] = str(error)
    return out
