"""Names of version 0.1, which are read with a warning until the next version."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar, cast

from dynmo.pipeline.options import RECORDS

P = ParamSpec("P")
T = TypeVar("T")

MOVED = {
    **{name: f"mesh.{name}" for name in ("shape", "replica", "ends", "microbatches", "partition")},
    **{name: f"mesh.{name}" for name in ("schedule", "modules", "identity")},
    **{name: f"measured.{name}" for name in ("loss", "decisions", "costs", "profile", "account")},
    **{name: f"cases.{name}" for name in ("token_shares", "wants_samples", "has_dense")},
    "forget_costs": "measured.forget",
    "save_trace": "measured.save_trace",
    "rebalance": "move",
    "buffers_digest": "digest(buffers=True)",
}
"""Members of `Pipeline`, and where they are now."""


def former_member(pipeline: object, name: str) -> Any:
    if (place := MOVED.get(name)) is None:
        raise AttributeError(f"Pipeline has no {name}", name=name, obj=pipeline)
    _warn(f"Pipeline.{name}", f"Pipeline.{place}", 4)
    member, *given = place.split("(")
    found = attrgetter(member)(pipeline)
    return partial(found, buffers=True) if given else found


def former_read(init: Callable[P, T]) -> Callable[P, T]:
    """Puts arguments of `Pipeline` in the record that has them now."""

    @wraps(init)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        given = cast("dict[str, Any]", kwargs)
        for name, record in RECORDS.items():
            own = {key: given.pop(key) for key in record.model_fields if key in given}
            if own:
                kind = f"{name}=dynmo.{record.__name__}"
                _warn(f"Pipeline({next(iter(own))}=)", f"{kind}({next(iter(own))}=)", 4)
                before = given.get(name, record())
                if isinstance(before, record):  # the call below says what else it is
                    given[name] = record(**{**dict(before), **own})
        return init(*args, **kwargs)

    return call


def _warn(old: str, new: str, level: int) -> None:
    text = f"{old} is {new} now; the old form goes with the next version"
    warnings.warn(text, FutureWarning, stacklevel=level)
