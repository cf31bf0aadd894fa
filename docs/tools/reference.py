"""The generated parts of docs/reference.

They are configuration keys, options of commands and public names. Generated text stands between
`<!-- keys: SECTION -->`, `<!-- options: COMMAND -->` or `<!-- names -->` and `<!-- end -->`. The
text around these marks is written by hand.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import annotated_types
import typer
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

import dynmo
from dynmo.cli import app
from dynmo.config import Config
from dynmo.options import LARGEST, Options, value_text

FOLDER = Path(__file__).parents[1] / "reference"
PAGES = [FOLDER / name for name in ("configuration.md", "commands.md", "python.md")]
_TYPES: dict[object, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "",
}
MARK = re.compile(r"<!-- (keys|options|names)(?:: ([\w.]+))? -->\n.*?<!-- end -->", re.DOTALL)


# -- configuration ---------------------------------------------------------------------------------


def sections(
    section: type[Options] = Config, prefix: str = ""
) -> Iterator[tuple[str, type[Options]]]:
    """The name and class of every section, the top level first under the name "top"."""
    yield prefix or "top", section
    for key, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Options):
            yield from sections(inner, f"{prefix}.{key}" if prefix else key)


def keys(section: type[Options]) -> dict[str, FieldInfo]:
    """The fields of a section that are values."""
    fields = section.model_fields.items()
    return {key: field for key, field in fields if not isinstance(field.default, BaseModel)}


def keys_table(name: str) -> str:
    """One row per key of a section: name, type, default, meaning."""
    rows = [
        (f"`{key}`", type_text(field), default_text(field.default), meaning(field))
        for key, field in keys(dict(sections())[name]).items()
    ]
    return table(("key", "type", "default", "meaning"), rows)


def type_text(field: FieldInfo) -> str:
    """The type of a key in words, with its limits."""
    if any(isinstance(extra, BeforeValidator) for extra in field.metadata):
        return "integer or string"
    return _type_words(field.annotation, field.metadata)


def _type_words(annotation: Any, metadata: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _type_words(inner, [*metadata, *more])
    if origin in (Union, types.UnionType):
        parts = (_type_words(part, metadata) for part in get_args(annotation))
        return " or ".join(dict.fromkeys(part for part in parts if part))
    if origin is Literal:
        return "string"
    if origin is tuple:
        return "list"
    if origin is dict:
        return "table"
    if annotation in (int, float):
        return _TYPES[annotation] + _limits_text(metadata)
    return _TYPES[annotation]


def _limits_text(metadata: list[Any]) -> str:
    flat = [
        item
        for extra in metadata
        for item in (extra.metadata if isinstance(extra, FieldInfo) else [extra])
    ]
    limits: list[str] = []
    for extra in flat:
        match extra:
            case annotated_types.Ge(ge):
                limits.append(f"≥ {ge}")
            case annotated_types.Gt(gt):
                limits.append(f"> {gt}")
            case annotated_types.Le(le) if cast(float, le) < LARGEST:
                limits.append(f"≤ {le:g}")  # pyright: ignore[reportUnknownMemberType]
            case annotated_types.Lt(lt):
                limits.append(f"< {lt}")
            case _:
                pass
    return " " + ", ".join(limits) if limits else ""


def default_text(value: object) -> str:
    """A default as TOML writes it."""
    return "not set" if value is None else f"`{value_text(value)}`"


def meaning(field: FieldInfo) -> str:
    """The description of a key, and the words that it allows."""
    text = " ".join((field.description or "").split())
    allowed = [f"`{word}`" for word in words(field.annotation)]
    if all(word in text for word in allowed):
        return text
    return f"{text} One of {', '.join(allowed)}."


def words(annotation: Any) -> list[str]:
    """The words that a type allows."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for part in get_args(annotation) for word in words(part)]


# -- commands --------------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """The commands of `dynmo` by name."""
    group: Any = typer.main.get_command(app)
    return cast("dict[str, Any]", group.commands)


def options_table(name: str) -> str:
    """One row per argument and option of a command: option, default, meaning."""
    return table(
        ("option", "default", "meaning"),
        [_option_row(option) for option in commands()[name].params],
    )


def _option_row(option: Any) -> tuple[str, str, str]:
    text: str = " ".join((option.help or "").split())
    match = re.search(r" \(default:? ([^()]*)\)", text)
    if match:
        text, default = text.replace(match[0], ""), match[1]
    elif option.required:
        default = "required"
    elif option.default is None or isinstance(option.default, bool) or option.default == []:
        default = "on" if option.default is True else "off" if option.default is False else ""
    else:
        default = f"`{getattr(option.default, 'value', option.default)}`"
    names: str = " / ".join([*option.opts, *option.secondary_opts])
    if option.param_type_name == "argument":
        names = option.metavar or option.name.upper()
    elif not option.is_flag:
        names += f" {_placeholder(option)}"
    return f"`{names}`", default, text


def _placeholder(option: Any) -> str:
    if isinstance(option.default, Enum):
        return "|".join(str(choice.value) for choice in type(option.default))
    return option.metavar or "VALUE"


# -- Python ----------------------------------------------------------------------------------------


def names_text() -> str:
    """Every public name of dynmo with its signature and its docstring's summary.

    The summary is the first paragraph of the docstring.
    """
    return "\n\n".join(_name_text(name) for name in sorted(dynmo.__all__, key=str.lower))


def _name_text(name: str) -> str:
    value: Any = getattr(dynmo, name)
    if isinstance(value, str):
        return f"### {name}\n\nThe version of dynmo, a string."
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0]
    section = next((key for key, kind in sections() if kind is value), None)
    if section is not None:
        anchor = section.replace(".", "")
        keys = f"Its options are the keys of [`[{section}]`](configuration.md#{anchor})."
        return f"### {name}\n\n{paragraph}\n{keys}"
    return f"### {name}\n\n```\n{_signature(name, value)}\n```\n\n{paragraph}"


def _signature(name: str, value: Callable[..., object]) -> str:
    if isinstance(value, type) and issubclass(value, BaseException):
        return f"{name}(message)"
    signature = inspect.signature(value)
    parameters = [p for p in signature.parameters.values() if not p.name.startswith("_")]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return f"class {name}"  # a base class without a constructor of its own
    plain = isinstance(value, type) and issubclass(value, BaseModel)
    parts: list[str] = []
    for previous, parameter in zip([None, *parameters], parameters, strict=False):
        first = parameter.kind is parameter.KEYWORD_ONLY
        if first and (previous is None or previous.kind is not parameter.KEYWORD_ONLY):
            parts.append("*")
        parts.append(_parameter(parameter, plain))
    end = f" -> {_annotation(signature.return_annotation)}" if inspect.isfunction(value) else ""
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= 96:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def _parameter(parameter: inspect.Parameter, plain: bool) -> str:
    text = parameter.name
    if not plain and parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        default = parameter.default
        text += f" = {default.__name__ if inspect.isfunction(default) else repr(default)}"
    return text


def _annotation(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


# -- pages -----------------------------------------------------------------------------------------


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [
        head,
        ("---",) * len(head),
        *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(text: str) -> str:
    """The text of a page with its generated parts replaced."""

    def part(match: re.Match[str]) -> str:
        kind, name = match[1], match[2] or ""
        content = {"keys": keys_table, "options": options_table, "names": lambda _: names_text()}[
            kind
        ](name)
        mark = f"{kind}: {name}" if name else kind
        return f"<!-- {mark} -->\n\n{content}\n\n<!-- end -->"

    return MARK.sub(part, text)
