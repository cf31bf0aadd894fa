"""The costs file: seconds and bytes of layers, and what their messages take.

`dynmo profile` writes it, and a run writes it into its folder. `dynmo plan` places the layers, and
`dynmo schedule` takes stages that are placed already.

    {"version": 1, "kind": "dynmo-costs", "names": ["embedding", ...],
     "f": [...], "b": [...], "w": [...], "weight_bytes": [...], ...,
     "links": [{"latency": 2e-5, "bytes_per_second": 1e9}, ...],
     "partition": [3, 3], "first_trainable": 0, ...}

Every list has one entry per layer. Times are seconds of one microbatch. Only f, b and w are needed,
so a file can be written by hand. Sizes that are not given are 0.

`links` has one entry per pair of neighbouring ranks. `between` says which pair, if it is not i and
i + 1. Instead of `links`, `comm` gives the seconds of a message over any boundary, or one number
per boundary.

A file for `dynmo schedule` has any unit. `mem_f`, `mem_b` and `mem_w` are the changes of live
memory at each op. They stand for `activation_bytes` and `stash_bytes`, and sum to 0. `cap` is the
most live memory of each stage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AliasChoices, BeforeValidator, Field, create_model

from dynmo.cost.input_file import Link, Time, checked, read_json
from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost, StageCost, stage_costs
from dynmo.errors import InputError
from dynmo.files import write_whole
from dynmo.options import Count, Listed, Options

VERSION = 1
KIND = "dynmo-costs"
IN_RUN = "costs.json"  # name of the costs file in a run's folder

TIMES = ("f", "b", "w")
SIZES = tuple(field.name for field in fields(LayerCost) if field.name not in TIMES)

OLD_NAMES = {"rollback_bytes": "copy_bytes", "pending_gradient_bytes": "aside_bytes"}
"""Sizes that had other names in files of earlier versions."""


def alias(size: str) -> AliasChoices | None:
    return AliasChoices(size, OLD_NAMES[size]) if size in OLD_NAMES else None


AT_MOST = {
    "forward_workspace_bytes": "workspace_bytes",
    "weight_workspace_bytes": "workspace_bytes",
}
"""An upper bound that stands in for a size that the file does not give."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Profile:
    """A model's layers, and the links between the ranks they were measured on.

    Attributes:
        first_trainable: The layers before it have neither B nor W.
        links: Cost of the link of each pair of ranks, the lower rank first.
        comm: Seconds over every boundary (one number) or over each. It stands instead of `links`.
        microbatch: Sequences in one microbatch.
        partition: Layers on each stage. None if it is not known.
        schedule: Order in which the ranks worked. None if it is not known.
        steps: Number of measured steps.
        cap: Most live memory of each stage, in the file's unit. None means no limit.
        keeps_nothing: Whether the file says that nothing is live between F, B and W.
    """

    layers: tuple[LayerCost, ...]
    names: tuple[str, ...]
    first_trainable: int = 0
    links: tuple[tuple[Pair, LinkCost], ...] = ()
    comm: float | tuple[float, ...] = 0.0
    model: str | None = None
    microbatch: int | None = None
    microbatches: int | None = None
    ranks: int | None = None
    partition: tuple[int, ...] | None = None
    schedule: str | None = None
    steps: int | None = None
    cap: tuple[float, ...] | None = None
    keeps_nothing: bool = False

    @property
    def has_memory(self) -> bool:
        kept = any(layer.activation_bytes or layer.stash_bytes for layer in self.layers)
        return kept or self.keeps_nothing

    def stages(
        self, counts: Sequence[int], stage_ranks: Sequence[int], w_memory: float = 0.5
    ) -> Costs:
        """Sums the layers of each stage.

        If no memory is known, F adds 1, W takes `w_memory` of it away, and B the rest.
        """
        costs = stage_costs(self.layers, counts)
        if not self.has_memory:
            costs = tuple(StageCost(x.f, x.b, x.w, 1.0, w_memory - 1.0, -w_memory) for x in costs)
        links = zip(self.boundaries(stage_ranks), accumulate(counts), strict=False)
        return Costs(costs, tuple(x.seconds(self.layers[end - 1].output_bytes) for x, end in links))

    def boundaries(self, stage_ranks: Sequence[int], exactly: bool = True) -> tuple[LinkCost, ...]:
        """Returns the link behind each stage but the last.

        The link between two stages of one rank costs nothing. A pair of ranks that was not measured
        gets the slowest measured link.

        Args:
            stage_ranks: Rank of each stage.
            exactly: Whether `comm` must list one number per boundary. If not, its largest number
                counts for all boundaries.
        """
        pairs = [(min(pair), max(pair)) for pair in pairwise(stage_ranks)]
        if self.links:
            known = dict(self.links)
            slowest = LinkCost(
                max(x.latency for x in known.values()),
                min(x.bytes_per_second for x in known.values()),
            )
            return tuple(
                _HERE if low == high else known.get((low, high), slowest) for low, high in pairs
            )
        if not isinstance(self.comm, tuple):
            seconds = [self.comm] * len(pairs)
        elif len(self.comm) == len(pairs):
            seconds = list(self.comm)
        elif not exactly:
            seconds = [max(self.comm, default=0.0)] * len(pairs)
        else:
            raise InputError(
                f"comm has {len(self.comm)} numbers, but {len(stage_ranks)} stages have "
                f"{len(pairs)} boundaries; give one per boundary, or one number for all"
            )
        return tuple(
            _HERE if low == high else LinkCost(x, math.inf)
            for x, (low, high) in zip(seconds, pairs, strict=True)
        )


