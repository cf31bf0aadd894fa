"""What a layer's modules have beside tensors, and what a step looks at before it trains them.

Parameters must be those that the optimizer has. Hooks, modes, numbers and strings follow a layer
that moves. A step that trains leaves the modes as their owner set them. They travel as the names of
the modules that evaluate, since most layers have none.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.models.model import hook_problem
from dynmo.runtime.layer.reads import second_place_of

_CALLED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes that torch itself sets on a module, and those of them that keep hooks.
OF_TORCH = frozenset(vars(nn.Module()))
_OF_HOOKS = tuple(name for name in OF_TORCH if "hook" in name)


class Census:
    """The parameters that a layer had when it was made. Its optimizer has no others.

    Args:
        name: The layer, for messages.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._names = self._names_now()
        self._parameters = list(module.parameters())
        self._dtypes = {id(p): p.dtype for p in self._parameters}
        # Names of the modules in evaluation mode at the last step. None before the first.
        self._evaluating: list[str] | None = None

    def _names_now(self) -> list[str]:
        return [name for name, _ in self._module.named_parameters()]

    def look(self, between_steps: bool) -> bool:
        """Looks at all modules before a step.

        Args:
            between_steps: Whether gradients are not those of a step. They are dropped then.

        Returns:
            Whether the modes have changed since the last step.

        Raises:
            ConfigError: A parameter would not train as it should.
        """
        evaluating = list[str]()
        for prefix, part in self._module.named_modules():
            if not part.training:
                evaluating.append(prefix)
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if (
                    parameter._backward_hooks
                    or parameter._post_accumulate_grad_hooks
                    or self._dtypes.get(id(parameter)) is not parameter.dtype
                ):
                    self._check(f"the parameter {prefix}.{name}".replace(" .", " "), parameter)
                if between_steps and parameter.grad is not None:
                    parameter.grad = None
        before, self._evaluating = self._evaluating, evaluating
        return before not in (None, evaluating)

    def _check(self, what: str, parameter: Tensor) -> None:
        what = f"{what} of {self._name}"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(hook_problem(what))
        if id(parameter) in self._dtypes:
            raise ConfigError(
                f"{what} was {self._dtypes[id(parameter)]} when the pipeline was made and is "
                f"{parameter.dtype} now; choose the type before, or Pipeline(precision=...)"
            )
        if parameter.requires_grad:
            raise ConfigError(
                f"{what} was not there when the pipeline was made, so no optimizer has it; make it "
                "before, and change its values later (with torch.no_grad(): parameter.copy_(...))"
            )

    def check_names(self) -> None:
        """Raises ConfigError if the layer cannot move or be saved, for other names of parameters.

        It has been pruned, say, or parametrized.
        """
        before, now = self._names, self._names_now()
        if before != now:
            new = ", ".join(name for name in now if name not in before) or "none"
            gone = ", ".join(name for name in before if name not in now) or "none"
            raise ConfigError(
                f"{self._name} got other parameters after the pipeline was made (new: {new}; gone: "
                f"{gone}) and can neither move nor be saved; prune, parametrize or replace before"
            )

    def check_move(self, tied: Collection[str]) -> None:
        """Raises ConfigError if a move, which replaces all parameters, would change the layer.

        Args:
            tied: Parameters that follow another one by themselves.
        """
        reason = second_place_of(self._module, self._names, tied)
        if reason is not None:
            raise ConfigError(f'{self._name} {reason}, or let no layer move (balance="none")')


def hooks_of(module: nn.Module) -> list[str]:
    """Returns the names of the hooks of a module and its submodules. Those of dynmo do not count.

    Example: `linear: forward hook double`.
    """
    return [
        f"{prefix or 'itself'}: {kind.strip('_').replace('_', ' ').removesuffix('s')} {name}"
        for prefix, part in module.named_modules()
        for kind in _CALLED
        for hook in getattr(part, kind).values()
        if not (name := _name(hook)).startswith("dynmo.")
    ]


def _name(hook: Any) -> str:
    while hasattr(hook, "func"):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    home = f"{named.__module__}." if named.__module__.startswith("dynmo.") else ""
    return f"{home}{named.__qualname__}"


def follow_hooks(module: nn.Module, given: nn.Module) -> None:
    """Gives a copy the hooks that its original has by now. Copies of earlier ones stay."""
    originals = dict(given.named_modules())
    for prefix, part in module.named_modules():
        original = originals.get(prefix, part)
        if original is part:
            continue
        for name in _OF_HOOKS:
            theirs, own = getattr(original, name), getattr(part, name)
            if isinstance(own, dict):
                followed = {key: own.get(key, hook) for key, hook in theirs.items()}
                own.clear()
                own.update(followed)
            else:
                setattr(part, name, theirs)


# -- training and evaluation mode ------------------------------------------------------------------


def evaluating_parts(layer: nn.Module) -> list[str]:
    """Returns the names of the modules in evaluation mode. The layer itself is ""."""
    return [name for name, module in layer.named_modules() if not module.training]


def set_modes(layer: nn.Module, evaluating: Collection[str]) -> None:
    """Sets the mode of each module that has another, through the module's own `train`."""
    for name, module in layer.named_modules():
        if module.training == (name in evaluating):
            module.train(name not in evaluating)


@contextmanager
def evaluated(layers: Iterable[nn.Module]) -> Generator[None]:
    """Puts layers into evaluation mode, and their modes back afterwards."""
    before = [(layer, evaluating_parts(layer)) for layer in layers]
    try:
        for layer, _ in before:
            layer.eval()
        yield
    finally:
        for layer, evaluating in before:
            set_modes(layer, evaluating)


# -- numbers and strings ---------------------------------------------------------------------------

Scalar = bool | int | float | str | None
Scalars = dict[str, dict[str, Scalar]]
"""Numbers and strings that the modules of a layer have as attributes, by module and name."""


def scalars_of(module: nn.Module) -> Scalars:
    """Returns those of a user's modules, such as `p` of a dropout, which a loop may change."""
    return {
        prefix: {
            name: value
            for name, value in vars(part).items()
            if name not in OF_TORCH and type(value) in (bool, int, float, str, type(None))
        }
        for prefix, part in module.named_modules()
        if not type(part).__module__.startswith("dynmo.")
    }


def set_scalars(module: nn.Module, scalars: Scalars) -> None:
    for prefix, part in module.named_modules():
        vars(part).update(scalars.get(prefix, {}))
