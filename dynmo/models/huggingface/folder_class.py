"""The class that a folder names, which may hold more than the model that trains.

The folder of a model for images and text names a class that has both. Its language model trains as
another class, under other names. Exports have the names of the folder's class.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from dynmo.models.huggingface.configs import one_line
from dynmo.models.huggingface.loading import Weights
from dynmo.models.huggingface.transformers_private import conversions_of, make_in


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
    folder: Path | None, config: PreTrainedConfig, model: PreTrainedModel, weights: Weights | None
) -> FolderClass:
    """Returns the class that a folder's config names, or else the model's.

    The named class must generate text, and have all that the model takes from the folder.

    Raises:
        ConfigError: The class cannot be made of the config.
    """
    kind = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if (
        weights is None
        or not isinstance(kind, type)
        or isinstance(model, kind)
        or not issubclass(kind, PreTrainedModel)
        or kind.config_class is not type(config)
        or not kind.can_generate()
    ):
        return FolderClass(model)
    with one_line(f"{folder}, {kind.__name__}"), torch.device("meta"):
        other = make_in(kind, copy.deepcopy(config), torch.float32)
    made, _ = conversions_of(other, weights.stored)
    names = {key: conversion.first for conversion in made for key in conversion.keys}
    if not weights.names.keys() <= names.keys():
        return FolderClass(model)
    parameters = {name: names[key] for key, name in weights.names.items()}
    modules = dict[str, str]()
    for own, its in parameters.items():
        modules |= _modules(own, its)
    return FolderClass(other, Renamed(modules, parameters))


def _modules(own: str, other: str) -> dict[str, str]:
    """Returns the modules around one weight that have the same names in both classes."""
    ours, theirs, found = own.split("."), other.split("."), dict[str, str]()
    while ours and theirs and ours[-1] == theirs[-1]:
        del ours[-1], theirs[-1]
        found[".".join(ours)] = ".".join(theirs)
    return found
