"""Seconds, bytes, shares and layers as commands show them."""

from __future__ import annotations

from collections.abc import Sequence


def show_time(seconds: float) -> str:
    """Returns seconds with a unit, in four digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if float(f"{seconds * scale:.4g}") >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def show_size(count: int) -> str:
    """Returns bytes with a unit."""
    if count < 1 << 20:
        return f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count} B"
    return f"{show_mebibytes(count)} MiB" if count < 10 << 30 else f"{count / 2**30:,.1f} GiB"


def show_mebibytes(count: float, digits: int = 1) -> str:
    return f"{count / 2**20:,.{digits}f}"


def show_share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def show_change(seconds: float, other: float) -> str:
    return f"{seconds / other - 1:+.1%}" if other else "-"


def plus(counts: Sequence[int]) -> str:
    """Returns the layers of each stage, such as 3+5."""
    return "+".join(map(str, counts))
