"""The generated parts of docs/reference.

They are configuration keys, options of commands and public names. Generated text stands between
`<!-- keys: SECTION -->`, `<!-- options: COMMAND -->`, `<!-- names -->` or `<!-- counterparts -->`,
and `<!-- end -->`. The text around these marks is written by hand.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import annotated_types
import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

import dynmo
from dynmo.cli import COMMANDS, application
from dynmo.config import Config
from dynmo.counterparts import COUNTERPARTS
from dynmo.options import LARGEST, Options, section_in, value_text
from dynmo.plan.balancers import BALANCERS
from dynmo.schedule.catalogue import AUTO, SCHEDULES

FOLDER = Path(__file__).parents[1] / "reference"
PAGES = [
    FOLDER / name for name in ("configuration.md", "commands.md", "python.md", "other-trainers.md")
]
_TYPES: dict[object, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "",
}
_FEW = 4
MARK = re.compile(
    r"<!-- (keys|options|names|counterparts)(?:: ([\w.]+))? -->\n.*?<!-- end -->", re.DOTALL
)


# -- configuration ---------------------------------------------------------------------------------


def sections(
    section: type[Options] = Config, prefix: str = ""
) -> Iterator[tuple[str, type[Options]]]:
    """The name and class of every section, the top level first under the name "top"."""
    yield prefix or "top", section
    for key, field in section.model_fields.items():
        inner = section_in(field.annotation)
        if inner is not None:
            yield from sections(inner, f"{prefix}.{key}" if prefix else key)


def keys(section: type[Options]) -> dict[str, FieldInfo]:
    """The fields of a section that are values, its own before those that it inherits."""
    fields = section.model_fields
    ordered = dict.fromkeys([*section.__annotations__, *fields])
    return {
        key: fields[key]
        for key in ordered
        if key in fields and section_in(fields[key].annotation) is None
    }


def keys_table(name: str) -> str:
    """One row per key of a section: name, type, default, meaning."""
    rows: list[tuple[str, ...]] = []
    for key, field in keys(dict(sections())[name]).items():
        text, unset = meaning(field)
        default = unset if field.default is None else f"`{value_text(field.default)}`"
        rows.append((f"`{key}`", type_text(field), default, text))
    return table(("key", "type", "default", "meaning"), rows)


def type_text(field: FieldInfo) -> str:
    """The type of a key in words, with the limits that its meaning does not tell.

    The type of a string with few allowed words is these words.
    """
    if any(isinstance(extra, BeforeValidator) for extra in field.metadata):
        lists = "list" in _type_words(field.annotation, [])
        return "integer, string or list" if lists else "integer or string"
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
        allowed = words(annotation)
        return "string" if len(allowed) > _FEW else ", ".join(f"`{word}`" for word in allowed)
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
            case annotated_types.Ge(ge) if ge not in (0, 1):
                limits.append(f"≥ {ge}")
            case annotated_types.Le(le) if cast(float, le) < LARGEST:
                limits.append(f"≤ {le:g}")  # pyright: ignore[reportUnknownMemberType]
            case annotated_types.Lt(lt):
                limits.append(f"< {lt}")
            case _:
                pass
    return " " + ", ".join(limits) if limits else ""


def meaning(field: FieldInfo) -> tuple[str, str]:
    """The description of a key, and what holds if it is not set.

    Many allowed words stand behind the description, few in the type.
    """
    text, _, unset = " ".join((field.description or "").split()).partition(" Not set: ")
    allowed = [f"`{word}`" for word in words(field.annotation)]
    if len(allowed) > _FEW and not all(word in text for word in allowed):
        text = f"{text} One of {', '.join(allowed)}."
    unset, _, more = unset.partition(". ")
    return f"{text} {more}".strip(), unset.removesuffix(".") or "not set"


def words(annotation: Any) -> list[str]:
    """The words that a type allows."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for part in get_args(annotation) for word in words(part)]


# -- commands --------------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """The commands of `dynmo` by name, such as "train" and "checkpoint.export"."""
    group: Any = typer.main.get_command(application(*COMMANDS))
    found = dict[str, Any]()
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name}.{x}": y for x, y in inner.items()}
    return found


def options_table(name: str) -> str:
    """One row per argument and option of a command: option, meaning.

    Every command has `--json`, which the page describes once.
    """
    options = [option for option in commands()[name].params if option.name != "as_json"]
    return table(("option", "meaning"), [_option_row(option) for option in options])


def _option_row(option: Any) -> tuple[str, str]:
    text: str = " ".join((option.help or "").split())
    for key, words in (
        ("balance.balancer", BALANCERS),
        ("pipeline.schedule", [*SCHEDULES, AUTO]),
        ("pipeline.schedule", SCHEDULES),
    ):
        text = text.replace(f"One of {', '.join(words)}", f"A value of `{key}`")
    if option.default not in (None, []) and not getattr(option, "is_flag", False):
        text = f"{text.removesuffix('.')} (default: {option.default})."
    names: str = " / ".join([*option.opts, *option.secondary_opts])
    if option.param_type_name == "argument":
        names = option.metavar or option.name.upper()
    elif not option.is_flag:
        names += f" {option.metavar}"
    return f"`{names}`", text


# -- Python ----------------------------------------------------------------------------------------


def names_text() -> str:
    """Every public name of dynmo with the first sentence of its docstring."""
    return "\n".join(_name_text(name) for name in sorted(dynmo.__all__, key=str.lower))


def _name_text(name: str) -> str:
    value: Any = getattr(dynmo, name)
    if isinstance(value, str):
        return f"- `{name}`: The version of dynmo, a string."
    first = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    first = re.split(r"(?<=\.) (?=[A-Z])", first)[0]
    section = next((key for key, kind in sections() if kind is value), None)
    if section is None:
        return f"- `{name}`: {first}"
    anchor = section.replace(".", "")
    return f"- `{name}`: {first} Options: [`[{section}]`](configuration.md#{anchor})."


def counterparts_table() -> str:
    """One row per option of other trainers."""

    def code(text: str) -> str:
        return text and f"`{text}`"

    rows = [
        (
            ", ".join(map(code, each.names.split())),
            code(each.file),
            code(each.python),
            f"{each.note[:1].upper()}{each.note[1:]}.",
        )
        for each in COUNTERPARTS
    ]
    return table(("you know", "in a file", "in Python", "note"), rows)


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
        makers = {"keys": keys_table, "options": options_table}
        content = (
            makers[kind](name)
            if name
            else names_text()
            if kind == "names"
            else counterparts_table()
        )
        mark = f"{kind}: {name}" if name else kind
        return f"<!-- {mark} -->\n\n{content}\n\n<!-- end -->"

    return MARK.sub(part, text)
