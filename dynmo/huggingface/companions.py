"""The files beside the weights: configs, tokenizer and processors, the model's own code."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch

from dynmo.models.huggingface.model import HuggingFaceModel

_GENERATION = "generation_config.json"
_INPUTS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
)


def write_companions(model: HuggingFaceModel, dtype: torch.dtype, folder: Path) -> None:
    """Writes the configs, and copies what else the model's source folder has.

    Args:
        dtype: Type of the weights in the files.
    """
    transformer = model.structure.model
    config = copy.deepcopy(model.config)
    config.architectures = [type(model.folder_class.model).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    source = model.folder
    if source is not None:
        own_code = ("*.py",) if getattr(config, "auto_map", None) else ()
        _copy(source, folder, (*_INPUTS, _GENERATION, *own_code))
    generation = getattr(transformer, "generation_config", None)
    if generation is not None and not (folder / _GENERATION).exists():
        generation.save_pretrained(folder)


def _copy(source: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in source.glob(pattern):
            if path.is_file():
                target = folder / path.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
