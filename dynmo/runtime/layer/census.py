"""The parameters of a layer as a step trains them, and the hooks that a layer brings along."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.models.model import hook_problem
from dynmo.runtime.layer.reads import kept_aside

_CALLED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# All that torch keeps of a module's hooks.
_OF_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hook" in name)


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

    def _names_now(self) -> list[str]:
        return [name for name, _ in self._module.named_parameters()]

    def look(self, between_steps: bool) -> list[str]:
        """Looks at all modules before a step.

        Args:
            between_steps: Whether gradients are not those of a step. They are dropped then.

        Returns:
            The names of the modules in evaluation mode.

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
        return evaluating

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
        reason = kept_aside(self._module, self._names, tied)
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
