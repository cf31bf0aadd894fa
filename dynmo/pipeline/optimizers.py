"""The optimizer that a pipeline is given, and a handle for learning-rate schedulers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynmo.errors import ConfigError
from dynmo.options import find_own
from dynmo.pipeline.optimizer_options import SGD, AdamW, NamedOptimizer
from dynmo.pipeline.options import PipelineOptions
from dynmo.runtime.optim import fused
from dynmo.runtime.optim.parameter_groups import OptimizerSettings, ParameterGroups

# Options that torch's schedulers change, beside rates such as `initial_lr`.
_SCHEDULED = ("lr", "momentum", "betas")
_OF_SCHEDULERS = ("_lr", "_momentum")


def settings_of(options: PipelineOptions) -> OptimizerSettings:
    given = options.optimizer
    if isinstance(given, SGD):
        given = partial(
            fused.SGD, lr=given.lr, weight_decay=given.weight_decay, momentum=given.momentum
        )
    elif isinstance(given, AdamW):
        given = partial(
            fused.AdamW,
            lr=given.lr,
            weight_decay=given.weight_decay,
            betas=(given.betas[0], given.betas[1]),
            eps=given.eps,
        )
    elif isinstance(given, NamedOptimizer):
        given = _named(given)
    return OptimizerSettings(given, options.groups)


def _named(optimizer: NamedOptimizer) -> Callable[..., torch.optim.Optimizer]:
    if optimizer.name.startswith("python:"):
        find_own("train.optimizer", optimizer.name)  # raises in one line if there is none
        module, _, name = optimizer.name.removeprefix("python:").partition(":")
        return partial(getattr(importlib.import_module(module), name), lr=optimizer.lr)
    classes = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim)}
    return partial(classes[optimizer.name], lr=optimizer.lr)


class OptimizerHandle(torch.optim.Optimizer):
    """The groups of a pipeline's optimizers, for torch's schedulers.

    The options in `param_groups` are those of the next step. `step` and `zero_grad` of this object
    do nothing. The weights and the optimizers' state stay with the ranks that hold the layers.

    Attributes:
        code: Functions of the user's own that decide the groups and their optimizers.
    """

    def __init__(self, groups: ParameterGroups) -> None:
        self._is_complete, self.code = False, groups.code
        self._known = [frozenset(group.options) for group in groups.groups]
        super().__init__(
            [{"params": [*x.parameters.values()], **x.options} for x in groups.groups],
            groups.defaults,
        )
        self._is_complete = True

    def options(self, rule: Callable[[float], float] | None = None) -> tuple[dict[str, Any], ...]:
        """Returns the options of all groups in the next step.

        Args:
            rule: Returns the present rate for a group's peak rate.
        """
        out: list[dict[str, Any]] = []
        for group, known in zip(self.param_groups, self._known, strict=True):
            for key in group:
                if key not in known and key != "params" and not key.endswith(_OF_SCHEDULERS):
                    raise ConfigError(
                        f"pipeline.optimizer: {key!r} has no effect there; the optimizer knows "
                        f"{', '.join(sorted(known))}"
                    )
            options = {key: _copy(group[key]) for key in group if key in known}
            if rule is not None and "lr" in options:
                options["lr"] = rule(float(options["lr"]))
            out.append(options)
        return tuple(out)

    def saved(self) -> list[dict[str, Any]]:
        """Returns what schedulers change, as JSON."""
        return [
            {key: _plain(options[key]) for key in _SCHEDULED if key in options}
            for options in self.options()
        ]

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Takes what `saved` returned, if it has as many groups."""
        if len(saved) != len(self.param_groups):
            return
        for group, options in zip(self.param_groups, saved, strict=True):
            for key, value in options.items():
                if key in group:
                    group[key] = tuple(value) if isinstance(value, list) else value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_is_complete", True):
            raise ConfigError(
                "pipeline.optimizer has the groups of the whole model and takes no other; give "
                "the pipeline groups=..., and pipeline.freeze keeps layers from training"
            )
        # torch's own method imports its compiler, which takes a second.
        self.param_groups.append(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Does nothing. `Pipeline.step` calls it, so that schedulers see the order they expect."""
        return None


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return list(value) if isinstance(value, tuple) else value
