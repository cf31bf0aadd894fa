"""What surrounds a call of a user: torch's modes, and names of arguments in messages.

A loop may have no_grad, inference_mode and autocast on around a call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from dynmo.counterparts import check_names
from dynmo.pipeline.argument_names import arguments_named
from dynmo.runtime.comm.world import World

P = ParamSpec("P")
T = TypeVar("T")


def public(method: Callable[P, T]) -> Callable[P, T]:
    """Runs a method that users call as without `no_grad` and `inference_mode` around it.

    Keywords that it does not have are refused, with what to use instead. In a loop of one's own, an
    error names arguments in place of a file's keys. Autocast stays on. It keeps casts of weights
    until it ends, but a step changes the weights.
    """

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        check_names(method, kwargs)
        torch.clear_autocast_cache()
        values = *args, *kwargs.values(), getattr(args[0], "_world", None)
        world = next((each for each in values if isinstance(each, World)), None)
        try:
            with arguments_named(world), torch.inference_mode(False), torch.enable_grad():
                return method(*args, **kwargs)
        finally:
            torch.clear_autocast_cache()

    return run
