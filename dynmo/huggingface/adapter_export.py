"""The folder of adapters, as peft writes it.

Each rank writes its adapters into a part of its own. One rank joins the parts, for peft has one
file of weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor, nn

from dynmo.huggingface.partial_folder import PartialFolder
from dynmo.huggingface.tensor_file import TensorFile
from dynmo.models.huggingface.adapter_config import renamed_config
from dynmo.models.huggingface.adapter_files import CONFIG, WEIGHTS
from dynmo.models.huggingface.adapter_names import saved_name
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.models.huggingface.weight_files import Reader
from dynmo.runtime.state.exact_state import shapes_of_state


class AdapterExport:
    """Writes the adapters of a model into a folder. It is used like `Export`."""

    def __init__(
        self,
        folder: Path,
        model: HuggingFaceModel,
        modules: Sequence[nn.Module],
        shards: Sequence[Sequence[int]],
        dtype: torch.dtype | None,
    ) -> None:
        self._place, self._model = PartialFolder(folder), model
        self._shards, self._dtype = shards, dtype
        self._shapes = [
            self.tensors(index, shapes_of_state(module)) for index, module in enumerate(modules)
        ]
        self.files = [WEIGHTS]
        self.bytes = sum(each.nbytes for shapes in self._shapes for each in shapes.values())

    @property
    def partial(self) -> Path:
        return self._place.path

    def prepare(self) -> None:
        self._place.prepare()

    def shard(self, number: int) -> TensorFile:
        return TensorFile(self._part(number), self._shapes_of(self._shards[number]))

    def tensors(self, index: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        saved = self._model.saved
        own = {name: tensor.detach() for name, tensor in state.items() if name in saved}
        if own and _is_random_cut(self._model.lora):
            own = self._beside_the_start(index, own)
        names = self._model.folder_class.names
        return {
            saved_name(saved[name], names): x.to(x.device, self._dtype or x.dtype)
            for name, x in own.items()
        }

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
        every = [index for shard in self._shards for index in shard]
        with TensorFile(self.partial / WEIGHTS, self._shapes_of(every)) as joined:
            for number in range(len(self._shards)):
                with Reader() as reader:
                    for name in reader.keys(self._part(number)):
                        joined.write({name: reader.tensor(self._part(number), name)})
                self._part(number).unlink()
        config = copy.deepcopy(self._model.lora)
        assert config is not None
        if self._model.folder_class.names.modules:
            config = renamed_config(config, self._model.folder_class.names)
        config.inference_mode = True  # as peft saves it
        if _is_random_cut(config):
            config.init_lora_weights, config.r = True, 2 * config.r
            ranks = config.rank_pattern or {}
            config.rank_pattern = {pattern: 2 * rank for pattern, rank in ranks.items()}
        config.save_pretrained(str(self.partial))
        self._place.complete(CONFIG, re.compile(r"adapter_model\.bin"))

    def _part(self, number: int) -> Path:
        return self.partial / f"part-{number}.safetensors"

    def _shapes_of(self, layers: Sequence[int]) -> dict[str, Tensor]:
        return {name: like for index in layers for name, like in self._shapes[index].items()}


def _is_random_cut(lora: LoraConfig | None) -> bool:
    """Whether adapters start as a random part of the weights, which peft would draw anew."""
    return lora is not None and str(lora.init_lora_weights).startswith("pissa_niter")
