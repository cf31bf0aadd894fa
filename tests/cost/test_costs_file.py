from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.costs_file import SIZES, Profile, parse, read, to_json, write
from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost, StageCost
from dynmo.errors import InputError

TWO: dict[str, Any] = {"f": [1, 2], "b": [3, 4], "w": [5, 6]}
MEMORY: dict[str, Any] = {"mem_f": [100, 200], "mem_b": [-60, -200], "mem_w": [-40, 0]}

times = st.floats(0, 1e6)
sizes = st.integers(0, 1 << 50)
layers = st.builds(LayerCost, times, st.floats(1e-9, 1e6), times, *[sizes] * len(SIZES))


def test_minimal_costs_file() -> None:
    profile = parse(TWO)
    assert profile == Profile((LayerCost(1, 3, 5), LayerCost(2, 4, 6)), ("layer 0", "layer 1"))
    assert profile.boundaries((0, 1)) == (LinkCost(0.0, math.inf),)


def test_general_workspace_is_the_default_of_each_op() -> None:
    (layer, _) = parse(TWO | {"workspace_bytes": [7, 8], "weight_workspace_bytes": [0, 0]}).layers
    assert layer.workspace_bytes == layer.forward_workspace_bytes == 7
    assert layer.weight_workspace_bytes == 0


@pytest.mark.parametrize(
    ("old", "field"), [("copy_bytes", "rollback_bytes"), ("aside_bytes", "pending_gradient_bytes")]
)
def test_files_of_earlier_versions_are_read(old: str, field: str) -> None:
    profile = parse(TWO | {old: [7, 8]})
    assert profile == parse(TWO | {field: [7, 8]})
    written = to_json(profile)
    assert written[field] == [7, 8]
    assert old not in written
    with pytest.raises(InputError, match=f"{field} has 1 entries"):
        parse(TWO | {old: [7]})
    with pytest.raises(InputError, match="must be greater"):
        parse(TWO | {old: [7, -1]})


@given(
    st.lists(layers, min_size=1, max_size=4),
    st.lists(st.tuples(times, st.floats(1, 1e12)), max_size=3),
)
def test_round_trip(costs: list[LayerCost], links: list[tuple[float, float]]) -> None:
    profile = Profile(
        layers=tuple(costs),
        names=tuple(f"blocks.{i}" for i in range(len(costs))),
        links=tuple(((i, i + 1), LinkCost(*link)) for i, link in enumerate(links)),
        model="gpt",
        microbatch=2,
        microbatches=8,
        ranks=1,
        partition=(len(costs),),
        schedule="zb-h1",
        steps=8,
    )
    assert parse(json.loads(json.dumps(to_json(profile)))) == profile


def test_costs_file_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    profile = parse(
        TWO | {"links": [{"latency": 1e-5}], "stash_bytes": [4e9, 1], "first_trainable": 0}
    )
    write(path, profile)
    assert json.loads(path.read_text())["links"] == [
        {"between": [0, 1], "latency": 1e-5, "bytes_per_second": None}
    ]
    assert read(path) == profile
    assert profile.layers[0].stash_bytes == 4_000_000_000
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]
    assert read(tmp_path) == profile, "a run's folder"


def test_boundaries_use_the_measured_links() -> None:
    near, far = LinkCost(1.0, 100.0), LinkCost(2.0, 10.0)
    profile = Profile((LayerCost(1, 1, 1),), ("a",), links=(((0, 1), near), ((1, 2), far)))
    here = LinkCost(0.0, math.inf)
    assert profile.boundaries((0, 1, 2)) == (near, far)
    assert profile.boundaries((0, 1, 1, 0)) == (near, here, near)
    assert profile.boundaries((0, 1, 0, 1)) == (near,) * 3
    assert profile.boundaries((0, 1, 2, 0, 1, 2))[2] == LinkCost(2.0, 10.0), (
        "a pair that was not measured: the slowest"
    )


def test_message_time_may_be_given_by_hand() -> None:
    one = parse(TWO | {"comm": 0.5})
    assert [x.seconds(10) for x in one.boundaries((0, 1, 2))] == [0.5, 0.5]
    many = parse(TWO | {"comm": [0.5, 1]})
    assert [x.seconds(10) for x in many.boundaries((0, 1, 2))] == [0.5, 1]
    assert [x.seconds(10) for x in many.boundaries((0, 1), exactly=False)] == [1]
    with pytest.raises(InputError, match="comm has 2 numbers"):
        many.boundaries((0, 1))


