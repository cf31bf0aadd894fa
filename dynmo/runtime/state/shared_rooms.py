"""Memory for tensors that another process of the same machine can read, and has if this one dies.

    rank 0   makes rooms in a file without a name, and tells: process 4711, file 9, a random word
    rank 1   opens /proc/4711/fd/9, finds the word, and maps it

On another machine, or in another container, the word is not there. Tensors then have to be sent.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import threading
from typing import NamedTuple
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor

# Pages that nothing was written to take no memory.
_FILE = 1 << 28
_ALIGNED = 64
_WORD = 16
_HEADER = _WORD + 8


class Address(BaseModel):
    """The process that has rooms, its first file, and the word that this begins with, in hex."""

    model_config = ConfigDict(extra="forbid", strict=True)
    process: int
    file: int
    word: str


class Place(NamedTuple):
    """The number of a tensor's file in its process, and the first byte."""

    file: int
    first: int


class SharedRooms:
    """Makes tensors that others can read.

    Raises:
        OSError: This system has no such files.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("files without a name need Linux")
        self._lock = threading.Lock()
        self._memory: Tensor = torch.empty(0, dtype=torch.uint8)
        self._used, self._file = 0, -1
        self._files: dict[int, int] = {}  # by the address of their memory
        with self._lock:
            self._begin(_FILE)
        word = secrets.token_bytes(_WORD)
        self.address = Address(process=os.getpid(), file=self._file, word=word.hex())
        header = self._take(_HEADER)
        header[:_WORD] = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        self._oldest = _number(header)

    def _begin(self, size: int) -> None:
        self._file = os.memfd_create("dynmo-copies")
        finalize(self, os.close, self._file)
        os.ftruncate(self._file, size)
        self._memory, self._used = _map(self._file), 0
        self._files[self._memory.data_ptr()] = self._file

    def _take(self, size: int) -> Tensor:
        with self._lock:
            if self._used + size > len(self._memory):
                # Each is twice as large as the last, since a process may open about 1000.
                self._begin(max(size, _FILE << len(self._files)))
            room = self._memory[self._used : self._used + size]
            self._used += -(-size // _ALIGNED) * _ALIGNED
            return room

    def make(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """Returns a tensor without values."""
        return self._take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def place_of(self, tensor: Tensor) -> Place:
        """Returns the place of a tensor that `make` has made."""
        base = tensor.untyped_storage().data_ptr()
        return Place(self._files[base], tensor.data_ptr() - base)

    def forget(self, before: int) -> None:
        """Tells readers that copies of smaller numbers may be overwritten from now on."""
        self._oldest[0] = before


class OtherRooms:
    """Reads the rooms of another process.

    Raises:
        OSError: They are not on this machine, or cannot be read.
    """

    def __init__(self, address: Address) -> None:
        self._process = address.process
        self._files: dict[int, Tensor] = {}
        header = self._file(address.file)[:_HEADER]
        if bytes(header[:_WORD].tolist()).hex() != address.word:
            raise OSError("another process has this number here")
        self._oldest = _number(header)

    def _file(self, number: int) -> Tensor:
        if number not in self._files:
            file = os.open(f"/proc/{self._process}/fd/{number}", os.O_RDWR)
            try:
                self._files[number] = _map(file)
            finally:
                os.close(file)
        return self._files[number]

    def tensor(self, place: Place, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """Returns a tensor of the other process. It must not be written to."""
        size = math.prod(shape) * dtype.itemsize
        return self._file(place.file)[place.first : place.first + size].view(dtype).view(shape)

    def has(self, number: int) -> bool:
        """Whether the copies of a number are still as they were."""
        return number >= int(self._oldest[0])


def _number(header: Tensor) -> NDArray[np.int64]:
    """Returns the number behind the word. An array, since a tensor gives Python's lock away."""
    return header[_WORD:].view(torch.int64).numpy()


def _map(file: int) -> Tensor:
    size = os.fstat(file).st_size
    if size < _HEADER:
        raise OSError("the file has no rooms")
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
