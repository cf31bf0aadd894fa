"""`dynmo profile` as a process, on emulated layers: what it measures is known."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from dynmo.cli import main
from dynmo.cli.profile import table
from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import Profile, read
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


class Done(NamedTuple):
    folder: Path
    status: int
    out: str
    err: str


def fill(folder: Path, text: str = CONFIG) -> None:
    (folder / "run.toml").write_text(text)
    (folder / "text").write_bytes(bytes(range(32, 127)) * 200)


def measure(folder: Path, *arguments: str) -> Done:
    process: subprocess.Popen[str] = start(
        [sys.executable, "-m", "dynmo", "profile", "run.toml", *arguments], folder
    )
    out, err = process.communicate(timeout=120)
    return Done(folder, process.returncode, out, err)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One measurement of two ranks, of which the first two layers are frozen."""
    folder = tmp_path_factory.mktemp("profile")
    fill(folder)
    freezing = (
        "--set",
        "dynamism.cases=['freezing']",
        "--set",
        "dynamism.freezing.schedule=[[0, 2]]",
    )
    return measure(folder, "--steps", "3", "--out", "measured.json", "--json", *freezing)


def test_what_it_writes(done: Done) -> None:
    assert done.status == 0, done.err
    assert {p.name for p in done.folder.iterdir()} == {"run.toml", "text", "measured.json", "tmp"}
    assert not list((done.folder / "tmp").glob("dynmo-*")), "the ranks' logs are gone"
    assert gone(done.folder)
    assert "measured 3 steps" in done.err
    assert done.out.count("\n") == 1
    printed: dict[str, Any] = json.loads(done.out)
    assert printed.pop("file") == "measured.json"
    assert printed == json.loads((done.folder / "measured.json").read_text())
    assert (printed["version"], printed["kind"], printed["ranks"], printed["partition"]) == (
        1,
        "dynmo-costs",
        2,
        [3, 2],
    )


def test_what_it_measures(done: Done) -> None:
    profile: Profile = read(done.folder / "measured.json")
    assert len(profile.names) == 5
    # A sleep is never shorter than asked for, and on a busy machine some milliseconds longer.
    for layer, seconds in zip(profile.layers, (0.004, 0.008, 0.012, 0.008, 0.004), strict=True):
        assert 0.95 * seconds <= layer.f <= seconds + 0.03
    assert [x.w for x in profile.layers[:2]] == [0, 0], "frozen"
    assert all(0.0038 <= x.w <= 0.034 and 0.0076 <= x.b <= 0.038 for x in profile.layers[2:])
    assert profile.first_trainable == 2
    assert [x.output_bytes for x in profile.layers[:-1]] == [1024] * 4
    assert [pair for pair, _ in profile.links] == [(0, 1)]
    assert (profile.microbatch, profile.microbatches, profile.schedule, profile.steps) == (
        2,
        4,
        "1f1b",
        3,
    )


def test_it_is_planned_with(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--costs", str(done.folder / "measured.json"), "--json", "--no-alternatives"])
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["ranks"], result["microbatches"], result["schedule"]) == (2, 4, "1f1b")
    layers, (first, second) = read(done.folder / "measured.json").layers, result["partition"]
    assert result["stage_cost"] == pytest.approx(
        [sum(x.seconds for x in own) for own in (layers[:first], layers[first:])]
    )
    assert first + second == 5


def test_what_fails_is_one_line(tmp_path: Path) -> None:
    """A model that the ranks cannot load writes nothing and leaves no log."""
    fill(tmp_path, CONFIG)
    status = measure(tmp_path, "--set", "model.kind=python:nowhere:layers")
    assert status.status == 2
    (line,) = [line for line in status.err.splitlines() if line.startswith("dynmo:")]
    assert "nowhere" in line
    assert {p.name for p in tmp_path.iterdir()} == {"run.toml", "text", "tmp"}
    assert not list((tmp_path / "tmp").glob("dynmo-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps 0: at least 1 is needed"),
        (
            ("--out", "run.toml"),
            "--out run.toml exists and was not written by dynmo profile; choose another name",
        ),
        (("--out", "none/costs.json"), "--out none/costs.json: there is no folder none"),
        (("--set", "data.source=file:none"), "none"),
        (("--set", "pipeline.schedule=zb-h3"), "pipeline.schedule"),
    ],
)
def test_bad_input_is_told_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    changed = (
        ("--set", "model.kind=gpt", "--set", "model.blocks=1")
        if "data.source=file:none" in arguments
        else ()
    )
    assert main(["profile", "run.toml", *changed, *arguments]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert message in out.err
    assert out.err.count("\n") == 1


def test_a_layer_s_name_is_no_markup() -> None:
    screen = io.StringIO()
    Console(file=screen, width=200).print(
        table(Profile((LayerCost(1.0, 1.0, 1.0),), ("[bold]a[/x]",)))
    )
    assert "[bold]a[/x]" in screen.getvalue()
