"""Memory that another process reads."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest
import torch

from dynmo.runtime.state import shared_rooms
from dynmo.runtime.state.shared_rooms import Address, OtherRooms, Place, SharedRooms

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

_OTHER = """
import time, torch
from dynmo.runtime.state.shared_rooms import SharedRooms
rooms = SharedRooms()
room = rooms.make(torch.int64, torch.Size((1000,)))
room.copy_(torch.arange(1000))
print(rooms.address.model_dump_json(), *rooms.place_of(room), flush=True)
time.sleep(100)
"""


def test_memory_outlives_the_process_that_made_it() -> None:
    call = [sys.executable, "-c", _OTHER]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, file, first = process.stdout.readline().split()
        rooms = OtherRooms(Address.model_validate_json(address))
        process.kill()
    read = rooms.tensor(Place(int(file), int(first)), torch.int64, torch.Size((1000,)))
    assert torch.equal(read, torch.arange(1000))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (3, 5)),
        (torch.bfloat16, ()),
        (torch.bool, (7,)),
        (torch.float64, (0, 2)),
        (torch.int16, (2000,)),  # more than a file
    ],
)
def test_any_tensor_is_read_as_it_was_written(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rooms, "_FILE", 2048)
    rooms = SharedRooms()
    other, written = OtherRooms(rooms.address), list[torch.Tensor]()
    for value in range(30):
        room = rooms.make(dtype, torch.Size(shape))
        room.fill_(value)
        written.append(room)
    for value, room in enumerate(written):
        read = other.tensor(rooms.place_of(room), room.dtype, room.shape)
        assert torch.equal(read, torch.full(shape, value).to(dtype))
    assert len({rooms.place_of(room).file for room in written}) < 8


def test_copies_that_may_be_overwritten_are_gone() -> None:
    rooms = SharedRooms()
    other = OtherRooms(rooms.address)
    assert other.has(0)
    rooms.forget(7)
    assert [other.has(number) for number in (6, 7, 8)] == [False, True, True]


def test_other_memory_is_refused() -> None:
    rooms = SharedRooms()
    with pytest.raises(OSError, match="another process"):
        OtherRooms(rooms.address.model_copy(update={"word": "00" * 16}))
    with tempfile.TemporaryFile() as file:
        file.write(bytes(10))
        file.flush()
        with pytest.raises(OSError, match="no rooms"):
            OtherRooms(rooms.address.model_copy(update={"file": file.fileno()}))
    with pytest.raises(FileNotFoundError):
        OtherRooms(rooms.address.model_copy(update={"process": 1 << 30}))
