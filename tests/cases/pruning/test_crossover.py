"""The crossover of sparse and dense linears: measured once and cached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from dynmo.cases.pruning.crossover import known_crossover


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The measurements, in order. The n-th measurement finds n / 10."""
    asked: list[tuple[int, int, int]] = []

    def crossover(rows: int, columns: int, tokens: int, *_: object) -> float:
        asked.append((rows, columns, tokens))
        return len(asked) / 10

    monkeypatch.setenv("DYNMO_CACHE", str(tmp_path))
    monkeypatch.setattr("dynmo.cases.pruning.crossover.measure_crossover", crossover)
    return asked


def test_crossover_is_measured_once_per_shape(
    measured: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, other = nn.Linear(8, 4), nn.Linear(4, 8)
    assert [known_crossover(x, 16) for x in (linear, other, linear, other)] == [0.1, 0.2, 0.1, 0.2]
    assert known_crossover(linear, 32) == 0.3
    assert known_crossover(nn.Linear(8, 4).bfloat16(), 16) == 0.4
    assert measured == [(4, 8, 16), (8, 4, 16), (4, 8, 32), (4, 8, 16)]
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    assert known_crossover(linear, 16) == 0.5, "as on another machine"


ELSEWHERE = '{"measured_on": "elsewhere", "sparsity": 0.7}'


@pytest.mark.parametrize("damage", ["", "[]", "{}", ELSEWHERE, '{"sparsity": "much"}', "other"])
def test_unreadable_cache_files_are_replaced(
    measured: list[tuple[int, int, int]], tmp_path: Path, damage: str
) -> None:
    known_crossover(nn.Linear(8, 4), 16)
    (file,) = (tmp_path / "crossover").iterdir()
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"sparsity": 7}) if damage == "other" else damage)
    assert known_crossover(nn.Linear(8, 4), 16) == 0.2
    assert json.loads(file.read_text()) == kept | {"sparsity": 0.2}


def test_unwritable_cache_is_no_error(measured: list[tuple[int, int, int]], tmp_path: Path) -> None:
    (tmp_path / "crossover").write_text("a file")
    assert [known_crossover(nn.Linear(8, 4), 16) for _ in range(2)] == [0.1, 0.2]
