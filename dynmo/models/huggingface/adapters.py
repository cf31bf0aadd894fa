"""LoRA adapters of peft in a model of transformers.

peft puts its layers into the model on the meta device, before it is cut. An adapter belongs to the
layer of its weight. Its first values depend on the seed and the layer alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from dynmo.errors import ConfigError
from dynmo.models.huggingface.adapter_files import AdapterFiles
from dynmo.models.huggingface.adapter_names import NAME
from dynmo.models.options import LoraOptions


class Adapters:
    """The adapters of one model.

    Args:
        model: The model on the meta device. It gets the adapters, and all else is frozen.
        lora: A config of peft, or the folder of adapters to go on from.
        base: Folder of the model, if it has one.
        paths: The path in files of each module that has another one there.

    Attributes:
        config: The config, with everything that peft has found out, such as the names of targets.

    Raises:
        ConfigError: The config fits no weight of the model, or asks for something else than LoRA.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lora: LoraConfig | str | Path,
        base: Path | None,
        paths: Mapping[str, str],
    ) -> None:
        self._files = AdapterFiles(Path(lora), paths) if isinstance(lora, str | Path) else None
        given = lora if isinstance(lora, LoraConfig) or self._files is None else self._files.config
        _check(given)
        self.config = copy.deepcopy(cast(LoraConfig, given))
        self.config.task_type = self.config.task_type or TaskType.CAUSAL_LM
        if base is not None:
            self.config.base_model_name_or_path = str(base)
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                inject_adapter_in_model(self.config, model, NAME, low_cpu_mem_usage=True)
        except (ValueError, TypeError, KeyError) as error:
            line = (str(error).strip().splitlines() or [""])[0]
            raise ConfigError(f"lora: {line}") from None
        if self._files is not None:
            self._files.check(model)

    def fill(self, layer: nn.Module) -> None:
        """Sets the values of a layer's adapters: those of files, or first ones as peft draws."""
        if self._files is not None:
            self._files.fill(layer)
            return
        for each in adapters_in(layer):
            for linear in (*each.lora_A.values(), *each.lora_B.values()):
                cast(nn.Linear, linear).reset_parameters()
            each.reset_lora_parameters(NAME, self.config.init_lora_weights)


def lora_config(options: LoraOptions) -> LoraConfig:
    """Returns the config of peft that [model.lora] means.

    Raises:
        ConfigError: peft refuses it.
    """
    targets = options.targets
    try:
        return LoraConfig(
            r=options.r,
            lora_alpha=options.alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            layers_to_transform=list(options.layers) or None,
            lora_dropout=options.dropout,
        )
    except ValueError as error:
        raise ConfigError(f"model.lora: {str(error).splitlines()[0]}") from None


def _check(lora: object) -> None:
    if not isinstance(lora, LoraConfig):
        raise ConfigError(f"lora is a {type(lora).__name__}; give a peft.LoraConfig, or a folder")
    if lora.modules_to_save:
        raise ConfigError(
            "lora.modules_to_save: dynmo trains adapters beside frozen weights; leave it out, or "
            "train the modules by freeze="
        )
    if lora.init_lora_weights not in (True, False, "gaussian"):
        raise ConfigError(
            f"lora.init_lora_weights = {lora.init_lora_weights!r} is not supported; use True, "
            "False or 'gaussian'"
        )


def adapters_in(module: nn.Module) -> Iterator[LoraLayer]:
    """Yields the modules of peft in a layer."""
    for each in module.modules():
        if isinstance(each, LoraLayer):
            yield each
