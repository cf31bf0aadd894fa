"""Loops compiled by numba, which run without Python's lock.

Every rank runs the same machine code, so the bits are the same.
"""

# numba has no types, so `jit` gives them to its functions.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import IndexDataCacheFile

_load = IndexDataCacheFile._load_index


def _load_index(self: IndexDataCacheFile) -> dict[Any, Any]:
    """Takes an index of kept code that cannot be read as empty.

    It is damaged, or it names a class as the argument of a loop that this version does not have.
    """
    try:
        return _load(self)
    except Exception:  # pickle raises any error
        return {}


IndexDataCacheFile._load_index = _load_index

_F = TypeVar("_F", bound=Callable[..., Any])


def jit(*fast: str) -> Callable[[_F], _F]:
    """Compiles a function at its first call.

    Args:
        fast: LLVM's fast-math flags: the changes that it may make to floating-point arithmetic.
    """

    def compiled(function: _F) -> _F:
        # The wrapper is for functions that C calls, and takes its share of the compiler's time.
        options = {"nogil": True, "fastmath": set(fast), "no_cfunc_wrapper": True}
        try:
            return cast(_F, numba.njit(cache=True, **options)(function))
        except RuntimeError:  # no place to keep the code: each process compiles anew
            return cast(_F, numba.njit(**options)(function))

    return compiled


def inner(function: _F) -> _F:
    """Compiles a function that only compiled functions call, together with them."""
    options: dict[str, Any] = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(_F, numba.njit(**options)(function))


def inlined(function: _F) -> _F:
    """Copies a function into its callers. A call in a long loop would count references."""
    return cast(_F, numba.njit(inline="always")(function))
