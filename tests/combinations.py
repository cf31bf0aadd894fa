"""Which combinations the everyday suite runs. `make matrix` runs all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_matrix(values: Iterable[Any], everyday: Collection[Any]) -> list[Any]:
    """Parameters of a test, of which the everyday suite runs some.

    Args:
        values: All parameters. A tuple is one set of arguments.
        everyday: The parameters that the everyday suite runs.
    """
    rows = list(values)
    missing = [row for row in everyday if row not in rows]
    assert not missing, f"not among the parameters: {missing}"
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            marks=() if row in everyday else pytest.mark.matrix,
        )
        for row in rows
    ]
