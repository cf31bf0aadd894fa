"""The names that peft gives the weights of a model with adapters."""

from __future__ import annotations

import re
from collections.abc import Callable

NAME = "default"
"""The only adapter of a model."""

PREFIX = "base_model.model."
"""What the names of adapters begin with in a file of peft."""

COPY = f".modules_to_save.{NAME}."
"""What the name of a weight has that is trained as a copy."""

# The modules of peft that hold a module of the model.
_HOLDERS = re.compile(
    rf"(\.(base_layer|token_adapter|original_module|modules_to_save\.{NAME}))+(?=\.)"
)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return COPY not in name and (f".{NAME}." in name or name.endswith(f".{NAME}"))


def base_name(name: str) -> str:
    """Returns the name of a weight in the model without adapters."""
    return _HOLDERS.sub("", name)


def adapted(name: str) -> str:
    """Returns the path of the module that an adapter belongs to."""
    return base_name(name).partition(f".{NAME}")[0].rpartition(".")[0]


def saved_name(name: str, rename: Callable[[str], str] = str) -> str:
    """Returns the name in a file of peft.

    Args:
        name: The name that peft gives it in the model.
        rename: Returns the name that the class of the file has for that of the model.
    """
    return f"{PREFIX}{rename(name.replace(f'.{NAME}', ''))}"
