"""The tag of a message, the dtypes that may travel, and the header that announces them.

A header announces a message's dtypes and shapes. A header is a lead of fixed size, which needs no
announcement itself. The lead holds the numbers of a usual message. The numbers that do not fit
follow in a second tensor, whose length the lead states.

    lead    [n, number 1, ..., number 63]       n: number of all numbers
    rest    [number 64, ..., number n]          only if n > 63
    numbers: ragged, and for each tensor: dtype, marks, dimensions, their sizes
    marks: 1 if it requires a gradient, and 2 if it is an alias (`mark_alias`)
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from dynmo.errors import RunError
from dynmo.schedule.lowering import Channel, Direction

# The dtypes that may travel, by name. A peer's word for a dtype is looked up here and nowhere else.
_NAMES = (
    *("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8"),
    *("uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128"),
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
_CODES = {dtype: code for code, dtype in enumerate(DTYPES.values())}
_BY_CODE = tuple(DTYPES.values())
_PLAIN = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
# NCCL does not know these dtypes. Their tensors travel as bytes.
_UNKNOWN_TO_NCCL = frozenset(
    {torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128}
)

LEAD = 64
MOST_TENSORS = 4096
MOST_DIMENSIONS = 64

Spec = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class Announcement(NamedTuple):
    """What a header tells about a message.

    Attributes:
        spec: Dtypes and shapes.
        differentiable: Whether each tensor gets a gradient.
        ragged: Whether every message of the step has a header of its own.
        aliases: Which tensors share memory with others where they were made.
    """

    spec: Spec
    differentiable: tuple[bool, ...]
    ragged: bool = False
    aliases: tuple[bool, ...] = ()


def mark_alias(tensor: Tensor) -> None:
    """Notes that a write to a tensor would change others, were it not for a copy."""
    tensor.dynmo_alias = True  # pyright: ignore[reportAttributeAccessIssue]


def is_alias(tensor: Tensor) -> bool:
    return getattr(tensor, "dynmo_alias", False)


def spec_of(tensors: tuple[Tensor, ...]) -> Spec:
    return tuple([(t.dtype, tuple(t.shape)) for t in tensors])


def bytes_of(spec: Spec) -> int:
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in spec)


def room_for(spec: Spec, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device=device) for dtype, shape in spec)


def is_plain(out: object) -> TypeGuard[Tensor]:
    """Returns whether this is a tensor that can travel as it is. A quick answer for most."""
    return (
        type(out) is Tensor
        and out.dtype in _PLAIN
        and out.layout is torch.strided
        and not out.is_nested
        and out.is_contiguous()
        and out.dim() <= MOST_DIMENSIONS
    )


def obstacle(tensor: Tensor) -> str | None:
    """Returns why a layer cannot hand on this tensor, or None if it can.

    Backward passes know no complex gradients. A parameter or a buffer may be complex.
    """
    if tensor.is_complex():
        return (
            f"a tensor of {tensor.dtype}, which cannot travel; "
            "let it hand on torch.view_as_real of that"
        )
    if tensor.dtype not in _CODES:
        return f"a tensor of {tensor.dtype}, which cannot travel; known are {', '.join(DTYPES)}"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return (
            f"a {'nested' if tensor.is_nested else str(tensor.layout)} tensor, "
            "which cannot travel; let it hand on a dense one"
        )
    if tensor.dim() > MOST_DIMENSIONS:
        return (
            f"a tensor of {tensor.dim()} dimensions, which cannot travel; "
            f"at most {MOST_DIMENSIONS} can"
        )
    return None


def on_wire(tensor: Tensor) -> Tensor:
    """Returns the same memory as the backend takes it. The tensor must be contiguous."""
    return as_bytes(tensor) if tensor.is_cuda and tensor.dtype in _UNKNOWN_TO_NCCL else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def encode(announced: Announcement) -> tuple[Tensor, ...]:
    """Returns the lead, and the rest if there is one."""
    assert len(announced.spec) <= MOST_TENSORS, "the layer checks this"
    aliases = announced.aliases or (False,) * len(announced.spec)
    numbers = [int(announced.ragged)]
    for (dtype, shape), differentiable, alias in zip(
        announced.spec, announced.differentiable, aliases, strict=True
    ):
        numbers += (_CODES[dtype], differentiable + 2 * alias, len(shape), *shape)
    numbers = [len(numbers), *numbers]
    lead = torch.tensor(numbers[:LEAD] + [0] * (LEAD - len(numbers)), dtype=torch.int64)
    return (
        (lead,) if len(numbers) <= LEAD else (lead, torch.tensor(numbers[LEAD:], dtype=torch.int64))
    )


def rest_of(lead: Tensor, what: str) -> Tensor | None:
    """Makes room for the rest of a header, if the lead announces one."""
    count = int(lead[0])
    if not 1 <= count <= 1 + MOST_TENSORS * (3 + MOST_DIMENSIONS):
        raise _damaged(what, f"it announces {count} numbers")
    missing = count + 1 - LEAD
    return torch.zeros(missing, dtype=torch.int64) if missing > 0 else None


def decode(header: Sequence[Tensor], device: torch.device, what: str) -> Announcement:
    numbers = [n for part in header for n in part.tolist()]
    tensors = list(_tensors(numbers[2 : numbers[0] + 1], what))
    spec = tuple((dtype, shape) for dtype, shape, _ in tensors)
    check_announced(bytes_of(spec), device, what)
    marks = [each for _, _, each in tensors]
    differentiable, aliases = (tuple(bool(each & bit) for each in marks) for bit in (1, 2))
    return Announcement(spec, differentiable, bool(numbers[1]), aliases if any(aliases) else ())


def _tensors(numbers: list[int], what: str) -> Iterator[tuple[torch.dtype, tuple[int, ...], int]]:
    at = 0
    while at < len(numbers):
        code, marks, dimensions = (*numbers[at : at + 3], -1, -1)[:3]
        shape = tuple(numbers[at + 3 : at + 3 + max(0, dimensions)])
        if not 0 <= code < len(_BY_CODE) or len(shape) != dimensions or min(shape, default=0) < 0:
            raise _damaged(
                what, f"it announces a tensor of dtype {code} and {dimensions} dimensions, {shape}"
            )
        yield _BY_CODE[code], shape, marks
        at += 3 + dimensions


def _damaged(what: str, how: str) -> RunError:
    return RunError(
        f"{what}: the header cannot be read, for {how}; do all ranks run the same dynmo?"
    )


def check_announced(size: int, device: torch.device, what: str) -> None:
    """Raises RunError if a size cannot be true, before any memory is asked for."""
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not 0 <= size <= room:
        problem = f"{size} bytes, of which {room} at most can be allocated here"
        raise RunError(f"{what}: it announces {problem}; do all ranks run the same dynmo?")


# Message tags: channels use 2 * boundary + direction. Everything else is above. Headers have tags
# of their own. Messages of one tag fill the receives posted for it in order. The receives of
# headers are posted ahead of those of the tensors.
TAG_HEADERS = 1 << 19
TAG_LINKS = 1 << 20
TAG_MIGRATE = 1 << 21
TAG_TRACE = 1 << 22
TAG_TIED = 1 << 23
TAG_PREFIX = 1 << 24
TAG_VERDICT = 1 << 25
TAG_SUMS = 1 << 26
TAG_END = 1 << 27
TAG_COPY = 1 << 28
TAG_AHEAD = 1 << 29


def tag_of(channel: Channel) -> int:
    return 2 * channel.boundary + (channel.direction is Direction.GRADIENT)
