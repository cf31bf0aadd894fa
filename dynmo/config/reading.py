"""Reads a config from TOML and `--set section.key=value`.

The result is a `Config`, or one line that says what was wrong. Overrides win over TOML, and TOML
over the defaults.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from dynmo.config.sections import Config
from dynmo.counterparts import counterpart
from dynmo.errors import ConfigError, one_line
from dynmo.files import parse_toml, read_text
from dynmo.models.options import KEYS_OF_KIND, ModelOptions, keys_of_other_kinds
from dynmo.options import Options, problems_of, section_in, value_text

_logger = logging.getLogger(__name__)


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Reads a config from a TOML file and overrides."""
    data = {} if path is None else _read(Path(path))
    if "w_granularity" in _section(data, "pipeline") and os.environ.get("RANK", "0") == "0":
        _logger.warning(
            f"{path}: pipeline.w_granularity is gone and has no effect; leave it out (each W runs "
            "where the schedule has it)"
        )
    data = without_unused_keys(data)
    before = _kind_of(data)
    for text in overrides:
        _override(data, text)
    keys = {text.partition("=")[0].strip() for text in overrides}
    lengths = keys & {"train.steps", "train.epochs"}
    if len(lengths) == 1 and isinstance(data.get("train"), dict):
        other = "epochs" if "train.steps" in lengths else "steps"
        data["train"].pop(other, None)  # the file's length
    if _kind_of(data) != before:  # drop the file's keys that the new kind does not have
        known = {*KEYS_OF_KIND.get(before, ()), "vocab"}
        strange = keys_of_other_kinds(_kind_of(data)) & known
        _drop(data, "model", {key for key in strange if f"model.{key}" not in keys})
    where = "defaults" if path is None else str(path)
    return parse(data, where, frozenset(keys))


def parse(
    data: Mapping[str, Any], where: str = "config", overridden: frozenset[str] = frozenset()
) -> Config:
    """Makes a config of nested dicts."""
    data = without_unused_keys(data)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems = problems_of(error, data)
        # One line tells one problem. Of several, an unknown key is most likely the root.
        problem = next((p for p in problems if p.is_unknown), problems[0])
        keys = [str(part) for part in problem.place]
        text = _unknown(tuple(keys)) if problem.is_unknown else problem.text
        if not overridden.isdisjoint(accumulate(keys, "{}.{}".format)):
            where = "--set"
        elif any(key.startswith(".".join(keys)) for key in overridden):
            where = f"{where} and --set"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise _error(f"{where}: {text}{more}") from None
    _check_kind(data, where, overridden)
    return config


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a section. It is empty if it is not there, or no section."""
    section: object = data.get(name)
    return cast(Mapping[str, Any], section) if isinstance(section, Mapping) else {}


def _kind_of(data: Mapping[str, Any]) -> str:
    """Returns `model.kind`, or "" if it is not text."""
    kind: object = _section(data, "model").get("kind", ModelOptions().kind)
    return kind if isinstance(kind, str) else ""


def _drop(data: dict[str, Any], section: str, keys: Collection[str]) -> None:
    """Removes keys of a section in place."""
    if found := _section(data, section):
        data[section] = {key: value for key, value in found.items() if key not in keys}


def without_unused_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a config without former keys, and keys of [model] that its kind does not have.

    The latter happens only to a config that the run of an earlier version wrote. Such a file lists
    every key that there was, also those that were ignored.
    """
    copy = dict(data)
    _drop(copy, "pipeline", ["w_granularity"])
    every = {*KEYS_OF_KIND["gpt"], *KEYS_OF_KIND["emulated"]}
    if every <= _section(copy, "model").keys():
        _drop(copy, "model", keys_of_other_kinds(_kind_of(copy)))
    return copy


def _check_kind(data: Mapping[str, Any], where: str, overridden: Collection[str]) -> None:
    """Raise ConfigError for a key of [model] that its kind would ignore."""
    kind = _kind_of(data)
    unused = [key for key in _section(data, "model") if key in keys_of_other_kinds(kind)]
    if not unused:
        return
    key, *others = unused
    owner = next((kind for kind, keys in KEYS_OF_KIND.items() if key in keys), None)
    of, own = value_text(owner), value_text(kind)
    text = f"is a key of kind = {of}, which model.kind = {own} has not; leave it out"
    if owner is None:
        text = f"is in the folder of model.kind = {own}; leave it out"
    else:
        is_function = kind.startswith("python:")
        text += ": the function makes the layers" if is_function else f", or use kind = {of}"
    place = "--set" if f"model.{key}" in overridden else where
    more = f" (and {len(others)} more)" if others else ""
    raise _error(f"{place}: model.{key} {text}{more}")


