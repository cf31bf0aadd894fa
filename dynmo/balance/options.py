"""Options of balancing: `dynmo.Balance`, and the section [balance]."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, get_args

from dynmo.options import OWN, Count, Listed, NonNegative, Options, written

BalancerName: TypeAlias = Literal["none", "uniform", "exact", "diffusion"]
BALANCERS: tuple[BalancerName, ...] = get_args(BalancerName)
OWN_BALANCER = "python:package.module:NAME"


class Balance(Options):
    """Decides where layers live: by which algorithm, by which cost and how often."""

    balancer: BalancerName | Annotated[str, written(OWN, OWN_BALANCER)] = "exact"
    """Algorithm that places the layers, or your own: `python:package.module:NAME`."""
    cost: Literal["time", "parameters"] = "time"
    """Cost of a layer: its measured seconds, or its number of parameters."""
    every: Literal["auto"] | Count = "auto"
    """Steps between two decisions, or `auto`: decide when the work or the imbalance of the ranks
    has changed."""
    initial: Listed[Count] | None = None
    """First placement: number of layers on each stage. Not set: as even as possible."""
    margin: NonNegative = 1.0
    """A move must save this many times the seconds that it takes."""
    hysteresis: NonNegative = 0.02
    """A move must save at least this share of a step."""
