"""The types of single values with their limits, and their checks.

The message of a check says what was wrong and what to write instead.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias, cast

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, PlainValidator, TypeAdapter

NOT_SERVED = "known but not served by this version"
# Largest count. A slip of the keyboard should not become an endless loop.
LARGEST = 2**31 - 1
_BYTE_SIZE = TypeAdapter(ByteSize)

# The models that [model] serves.
MODEL_KINDS = ("gpt", "moe", "emulated")

# The cases that [dynamism] serves.
CASES = ("freezing", "pruning", "sparse_attention", "early_exit", "mixture_of_depths", "moe")


def parse_bytes(text: str) -> int:
    """Read a size such as "40GiB", "1.5 GB" or "4096".

    Args:
        text: A number and a unit. KiB to TiB are powers of 1024, KB to TB powers of 1000.
            No unit means bytes. Case does not matter.

    Returns:
        The size in bytes.

    Raises:
        ValueError: The text is not a size.
    """
    try:
        # ByteSize ignores what follows the first size in a text.
        if not re.fullmatch(r"\s*\d{1,15}(\.\d{1,15})?\s*[A-Za-z]*\s*", text, re.ASCII):
            raise ValueError
        return int(_BYTE_SIZE.validate_python(text.strip()))
    except ValueError:
        raise ValueError(
            "not a size; write bytes, or a number and one of KiB, MiB, GiB, TiB, KB, MB, GB, TB, "
            'like "40GiB"'
        ) from None


def value_text(value: object) -> str:
    """Writes a value in one line of TOML, as error messages quote it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(value_text(item) for item in cast(Sequence[object], value))}]"
    if isinstance(value, dict):
        return f"""{{{
            ", ".join(
                f"{key} = {value_text(item)}"
                for key, item in cast(dict[str, object], value).items()
            )
        }}}"""
    return str(value)


def _quoted(values: Collection[str]) -> str:
    return ", ".join(f'"{word}"' for word in values)


def _check_word(
    value: str, served: Collection[str], planned: Collection[str], own: str = ""
) -> str:
    """`own` is how a value of the user's own is written, if that is served too."""
    if value in served:
        return value
    choices = f"choose one of {_quoted(served)}" if len(served) > 1 else f"use {_quoted(served)}"
    choices += f', or "{own}" for your own' if own else ""
    if value in planned:
        raise ValueError(f"{NOT_SERVED}; {choices}")
    near = difflib.get_close_matches(value, served, 1) if len(served) > 1 else ()
    raise ValueError(
        f'unknown; did you mean "{near[0]}"? {choices}' if near else f"unknown; {choices}"
    )


@dataclass(frozen=True, slots=True)
class OneOf(AfterValidator):
    """A check that a value is one of `allowed`.

    Attributes:
        allowed: The served words, for the documentation.
    """

    allowed: tuple[str, ...] = ()


def word(served: Collection[str], planned: Collection[str] = ()) -> OneOf:
    """Returns a check that a value is one of the served words.

    Args:
        served: The words that are allowed.
        planned: Words that a later version may serve. The error message says so.
    """

    def check(value: str) -> str:
        return _check_word(value, served, planned)

    return OneOf(check, tuple(served))


def _check_name(value: str) -> str:
    # The name becomes a folder. It must not lead elsewhere or be hidden.
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", value):
        raise ValueError("must be 1 to 100 letters, digits, '.', '_' or '-', not starting with '.'")
    return value


