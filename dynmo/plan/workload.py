"""A workload that changes while it trains: its file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import ConfigDict, Field, create_model

from dynmo.cost.costs_file import AT_MOST, SIZES, TIMES, alias
from dynmo.cost.input_file import Link, Time, checked, read_json, read_text
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import InputError
from dynmo.files import parse_toml
from dynmo.options import Count, Lax, Listed, MemoryLimit, Options, Whole
from dynmo.plan.options import Balance
from dynmo.plan.problem import Layers
from dynmo.schedule.bounds import Objective

Factor = Annotated[float, Field(gt=0, le=1e30)]
Size = Annotated[int, Field(ge=0, le=1 << 60)]
Sizes = Size | Listed[Size]

_size_fields: dict[str, Any] = {
    key: (Sizes | None, Field(None, validation_alias=alias(key))) for key in SIZES
}
_Sized = create_model("_Sized", __base__=Options, **_size_fields)


def _wrong_lengths(lists: Iterable[tuple[str, Any]], count: int, unit: str) -> Iterator[str]:
    for key, values in lists:
        if not isinstance(values, int | None) and len(values) != count:
            yield f"{key} has {len(values)} entries for {count} {unit}s; give one per {unit}"


class Moment(_Sized):
    """Costs from a step on: seconds of each layer, and sizes that differ from those of [layers]."""

    step: Whole
    f: Listed[Time]
    b: Listed[Time]
    w: Listed[Time]

    @classmethod
    def of(cls, step: int, layers: Sequence[LayerCost]) -> Self:
        return cls(step=step, **{key: [getattr(x, key) for x in layers] for key in TIMES + SIZES})


class LayerSection(_Sized):
    """The section [layers]. Each size is one number, or one per layer."""

    trace: str | None = None
    """File that has the moments instead."""
    moments: Listed[Moment] = ()
    unit: Factor = 1.0
    """Seconds of one unit of F, B and W."""
    names: Listed[str] | None = None

    def _problems(self) -> Iterator[str]:
        if not self.moments:
            yield _NO_MOMENTS
        where = "layers.moments" if self.trace is None else f"trace {self.trace}: moments"
        count = len(self.moments[0].f)
        if not count:
            yield f"{where}[0].f is empty; give one number per layer"
        lists = [
            (f"{where}[{index}].{key}", getattr(moment, key))
            for index, moment in enumerate(self.moments)
            for key in TIMES + SIZES
        ]
        lists += [(f"layers.{key}", getattr(self, key)) for key in (*SIZES, "names")]
        yield from _wrong_lengths(lists, count, "layer")
        for index, moment in enumerate(self.moments):
            if not any((*moment.b, *moment.w)):
                yield f"{where}[{index}]: b and w are 0 for every layer, so nothing trains"

    def costs(self, moment: Moment) -> Layers:
        count, columns = len(moment.f), list[Sequence[int]]()
        for key in SIZES:
            given = [
                getattr(at, name) for name in (key, AT_MOST.get(key, key)) for at in (moment, self)
            ]
            size: Any = next((x for x in given if x is not None), 0)
            columns.append((size,) * count if isinstance(size, int) else size)
        return tuple(
            LayerCost(f * self.unit, b * self.unit, w * self.unit, *sizes)
            for f, b, w, *sizes in zip(moment.f, moment.b, moment.w, *columns, strict=True)
        )


_NO_MOMENTS = "[layers] needs either trace = FILE or [[layers.moments]] with step, f, b, w"


class Policy(Balance):
    """The balancer, its frequency, and what a move must bring."""

    every: Count = 10
    """Steps from one decision to the next."""
    seconds_per_byte: Time | None = None
    """Seconds per byte of a move. Not set: as long as the link takes."""
    seed: Whole = 0


class Workload(Options):
    """A workload that changes while it trains. The file has these keys."""

    name: str = "workload"
    steps: Annotated[int, Field(ge=1, le=10**7)]
    ranks: Count
    microbatches: Count
    """Microbatches of a step of one replica."""
    replicas: Count = 1
    """Number of pipelines that sum their gradients."""
    schedule: str = "zb-h1"
    chunks: Count | None = None
    """Stages per rank. Not set: the schedule's own number."""
    objective: Annotated[Objective, Lax] = Objective.MAKESPAN
    memory_limit: MemoryLimit = None
    speeds: Listed[Factor] | None = None
    """Speed of each rank. Not set: all are 1."""
    announced: bool = True
    """Whether a dynamic case announces that the costs change."""
    layers: LayerSection
    policy: Policy = Policy()
    link: Link = Link()
    """Between ranks."""
    replica_link: Link | None = None
    """Between copies. Not set: as between ranks."""

    def _problems(self) -> Iterator[str]:
        of_ranks = [("memory_limit", self.memory_limit), ("speeds", self.speeds)]
        yield from _wrong_lengths(of_ranks, self.ranks, "rank")
        steps = [moment.step for moment in self.layers.moments]
        if steps[0] != 0 or any(b <= a for a, b in pairwise(steps)):
            yield (
                f"layers.moments begin at the steps {steps}; the first begins at 0, and each later "
                "than the one before"
            )
        if steps[-1] >= self.steps:
            yield (
                f"layers.moments: the last begins at step {steps[-1]}, but there are {self.steps} "
                "steps"
            )

    @property
    def moments(self) -> tuple[tuple[int, Layers], ...]:
        """First step and costs of each moment."""
        return tuple((x.step, self.layers.costs(x)) for x in self.layers.moments)

    @property
    def names(self) -> tuple[str, ...]:
        count = len(self.layers.moments[0].f)
        return tuple(self.layers.names or (f"layer {i}" for i in range(count)))


class _Trace(Options):
    """The costs of a trace at its moments. Further keys say where a trace is from."""

    model_config = ConfigDict(extra="ignore")

    f: Listed[Listed[Time]]
    b: Listed[Listed[Time]]
    w: Listed[Listed[Time]]

    def _problems(self) -> Iterator[str]:
        lengths = [len(self.f), len(self.b), len(self.w)]
        if not lengths[0] or len(set(lengths)) > 1:
            yield f"f, b and w have {lengths} moments; all have as many, and at least one"


def read(path: Path) -> Workload:
    """Reads and checks a workload, and the trace that it names (from its own folder)."""
    text = read_text(path, f"workload {path}")
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise InputError(f"workload {path}: not TOML: {error}") from None
    try:
        return parse({"name": path.stem} | data, path.parent)
    except InputError as error:
        raise InputError(f"workload {path}: {error}") from None


def parse(data: Mapping[str, Any], folder: Path) -> Workload:
    """Checks a workload that is already read, and reads the trace that it names."""
    layers, steps = _table(data.get("layers")), data.get("steps")
    trace = layers.get("trace")
    if isinstance(trace, str) and "moments" in layers:
        raise InputError(_NO_MOMENTS)
    if isinstance(trace, str) and isinstance(steps, int):
        data = {**data, "layers": layers | {"moments": _moments(folder / trace, steps)}}
    return checked(Workload, data)


def _table(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _moments(trace: Path, steps: int) -> list[Moment]:
    """Spreads the moments of a trace evenly over the steps. With fewer steps, some are left out."""
    where = f"trace {trace}"
    costs = checked(_Trace, _table(read_json(trace, where)), f"{where}: ")
    count = len(costs.f)
    starts = {
        index * steps // count: times
        for index, times in reversed(list(enumerate(zip(costs.f, costs.b, costs.w, strict=True))))
    }
    return [Moment(step=step, f=f, b=b, w=w) for step, (f, b, w) in sorted(starts.items())]
