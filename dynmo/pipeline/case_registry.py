"""The cases that a run names: those of dynmo, and the user's own classes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from dynmo.errors import ConfigError, place
from dynmo.pipeline.case import Dynamism
from dynmo.pipeline.case_options import CaseOptions, RunFacts


def make_cases(cases: Sequence[CaseOptions | Dynamism], run: RunFacts) -> list[Dynamism]:
    """Makes the cases of a run: those with options in the order of their turns, then others."""
    named = {each.name: each for each in cases if isinstance(each, CaseOptions)}
    run = replace(run, cases=named)
    for problem in run.problems():
        raise ConfigError(problem)
    own = [each for each in cases if not isinstance(each, CaseOptions)]
    for each in own:
        _check(each, f"cases: {type(each).__name__}")
    in_turn = sorted(named.values(), key=lambda options: options.turn)
    ready = [*(_make(options, run) for options in in_turn), *own]
    names = [each.name for each in cases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:  # checkpoints keep a case's state by its name
        raise ConfigError(f"dynamism.cases: two are called {twice!r}; give yours another name")
    return ready


def _make(options: CaseOptions, run: RunFacts) -> Dynamism:
    # The class that names the case has it in its folder. A subclass of the user's need not.
    kind = next(each for each in type(options).__mro__ if "name" in vars(each))
    module = f"{kind.__module__.rpartition('.')[0]}.case".removeprefix(".")
    try:
        make = importlib.import_module(module).make
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cases: {kind.__name__} of {kind.__module__}: cannot import make of {module}: "
            f"{error}{place(error)}; write {module} with a function make(options, run)"
        ) from error
    return make(options, run)


def from_class(path: str) -> Dynamism:
    """Makes a case of the user's own class, `package.module:Class`."""
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
    _check(case, where)
    return cast(Dynamism, case)


def _check(case: object, where: str) -> None:
    """Raises ConfigError if an object is no case."""
    methods = [name for name, x in vars(Dynamism).items() if callable(x) and name[0] != "_"]
    missing = [name for name in methods if not callable(getattr(case, name, None))]
    flags = ("announces", "divides_parameters", "wants_samples")
    missing += [name for name in flags if not hasattr(case, name)]
    missing += [] if isinstance(getattr(case, "name", None), str) else ["name"]
    if missing:
        raise ConfigError(
            f"{where}: has no {missing[0]}; inherit from dynmo.Dynamism, give it a name and write "
            "act"
        )
