"""LoRA adapters of peft in a model of transformers.

peft puts its layers into the model on the meta device, before it is cut. An adapter belongs to the
layer of its weight. Its first values depend on the seed and the layer alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from dynmo.errors import ConfigError
from dynmo.models.huggingface.adapter_names import NAME


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> LoraConfig:
    """Puts adapters into a model on the meta device, and freezes everything else.

    Returns:
        The config, with everything that peft has found out, such as the names of the targets.

    Raises:
        ConfigError: The config fits no weight of the model, or asks for something else than LoRA.
    """
    _check(lora)
    config = copy.deepcopy(lora)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, model, adapter_name=NAME, low_cpu_mem_usage=True)
    except (ValueError, TypeError, KeyError) as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"lora: {line}") from None
    return config


def _check(lora: LoraConfig) -> None:
    if not isinstance(lora, LoraConfig):
        raise ConfigError(f"lora is a {type(lora).__name__}; give a peft.LoraConfig")
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


def initialise_adapters(layer: nn.Module, lora: LoraConfig) -> None:
    """Sets the first values of a layer's adapters, as peft does."""
    for each in adapters_in(layer):
        for linear in (*each.lora_A.values(), *each.lora_B.values()):
            linear.reset_parameters()
        each.reset_lora_parameters(NAME, lora.init_lora_weights)
