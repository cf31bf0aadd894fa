"""The config of adapters, for a class that has other names for the same modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from dynmo.models.huggingface.folder_class import Renamed


def renamed_config(config: LoraConfig, names: Renamed) -> LoraConfig:
    """Returns a config whose targets are named one by one, as another class names them.

    So nothing else in that class is a target.

    Args:
        config: The config for the class whose names are replaced.
    """
    made = copy.deepcopy(config)
    modules = [path for path in names.modules if check_target_module_exists(config, path)]
    ends = config.target_parameters or ()
    parameters = [
        name for name in names.parameters if any(f".{name}".endswith(f".{end}") for end in ends)
    ]
    if config.target_modules is not None:
        made.target_modules = sorted(names.modules[path] for path in modules)
    if config.target_parameters is not None:
        made.target_parameters = sorted(names.parameters[name] for name in parameters)
    if config.modules_to_save:
        made.modules_to_save = _ending(config.modules_to_save, names)
    if isinstance(config.trainable_token_indices, dict):
        made.trainable_token_indices = {
            path: indices
            for key, indices in config.trainable_token_indices.items()
            for path in _ending([key], names)
        }
    made.layers_to_transform = made.layers_pattern = made.exclude_modules = None
    every = {path: names.modules[path] for path in modules}
    every |= {name: names.parameters[name] for name in parameters}
    made.rank_pattern = _by_target(config.rank_pattern, every)
    made.alpha_pattern = _by_target(config.alpha_pattern, every)
    return made


def _ending(keys: list[str], names: Renamed) -> list[str]:
    """Returns the modules whose paths end with a key, by their paths in the other class."""
    return sorted(other for path, other in names.modules.items() if path.endswith(tuple(keys)))


def _by_target(pattern: Mapping[str, Any] | None, targets: Mapping[str, str]) -> dict[str, Any]:
    """Returns the value of each target that a pattern matches, by its other name."""
    values = pattern or {}
    keys = {name: get_pattern_key([*values], name) for name in targets}
    return {targets[name]: values[key] for name, key in keys.items() if key in values}