@pytest.mark.parametrize(
    ("b", "w", "said", "first"),
    [([0, 0, 1], [0, 0, 1], None, 2), ([0, 1, 1], [1, 1, 1], None, 0), ([0, 0, 1], [0] * 3, 1, 1)],
)
def test_a_prefix_without_backward_is_frozen(
    b: list[float], w: list[float], said: int | None, first: int
) -> None:
    data = {"f": [1, 1, 1], "b": b, "w": w} | ({} if said is None else {"first_trainable": said})
    assert parse(data).first_trainable == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": [5]}, "w has 1 entries, f has 2"),
        ({"f": [1, 2, 3]}, "b has 2 entries, f has 3"),
        ({"weight_bytes": [1]}, "weight_bytes has 1 entries, f has 2"),
        ({"names": ["a"]}, "names has 1 entries, f has 2"),
        ({"f": [], "b": [], "w": []}, "f is empty"),
        ({"b": [3, -4]}, "b[1] = -4"),
        ({"f": [float("nan"), 1]}, "f[0] = nan"),
        ({"w": [5, float("inf")]}, "w[1] = inf"),
        ({"w": [5, "6"]}, 'w[1] = "6"'),
        ({"w": [True, 6]}, "w[0] = true"),
        ({"w": 5}, "w = 5: must be a list"),
        ({"weight_bytes": [1, -1]}, "weight_bytes[1] = -1"),
        ({"weight_bytes": [1, 0.5]}, "weight_bytes[1] = 0.5"),
        ({"names": ["a", 3]}, "names[1] = 3"),
        ({"comm": -1}, "comm = -1"),
        ({"weight_byte": [1, 1]}, "unknown key 'weight_byte'; did you mean 'weight_bytes'?"),
        ({"version": 2}, "version 2"),
        ({"version": "1"}, 'version "1"'),
        ({"kind": "other"}, 'kind = "other"'),
        ({"partition": [1, 2]}, "partition sums to 3"),
        ({"partition": [2, 0]}, "partition[1] = 0"),
        ({"ranks": 0}, "ranks = 0"),
        ({"first_trainable": 1}, "layer 0: it has a backward, but first_trainable = 1"),
        ({"b": [0, 0], "w": [0, 0]}, "b and w are 0 for every layer"),
        ({"links": [{"latency": 1}, {"between": [1, 0]}]}, "link 1: (0, 1) is there twice"),
        ({"links": [{"between": [1, 1]}]}, "link 0: (1, 1) is between a rank and itself"),
        ({"links": [{"latency": -1}]}, "links[0].latency = -1"),
        ({"links": [{"latencyy": 1}]}, "unknown key 'links.latencyy'; did you mean 'latency'?"),
        ({"links": [{}], "comm": 1}, "links and comm both say"),
        ({"cap": [1, 2]}, "cap is for dynmo schedule alone"),
        (MEMORY, "mem_f is for dynmo schedule alone"),
    ],
)
def test_a_wrong_value_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse(TWO | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (MEMORY | {"mem_b": [-60]}, "mem_b has 1 entries"),
        ({"cap": [1, 2, 3]}, "cap has 3 entries for 2 stages"),
        ({"cap": [1, -1]}, "cap[1] = -1"),
        (MEMORY | {"mem_w": [-40, float("nan")]}, "mem_w[1] = nan"),
        (MEMORY | {"mem_w": [-40, 1]}, "layer 1: mem_f + mem_b + mem_w is 1"),
        ({"mem_f": [1, -1], "mem_b": [-1, 1], "mem_w": [0, 0]}, "layer 1: mem_f is -1"),
        ({"mem_f": [1, 1], "mem_b": [-2, -1], "mem_w": [1, 0]}, "mem_w is 1"),
        ({"mem_f": [1, 1], "mem_w": [0, 0]}, "mem_f, mem_b and mem_w come together"),
        (MEMORY | {"stash_bytes": [1, 1]}, "instead of activation_bytes, stash_bytes"),
        ({"mem_F": [1, 1]}, "unknown key 'mem_F'; did you mean 'mem_f'?"),
    ],
)
def test_a_wrong_value_of_stages_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse(TWO | change, of_stages=True)
    assert message in str(error.value)


def test_stages_of_a_file_by_hand() -> None:
    """Files of `dynmo schedule` that earlier versions read."""
    file = parse(TWO | {"comm": 0.25}, of_stages=True)
    stages = (StageCost(1, 3, 5), StageCost(2, 4, 6))
    assert file.stages((1, 1), (0, 1)) == Costs(stages, (0.25,))
    (first, _) = file.stages((1, 1), (0, 1), w_memory=0.25).stages
    assert first == StageCost(1, 3, 5, 1.0, -0.75, -0.25)
    file = parse(TWO | MEMORY | {"comm": [0.5], "cap": [300, 250.5]}, of_stages=True)
    stages = (StageCost(1, 3, 5, 100, -60, -40), StageCost(2, 4, 6, 200, -200, 0))
    assert file.stages((1, 1), (0, 1)) == Costs(stages, (0.5,))
    assert file.cap == (300, 250.5)
    rounded = {"mem_f": [0.3], "mem_b": [-0.1], "mem_w": [-0.2]}
    assert parse({"f": [1], "b": [1], "w": [1]} | rounded, of_stages=True).has_memory


def test_stages_of_measured_layers() -> None:
    sizes = {"activation_bytes": [4, 6], "stash_bytes": [1, 2], "output_bytes": [10, 20]}
    link = {"latency": 1, "bytes_per_second": 20}
    file = parse(TWO | sizes | {"links": [link], "partition": [1, 1]})
    stages = (StageCost(1, 3, 5, 4, -3, -1), StageCost(2, 4, 6, 6, -4, -2))
    assert file.stages((1, 1), (0, 1)) == Costs(stages, (1.5,))
    assert file.stages((2,), (0,)) == Costs((StageCost(3, 7, 11, 10, -7, -3),), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"f": [1,\n 2}', "at line 2, column 3"),
        ("", "not JSON: "),
        ('{"f": [1' + "0" * 5000 + "]}", "not JSON that can be read"),
        ("[1]", "expected an object such as"),
        ('{"f": [1], "b": [1]}', "w: missing"),
        ("[" * 100_000, "not JSON that can be read"),
    ],
)
def test_file_of_another_kind_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read(path)
    assert str(error.value).startswith(f"costs file {path}: ")
    assert message in str(error.value)


def test_unreadable_or_unwritable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"is no run: it has no costs\.json"):
        read(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(InputError, match=r"no costs\.json; .*dynmo profile"):
        read(tmp_path)
    with pytest.raises(InputError, match="cannot be written: No such file"):
        write(tmp_path / "none" / "costs.json", parse(TWO))
