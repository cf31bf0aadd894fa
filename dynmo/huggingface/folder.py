"""A folder while its files are written, and the files that it has.

    .FOLDER.partial/   beside a new FOLDER
    FOLDER/.partial/   in a FOLDER that exists

Files go into place when all are complete. Until then the files of FOLDER are as before.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
from torch import Tensor

from dynmo.errors import InputError, RunError
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.runtime.comm.headers import as_bytes

_PARTIAL = ".partial"
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


class PartialFolder:
    """The files of a folder that is not complete.

    Args:
        folder: The folder. Other files that it has stay there.

    Attributes:
        path: Where the files are until they are complete.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_new = folder, not folder.is_dir()
        self.path = (
            folder.with_name(f".{folder.name}{_PARTIAL}") if self._is_new else folder / _PARTIAL
        )

    def prepare(self) -> None:
        """Makes the folder. One rank calls it, before the others write."""
        if self._folder.exists() and not self._folder.is_dir():
            raise InputError(f"{self._folder} is a file; give a folder")
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    def complete(self, last: str, stale: re.Pattern[str]) -> None:
        """Puts the files into place.

        Args:
            last: Name of the file by which others find the folder's content.
            stale: Names of older files, which are removed.
        """
        if self._is_new:
            self.path.rename(self._folder)
            return
        made = [path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file()]
        for name in sorted(made, key=lambda each: (str(each) == last, each)):
            (self._folder / name).parent.mkdir(exist_ok=True)
            (self.path / name).replace(self._folder / name)
        for path in self._folder.iterdir():
            if stale.fullmatch(path.name) and Path(path.name) not in made:
                path.unlink()
        shutil.rmtree(self.path)


class TensorFile:
    """A safetensors file that is being written, in any order. Leave it as a context manager.

        8 bytes      length of the JSON
        JSON         name -> dtype, shape, first and last byte
        bytes        of the tensors, those of the largest elements first, so that all are aligned

    safetensors' own writer takes all tensors of a file at once. Here no more than one is in memory.

    Args:
        path: The file, which does not exist yet.
        shapes: What will be written, by name, on the meta device.
    """

    def __init__(self, path: Path, shapes: Mapping[str, Tensor]) -> None:
        self._path, self._missing = path, dict(shapes)
        self._offsets = dict[str, int]()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(shapes, key=lambda each: (-shapes[each].itemsize, each)):
            start, end = end, end + shapes[name].nbytes
            header[name] = {
                "dtype": _dtype_name(shapes[name].dtype),
                "shape": list(shapes[name].shape),
                "data_offsets": [start, end],
            }
            self._offsets[name] = start
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self._data = 8 + len(text)
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            like = self._missing.pop(name, None)
            if like is None or (like.shape, like.dtype) != (tensor.shape, tensor.dtype):
                raise RunError(f"{name} is not in the header of {self._path.name} as it is")
            self._file.seek(self._data + self._offsets[name])
            self._file.write(as_bytes(tensor.detach().cpu()).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                if self._missing:
                    raise RunError(f"{next(iter(self._missing))} was not written to {self._path}")
                self._file.flush()
                os.fsync(self._file.fileno())


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Returns the name that safetensors gives a type."""
    content = safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
    return json.loads(content[8:])["x"]["dtype"]


def write_companions(model: HuggingFaceModel, dtype: torch.dtype, folder: Path) -> None:
    """Writes the configs, and copies what else the model's source folder has.

    Args:
        dtype: Type of the weights in the files.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model.folder_class.model).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    copy_inputs(model, folder, _GENERATION)
    generation = getattr(model.structure.model, "generation_config", None)
    if generation is not None and not (folder / _GENERATION).exists():
        generation.save_pretrained(folder)


def copy_inputs(model: HuggingFaceModel, folder: Path, *others: str) -> None:
    """Copies the tokenizer of the model's source folder, its own code and other files."""
    source = model.folder
    if source is None:
        return
    own_code = ("*.py",) if getattr(model.config, "auto_map", None) else ()
    for path in (p for each in (*_INPUTS, *others, *own_code) for p in source.glob(each)):
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
