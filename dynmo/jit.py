"""Loops compiled by numba, without Python's lock: the same machine code on every rank, so the same bits."""

# numba has no types: its functions are given theirs by `jit`.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
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
