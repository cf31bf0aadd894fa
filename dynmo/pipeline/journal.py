"""The calls of a loop since the oldest copy, to make them again after a fault.

Batches stay in host memory. If the mesh has become another one, the ranks give each other the parts
of a batch that they need now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from dynmo.events import StepResult
from dynmo.pipeline.results import Evaluation
from dynmo.runtime.comm.agreement import share_bytes, share_texts
from dynmo.runtime.comm.rank_group import RankGroup

P = ParamSpec("P")
T = TypeVar("T")


class Part(NamedTuple):
    """What a replica is given for a step, as `Pipeline.step` takes it."""

    inputs: Any = None
    targets: Any = None
    samples: Sequence[Hashable] | None = None


# Inputs, targets and samples.
Reread = Callable[[], tuple[Any, Any, Any]]


@dataclass
class Call:
    """A call of a method of the pipeline, which all ranks make together.

    Attributes:
        number: Its number among all calls, the same on every rank.
        run: Makes it.
        changes: Whether the model or the optimizer is another one afterwards.
        has_results: Whether it returns results of steps.
    """

    number: int
    run: Callable[[], Any]
    changes: bool
    has_results: bool = False


@dataclass
class Training(Call):
    """A call that trains on a batch.

    Attributes:
        is_new: Whether it was not made yet.
        rates: Options of the optimizer's groups in the step.
        replicas: Number of replicas of the mesh for which the parts are.
        parts: The parts of the batch that are here, by replica.
    """

    is_new: bool = True
    replicas: int = 1
    rates: tuple[dict[str, Any], ...] | None = None
    parts: dict[int, Part] = field(default_factory=dict[int, Part])

    def part(self, replica: int, replicas: int) -> Part | None:
        """Returns the part of a replica of another mesh. None if it is not here."""
        if replicas == self.replicas:
            return self.parts.get(replica)
        needed = sources(replica, replicas, self.replicas)
        if not all(at in self.parts for at in needed):
            return None
        # Of the parts that are joined, this replica has those rows.
        low = replica * self.replicas - needed.start * replicas
        share = low, low + self.replicas, len(needed) * replicas
        own = [self.parts[at] for at in needed]
        # Samples only spare work, and their numbers are those of other microbatches.
        return Part(
            _cut(_join([each.inputs for each in own]), *share),
            _cut(_join([each.targets for each in own]), *share),
        )


class Survivor(Protocol):
    """Makes the calls of a loop again after a fault (`Recovery`)."""

    def call(self, run: Callable[[], T], *, changes: bool, has_results: bool = False) -> T: ...

    def forget(self) -> None: ...

    def train(
        self, part: Part, stop: bool, adapt: bool, reread: Reread | None
    ) -> tuple[StepResult, ...]: ...

    def evaluate(self, part: Part, count: int, shared: bool, **options: Any) -> Evaluation: ...

    def before_acting(self, step: int) -> None: ...

    def before_training(self, step: int) -> None: ...

    def settle(self) -> None: ...


def surviving(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], T]:
    """Makes a method of `Pipeline`, or of a view of it, that all ranks call together survive."""

    @wraps(method)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        recovery: Survivor | None = self._parts.recovery
        if recovery is None:
            return method(self, *args, **kwargs)
        return recovery.call(
            partial(method, self, *args, **kwargs),
            changes=name in _CHANGES,
            has_results=name in _RESULTS,
        )

    name = method.__name__
    return run


# Methods that return results of steps.
_RESULTS = ("adapt", "drain", "finish")
# Methods after which the model or the optimizer is another one.
_CHANGES = ("adapt", "move", "freeze", "unfreeze", "load", "load_state_dict")


def rows_of(batch: Any) -> int | None:
    """Returns the rows of a batch, or its microbatches if it is a list. None if there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    if isinstance(batch, Mapping):
        named = cast("Mapping[str, Any]", batch)
        return next((rows_of(each) for each in named.values() if each is not None), None)
    return len(cast("list[Any]", batch)) if isinstance(batch, list) else None


