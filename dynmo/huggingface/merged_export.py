"""The folder of a model whose adapters have become a part of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.huggingface.export import Export
from dynmo.models.huggingface.adapter_names import base_name
from dynmo.models.huggingface.adapters import REFUSALS
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.runtime.state.exact_state import exact_state


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
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"merge: {path}: {reason}; export the adapters") from None
        done.append(path)
        parent, _, name = path.rpartition(".")
        setattr(layer.get_submodule(parent), name, bare)
    return layer
