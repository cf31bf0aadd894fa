"""The folder of adapters that peft writes: a config and one file of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig
from torch import nn

from dynmo.errors import ConfigError
from dynmo.models.huggingface.adapter_config import renamed_config
from dynmo.models.huggingface.adapter_names import PREFIX, saved_name
from dynmo.models.huggingface.folder_class import Renamed
from dynmo.models.huggingface.weight_files import Reader, Stored, header_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdapterFiles:
    """Adapters to go on from.

    Args:
        folder: A folder that peft or dynmo has written.
        names: The names of another class. The adapters may be of either class.

    Attributes:
        config: The config of the adapters.

    Raises:
        ConfigError: A file is missing or damaged, or the adapters are no LoRA.
    """

    def __init__(self, folder: Path, names: Renamed) -> None:
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise ConfigError(f"{folder} has no {name}; give a folder that peft has written")
        try:
            config = PeftConfig.from_pretrained(str(folder))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{folder / CONFIG}: {str(error).splitlines()[0]}") from None
        if not isinstance(config, LoraConfig):
            raise ConfigError(f"{folder / CONFIG} is of {config.peft_type}; dynmo trains LoRA")
        config.inference_mode = False
        self._stored: dict[str, Stored] = dict(header_of(folder / WEIGHTS))
        others = {f"{PREFIX}{other}" for own, other in names.modules.items() if own != other}
        is_other = any(key.partition(".lora_")[0] in others for key in self._stored)
        self._names = names if is_other else Renamed()
        if is_other:
            config = renamed_config(config, names.reversed())
        self.folder, self.config = folder, config

    def check(self, model: nn.Module, saved: Mapping[str, str]) -> None:
        """Checks that the adapters fit a model that has such ones.

        peft may save the embedding beside its adapters.

        Args:
            saved: Names in the file of what is saved, by names in the model.

        Raises:
            ConfigError: They were trained on another base.
        """
        state = model.state_dict()
        wanted = {self._key(key): state[name].shape for name, key in saved.items()}
        known = wanted | {self._key(name): tensor.shape for name, tensor in state.items()}
        for name in sorted(wanted.keys() - self._stored.keys())[:1]:
            raise ConfigError(f"{self._of_another_base()}: the file has no {name}")
        for name in sorted(self._stored.keys() - known.keys())[:1]:
            raise ConfigError(f"{self._of_another_base()}: the file has {name}")
        for name, stored in self._stored.items():
            if known[name] != stored.shape:
                raise ConfigError(
                    f"{self._of_another_base()}: {name} is {list(stored.shape)}, and the model's "
                    f"is {list(known[name])}"
                )

    def _of_another_base(self) -> str:
        base = self.config.base_model_name_or_path
        return f"{self.folder} has adapters of another base ({base or 'unknown'})"

    def fill(self, layer: nn.Module, saved: Mapping[str, str]) -> None:
        """Sets the values of a layer that the file has."""
        with Reader() as reader, torch.no_grad():
            for name, tensor in layer.state_dict().items():
                key = self._key(saved.get(name, name))
                if key in self._stored:
                    tensor.copy_(reader.tensor(self.folder / WEIGHTS, key))

    def _key(self, name: str) -> str:
        return saved_name(name, self._names)
