"""The names that peft gives the weights of a model with adapters."""

from __future__ import annotations

NAME = "default"
"""The only adapter of a model."""


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return f".{NAME}." in name or name.endswith(f".{NAME}")


def base_name(name: str) -> str:
    """Returns the name of a weight in the model without adapters."""
    return name.replace(".base_layer.", ".")


def saved_name(name: str) -> str:
    """Returns the name of an adapter's weight in a file of peft."""
    return f"base_model.model.{name.replace(f'.{NAME}', '')}"
