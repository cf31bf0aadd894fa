"""The config of adapters, for a class that has other paths to the same modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from dynmo.models.huggingface.adapter_names import renamed


def renamed_config(config: LoraConfig, paths: Mapping[str, str]) -> LoraConfig:
    """Returns a config whose targets are named one by one, by their paths in another class.

    So no other module of that class is a target.

    Args:
        config: The config, for a class whose modules have the keys of `paths`.
        paths: The path in the other class of each module, by its path in the first.
    """
    made = copy.deepcopy(config)
    if config.target_modules is not None:
        targets = [path for path in paths if check_target_module_exists(config, path)]
        made.target_modules = sorted(paths[path] for path in targets)
        made.layers_to_transform = made.layers_pattern = made.exclude_modules = None
        made.rank_pattern = _named(config.rank_pattern, targets, paths)
        made.alpha_pattern = _named(config.alpha_pattern, targets, paths)
    if config.modules_to_save:
        made.modules_to_save = _ending(config.modules_to_save, paths)
    if isinstance(config.trainable_token_indices, dict):
        made.trainable_token_indices = {
            path: indices
            for key, indices in config.trainable_token_indices.items()
            for path in _ending([key], paths)
        }
    if config.target_parameters is not None:
        made.target_parameters = [renamed(each, paths) for each in config.target_parameters]
    return made


def _ending(keys: list[str], paths: Mapping[str, str]) -> list[str]:
    """Returns the modules whose paths end with a key, by their paths in the other class."""
    return sorted(other for path, other in paths.items() if path.endswith(tuple(keys)))


def _named(
    pattern: Mapping[str, Any] | None, targets: list[str], paths: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the value of each target that a pattern matches."""
    values = pattern or {}
    keys = {path: get_pattern_key([*values], path) for path in targets}
    return {paths[path]: values[key] for path, key in keys.items() if key in values}