def on_host(batch: Any) -> Any:
    """Returns a copy of a batch, or of a part of one."""
    if isinstance(batch, Tensor):
        return batch.detach().to("cpu", copy=True)
    if isinstance(batch, Mapping):
        named = cast("Mapping[str, Any]", batch)
        return {name: on_host(each) for name, each in named.items()}
    if isinstance(batch, list):
        return [on_host(each) for each in cast("list[Any]", batch)]
    return batch


def _join(parts: Sequence[Any]) -> Any:
    """Joins the parts of neighbouring replicas."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {name: _join([each[name] for each in parts]) for name in cast(Any, first)}
    if isinstance(first, list):
        return [microbatch for part in parts for microbatch in part]
    return first


def sources(replica: int, replicas: int, before: int) -> range:
    """Returns the replicas of a mesh of `before` replicas whose parts a replica now needs."""
    return range(replica * before // replicas, -(-(replica + 1) * before // replicas))


def _cut(batch: Any, low: int, high: int, of: int) -> Any:
    """Returns the share from `low` to `high` of so many of a batch."""
    if isinstance(batch, Mapping):
        named = cast("Mapping[str, Any]", batch)
        return {name: _cut(each, low, high, of) for name, each in named.items()}
    if isinstance(batch, Tensor | list):
        rows: Any = batch
        return rows[len(rows) * low // of : len(rows) * high // of]
    return batch


# -- batches travel ---


def packed(batch: Any) -> bytes:
    """Returns a batch as bytes of safetensors, whose metadata have its structure."""
    tensors = dict[str, Tensor]()

    def structure(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[name := str(len(tensors))] = value.contiguous().clone()
            return name
        if isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value)
            return {"dict": {key: structure(each) for key, each in named.items()}}
        if isinstance(value, list):
            return {"list": [structure(each) for each in cast("list[Any]", value)]}
        return None

    return save(tensors, {"structure": json.dumps(structure(batch))})


def unpacked(data: bytes) -> Any:
    length = int.from_bytes(data[:8], "little")
    tensors = load(data)

    def value(structure: Any) -> Any:
        if isinstance(structure, str):
            return tensors[structure]
        if structure is None:
            return None
        if "list" in structure:
            return [value(each) for each in structure["list"]]
        return {key: value(each) for key, each in structure["dict"].items()}

    return value(json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["structure"]))


def share_parts(world: RankGroup, calls: Sequence[Training], replica: int, replicas: int) -> None:
    """Gives each rank the parts that its replica needs now and some rank has. All call it.

    Args:
        calls: Own calls, ascending. Ranks may lack the last ones.
        replica: The replica of this rank now.
        replicas: Their number now.
    """
    mine = {
        call.number: [call.replicas, {r: _has(part) for r, part in call.parts.items()}]
        for call in calls
    }
    what = "the batches of steps that are repeated"
    tables: list[tuple[int, dict[str, Any]]] = [
        json.loads(text) for text in share_texts(world, json.dumps([replica, mine]), what)
    ]
    numbers = sorted({int(number) for _, table in tables for number in table})
    by_number = {call.number: call for call in calls}
    for number in numbers:
        rows = [(new, table.get(str(number))) for new, table in tables]
        before: int = next(row[0] for _, row in rows if row is not None)
        for old in range(before):
            for at, name in enumerate(("inputs", "targets")):
                holders = [
                    rank
                    for rank, (_, row) in enumerate(rows)
                    if row is not None and row[1].get(str(old), (0, 0))[at]
                ]
                needers = [
                    rank
                    for rank, (new, row) in enumerate(rows)
                    if row is not None
                    and old in sources(new, replicas, before)
                    and rank not in holders
                ]
                if not needers or not holders:
                    continue
                call = by_number.get(number)
                is_giver = world.rank == holders[0] and call is not None
                given = getattr(call.parts[old], name) if is_giver and call else None
                data = share_bytes(world, packed(given) if is_giver else b"", what)[holders[0]]
                if world.rank in needers and call is not None:
                    part = call.parts.get(old, Part())
                    call.parts[old] = part._replace(**{name: unpacked(data)})


def _has(part: Part) -> tuple[bool, bool]:
    return part.inputs is not None, part.targets is not None
