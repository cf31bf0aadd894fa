"""Options of balancing: `dynmo.Balance`, and the section [balance]."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import PlainValidator

from dynmo.options import LARGEST, Count, Lax, NonNegative, Options, word


def _check_every(value: object) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        raise ValueError('must be a number of steps greater than or equal to 1, or "auto"')
    return value


Every: TypeAlias = Annotated[int | str, PlainValidator(_check_every)]

BALANCERS = (
    "none",
    "uniform",
    "exact",
    "schedule-aware",
    "diffusion",
    "random",
    "deepspeed-uniform",
    "deepspeed-parameters",
    "deepspeed-time",
    "megatron-uniform",
    "megatron-embedding-loss",
    "algorithm-3",
)


class Balance(Options):
    """Decides where layers live: by which algorithm, by which cost and how often."""

    balancer: Annotated[str, word(BALANCERS)] = "exact"
    """Algorithm that places the layers."""
    cost: Annotated[str, word(("time", "parameters"))] = "time"
    """Cost of a layer: its measured seconds, or its number of parameters."""
    every: Every = "auto"
    """Steps between two decisions, or `auto`: decide when the work or the imbalance of the ranks
    has changed."""
    initial: Annotated[tuple[Count, ...] | None, Lax] = None
    """First placement: number of layers on each stage. Not set: as even as possible."""
    margin: NonNegative = 1.0
    """A move must save this many times the seconds that it takes."""
    hysteresis: NonNegative = 0.02
    """A move must save at least this share of a step."""
