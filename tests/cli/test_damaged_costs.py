"""Files of costs in which a bit is flipped or a number is absurd.

A command refuses such a file in one line, or gives finite figures. A file that is still valid is
taken: it has no checksum, because it is written by hand too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from tests.cli.runs import Run

LAYERS = b"""{"version": 1, "kind": "dynmo-costs", "microbatch": 1, "microbatches": 4, "ranks": 2,
 "schedule": "1f1b", "partition": [2, 1], "first_trainable": 0, "names": ["a", "b", "c"],
 "f": [0.5, 1e-3, 2], "b": [1, 1, 2], "w": [1, 1, 2], "weight_bytes": [8, 4e3, 0],
 "output_bytes": [8, 8, 8], "links": [{"between": [0, 1], "bytes_per_second": 1e9}]}"""
STAGES = b"""{"f": [1, 0.5], "b": [1, 1e-2], "w": [1, 1], "comm": 0.1, "cap": [4, 3],
 "mem_f": [2, 2], "mem_b": [-1, -1.5], "mem_w": [-1, -0.5]}"""
WORKLOAD = b"""steps = 12
ranks = 2
microbatches = 4
[layers]
trace = "trace.json"
unit = 0.5
weight_bytes = 1_000
[policy]
every = 4
[link]
bytes_per_second = 1e9
"""
TRACE = b"""{"f": [[1, 1, 1], [1, 2, 1]], "b": [[1, 1, 1], [0, 1, 1.5]],
 "w": [[1, 1, 1], [0, 1e-1, 1]]}"""

ABSURD = ["0", "-1", "1e30", "1e308", "1e400", "NaN", "-Infinity", "inf", "-0.0", "5e-324", "null"]
ABSURD += ["1000000000000000000", "9" * 400, "true", '"x"', "[1]", "{}"]


Problems = Callable[["Read", Iterable[bytes]], list[tuple[str, bytes]]]


@dataclass(frozen=True)
class Read:
    """A file that a command reads.

    Attributes:
        file: Its name.
        text: Its content.
        command: The command line, with the names of files.
    """

    file: str
    text: bytes
    command: tuple[str, ...]


_SCHEDULE = ("schedule", "--costs", "stages.json", "--ranks", "2", "--microbatches", "3")
_PLAN = ("plan", "--costs", "layers.json")
READ = {
    "plan": Read("layers.json", LAYERS, (*_PLAN, "--no-alternatives")),
    "mesh": Read("layers.json", LAYERS, (*_PLAN, "--gpus", "2", "--global-batch", "4")),
    "fewest": Read("layers.json", LAYERS, (*_PLAN, "--fewest-ranks", "0.1")),
    "by hand": Read("stages.json", STAGES, (*_SCHEDULE, "--schedule", "1f1b")),
    "automatic": Read("stages.json", STAGES, (*_SCHEDULE, "--schedule", "zb-auto")),
    "workload": Read("workload.toml", WORKLOAD, ("simulate", "workload.toml")),
    "trace": Read("trace.json", TRACE, ("simulate", "workload.toml")),
}


def flipped(text: bytes) -> Iterator[bytes]:
    """Yields `text` with each of its bits flipped."""
    for at in range(8 * len(text)):
        damaged = bytearray(text)
        damaged[at // 8] ^= 1 << at % 8
        yield bytes(damaged)


def absurd(text: bytes) -> Iterator[bytes]:
    """Yields `text` with each of its numbers replaced by each of `ABSURD`."""
    for number in re.finditer(rb"(?<![\w.])-?\d[\w.-]*", text):
        for value in ABSURD:
            yield text[: number.start()] + value.encode() + text[number.end() :]


@pytest.fixture
def problems(dynmo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problems:
    """Runs a command on damaged files, and returns what is wrong with its answers."""
    monkeypatch.chdir(tmp_path)
    for read in READ.values():
        Path(read.file).write_bytes(read.text)

    def call(read: Read, damaged: Iterable[bytes]) -> list[tuple[str, bytes]]:
        wrong: list[tuple[str, bytes]] = []
        for text in damaged:
            Path(read.file).write_bytes(text)
            problem = _problem(*dynmo(*read.command, "--json"))
            wrong += [] if problem is None else [(problem, text)]
        return wrong

    return call


def _problem(status: int, out: str, err: str) -> str | None:
    if status == 0:
        figures = list(_numbers(json.loads(out)))
        wrong = [x for x in figures if not -1e-9 <= x < math.inf]
        return f"figures {wrong} {err}" if wrong or err else None
    one_line = status == 2 and not out and err[:-1].isprintable() and err.startswith("dynmo: ")
    raw = re.search(r"[A-Z]\w*(Error|Exception|Warning)\b|Traceback", err)
    return None if one_line and raw is None else f"status {status}: {err}"


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(cast("dict[str, object]", value).values())
    if isinstance(value, list):
        for each in cast("list[object]", value):
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.parametrize("name", READ)
def test_flipped_bit_is_refused_or_harmless(problems: Problems, name: str) -> None:
    """Every 97th bit. The matrix flips all of them."""
    read = READ[name]
    assert problems(read, [read.text]) == []
    assert problems(read, list(flipped(read.text))[::97]) == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("plan", b'"between"', b'"bet\x7feen"'),
        ("plan", b'"microbatches": 4', b'"microbatches": 1000000000000'),
        ("plan", b'"ranks": 2', b'"ranks": 1000000000000000000'),
        ("plan", b"1e9", b"5e-324"),
        ("fewest", b'"output_bytes": [8, 8', b'"output_bytes": [8, 1e18'),
        ("automatic", b'"f": [1, 0.5]', b'"f": [1, 1e308]'),
        ("workload", b"unit = 0.5", b"unit = 1e308"),
        ("workload", b"steps = 12", b"steps = 2_000_000_000"),
        ("workload", b"microbatches = 4", b"microbatches = 2_000_000_000"),
    ],
)
def test_absurd_number_is_refused_or_harmless(
    problems: Problems, name: str, old: bytes, new: bytes
) -> None:
    read = READ[name]
    assert old in read.text
    assert problems(read, [read.text.replace(old, new)]) == []


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", READ)
def test_no_flipped_bit_or_absurd_number_gets_through(problems: Problems, name: str) -> None:
    read = READ[name]
    assert problems(read, flipped(read.text)) == []
    assert problems(read, absurd(read.text)) == []
