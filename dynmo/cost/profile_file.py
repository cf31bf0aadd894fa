"""The costs file of a model's layers.

`dynmo profile` writes it, and `dynmo plan` reads it.

    {"version": 1, "kind": "dynmo-costs", "names": ["embedding", ...],
     "f": [...], "b": [...], "w": [...], "weight_bytes": [...], ...,
     "links": [{"latency": 2e-5, "bytes_per_second": 1e9}, ...],
     "partition": [3, 3], "first_trainable": 0, ...}

Every list has one entry per layer. Times are seconds of one microbatch. Only f, b and w are needed,
so a file can be written by hand. Sizes that are not given are 0.

`links` has one entry per pair of neighbouring ranks. `between` says which pair, if it is not i and
i + 1. Instead of `links`, `comm` gives the seconds of a message over any boundary, or one number
per boundary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, create_model

from dynmo.cost.input_file import Link, Strict, Time, first_problem, read_json, short, unknown_key
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import InputError
from dynmo.files import write_whole

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


def read(path: Path) -> Profile:
    """Reads and checks a costs file, or that of a recorded run's folder."""
    try:
        is_folder = path.is_dir()
    except OSError:  # read_json says why
        is_folder = False
    if is_folder:
        path = _in_run(path)
    data = read_json(path, f"costs file {path}")
    try:
        return parse(data)
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
    raise InputError(
        f"{folder} is a folder, but no run: it has no {IN_RUN}; give a costs file, or runs/NAME"
    )


def write(path: Path, profile: Profile) -> None:
    """Writes a costs file whole or not at all."""
    try:
        write_whole(path, json.dumps(to_json(profile), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"costs file {path} cannot be written: {error.strerror}") from None


def to_json(profile: Profile) -> dict[str, Any]:
    """Returns the file's content. Numbers read back exactly."""
    whole = asdict(profile) | {"version": VERSION, "kind": KIND}
    del whole["layers"]
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


class _Link(Link):
    between: Annotated[list[_Size], Field(min_length=2, max_length=2)] | None = None


class _Head(Strict):
    version: int = VERSION
    kind: str = KIND
    model: str | None = None
    microbatch: Annotated[int, Field(ge=1)] | None = None
    microbatches: Annotated[int, Field(ge=1)] | None = None
    ranks: Annotated[int, Field(ge=1)] | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    schedule: str | None = None
    partition: list[Annotated[int, Field(ge=1)]] | None = None
    first_trainable: _Size | None = None
    names: list[str] | None = None
    f: list[Time]
    b: list[Time]
    w: list[Time]


_size_fields: dict[str, Any] = {
    key: (list[_Size] | None, Field(None, validation_alias=alias(key))) for key in SIZES
}
_Sized = create_model("_Sized", __base__=_Head, **_size_fields)


class _File(_Sized):
    links: list[_Link] | None = None
    comm: list[Time] | None = None


def parse(data: object) -> Profile:
    """Checks costs of layers that are already read from JSON."""
    if not isinstance(data, dict):
        raise InputError(
            'expected an object such as {"f": [1, 1], "b": [1, 1], "w": [1, 1], "comm": 0}'
        )
    fields = dict(cast("dict[str, Any]", data))
    if fields.get("kind", KIND) != KIND:
        raise InputError(f"kind is {short(fields['kind'])}; a costs file's is {KIND!r}")
    version: object = fields.get("version", VERSION)
    if version is True or version != VERSION:
        raise InputError(
            f"version {short(version)} is unknown; this dynmo reads version {VERSION}, so write "
            "the file anew"
        )
    comm = fields.get("comm")
    if comm is not None and not isinstance(comm, list):
        fields["comm"] = [comm]
    try:
        file = _File.model_validate(fields)
    except ValidationError as error:
        raise InputError(_explain(error)) from None
    count = _check_lengths(file)
    first = _first_trainable(file, count)
    sizes = [
        getattr(file, AT_MOST.get(key, key) if getattr(file, key) is None else key) or [0] * count
        for key in SIZES
    ]
    layers = tuple(LayerCost(*row) for row in zip(file.f, file.b, file.w, *sizes, strict=True))
    if file.links is not None and comm is not None:
        raise InputError("links and comm both say what a message takes; use one of them")
    many = None if file.comm is None else tuple(file.comm)
    return Profile(
        layers=layers,
        names=tuple(file.names or (f"layer {index}" for index in range(count))),
        first_trainable=first,
        links=_links(file.links or []),
        comm=0.0 if many is None else many if isinstance(comm, list) else many[0],
        model=file.model,
        microbatch=file.microbatch,
        microbatches=file.microbatches,
        ranks=file.ranks,
        partition=None if file.partition is None else tuple(file.partition),
        schedule=file.schedule,
        steps=file.steps,
    )


def _check_lengths(file: _File) -> int:
    count = len(file.f)
    if not count:
        raise InputError("f is empty; give one number per layer")
    for key in ("b", "w", *SIZES, "names"):
        values = getattr(file, key)
        if values is not None and len(values) != count:
            raise InputError(
                f"{key} has {len(values)} entries, f has {count}; every list has one per layer"
            )
    if file.partition is not None and sum(file.partition) != count:
        raise InputError(
            f"partition sums to {sum(file.partition)}, but there are {count} layers; it counts "
            "the layers of each stage"
        )
    return count


def _first_trainable(file: _File, count: int) -> int:
    working = next((index for index in range(count) if file.b[index] or file.w[index]), None)
    if working is None:
        raise InputError(
            "b and w are 0 for every layer, so nothing trains; the last layer at least has a "
            "backward"
        )
    if file.first_trainable is None:
        return working
    if file.first_trainable > working:
        raise InputError(
            f"layer {working}: it has a backward, but first_trainable = {file.first_trainable} "
            "says that it is frozen"
        )
    return file.first_trainable


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


def _explain(error: ValidationError) -> str:
    first = first_problem(error)
    if not first["loc"]:
        return f"a key is no text that can be written as UTF-8: {first['msg']}"
    key, *rest = (str(part) if isinstance(part, str) else part for part in first["loc"])
    if key == "links" and rest:
        inner = "" if len(rest) < 2 else f"{rest[1]} is {short(first['input'])}; "
        return (
            f"link {rest[0]}: {inner}a link has latency (seconds) and bytes_per_second "
            "(1e-30 or more, or null), and may have between"
        )
    if first["type"] == "extra_forbidden":
        return unknown_key(str(key), _File.model_fields)
    if first["type"] == "missing":
        return f"key {key!r} is missing; f, b and w are needed, one number per layer"
    rule, sizes = "it is a number of at least 0", (*SIZES, *OLD_NAMES.values())
    if key in (*TIMES, "comm"):
        rule = "a time is a number from 0 to 1e30"
    elif key in sizes:
        rule = "a size is a whole number from 0 to 2**60"
    elif key == "names":
        rule = "a name is text"
    elif key in ("model", "schedule"):
        return f"{key} is {short(first['input'])}; it is text"
    if not rest:
        lists = key in (*TIMES, *sizes, "names", "partition", "links", "comm")
        return f"{key} is {short(first['input'])}; " + (
            "it is a list, one entry per layer" if lists else "it is a whole number"
        )
    unit = {"comm": "boundary", "partition": "stage"}.get(str(key), "layer")
    if key == "partition":
        rule = "a stage has at least 1 layer"
    return f"{unit} {rest[0]}: {key} is {short(first['input'])}; {rule}"
