"""The cases that a config names: those of dynmo, and the user's own classes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

from dynmo.dynamism import early_exit, freezing, mixture_of_depths, moe, pruning, sparse_attention
from dynmo.dynamism.case import Dynamism
from dynmo.errors import ConfigError, place


def make_cases(config: Any, layers: int) -> list[Dynamism]:
    """Makes the cases that `[dynamism]` names.

    Args:
        config: The run.
        layers: Number of layers of the model.

    Returns:
        The cases in the order in which they act. It does not depend on the order in the config. The
        user's own cases come last, as named.

    Raises:
        ConfigError: A case is unknown, or two have one name.
    """
    makers: dict[str, Callable[[Any, int], Dynamism]] = {
        "pruning": pruning.make,
        "sparse_attention": sparse_attention.make,
        "early_exit": early_exit.make,
        "mixture_of_depths": mixture_of_depths.make,
        "moe": moe.make,
        "freezing": freezing.make,
    }
    named: Sequence[str] = config.dynamism.cases
    unknown = [case for case in named if case not in makers and not case.startswith("python:")]
    if unknown:
        raise ConfigError(
            f"dynamism.cases: {unknown[0]!r} is not served by this version; choose from "
            f"{', '.join(makers)}"
        )
    own = [from_class(case.removeprefix("python:")) for case in named if case.startswith("python:")]
    cases = [*(make(config, layers) for case, make in makers.items() if case in named), *own]
    names = [case.name for case in cases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:  # checkpoints keep a case's state by its name
        raise ConfigError(f"dynamism.cases: two are called {twice!r}; give yours another name")
    return cases


def from_class(path: str) -> Dynamism:
    """Makes a case of the user's own class.

    Args:
        path: `package.module:Class`. It is called without arguments.

    Raises:
        ConfigError: The path does not lead to a case.
    """
    where = f"dynamism.cases: 'python:{path}'"
    module_name, _, class_name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
        case = None if getattr(kind, "__abstractmethods__", ()) else kind()
    except ImportError as error:
        raise ConfigError(
            f"{where}: cannot import {module_name}: {error}; run from its folder or install it"
        ) from error
    except AttributeError as error:
        if getattr(error, "name", None) != class_name:
            raise ConfigError(f"{where}: raised AttributeError: {error}{place(error)}") from error
        raise ConfigError(f"{where}: {module_name} has no class {class_name}") from None
    except Exception as error:  # anything that the user's code raises
        raise ConfigError(
            f"{where}: raised {type(error).__name__}: {error}{place(error)}"
        ) from error
    missing = [
        x
        for x in (
            "act",
            "check",
            "observe",
            "forecast",
            "collect",
            "dense",
            "state",
            "load",
            "acts",
        )
        if not callable(getattr(case, x, None))
    ]
    missing += [] if isinstance(getattr(case, "name", None), str) else ["name"]
    if missing:
        raise ConfigError(
            f"{where}: has no {missing[0]}; inherit from dynmo.dynamism.Dynamism, give it a name "
            "and write act"
        )
    return cast(Dynamism, case)