_HERE = LinkCost(0.0, math.inf)


def read(path: Path, of_stages: bool = False) -> Profile:
    """Reads and checks a costs file, or that of a recorded run's folder.

    Args:
        of_stages: Whether the keys of stages alone may be in it.
    """
    try:
        is_folder = path.is_dir()
    except OSError:  # read_json says why
        is_folder = False
    if is_folder:
        path = _in_run(path)
    data = read_json(path, f"costs file {path}")
    try:
        return parse(data, of_stages)
    except InputError as error:
        raise InputError(f"costs file {path}: {error}") from None


def _in_run(folder: Path) -> Path:
    if (folder / IN_RUN).is_file():
        return folder / IN_RUN
    if (folder / "config.toml").is_file():
        raise InputError(
            f"run {folder} has recorded no {IN_RUN}; measure with: dynmo profile "
            f"{folder / 'config.toml'} --out FILE"
        )
    raise InputError(f"{folder} is no run: it has no {IN_RUN}; give a costs file, or runs/NAME")


def write(path: Path, profile: Profile) -> None:
    """Writes a costs file whole or not at all."""
    try:
        write_whole(path, json.dumps(to_json(profile), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"costs file {path} cannot be written: {error.strerror}") from None


def to_json(profile: Profile) -> dict[str, Any]:
    """Returns the file's content. Numbers read back exactly."""
    whole = asdict(profile) | {"version": VERSION, "kind": KIND}
    for field in (*TIMES, *SIZES):
        whole[field] = [getattr(layer, field) for layer in profile.layers]
    whole["links"] = [
        {
            "between": list(pair),
            "latency": x.latency,
            "bytes_per_second": x.bytes_per_second if math.isfinite(x.bytes_per_second) else None,
        }
        for pair, x in profile.links
    ]
    del whole["comm" if profile.links else "links"]
    return {key: whole[key] for key in _File.model_fields if whole.get(key) is not None}


# -- reading ---------------------------------------------------------------------------------------


def _whole(value: object) -> object:
    """Makes 4e9 an integer. Bytes are written so by hand."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Size = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=1 << 60)]
_Change = Annotated[float, Field(ge=-1e30, le=1e30)]
_OF_STAGES = ("mem_f", "mem_b", "mem_w", "cap")


class _Link(Link):
    between: Annotated[list[_Size], Field(min_length=2, max_length=2)] | None = None


class _Head(Options):
    version: int = VERSION
    kind: Literal["dynmo-costs"] = KIND
    model: str | None = None
    microbatch: Count | None = None
    microbatches: Count | None = None
    ranks: Count | None = None
    steps: Count | None = None
    schedule: str | None = None
    partition: Listed[Count] | None = None
    first_trainable: _Size | None = None
    names: Listed[str] | None = None
    f: Listed[Time]
    b: Listed[Time]
    w: Listed[Time]


_size_fields: dict[str, Any] = {
    key: (Listed[_Size] | None, Field(None, validation_alias=alias(key))) for key in SIZES
}
_Sized = create_model("_Sized", __base__=_Head, **_size_fields)


class _File(_Sized):
    links: Listed[_Link] | None = None
    comm: Time | Listed[Time] | None = None
    mem_f: Listed[_Change] | None = None
    mem_b: Listed[_Change] | None = None
    mem_w: Listed[_Change] | None = None
    cap: Listed[Time] | None = None

    def _problems(self) -> Iterator[str]:
        count = len(self.f)
        if not count:
            yield "f is empty; give one number per layer"
        for key in ("b", "w", *SIZES, "names", *_OF_STAGES[:3]):
            values = getattr(self, key)
            if values is not None and len(values) != count:
                yield f"{key} has {len(values)} entries, f has {count}; give one per layer"
        if self.partition is not None and sum(self.partition) != count:
            yield (
                f"partition sums to {sum(self.partition)}, but there are {count} layers; it counts "
                "the layers of each stage"
            )
        stages = count if self.partition is None else len(self.partition)
        if self.cap is not None and len(self.cap) != stages:
            yield f"cap has {len(self.cap)} entries for {stages} stages; give one per stage"
        working = self.working
        if working is None:
            yield (
                "b and w are 0 for every layer, so nothing trains; the last layer at least has a "
                "backward"
            )
        elif (self.first_trainable or 0) > working:
            yield (
                f"layer {working}: it has a backward, but first_trainable = {self.first_trainable} "
                "says that it is frozen"
            )
        if self.links is not None and self.comm is not None:
            yield "links and comm both say what a message takes; use one of them"
        yield from self._memory_problems()

    @property
    def working(self) -> int | None:
        """The first layer with B or W."""
        pairs = enumerate(zip(self.b, self.w, strict=True))
        return next((index for index, times in pairs if any(times)), None)

    def _memory_problems(self) -> Iterator[str]:
        lists: list[Any] = [getattr(self, key) for key in _OF_STAGES[:3]]
        if lists == [None] * 3:
            return
        sizes = [getattr(self, key) for key in ("activation_bytes", "stash_bytes")]
        if None in lists or sizes != [None] * 2:
            yield "mem_f, mem_b and mem_w come together, instead of activation_bytes, stash_bytes"
        for index, (f, b, w) in enumerate(zip(*lists, strict=True)):
            if abs(f + b + w) > 1e-6 * max(abs(f), abs(b), abs(w)):
                yield (
                    f"layer {index}: mem_f + mem_b + mem_w is {f + b + w:g}; what F adds, B and W "
                    "take away: the sum is 0"
                )
            if f < 0 or w > 0:
                yield (
                    f"layer {index}: mem_f is {f:g} and mem_w is {w:g}; mem_f is at least 0, and "
                    "mem_w at most 0"
                )


# Fields of a profile that the file has as they are.
_SAME = {"model", "microbatch", "microbatches", "ranks", "partition", "schedule", "steps", "cap"}


def parse(data: object, of_stages: bool = False) -> Profile:
    """Checks costs that are already read from JSON."""
    if not isinstance(data, dict):
        raise InputError(
            'expected an object such as {"f": [1, 1], "b": [1, 1], "w": [1, 1], "comm": 0}'
        )
    given = cast("dict[str, Any]", data)
    version = given.get("version", VERSION)
    if version is True or version != VERSION:
        raise InputError(
            f"version {json.dumps(version)} is unknown; this dynmo reads version {VERSION}, so "
            "write the file anew"
        )
    file = checked(_File, given)
    if not of_stages and (key := next((key for key in _OF_STAGES if key in given), None)):
        raise InputError(
            f"{key} is for dynmo schedule alone; give activation_bytes and stash_bytes, and "
            "--memory-limit"
        )
    count = len(file.f)
    sizes = {
        key: getattr(file, AT_MOST.get(key, key) if getattr(file, key) is None else key)
        for key in SIZES
    }
    if file.mem_f is not None and file.mem_w is not None:
        sizes |= {"activation_bytes": file.mem_f, "stash_bytes": [-x for x in file.mem_w]}
    columns = [values or [0] * count for values in sizes.values()]
    comm = file.comm
    assert file.working is not None
    return Profile(
        layers=tuple(LayerCost(*row) for row in zip(file.f, file.b, file.w, *columns, strict=True)),
        names=tuple(file.names or (f"layer {index}" for index in range(count))),
        first_trainable=file.working if file.first_trainable is None else file.first_trainable,
        links=_links(file.links or ()),
        comm=tuple(comm) if isinstance(comm, Sequence) else comm or 0.0,
        keeps_nothing=file.mem_f is not None and not any([*file.mem_f, *(file.mem_w or ())]),
        **file.model_dump(include=_SAME),
    )


def _links(links: Sequence[_Link]) -> tuple[tuple[Pair, LinkCost], ...]:
    out: dict[Pair, LinkCost] = {}
    for index, link in enumerate(links):
        low, high = sorted(link.between) if link.between else (index, index + 1)
        if low == high or (low, high) in out:
            wrong = "is between a rank and itself" if low == high else "is there twice"
            raise InputError(
                f"link {index}: ({low}, {high}) {wrong}; give one link per pair of ranks"
            )
        out[low, high] = link.to_link_cost()
    return tuple(out.items())
