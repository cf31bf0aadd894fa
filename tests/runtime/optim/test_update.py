"""Torch's optimizers layer by layer have the bits of one optimizer over the whole model."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.models.sequential import Sequential
from dynmo.runtime.optim.optimizer import LayerOptimizer, shares_in
from dynmo.runtime.optim.parameter_groups import OptimizerSettings, ParameterGroups
from dynmo.runtime.optim.trial import check_is_separable, is_elementwise
from dynmo.runtime.optim.update import Update
from tests.pipeline.optimizer_jobs import OPTIMIZERS, layers
from tests.runtime.optimizers import optimizer_of

CPU = torch.device("cpu")


def give(modules: list[nn.Module], step: int) -> None:
    """Gradients of all parameters but one, which has none at first."""
    generator = torch.Generator().manual_seed(step)
    for index, module in enumerate(modules):
        for name, p in module.named_parameters():
            gradient = torch.randn(p.shape, generator=generator)
            p.grad = None if (index, name, step) == (2, "weight", 0) else gradient


def optimizers(name: str, modules: list[nn.Module]) -> list[LayerOptimizer]:
    settings = OptimizerSettings(OPTIMIZERS[name]["optimizer"], OPTIMIZERS[name].get("groups"))
    groups = ParameterGroups(settings, Sequential(modules), modules, CPU)
    return [LayerOptimizer(m, partial(groups.group, i)) for i, m in enumerate(modules)]


def whole(name: str, modules: list[nn.Module]) -> list[torch.optim.Optimizer]:
    make, rule = OPTIMIZERS[name]["optimizer"], OPTIMIZERS[name].get("groups")
    by_make: dict[Any, list[dict[str, Any]]] = {}
    for key, p in nn.Sequential(*modules).named_parameters():
        options = dict((rule(key, p) if rule else None) or {})
        by_make.setdefault(options.pop("optimizer", make), []).append({"params": [p], **options})
    return [own(groups) for own, groups in by_make.items()]


def weights(modules: list[nn.Module]) -> list[Tensor]:
    return [p.detach().clone() for module in modules for p in module.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layers_have_the_bits_of_the_whole_model(name: str) -> None:
    """After step 2 a step is taken back, and the state goes on in other layers."""
    ours, theirs = layers(), layers()
    own, others, update = optimizers(name, ours), whole(name, theirs), Update()
    for step in range(5):
        if step in (0, 2):  # in the first step nothing has state
            before = weights(ours)
            give(ours, 9)
            shares = list(shares_in(own))
            for share in shares:
                share.keep()
            update.step(dict.fromkeys(own, 1.0), 1.0)
            update.restore(own)
            assert all(map(torch.equal, weights(ours), before))
        if step == 3:
            states = [copy.deepcopy(optimizer.state()) for optimizer in own]
            ours = copy.deepcopy(ours)
            own = optimizers(name, ours)
            update.release()
            for optimizer, state in zip(own, states, strict=True):
                assert all(map(optimizer.knows, state))
                optimizer.load(state)
        give(ours, step)
        give(theirs, step)
        for optimizer in others:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            optimizer.step()
        expected = [optimizer.state_bytes for optimizer in own]
        update.step(dict.fromkeys(own, 1.0), 0.1 / (step + 1))
        for optimizer, bytes_ in zip(own, expected, strict=True):
            numbers = sum(t.nbytes for t in optimizer.state().values() if not t.dim())
            assert optimizer.state_bytes - bytes_ in range(numbers + 1), "the account was right"
        assert all(map(torch.equal, weights(ours), weights(theirs))), f"step {step}"


class Early(torch.optim.Optimizer):
    """Its state is made with it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.zeros_like(p)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] += p.grad.square()
                p.data.addcdiv_(p.grad, self.state[p]["sum"].sqrt(), value=-group["lr"])


def test_first_step_is_taken_back_if_state_is_made_with_the_optimizer() -> None:
    modules = ours, theirs = [nn.Linear(3, 2) for _ in range(2)]
    theirs.load_state_dict(ours.state_dict())
    optimizer, update, whole = optimizer_of(ours, Early), Update(), Early(theirs.parameters())
    for p in (p for module in modules for p in module.parameters()):
        p.grad = torch.ones_like(p)
    for share in optimizer.shares.values():
        share.keep()
    update.step({optimizer: 1.0}, 0.5)
    update.restore([optimizer])
    for _ in range(2):
        update.step({optimizer: 1.0}, 0.1)
        whole.step()
    assert all(map(torch.equal, weights([ours]), weights([theirs])))


class Coupled(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        norm = sum(p.grad.norm() for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad / norm, alpha=-0.1)


class InGroup(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class InAttribute(torch.optim.SGD):
    times = 0

    def step(self, closure: Any = None) -> Any:
        self.times += 1


class InList(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["past"] = [p.grad]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Coupled, "Coupled needs all parameters at once, but each rank has some"),
        (InGroup, "InGroup keeps 'k' outside of its parameters' state"),
        (InAttribute, "InAttribute keeps 'times' outside"),
        (InList, "InList keeps 'past', a list, which can neither move nor be saved"),
    ],
)
def test_optimizers_that_cannot_be_split_are_found(kind: Any, reason: str) -> None:
    module = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=reason):
        ParameterGroups(OptimizerSettings(kind), Sequential([module]), [module], CPU)


class Trust(torch.optim.SGD):
    """LARS: the step of a parameter is as long as a part of the parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.1 * float(p.detach().norm() / p.grad.norm()))


def test_an_optimizer_that_takes_norms_works_not_by_element() -> None:
    assert is_elementwise(torch.optim.SGD, {}, CPU)
    assert not is_elementwise(Trust, {}, CPU)
    check_is_separable(Trust, [({}, [1, 2])], CPU)


def test_trials_leave_the_random_numbers_as_they_were() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check_is_separable(torch.optim.AdamW, [({}, [1, 2])], CPU)
    assert torch.equal(torch.get_rng_state(), before)
