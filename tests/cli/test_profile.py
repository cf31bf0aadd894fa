"""`dynmo profile`, on emulated layers with known times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynmo.cli.profile import _print_text
from dynmo.cost.costs_file import Profile, read
from dynmo.cost.layer_cost import LayerCost
from tests.cli.runs import ONE_RANK, Done, Run, assert_refused, end, free_port
from tests.pool import Pool
from tests.processes import gone, start

CONFIG = """
name = "run"
[model]
kind = "emulated"
layers = 5
f = [0.004, 0.008, 0.012, 0.008, 0.004]
b = 0.008
w = 0.004
sequence = 16
bytes = 1024
[data]
source = "file:text"
[train]
global_batch = 8
micro_batch = 2
[parallel]
pipeline = 2
timeout = 60.0
[pipeline]
schedule = "1f1b"
"""


class Measured(NamedTuple):
    folder: Path
    done: Done


def fill(folder: Path) -> None:
    (folder / "run.toml").write_text(CONFIG)
    (folder / "text").write_bytes(bytes(range(32, 127)) * 200)


def measure(folder: Path, *arguments: str) -> Done:
    command = [sys.executable, "-m", "dynmo", "profile", "run.toml", *arguments]
    return end(start(command, folder), 120)


FREEZING = ("--set=dynamism.cases=['freezing']", "--set=dynamism.freezing.schedule=[[0, 2]]")
OPTIONS = ("--steps", "3", "--out", "measured.json", "--json", *FREEZING)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Measured:
    """One measurement of two ranks, of which the first two layers are frozen."""
    folder = tmp_path_factory.mktemp("profile")
    fill(folder)
    lines = [["profile", "run.toml", *OPTIONS]] * 2
    given = {"lines": lines, "folder": str(folder), "port": free_port()}
    return Measured(folder, Done(*pool.run("command_in_emulated_time", 2, **given)[0]))


@pytest.mark.matrix
def test_processes_leave_one_file_and_no_logs(tmp_path: Path) -> None:
    fill(tmp_path)
    assert measure(tmp_path, *OPTIONS).status == 0
    assert {p.name for p in tmp_path.iterdir()} == {"run.toml", "text", "measured.json", "tmp"}
    assert not list((tmp_path / "tmp").glob("dynmo-*")), "the ranks' logs are gone"
    assert gone(tmp_path)


def test_profile_is_printed_and_written(measured: Measured) -> None:
    folder, done = measured
    assert done.status == 0, done.err
    assert done.out.count("\n") == 1
    printed: dict[str, Any] = json.loads(done.out)
    assert printed.pop("file") == "measured.json"
    assert printed == json.loads((folder / "measured.json").read_text())
    assert (printed["version"], printed["kind"], printed["ranks"], printed["partition"]) == (
        1,
        "dynmo-costs",
        2,
        [3, 2],
    )


def test_profile_measures_the_times_of_emulated_layers(measured: Measured) -> None:
    profile: Profile = read(measured.folder / "measured.json")
    assert len(profile.names) == 5
    assert [x.f for x in profile.layers] == pytest.approx([0.004, 0.008, 0.012, 0.008, 0.004])
    assert [x.b for x in profile.layers] == pytest.approx([0, 0, 0.008, 0.008, 0.008]), "frozen"
    assert [x.w for x in profile.layers] == pytest.approx([0, 0, 0.004, 0.004, 0.004])
    assert profile.first_trainable == 2
    assert [x.output_bytes for x in profile.layers[:-1]] == [1024] * 4
    assert [pair for pair, _ in profile.links] == [(0, 1)]
    assert (profile.microbatch, profile.microbatches, profile.schedule, profile.steps) == (
        2,
        4,
        "1f1b",
        3,
    )


def test_profile_can_be_planned_with(measured: Measured, dynmo: Run) -> None:
    path = measured.folder / "measured.json"
    result = json.loads(dynmo("plan", "--costs", path, "--json", "--no-alternatives").out)
    assert (result["ranks"], result["microbatches"], result["schedule"]) == (2, 4, "1f1b")
    layers, (first, second) = read(path).layers, result["partition"]
    assert result["stage_cost"] == pytest.approx(
        [sum(x.seconds for x in own) for own in (layers[:first], layers[first:])]
    )
    assert first + second == 5


@pytest.mark.matrix
def test_unloadable_model_leaves_no_files(tmp_path: Path) -> None:
    """The command writes no profile and leaves no log."""
    fill(tmp_path)
    sets = ("--set", "model.kind=python:nowhere:layers", "--set", ONE_RANK)
    assert_refused(measure(tmp_path, *sets), "nowhere")
    assert {p.name for p in tmp_path.iterdir()} == {"run.toml", "text", "tmp"}
    assert not list((tmp_path / "tmp").glob("dynmo-*"))


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (("--steps", "0"), ["--steps 0"]),
        (("--out", "run.toml"), ["--out run.toml"]),
        (("--out", "none/costs.json"), ["--out none/costs.json"]),
        (("--set", "model.kind=gpt", "--set", "data.source=file:none"), ["data.source", "none"]),
        (("--set", "pipeline.schedule=zb-h3"), ["pipeline.schedule", "zb-h3"]),
    ],
)
def test_wrong_options_start_no_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dynmo: Run,
    arguments: tuple[str, ...],
    mentions: list[str],
) -> None:
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_refused(dynmo("profile", "run.toml", *arguments), *mentions)


def test_markup_in_a_layer_name_is_printed_literally(capsys: pytest.CaptureFixture[str]) -> None:
    _print_text(Profile((LayerCost(1.0, 1.0, 1.0),), ("[bold]a[/x]",)), Path("costs.json"))
    assert "[bold]a[/x]" in capsys.readouterr().out
