"""The header of a message: what tells its receiver how many tensors come, of which dtypes and shapes. Of fixed size, so it needs none."""

from __future__ import annotations

import torch
from torch import Tensor

from dynmo.errors import RunError

HEADER = 64  # int64 numbers: count, then per tensor dtype, dimensions, sizes
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.int8)

Spec = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def encode(spec: Spec) -> Tensor:
    numbers = [len(spec)]
    for dtype, shape in spec:
        if dtype not in _DTYPES:
            raise RunError(f"a layer hands on a tensor of {dtype}, which cannot travel; known are {', '.join(map(str, _DTYPES))}")
        numbers += [_DTYPES.index(dtype), len(shape), *shape]
    if len(numbers) > HEADER:
        raise RunError(f"a message of {len(spec)} tensors with so many dimensions does not fit the channel's header")
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64)


def decode(header: Tensor) -> Spec:
    numbers = header.tolist()
    spec: list[tuple[torch.dtype, tuple[int, ...]]] = []
    at = 1
    for _ in range(numbers[0]):
        dtype, dimensions = _DTYPES[numbers[at]], numbers[at + 1]
        spec.append((dtype, tuple(numbers[at + 2 : at + 2 + dimensions])))
        at += 2 + dimensions
    return tuple(spec)


def spec_of(tensors: tuple[Tensor, ...]) -> Spec:
    return tuple((t.dtype, tuple(t.shape)) for t in tensors)
