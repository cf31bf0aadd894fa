"""The folder of adapters, as peft writes it, and of a model whose adapters became its weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from dynmo.errors import ConfigError, first_line
from dynmo.huggingface.export import Export
from dynmo.huggingface.folder import copy_inputs
from dynmo.models.huggingface.adapters import CONFIG, REFUSALS, WEIGHTS, renamed_config
from dynmo.models.huggingface.load import Reader
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.models.huggingface.names import base_name, saved_name
from dynmo.runtime.state.exact_state import exact_state


class AdapterExport(Export):
    """Writes the adapters of a model into a folder.

    Each rank writes its adapters into a part. One rank joins them: peft has one file of weights.
    """

    def in_files(self, index: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        saved = self._model.saved
        own = {name: tensor.detach() for name, tensor in state.items() if name in saved}
        if own and _is_random_cut(self._model.lora):
            own = self._beside_the_start(index, own)
        names = self._model.folder_class.names
        return {
            saved_name(saved[name], names): x.to(self._dtype or x.dtype) for name, x in own.items()
        }

    def _unused(self, names: set[str]) -> dict[str, Tensor]:
        return {}

    def _beside_the_start(self, index: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns adapters of twice the rank, which fit the weights of the folder.

        The start, which was cut out of the weights, is taken away from what was trained.
        """
        lora = self._model.lora
        assert lora is not None
        is_meta = next(iter(state.values())).is_meta
        start = state if is_meta else self._model.build((index,))[index].state_dict()
        # alpha stays, and twice the rank makes its share smaller.
        scale = 2**0.5 if lora.use_rslora else 2.0
        made = dict(state)
        for name, tensor in state.items():
            first = start[name].to(tensor)
            if ".lora_A." in name:
                made[name] = torch.cat((tensor, first))
            elif ".lora_B." in name:
                made[name] = torch.cat((tensor, -first), 1) * scale
        return made

    def complete(self) -> None:
        parts, self.files = [self.place.path / name for name in self.files], [WEIGHTS]
        with Reader() as reader:
            named = [(part, name) for part in parts for name in reader.keys(part)]
            every = {name: reader.tensor(part, name) for part, name in named}
            save_file(every, self.place.path / WEIGHTS, {"format": "pt"})
        for part in parts:
            part.unlink()
        config = copy.deepcopy(self._model.lora)
        assert config is not None
        if self._model.folder_class.names.modules:
            config = renamed_config(config, self._model.folder_class.names)
        config.inference_mode = True  # as peft saves it
        if _is_random_cut(config):
            config.init_lora_weights, config.r = True, 2 * config.r
            ranks = config.rank_pattern or {}
            config.rank_pattern = {pattern: 2 * rank for pattern, rank in ranks.items()}
        config.save_pretrained(str(self.place.path))
        copy_inputs(self._model, self.place.path)
        self.place.complete(CONFIG, re.compile(r"adapter_model\.bin"))


def _is_random_cut(lora: LoraConfig | None) -> bool:
    """Whether adapters start as a random part of the weights, which peft would draw anew."""
    return lora is not None and str(lora.init_lora_weights).startswith("pissa_niter")


class MergedExport(Export):
    """Writes a model without its adapters, as peft merges them. It is used like `Export`.

    The weights beside adapters are read from the model's folder again, in float32.

    Raises:
        ConfigError: The adapters cannot be merged.
    """

    def __init__(
        self,
        folder: Path,
        model: HuggingFaceModel,
        modules: Sequence[nn.Module],
        shards: Sequence[Sequence[int]],
        dtype: torch.dtype | None,
    ) -> None:
        del modules  # they have adapters
        _check(model)
        bare = [_unload(layer, merge=False) for layer in model.build(())]
        super().__init__(folder, model, bare, shards, dtype)

    def tensors(self, index: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layer = self._model.build((index,))[index]
        own = layer.state_dict()
        for name in own.keys() & self._model.saved.keys():
            own[name].copy_(state[name])
        return super().tensors(index, exact_state(_unload(layer, merge=True), {}))


def _check(model: HuggingFaceModel) -> None:
    assert model.lora is not None
    if model.lora.layer_replication is not None:
        raise ConfigError(
            "merge: lora.layer_replication gives one weight several adapters; export the adapters"
        )
    for pair in model.tied:
        for _, name in pair:
            if base_name(name) != name:
                raise ConfigError(
                    f"merge: {base_name(name)} is tied to another weight, which has not its "
                    "adapters; export the adapters"
                )


def _unload(layer: nn.Module, merge: bool) -> nn.Module:
    """Replaces the modules of peft in a layer by those that they hold, as peft does."""
    done = list[str]()
    for path, each in list(layer.named_modules()):
        module: Any = each
        if any(path.startswith(f"{outer}.") for outer in done):
            continue
        try:
            if hasattr(type(module), "unload_and_optionally_merge_module"):
                bare = module.unload_and_optionally_merge_module(
                    merge=merge, safe_merge=merge, adapter_names=None
                )
            elif isinstance(module, BaseTunerLayer):
                if merge:
                    module.merge(safe_merge=True)
                bare = module.get_base_layer()
            else:
                continue
        except REFUSALS as error:
            raise ConfigError(f"merge: {path}: {first_line(error)}; export the adapters") from None
        done.append(path)
        parent, _, name = path.rpartition(".")
        setattr(layer.get_submodule(parent), name, bare)
    return layer
