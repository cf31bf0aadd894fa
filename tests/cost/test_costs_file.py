from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynmo.cost.costs_file import CostsFile, parse_costs, read_costs
from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.errors import InputError

TWO: dict[str, Any] = {"f": [1, 2], "b": [3, 4], "w": [5, 6]}
MEMORY: dict[str, Any] = {"mem_f": [100, 200], "mem_b": [-60, -200], "mem_w": [-40, 0]}


def test_minimal_costs_file() -> None:
    stages = (StageCost(1, 3, 5), StageCost(2, 4, 6))
    assert parse_costs(TWO, 2) == CostsFile(Costs(stages, (0.0,)), None, False)
    (first, _) = parse_costs(TWO, 2, w_memory=0.25).costs.stages
    assert first == StageCost(1, 3, 5, 1.0, -0.75, -0.25)


def test_complete_costs_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(TWO | MEMORY | {"comm": [0.5], "cap": [300, 250.5]}))
    stages = (StageCost(1, 3, 5, 100, -60, -40), StageCost(2, 4, 6, 200, -200, 0))
    assert read_costs(path, 2) == CostsFile(Costs(stages, (0.5,)), (300, 250.5), True)


def test_one_link_time_serves_all_boundaries() -> None:
    three = {key: [*values, 1] for key, values in TWO.items()}
    assert parse_costs(three | {"comm": 0.25}, 3).costs.links == (0.25, 0.25)
    assert parse_costs(three | {"comm": [0.25, 1]}, 3).costs.links == (0.25, 1)
    assert parse_costs({"f": [1], "b": [1], "w": [1], "comm": 0.25}, 1).costs.links == ()


@pytest.mark.parametrize(
    ("b", "w", "first"),
    [
        ([0, 0, 1], [0, 0, 1], 2),
        ([0, 1, 0], [0, 1, 0], 1),
        ([0, 1, 1], [1, 1, 1], 0),
        ([1, 1, 1], [0, 0, 1], 0),
    ],
)
def test_a_prefix_without_backward_is_frozen(b: list[float], w: list[float], first: int) -> None:
    assert parse_costs({"f": [1, 1, 1], "b": b, "w": w}, 3).first_trainable == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": [5]}, "w has 1 numbers, 2 expected"),
        ({"f": [1, 2, 3]}, "f has 3 numbers, 2 expected"),
        ({"comm": [1, 2]}, "comm has 2 numbers, 1 expected"),
        ({"cap": [1, 2, 3]}, "cap has 3 numbers, 2 expected"),
        (MEMORY | {"mem_b": [-60]}, "mem_b has 1 numbers, 2 expected"),
        ({"b": [3, -4]}, "stage 1: b is -4"),
        ({"f": [float("nan"), 1]}, "stage 0: f is NaN"),
        ({"w": [5, float("inf")]}, "stage 1: w is Infinity"),
        ({"w": [5, "6"]}, 'stage 1: w is "6"'),
        ({"w": [True, 6]}, "stage 0: w is true"),
        ({"w": [5, None]}, "stage 1: w is null"),
        ({"w": 5}, "w is 5"),
        ({"comm": -1}, "boundary 0: comm is -1"),
        ({"comm": "fast"}, 'boundary 0: comm is "fast"'),
        ({"cap": [1, -1]}, "stage 1: cap is -1"),
        (MEMORY | {"mem_w": [-40, float("nan")]}, "stage 1: mem_w is NaN"),
        (MEMORY | {"mem_w": [-40, 1]}, "stage 1: mem_f + mem_b + mem_w is 1"),
        ({"mem_f": [1, -1], "mem_b": [-1, 1], "mem_w": [0, 0]}, "stage 1: mem_f is -1"),
        ({"mem_f": [1, 1], "mem_b": [-2, -1], "mem_w": [1, 0]}, "stage 0: mem_w is 1"),
        ({"mem_f": [1, 1], "mem_w": [0, 0]}, "mem_f, mem_b and mem_w come together: mem_b"),
        ({"mem_F": [1, 1]}, "unknown key 'mem_F'; did you mean 'mem_f'?"),
        (
            {"colour": 1},
            "unknown key 'colour'; the keys are f, b, w, comm, mem_f, mem_b, mem_w, cap",
        ),
        ({"b": [0, 0], "w": [0, 0]}, "b and w are 0 on every stage"),
        ({"\ud800": 1}, "a key is no text that can be written as UTF-8"),
    ],
)
def test_a_wrong_value_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_costs(TWO | change, 2)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"f": [1], "b": [1], "w": [1], "comm": -1}, "comm is -1"),
        ({"f": [1], "b": [1]}, "key 'w' is missing"),
        ({"f": [1], "b": [1], "capp": [1]}, "unknown key 'capp'; did you mean 'cap'"),
        ([1, 2], "expected an object"),
    ],
)
def test_a_wrong_file_of_one_stage_is_refused(data: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_costs(data, 1)


def test_memory_sums_to_zero_up_to_rounding() -> None:
    memory = {"mem_f": [0.3], "mem_b": [-0.1], "mem_w": [-0.2]}
    assert parse_costs({"f": [1], "b": [1], "w": [1]} | memory, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON: "),
        (b"", "not JSON: "),
        (b"\xff\xfe", "cannot be read: it is not text in UTF-8"),
        (b"[" * 100_000, "not JSON that can be read"),
        (b'{"f": [1' + b"0" * 5000 + b"]}", "not JSON that can be read"),
        (b'{"f": [1]}', "key 'b' is missing"),
    ],
)
def test_every_message_names_the_file(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_costs(path, 2)
    assert str(caught.value).startswith(f"costs file {path}: {message}")
    assert "\n" not in str(caught.value)


def test_file_that_is_missing_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = {"version": 1, "kind": "dynmo-costs", "f": [1], "b": [1], "w": [1]}
    (tmp_path / "costs.json").write_text(json.dumps(other))
    with pytest.raises(InputError, match=r"costs\.json: .*dynmo plan --costs"):
        read_costs(tmp_path / "costs.json", 1)
    with pytest.raises(InputError, match=r"none\.json: .*No such file"):
        read_costs(tmp_path / "none.json", 2)
    with pytest.raises(InputError, match=r"a folder; .*dynmo plan --costs"):
        read_costs(tmp_path, 2)
