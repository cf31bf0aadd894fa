"""Writes a safetensors file whose tensors come one after another.

    8 bytes      length of the JSON
    JSON         name -> dtype, shape, first and last byte
    bytes        of the tensors, those of the largest elements first, so that all are aligned

The header is written first. So no more than one tensor need be in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from dynmo.errors import RunError
from dynmo.runtime.comm.headers import as_bytes

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}


class TensorFile:
    """A safetensors file that is being written. Leave it as a context manager.

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
                "dtype": _NAMES[shapes[name].dtype],
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
