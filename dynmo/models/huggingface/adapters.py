"""LoRA adapters of peft in a model of transformers.

peft puts its layers into the model on the meta device, before it is cut. An adapter belongs to the
layer of its weight. Its first values depend on the weight, the seed and the layer alone: peft's own
code sets them once the weight has its value.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, TaskType, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import LoraRuntimeConfig, VeloraConfig
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dynmo.errors import ConfigError
from dynmo.models.huggingface.adapter_files import AdapterFiles
from dynmo.models.huggingface.adapter_names import NAME
from dynmo.models.huggingface.folder_class import Renamed
from dynmo.models.huggingface.lora_options import check
from dynmo.models.huggingface.values import has_no_values
from dynmo.models.options import LoraOptions

# What peft raises. It asserts that there is a GPU, say.
REFUSALS = ValueError, TypeError, KeyError, AssertionError, ImportError, RuntimeError


class Adapters:
    """The adapters of one model.

    Args:
        model: The model on the meta device. It gets the adapters, and all else is frozen.
        lora: A config of peft, or the folder of adapters to go on from.
        base: Folder of the model, if it has one.
        names: The names that the class of the folder has.

    Attributes:
        config: The config, with everything that peft has found out, such as the names of targets.
        saved: Names that peft gives the tensors that are saved, by their names in the model.

    Raises:
        ConfigError: The config fits no weight of the model, or has an option that is not supported.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lora: LoraConfig | str | Path,
        base: Path | None,
        names: Renamed,
    ) -> None:
        self._files = AdapterFiles(Path(lora), names) if isinstance(lora, str | Path) else None
        given = lora if isinstance(lora, LoraConfig) or self._files is None else self._files.config
        check(given, is_folder=self._files is not None)
        self.config = copy.deepcopy(cast(LoraConfig, given))
        self.config.task_type = self.config.task_type or TaskType.CAUSAL_LM
        if base is not None:
            self.config.base_model_name_or_path = str(base)
        self._inject(model)
        self.saved = _saved_names(model)
        if self._files is not None:
            self._files.check(model, self.saved)

    @property
    def blocks(self) -> list[int] | None:
        """The block of the folder that each block is, if peft repeats some."""
        spans = self.config.layer_replication
        return None if spans is None else [at for start, end in spans for at in range(start, end)]

    def _inject(self, model: PreTrainedModel) -> None:
        config = self.config
        config.runtime_config = LoraRuntimeConfig()  # values come on the CPU
        init, velora = config.init_lora_weights, cast(VeloraConfig | None, config.velora_config)
        # Most starts need values, which weights do not have yet. "mica" makes other layers.
        config.init_lora_weights = init if init == "mica" else True
        config.velora_config = (
            None if velora is None else replace(velora, init_type="batch_average")
        )
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=True)
        except REFUSALS as error:
            raise _refusal(error, model) from None
        config.init_lora_weights, config.velora_config = init, velora
        if getattr(config, "target_modules_to_tie", None):
            raise ConfigError(
                "lora.ensure_weight_tying: embedding and output layer may be on two ranks, and one "
                "would train the other's adapters transposed; leave one of them out of "
                "target_modules"
            )
        for each in adapters_in(model):
            self._settle(each)

    def fill(self, layer: nn.Module) -> None:
        """Sets the values of a layer's adapters as peft does, or to those of files.

        peft may change the weight beside an adapter, too. The weight has its value before.
        """
        if has_no_values():
            return
        flags = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for path, each in list(layer.named_modules()):
                    self._start(path, each)
        except REFUSALS as error:
            raise _refusal(error) from None
        for name, parameter in layer.named_parameters():
            parameter.data = parameter.data.contiguous()
            parameter.requires_grad_(flags[name])
        if self._files is not None:
            self._files.fill(layer, self.saved)

    def _settle(self, module: Any) -> None:
        """Does now what peft leaves to the first forward, which is on any rank."""
        velora = cast(VeloraConfig | None, self.config.velora_config)
        if velora is not None:
            module.lora_velora_init_type[NAME] = velora.init_type
            module.lora_velora_initialized[NAME] = True
        if self.config.kasa_config is not None:
            module._lora_kasa_truncation_deferred.clear()  # `fill` has cut the weight

    def _start(self, path: str, module: Any) -> None:
        if isinstance(module, LoraLayer):
            module.update_layer(
                NAME,
                module.r[NAME],
                lora_alpha=module.lora_alpha[NAME],
                config=self.config,
                target_name=path,
            )
            self._settle(module)
        elif isinstance(module, TrainableTokensLayer):
            module.update_layer(NAME, token_indices=module.token_indices[NAME])
        elif isinstance(module, ModulesToSaveWrapper):
            module.modules_to_save[NAME].load_state_dict(module.original_module.state_dict())


def _saved_names(model: PreTrainedModel) -> dict[str, str]:
    """Asks peft what it would save. The values that it sorts are names here."""
    names = cast(Any, {name: name for name in model.state_dict()})
    found: Any = get_peft_model_state_dict(model, names, NAME, save_embedding_layers=False)
    return {name: key for key, name in found.items()}


def _refusal(error: Exception, model: nn.Module | None = None) -> ConfigError:
    text = (str(error).strip().splitlines() or [""])[0]
    if "layers_to_transform" in text:
        return ConfigError(f"lora: {text} Blocks have numbers from 0 on.")
    if model is not None and "not found in the base model" in text:
        linear = nn.Linear | Conv1D
        there = {name for name, each in model.named_modules() if isinstance(each, linear)}
        text += f" Its linears are {', '.join(sorted({name.split('.')[-1] for name in there}))}."
    return ConfigError(f"lora: {text}")


def lora_config(options: LoraOptions) -> LoraConfig:
    """Returns the config of peft that [model.lora] means.

    Raises:
        ConfigError: peft refuses it.
    """
    targets = options.targets
    if options.layers and isinstance(targets, str):
        raise ConfigError(
            'model.lora.layers needs model.lora.targets by name, such as ["q_proj", "v_proj"]'
        )
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


def adapters_in(module: nn.Module) -> Iterator[LoraLayer]:
    """Yields the modules of peft in a layer."""
    for each in module.modules():
        if isinstance(each, LoraLayer):
            yield each
