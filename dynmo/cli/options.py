"""Makes a typer command from a function of one record of options.

The record is a pydantic model. Its fields are the command line: a field without a default is an
argument, and any other an option. The text under a field is its help. Types, defaults and bounds
are those of the field. A tuple is written with commas.

    class GreetOptions(CommandOptions):
        name: str                                       # ARGUMENT marks one that may be left out
        times: Annotated[int, Field(ge=1)] = 1

    @command
    def greet(options: GreetOptions) -> None: ...          # dynmo greet NAME [--times N] [--json]
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from dynmo.errors import InputError
from dynmo.options import Options, problems_of

_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
_FEW = 4
ARGUMENT = "argument"
"""Marks a field with a default that is an argument all the same."""


class CommandOptions(Options):
    """The options of a command. A number may come as text."""

    model_config = ConfigDict(strict=False)

    as_json: bool = False
    """One JSON object on stdout."""


class OfRun(CommandOptions):
    config: Path
    """The run, as TOML."""
    set_: list[str] | None = None
    """Change a key: SECTION.KEY=VALUE."""


Record = TypeVar("Record", bound=CommandOptions)


def like(record: type[Options], key: str) -> Any:
    """Returns the default and the text of a field, for the same field of another record."""
    return record.model_fields[key]


def command(function: Callable[[Record], None]) -> Callable[..., None]:
    """Makes a function of a record callable with the record's fields as keyword arguments.

    typer reads the signature of the returned function. Its `--json` is the last option.
    """
    [record] = (hint for key, hint in get_type_hints(function).items() if key != "return")
    fields: dict[str, FieldInfo] = record.model_fields

    @functools.wraps(function)
    def call(**values: Any) -> None:
        given = {
            key: _listed(fields[key], value)
            for key, value in values.items()
            if value not in (None, fields[key].default, str(fields[key].default))
        }
        try:
            options = record.model_validate(given)
        except ValidationError as error:
            place, _, text = problems_of(error, given)[0]
            if place:  # the text begins with the key and its value
                key = str(place[0])
                text = f"{_option(key)} {values[key]}: {text.partition(': ')[2]}"
            raise InputError(text) from None
        function(options)

    order = sorted(fields, key="as_json".__eq__)
    parameters = [_parameter(key, fields[key]) for key in order]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    signature = inspect.Signature(parameters)
    call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return call


def _option(key: str) -> str:
    """Returns `--memory-limit` for `memory_limit`, and `--json` for `as_json`."""
    return f"--{key.removeprefix('as_').rstrip('_').replace('_', '-')}"


def _kinds(annotation: Any) -> list[Any]:
    """Returns the types that a field may have, without their constraints."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return [] if annotation is NoneType else [annotation]


def _listed(field: FieldInfo, value: Any) -> Any:
    kinds = _kinds(field.annotation)
    if not any(get_origin(kind) is tuple for kind in kinds):
        return value
    return value.split(",") if len(kinds) == 1 or "," in value else value


def _parameter(key: str, field: FieldInfo) -> inspect.Parameter:
    """Returns a parameter of text, which the record reads. Flags and repeated options stay."""
    kinds, text, default = _kinds(field.annotation), field.description or "", field.default
    kind = kinds[0] if kinds[0] is bool or get_origin(kinds[0]) is list else str
    words = [str(word) for each in kinds for word in _words(each)]
    metavar = None if kind is bool else _METAVARS.get(kinds[-1], "VALUE")
    if words:
        metavar = "|".join(words) if len(words) <= _FEW and len(kinds) == 1 else "NAME"
        text += f" One of {', '.join(words)}." * (metavar == "NAME")
    if field.is_required():
        kind = list[str] if kind is not str else str
        default, info = inspect.Parameter.empty, typer.Argument(help=text, show_default=False)
    elif ARGUMENT in field.metadata:
        default = None if default is None else str(default)
        kind, info = kind | None, typer.Argument(help=text, show_default=default is not None)
    else:
        name = _option(key)
        names = (f"{name}/--no-{name[2:]}" if default is True else name,)
        info = typer.Option(*names, help=" ".join(text.split()), metavar=metavar)
        if kind is not bool:
            default, kind = str(default) if default else None, kind | None
    place = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(key, place, default=default, annotation=Annotated[kind, info])


def _words(kind: Any) -> list[Any]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [each.value for each in kind]
    return [*get_args(kind)] if get_origin(kind) is Literal else []