def _check_kind(value: str) -> str:
    if not value.startswith("python:"):
        return _check_word(value, MODEL_KINDS, ("hf",), "python:package.module:function")
    if not re.fullmatch(r"python:[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise ValueError('a model of your own is written "python:package.module:function"')
    return value


def _check_case(value: str) -> str:
    if not value.startswith("python:"):
        return _check_word(value, CASES, (), "python:package.module:Class")
    if not re.fullmatch(r"python:[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise ValueError('a case of your own is written "python:package.module:Class"')
    return value


def _check_source(value: str) -> str:
    if value.startswith("hf:"):
        raise ValueError(f'{NOT_SERVED}; use "stdlib" or "file:PATH"')
    if value != "stdlib" and (not value.startswith("file:") or value == "file:"):
        raise ValueError('unknown; use "stdlib" or "file:PATH"')
    return value


def _check_seconds(value: object) -> float | tuple[float, ...]:
    # Checked by hand, because pydantic would report one error per alternative of a union.
    if isinstance(value, list | tuple):
        return tuple(_check_one_time(item) for item in cast(Sequence[object], value))
    return _check_one_time(value)


def _check_one_time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
        raise ValueError("must be seconds, 0 or more: a number, or a list of one number per layer")
    return float(value)


def _check_dense_below(value: object) -> float | str | dict[str, float]:
    if value in ("auto", "measured"):
        return cast(str, value)
    if isinstance(value, dict):
        shapes = cast("dict[str, object]", value)
        wrong = next(
            (shape for shape in shapes if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape)), None
        )
        if wrong is not None:
            raise ValueError(
                f'has the key {wrong!r}; a table says shapes of weights, such as "256x1024" = 0.6 '
                "(rows x columns)"
            )
        return {shape: _check_share(share) for shape, share in shapes.items()}
    return _check_share(value)


def _check_share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(
            'must be a share from 0 to 1, a table of shares by shape, "auto" or "measured"'
        )
    return float(value)


def _check_loss_scale(value: object) -> float | str | None:
    if value is None or value == "dynamic":
        return cast("str | None", value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 1 <= value <= 2**64
        or math.frexp(value)[0] != 0.5
    ):
        raise ValueError(
            'must be "dynamic" or a power of two from 1 to 2^64: others would round the gradients'
        )
    return float(value)


def _check_recompute(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return _check_word(value, ("none", "all", "auto"), ())
    items = cast(Sequence[object], value) if isinstance(value, list | tuple) else [None]
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in items):
        raise ValueError('must be "none", "all", "auto", or a list of layer indices from 0 on')
    return tuple(sorted({cast(int, x) for x in items}))


def _check_every(value: object) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        raise ValueError('must be a number of steps greater than or equal to 1, or "auto"')
    return value


def _check_memory(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


def _check_unique(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise ValueError("a case is named twice; name each once")
    return value


def _check_pairs(value: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    for (step, layers), (next_step, next_layers) in itertools.pairwise(value):
        if next_step <= step or next_layers < layers:
            raise ValueError(
                f"[{next_step}, {next_layers}] after [{step}, {layers}]: steps must ascend, and "
                "frozen layers never be fewer"
            )
    return value


def _check_blocks(
    value: tuple[tuple[int, tuple[int, ...]], ...],
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    for (step, _), (next_step, _) in itertools.pairwise(value):
        if next_step <= step:
            raise ValueError(f"step {next_step} after step {step}: steps must ascend")
    return value


def _check_even(value: int) -> int:
    if value % 2:
        raise ValueError(
            f"must be even, for a direction and its opposite are two buckets; use {value + 1}"
        )
    return value


def _check_shapes(value: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    for (step, *_), (next_step, *_) in itertools.pairwise(value):
        if next_step <= step:
            raise ValueError(f"step {next_step} after step {step}: steps must ascend")
    return value


Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST)]
Whole: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
# A longer wait overflows the system's type. More threads take long to start and gain nothing.
Timeout: TypeAlias = Annotated[float, Field(gt=0, le=1e9)]
Threads: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
BelowOne: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
# TOML has lists only, and strict pydantic takes no list for a tuple. Tuples (frozen, hashable) are
# therefore lax. Their items are not.
Lax = Field(strict=False)

Seconds: TypeAlias = Annotated[float | tuple[float, ...], PlainValidator(_check_seconds)]
Bytes: TypeAlias = Annotated[int, Field(ge=0), BeforeValidator(_check_memory)]
MemoryLimit: TypeAlias = Annotated[int | None, Field(ge=1), BeforeValidator(_check_memory)]
RunName: TypeAlias = Annotated[str, AfterValidator(_check_name)]
ModelKind: TypeAlias = Annotated[str, AfterValidator(_check_kind)]
DataSource: TypeAlias = Annotated[str, AfterValidator(_check_source)]
LossScale: TypeAlias = Annotated[float | str | None, PlainValidator(_check_loss_scale)]
Recompute: TypeAlias = Annotated[str | tuple[int, ...], PlainValidator(_check_recompute)]
Every: TypeAlias = Annotated[int | str, PlainValidator(_check_every)]
DenseBelow: TypeAlias = Annotated[
    float | str | dict[str, float], PlainValidator(_check_dense_below)
]
Buckets: TypeAlias = Annotated[Count, AfterValidator(_check_even)]
Blocks: TypeAlias = Annotated[tuple[Whole, ...], Lax]
Cases: TypeAlias = Annotated[
    tuple[Annotated[str, AfterValidator(_check_case)], ...], Lax, AfterValidator(_check_unique)
]

# Values that change at given steps. The steps ascend.
FrozenAt: TypeAlias = Annotated[
    tuple[Annotated[tuple[Whole, Whole], Lax], ...], Lax, AfterValidator(_check_pairs)
]
BlocksAt: TypeAlias = Annotated[
    tuple[Annotated[tuple[Whole, Blocks], Lax], ...], Lax, AfterValidator(_check_blocks)
]
ShapesAt: TypeAlias = Annotated[
    tuple[Annotated[tuple[Count, Count, Count], Lax], ...], Lax, AfterValidator(_check_shapes)
]
