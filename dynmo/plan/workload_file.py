"""Reads and checks a workload's TOML file, and the trace that it may name.

A trace has the costs of the layers over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from dynmo.cost.input_file import (
    Link,
    Strict,
    Time,
    first_problem,
    read_json,
    read_text,
    short,
    unknown_key,
)
from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import AT_MOST, SIZES, TIMES, alias
from dynmo.errors import InputError
from dynmo.files import parse_toml
from dynmo.options import parse_bytes
from dynmo.plan.speeds import Speeds
from dynmo.plan.workload import Policy, Workload
from dynmo.schedule.bounds import Objective
from dynmo.schedule.memory import Limit

_Unit = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
_Speed = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Steps = Annotated[int, Field(ge=1, le=10**7)]
_Whole = Annotated[int, Field(ge=0, le=1 << 60)]
_Sizes = _Whole | list[_Whole]


_Times = tuple[list[float], list[float], list[float]]  # seconds of F, B and W of each layer


class _Moment(Strict):
    step: _Whole
    f: list[Time]
    b: list[Time]
    w: list[Time]


class _Costs(Strict):
    trace: str | None = None
    moments: list[_Moment] | None = None
    unit: _Unit = 1.0
    names: list[str] | None = None


_size_fields: dict[str, Any] = {
    key: (_Sizes | None, None)
    if key in AT_MOST
    else (_Sizes, Field(0, validation_alias=alias(key)))
    for key in SIZES
}
_Sized = create_model("_Sized", __base__=_Costs, **_size_fields)


class _Layers(_Sized):
    """The section [layers]."""


class _Policy(Strict):
    balancer: str = "exact"
    cost: Literal["time", "parameters"] = "time"
    every: _Count = 10
    margin: Time = 1.0
    hysteresis: Time = 0.02
    initial: list[_Count] | None = None
    seconds_per_byte: Time | None = None
    seed: _Whole = 0


class _File(Strict):
    name: str | None = None
    steps: _Steps
    ranks: _Count
    microbatches: _Count
    replicas: _Count = 1
    schedule: str = "zb-h1"
    chunks: _Count | None = None
    objective: Literal["span", "makespan"] = "makespan"
    memory_limit: _Count | str | list[_Count | str] | None = None
    speeds: list[_Speed] | None = None
    layers: _Layers
    policy: _Policy = _Policy()
    link: Link = Link()
    replica_link: Link | None = None


class _Trace(BaseModel):
    """The costs of a trace. Further keys say where a trace is from."""

    model_config = ConfigDict(extra="ignore", strict=True)

    f: list[list[Time]]
    b: list[list[Time]]
    w: list[list[Time]]


def read(path: Path) -> Workload:
    """Reads and checks a workload, and the trace that it names (from its own folder)."""
    try:
        data = parse_toml(read_text(path, f"workload {path}"))
    except ValueError as error:
        raise InputError(f"workload {path}: not TOML: {error}") from None
    try:
        return parse(data, path.parent, path.stem)
    except InputError as error:
        raise InputError(f"workload {path}: {error}") from None


def parse(data: dict[str, Any], folder: Path, name: str = "workload") -> Workload:
    """Checks a workload that is already read, and reads the trace that it names."""
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(error)) from None
    moments = _moments(file, folder)
    count = len(moments[0][1][0])
    costs = _costs(file.layers, moments, count)
    policy = file.policy
    return Workload(
        file.name or name,
        costs,
        _names(file.layers, count),
        file.steps,
        file.ranks,
        file.microbatches,
        file.replicas,
        file.schedule,
        file.chunks,
        Objective(file.objective),
        _limits(file),
        None if policy.initial is None else tuple(policy.initial),
        file.link.to_link_cost(),
        (file.replica_link or file.link).to_link_cost(),
        Policy(
            policy.balancer,
            policy.cost,
            policy.every,
            policy.margin,
            policy.hysteresis,
            policy.seconds_per_byte,
            policy.seed,
        ),
        speeds=_speeds(file),
    )


def _check_count(key: str, count: int, ranks: int) -> None:
    if count != ranks:
        raise InputError(f"{key} has {count} entries for {ranks} ranks; give one per rank")


def _speeds(file: _File) -> Speeds | None:
    if file.speeds is None:
        return None
    _check_count("speeds", len(file.speeds), file.ranks)
    return tuple(file.speeds)


def _limits(file: _File) -> Limit:
    value = file.memory_limit
    if isinstance(value, list):
        _check_count("memory_limit", len(value), file.ranks)
        return tuple(map(_limit, value))
    return None if value is None else _limit(value)


def _limit(value: int | str) -> int:
    if isinstance(value, int):
        return value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise InputError(f"memory_limit = {value!r}: {error}") from None


def _costs(
    layers: _Layers, moments: Sequence[tuple[int, _Times]], count: int
) -> tuple[tuple[int, tuple[LayerCost, ...]], ...]:
    unit = layers.unit
    sizes = [
        _sizes(layers, AT_MOST.get(key, key) if getattr(layers, key) is None else key, count)
        for key in SIZES
    ]
    return tuple(
        (
            step,
            tuple(
                LayerCost(f * unit, b * unit, w * unit, *size)
                for f, b, w, *size in zip(*times, *sizes, strict=True)
            ),
        )
        for step, times in moments
    )


def _names(layers: _Layers, count: int) -> tuple[str, ...]:
    names = layers.names
    if names is not None and len(names) != count:
        raise InputError(
            f"layers.names has {len(names)} entries, but there are {count} layers; "
            "give one per layer, or none"
        )
    return tuple(names or (f"layer {i}" for i in range(count)))


def _sizes(layers: _Layers, key: str, count: int) -> list[int]:
    value = cast("int | list[int]", getattr(layers, key))
    if isinstance(value, int):
        return [value] * count
    if len(value) != count:
        raise InputError(
            f"layers.{key} has {len(value)} entries, but there are {count} "
            "layers; give one number, or one per layer"
        )
    return value


def _moments(file: _File, folder: Path) -> list[tuple[int, _Times]]:
    layers = file.layers
    if (layers.trace is None) == (layers.moments is None):
        raise InputError(
            "[layers] needs either trace = FILE or [[layers.moments]] with step, f, b, w"
        )
    if layers.trace is not None:
        trace = _read_trace(folder / layers.trace)
        count = len(trace)
        # The moments are spread evenly over the steps. With fewer steps, some are left out.
        starts = {
            index * file.steps // count: times for index, times in reversed(list(enumerate(trace)))
        }
        moments, where = sorted(starts.items()), f"trace {layers.trace}: moment"
    else:
        assert layers.moments is not None
        moments, where = [(x.step, (x.f, x.b, x.w)) for x in layers.moments], "layers.moments"
        steps = [step for step, _ in moments]
        if not steps or steps[0] != 0 or any(b <= a for a, b in pairwise(steps)):
            raise InputError(
                f"layers.moments begin at the steps {steps}; "
                "the first begins at 0, and each later than the one before"
            )
        if steps[-1] >= file.steps:
            raise InputError(
                f"layers.moments: the last begins at step {steps[-1]}, but there are "
                f"{file.steps} steps"
            )
    _check_lengths(moments, where)
    return moments


def _check_lengths(moments: Sequence[tuple[int, _Times]], where: str) -> None:
    count = len(moments[0][1][0])
    if not count:
        raise InputError(f"{where} 0: f is empty; give one number per layer")
    for index, (_, times) in enumerate(moments):
        for key, values in zip(TIMES, times, strict=True):
            if len(values) != count:
                raise InputError(
                    f"{where} {index}: {key} has {len(values)} entries, but f of moment 0 has "
                    f"{count}; give one per layer"
                )
        if not any(times[1]) and not any(times[2]):
            raise InputError(f"{where} {index}: b and w are 0 for every layer, so nothing trains")


def _read_trace(path: Path) -> list[_Times]:
    data = read_json(path, f"trace {path}")
    try:
        trace = _Trace.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, *rest = first["loc"] or ("it",)
        rule = "f, b and w are lists of moments, each with one number from 0 to 1e30 per layer"
        if first["type"] == "missing":
            raise InputError(f"trace {path}: key {key!r} is missing; {rule}") from None
        where = "".join(
            f"{word} {index}: " for word, index in zip(("moment", "layer"), rest, strict=False)
        )
        raise InputError(f"trace {path}: {where}{key} is {short(first['input'])}; {rule}") from None
    lengths = [len(trace.f), len(trace.b), len(trace.w)]
    if not lengths[0] or len(set(lengths)) > 1:
        raise InputError(
            f"trace {path}: f, b and w have {lengths} moments; all have as many, and at least one"
        )
    return list(zip(trace.f, trace.b, trace.w, strict=True))


_SECTIONS: dict[str, type[BaseModel]] = {
    "layers": _Layers,
    "policy": _Policy,
    "link": Link,
    "replica_link": Link,
}


def _explain(error: ValidationError) -> str:
    """Pydantic's first finding, in words.

    A mistyped key comes before the key that is missing for it. An entry of a list comes before "it
    is no number".
    """
    first = first_problem(error, lambda problem: -len(problem["loc"]))
    location = [
        part
        for part in first["loc"]
        if part not in ("int", "str") and not str(part).startswith(("list[", "constrained"))
    ]
    key_path = ".".join(part for part in location if isinstance(part, str))
    indices = [part for part in location if isinstance(part, int)]
    if location[:2] == ["layers", "moments"] and indices:
        key_path = f"layers.moments {indices.pop(0)}: " + ".".join(
            str(part) for part in location[3:] if isinstance(part, str)
        )
    if first["type"] == "extra_forbidden":
        *section, key = (part for part in location if isinstance(part, str))
        kind = _SECTIONS.get(section[0], _File) if section else _File
        kind = _Moment if section[1:] == ["moments"] else kind
        return unknown_key(key, kind.model_fields, key_path)
    if first["type"] == "missing":
        return f"key {key_path!r} is missing"
    where = f"layer {indices[0]}: " if indices else ""
    return (
        f"{where}{key_path} = {short(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"
    )
