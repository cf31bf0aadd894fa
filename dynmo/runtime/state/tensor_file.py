"""Writes safetensors files one tensor at a time, to a disk or to memory.

    8 bytes      length of the JSON
    JSON         name -> dtype, shape, first and last byte
    bytes        of the tensors, those of the largest elements first, so that all are aligned

safetensors' own writer takes all tensors of a file at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any, Self

import safetensors.torch
import torch
from torch import Tensor

from dynmo.errors import RunError
from dynmo.runtime.comm.headers import as_bytes


class TensorFile:
    """A safetensors file that is being written, in any order. Leave it as a context manager.

    Args:
        place: A path, which does not exist yet: the file is synced and closed at the end. Or an
            open file, from whose present position on it is written.
        shapes: What will be written, by name. The tensors may be on the meta device.
    """

    def __init__(self, place: Path | IO[bytes], shapes: Mapping[str, Tensor]) -> None:
        self._is_own, self._missing = isinstance(place, Path), dict(shapes)
        self._file = file = place.open("xb") if isinstance(place, Path) else place
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
        file.write(len(text).to_bytes(8, "little") + text)
        self._data = file.tell()
        self._end = self._data + end

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            like = self._missing.pop(name, None)
            if like is None or (like.shape, like.dtype) != (tensor.shape, tensor.dtype):
                raise RunError(f"{name} is not in the header of {self._file.name} as it is")
            self._file.seek(self._data + self._offsets[name])
            self._file.write(as_bytes(tensor.detach().cpu()).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._missing:
                raise RunError(f"{next(iter(self._missing))} was not written to {self._file.name}")
            self._file.seek(self._end)
            if kind is None and self._is_own:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            if self._is_own:
                self._file.close()


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Returns the name that safetensors gives a type."""
    content = safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
    return json.loads(content[8:])["x"]["dtype"]
