"""Loops compiled by numba, without Python's lock: the same machine code on every rank, so the same
bits."""

# numba has no types: its functions are given theirs by `jit`.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import numba

_F = TypeVar("_F", bound=Callable[..., Any])


def jit(*fast: str) -> Callable[[_F], _F]:
    """fast: what LLVM may change about floating-point arithmetic, by its fast-math flags."""

    def compiled(function: _F) -> _F:
        try:
            return cast(_F, numba.njit(nogil=True, fastmath=set(fast), cache=True)(function))
        except RuntimeError:  # nowhere to keep the compiled code: it is made anew in each process
            return cast(_F, numba.njit(nogil=True, fastmath=set(fast))(function))

    return compiled


def jit_as(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a function that Python calls, together with all that it calls, at its first call.

    Args:
        signature: The types of the result and the arguments, as numba writes them.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @cache
        def compiled() -> Callable[..., Any]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    return numba.njit(signature, cache=True)(function)
                except Exception:  # nowhere to keep the code, or a damaged file there, which pickle meets with any error it likes
                    return numba.njit(signature)(function)

        @wraps(function)
        def call(*arguments: Any) -> Any:
            return compiled()(*arguments)

        return call

    return decorate
