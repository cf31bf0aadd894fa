"""What an optimizer keeps for a parameter, by the parameter's dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Takes groups of parameters, as torch's optimizers do."""
NUMBER = ":number"
"""End of the name of a state that is a Python number."""


class StateForm(NamedTuple):
    """A tensor or number of a parameter's state.

    Attributes:
        shape: Size of each dimension. None is the parameter's own.
        dtype: None is the parameter's own.
        on_cpu: Whether it stays on the CPU, wherever the parameter is.
        is_number: Whether it is a Python number.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None
    on_cpu: bool = False
    is_number: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether it has an element for each of the parameter's."""
        return bool(self.shape) and all(size is None for size in self.shape)

    def bytes(self, shape: Sequence[int], element: int) -> int:
        """Returns its bytes beside a parameter. A number counts as none."""
        if not self.shape:
            return 0
        size = element if self.dtype is None else self.dtype.itemsize
        own = (*shape, *[1] * len(self.shape))
        return size * math.prod(
            theirs if size is None else size for size, theirs in zip(self.shape, own, strict=False)
        )


Forms = Mapping[str, StateForm]


def name_of(make: object) -> str:
    """Returns the name of a function behind its `functools.partial`."""
    while isinstance(make, partial):
        make = cast(object, make.func)
    return getattr(make, "__name__", type(make).__name__)