def with_options(config: Config, section: tuple[str, ...], options: Mapping[str, Any]) -> Config:
    """Returns the same config with other options of a section."""
    data = config.model_dump()
    table = data
    for name in section:
        table = table[name]
    table |= options
    return parse(data)


def _error(message: str) -> ConfigError:
    """Makes one printable line, whatever keys and values it quotes."""
    return ConfigError(one_line(message))


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_text(path))
    except OSError as error:
        raise _error(
            f"{path}: cannot be read ({error.strerror}); give the path of a TOML file"
        ) from None
    except UnicodeDecodeError as error:
        raise _error(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except ValueError as error:
        # ValueError is tomllib's own error, but also that of an integer of thousands of digits.
        raise _error(f"{path}: not valid TOML: {error}") from None


def _override(data: dict[str, Any], text: str) -> None:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise _error(f"--set {text}: no '='; write section.key=value")
    parts = tuple(key.split("."))
    fields = _fields(parts[:-1]) or {}
    if parts[-1] not in fields:
        raise _error(f"--set: {_unknown(parts)}")
    if inner := _fields(parts):
        first = next(iter(inner))
        raise _error(f"--set: {key} is a section; set its keys one by one, like {key}.{first}=...")
    node = data
    for part in parts[:-1]:
        section: object = node.setdefault(part, {})
        if not isinstance(section, dict):
            raise _error(
                f"--set {text}: {part} must be a section in the file; write [{part}] there"
            )
        node = cast(dict[str, Any], section)
    node[parts[-1]] = _value(text, value, plain=fields[parts[-1]] is str)


def _value(text: str, value: str, plain: bool) -> Any:
    """Reads an override's value: TOML, or else a bare string.

    The value of a `plain` key is a string, so that a run may be called 2024.
    """
    try:
        table = parse_toml(f"value = {value}")
    except ValueError as error:
        if value.startswith(("'", '"', "[", "{")):  # meant as TOML
            raise _error(f"--set {text}: not a TOML value: {error}") from None
        return value
    if len(table) > 1 or (plain and not isinstance(table["value"], str)):
        return value
    return table["value"]


# Messages that say what was wrong.


def _fields(parts: Sequence[str]) -> dict[str, Any] | None:
    """Returns key -> type of the section at `parts`, or None if that is no section."""
    section: Any = Config
    for part in parts:
        annotation = section.model_fields[part].annotation if part in section.model_fields else None
        section = section_in(annotation)
        if section is None:
            return None
    return {
        key: field.annotation for key, field in cast(type[Options], section).model_fields.items()
    }


def _keys(parts: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key in _fields(parts) or ():
        yield (*parts, key)
        yield from _keys((*parts, key))


def _unknown(parts: tuple[str, ...]) -> str:
    """Says that a key is unknown, and what was meant.

    That is what an option of another trainer is called here, a key of the same section, the same
    word in another section, or the nearest path. Otherwise it lists the keys.
    """
    key = ".".join(parts)
    advice = counterpart(parts[-1])
    if advice is not None and f"use {key}:" not in advice:
        return f"unknown key {key}; {advice}"
    siblings, known = _fields(parts[:-1]), [".".join(path) for path in _keys()]
    words = difflib.get_close_matches(parts[-1], siblings or (), 1)
    near = [".".join((*parts[:-1], word)) for word in words]
    near = near or [path for path in known if path.endswith(f".{parts[-1]}")]
    near = near or difflib.get_close_matches(key, () if siblings else known, 1)
    if near:
        return f"unknown key {key}; did you mean {near[0]}?"
    where = f"[{'.'.join(parts[:-1])}]" if siblings and parts[:-1] else "the top level"
    return f"unknown key {key}; {where} has {', '.join(siblings or _fields(()) or ())}"
