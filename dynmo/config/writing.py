"""Writing a config as TOML. It holds strings, numbers, booleans and lists of them only: no need for a library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:  # the sections say their values in errors as they are written here
    from dynmo.config.sections import Config


def to_toml(config: Config) -> str:
    """TOML that `load` reads back as the same config. A key that is None is left out."""
    return "\n".join(_tables(config.model_dump(), ())) + "\n"


def _tables(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"\n[{'.'.join(path)}]"
    for key, value in table.items():
        if value is not None and not isinstance(value, dict):
            yield f"{key} = {value_text(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _tables(cast(dict[str, Any], value), (*path, key))


def value_text(value: object) -> str:
    """A value as a TOML file has it, or as an error quotes it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's, but TOML forbids a bare DEL
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(value_text(item) for item in cast(Sequence[object], value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {value_text(item)}' for key, item in cast(dict[str, object], value).items())}}}"
    return str(value)  # an int, or a float's shortest digits that read back exactly
