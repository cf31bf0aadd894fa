"""The names that peft gives the weights of a model with adapters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NAME = "default"
"""The only adapter of a model."""

PREFIX = "base_model.model."
"""What the names of adapters begin with in a file of peft."""


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return f".{NAME}." in name or name.endswith(f".{NAME}")


def base_name(name: str) -> str:
    """Returns the name of a weight in the model without adapters."""
    return name.replace(".base_layer.", ".")


def adapted(name: str) -> str:
    """Returns the path of the module that an adapter belongs to."""
    return base_name(name).partition(f".{NAME}")[0].rpartition(".")[0]


def saved_name(name: str, paths: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns the name of an adapter's weight in a file of peft.

    Args:
        paths: The path in files of each module that has another one there (`folder_class`).
    """
    return f"{PREFIX}{renamed(name.replace(f'.{NAME}', ''), paths)}"


def renamed(name: str, paths: Mapping[str, str]) -> str:
    """Returns a name with its longest known path replaced."""
    path = name
    while path and path not in paths:
        path = path.rpartition(".")[0]
    if path not in paths:
        return name
    return f"{paths[path]}{name[len(path) :]}" if path else f"{paths[path]}.{name}".lstrip(".")
