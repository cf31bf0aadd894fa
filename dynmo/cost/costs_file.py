"""Reads a file of per-stage costs for `dynmo schedule --costs`.

    {"f": [1, 1], "b": [1, 1.2], "w": [1, 0.8], "comm": 0.1, "cap": [2, 2]}

The keys f, b and w are times per stage. The key comm is one link time, or one per boundary (default
0). The keys mem_f, mem_b and mem_w are the changes of live memory at each op. These three sum to 0
per stage, and come together or not at all. The key cap is the most live memory of a stage, in the
same unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, ValidationError

from dynmo.cost.input_file import Strict, Time, first_problem, read_json, short, unknown_key
from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.errors import InputError

_Change = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]


class _File(Strict):
    f: list[Time]
    b: list[Time]
    w: list[Time]
    comm: list[Time]
    mem_f: list[_Change] | None = None
    mem_b: list[_Change] | None = None
    mem_w: list[_Change] | None = None
    cap: list[Time] | None = None


@dataclass(frozen=True)
class CostsFile:
    """The content of a costs file.

    Attributes:
        caps: Memory limit of each stage, in the file's unit of memory. None means no limit.
        has_memory: Whether the file gives mem_f, mem_b and mem_w.
    """

    costs: Costs
    caps: tuple[float, ...] | None
    has_memory: bool

    @property
    def first_trainable(self) -> int:
        """The first stage with B or W. Those before it are a frozen prefix."""
        return next(i for i, stage in enumerate(self.costs.stages) if stage.b or stage.w)


_OF_LAYERS = (
    "here one number per stage is wanted; dynmo plan --costs takes the costs of layers, or a "
    "run's folder"
)


def read_costs(
    path: Path, stages: int, w_memory: float = 0.5, or_stages: int | None = None
) -> CostsFile:
    """Reads and checks a file of costs per stage.

    If the file gives no memory, F adds 1, W takes `w_memory` of it away, and B the rest.
    `or_stages` is taken instead of `stages` if the file's list f has that length.
    """
    data = read_json(path, f"costs file {path}", _OF_LAYERS)
    fields = cast("dict[str, object]", data) if isinstance(data, dict) else {}
    try:
        if fields.get("kind") == "dynmo-costs":
            raise InputError(f"it has the costs of layers; {_OF_LAYERS}")
        given = fields.get("f")
        if (
            or_stages is not None
            and isinstance(given, list)
            and len(cast("list[object]", given)) == or_stages
        ):
            stages = or_stages
        return parse_costs(cast(object, data), stages, w_memory)
    except InputError as error:
        raise InputError(f"costs file {path}: {error}") from None


def parse_costs(data: object, stages: int, w_memory: float = 0.5) -> CostsFile:
    """Checks costs per stage that are already read from JSON."""
    if not isinstance(data, dict):
        raise InputError(
            'expected an object such as {"f": [1, 1], "b": [1, 1], "w": [1, 1], "comm": 0}'
        )
    fields = dict(cast("dict[str, Any]", data))
    comm = fields.get("comm", 0.0)
    if not isinstance(comm, list):
        # One number serves all boundaries. A single stage has none, but the number is still
        # checked.
        fields["comm"] = [comm] * max(1, stages - 1)
    try:
        file = _File.model_validate(fields)
    except ValidationError as error:
        raise InputError(_explain(error)) from None
    if not isinstance(comm, list):
        file.comm = file.comm[: stages - 1]
    for key in _File.model_fields:
        values = cast("list[float] | None", getattr(file, key))
        count, unit = (stages - 1, "boundary") if key == "comm" else (stages, "stage")
        if values is not None and len(values) != count:
            raise InputError(
                f"{key} has {len(values)} numbers, {count} expected (one per {unit} of {stages} "
                "ranks)"
            )
    if not any(file.b) and not any(file.w):
        raise InputError(
            "b and w are 0 on every stage, so nothing trains; the last stage at least has a "
            "backward"
        )
    memory = _memory(file, stages, w_memory)
    costs = tuple(
        StageCost(*times, *changes)
        for times, changes in zip(zip(file.f, file.b, file.w, strict=True), memory, strict=True)
    )
    caps = None if file.cap is None else tuple(file.cap)
    return CostsFile(Costs(costs, tuple(file.comm)), caps, file.mem_f is not None)


def _memory(file: _File, stages: int, w_memory: float) -> list[tuple[float, float, float]]:
    lists = {"mem_f": file.mem_f, "mem_b": file.mem_b, "mem_w": file.mem_w}
    given = [values for values in lists.values() if values is not None]
    if not given:
        return [(1.0, w_memory - 1.0, -w_memory)] * stages
    if len(given) < 3:
        absent = ", ".join(key for key, values in lists.items() if values is None)
        raise InputError(f"mem_f, mem_b and mem_w come together: {absent} is missing")
    memory = list(zip(*given, strict=True))
    for stage, (f, b, w) in enumerate(memory):
        if abs(f + b + w) > 1e-6 * max(abs(f), abs(b), abs(w)):
            raise InputError(
                f"stage {stage}: mem_f + mem_b + mem_w is {f + b + w:g}; what F adds, B and W "
                "take away: the sum is 0"
            )
        if f < 0 or w > 0:
            key, value, rule = ("mem_f", f, "at least") if f < 0 else ("mem_w", w, "at most")
            raise InputError(
                f"stage {stage}: {key} is {value:g}; it is {rule} 0, or live memory would be "
                "negative"
            )
    return cast("list[tuple[float, float, float]]", memory)


def _explain(error: ValidationError) -> str:
    first = first_problem(error)
    if not first["loc"]:
        return f"a key is no text that can be written as UTF-8: {first['msg']}"
    key, *rest = first["loc"]
    if first["type"] == "extra_forbidden":
        return unknown_key(str(key), _File.model_fields)
    if first["type"] == "missing":
        return f"key {key!r} is missing; f, b and w are needed, one number per stage"
    if not rest:
        return (
            f"{key} is {short(first['input'])}; it is a list of numbers, one per "
            f"{'boundary' if key == 'comm' else 'stage'}"
        )
    rules = {
        "cap": "a limit is a number from 0 to 1e30",
        "mem": "a change of memory is a number from -1e30 to 1e30",
    }
    rule = rules.get(str(key)[:3], "a time is a number from 0 to 1e30")
    return (
        f"{'boundary' if key == 'comm' else 'stage'} {rest[0]}: {key} is "
        f"{short(first['input'])}; {rule}"
    )
