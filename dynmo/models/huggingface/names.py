"""The names that peft, and the class of a folder, give the weights of a model.

The folder of a model for images and text names a class that has both. Its language model trains as
another class, under other names. Exports have the names of the folder's class.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from dynmo.models.huggingface.private import conversions_of, make_in

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


@dataclass(frozen=True)
class Renamed:
    """The names that another class has for the modules and parameters of a model.

    Empty if both are of one class.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, name: str) -> str:
        """Returns a name with the longest known path in it replaced."""
        path = name
        while path and path not in self.modules:
            path = path.rpartition(".")[0]
        if path not in self.modules:
            return name
        rest = name[len(path) :].lstrip(".")
        return f"{self.modules[path]}.{rest}".strip(".")

    def reversed(self) -> Renamed:
        return Renamed(
            {other: own for own, other in self.modules.items()},
            {other: own for own, other in self.parameters.items()},
        )


@dataclass(frozen=True)
class FolderClass:
    """How the class of a folder names what a model has.

    Attributes:
        model: A model of that class, on the meta device.
        names: Its names, by those of the model that trains.
    """

    model: PreTrainedModel
    names: Renamed = field(default_factory=Renamed)


def folder_class_of(
    config: PreTrainedConfig,
    model: PreTrainedModel,
    stored: Iterable[str],
    used: Mapping[str, str],
) -> FolderClass:
    """Returns the class that a folder's config names, or else the model's.

    The named class must generate text, and have all that the model takes from the folder.

    Args:
        stored: The keys in the folder's files. None if there is no folder.
        used: Of each key that the model uses, the name in the model.
    """
    kind = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if (
        not used
        or not isinstance(kind, type)
        or isinstance(model, kind)
        or not issubclass(kind, PreTrainedModel)
        or kind.config_class is not type(config)
        or not kind.can_generate()
    ):
        return FolderClass(model)
    with torch.device("meta"):
        other = make_in(kind, copy.deepcopy(config), torch.float32)
    made, _ = conversions_of(other, stored)
    names = {key: conversion.first for conversion in made for key in conversion.keys}
    if not used.keys() <= names.keys():
        return FolderClass(model)
    parameters = {name: names[key] for key, name in used.items()}
    modules = dict[str, str]()
    for own, its in parameters.items():
        ours, theirs = own.split("."), its.split(".")
        # The modules around a weight that have the same names in both classes.
        while ours and theirs and ours[-1] == theirs[-1]:
            del ours[-1], theirs[-1]
            modules[".".join(ours)] = ".".join(theirs)
    return FolderClass(other, Renamed(modules, parameters))
