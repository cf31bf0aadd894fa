"""Mistakes in a stranger's folder, model or number.

Each gives one line that says what is wrong, or the run works all the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from dynmo.config import parse
from dynmo.models.registry import load_model
from dynmo.train.shape_costs import shapes_of
from tests.cli.runs import GPT, Run, end, fill, train, tree
from tests.processes import start

OWN = """# The line numbers of this file are told in errors.
import sys
import torch
from torch import nn

class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        if x.abs().max() > 1000:
            x = x / 2
        return self.linear(x)

class Routes(Asks):
    def forward(self, x):
        rows = (x.sum(-1) > 0).nonzero(as_tuple=True)
        return x + torch.zeros_like(x).index_put(rows, self.linear(x[rows]))

def around(*middle):
    return [nn.Embedding(256, 8), *middle, nn.Linear(8, 256)]

def asks():
    return around(Asks())

def routes():
    return around(Routes())

def to():
    return around(nn.Linear(8, 8).to(torch.float32), nn.Linear(8, 8).float())

def number():
    return around(nn.Dropout(float(torch.linspace(0, 0.1, 3)[1])), nn.Linear(8, 8))

def factories():
    def middle():
        nn.Dropout(float(torch.tensor(0.1)))
        return nn.Linear(8, 8)
    return [lambda: nn.Embedding(256, 8), middle, lambda: nn.Linear(8, 256)]

def leaves():
    sys.exit(0)
"""


def of(function: str, *sets: str) -> tuple[str, ...]:
    return (
        f"model.kind=python:own:{function}",
        "dynamism.cases=[]",
        "checkpoint.every=0",
        "train.steps=2",
        *sets,
    )


def fill_own(folder: Path) -> None:
    fill(folder)
    (folder / "own.py").write_text(OWN)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "own", raising=False)
    fill_own(tmp_path)
    return tmp_path


# -- models that train, but not on shapes alone ----------------------------------------------------


@pytest.mark.parametrize(
    ("function", "line"),
    [("asks", 11), ("routes", 17), ("to", 30), ("number", 33)],
)
def test_a_dry_run_without_activations(own: Path, run: Run, function: str, line: int) -> None:
    done = run(own, "run.toml", "--dry-run", "--json", sets=of(function))
    assert (done.status, done.err.count("\n")) == (0, 1)
    assert done.line.startswith(
        "dynmo: activations unknown, so memory is that of parameters, gradients and optimizer "
        "state alone: "
    )
    assert f"(own.py:{line})" in done.line
    plan = json.loads(done.out)
    assert sum(plan["parameters"]) == 256 * 8 + (2 if function == "to" else 1) * 72 + 9 * 256
    assert sum(plan["memory"]) >= 16 * sum(plan["parameters"])


def test_a_factory_that_asks_for_a_number(own: Path, run: Run) -> None:
    """The meta device has no numbers.

    The layer is made for real to learn its shapes.
    """
    done = run(own, "run.toml", "--dry-run", "--json", sets=of("factories"))
    assert (done.status, done.err) == (0, "")
    assert sum(json.loads(done.out)["parameters"]) == 256 * 8 + 72 + 9 * 256


def test_a_limit_is_held_against_parameters_alone(own: Path, run: Run) -> None:
    plan = json.loads(run(own, "run.toml", "--dry-run", "--json", sets=of("asks")).out)
    most = max(plan["memory"])
    assert (
        run(own, "run.toml", "--dry-run", sets=of("asks", f"pipeline.memory_limit={most}")).status
        == 0
    )
    done = run(own, "run.toml", "--dry-run", sets=of("asks", f"pipeline.memory_limit={most - 1}"))
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert (
        f"for parameters, gradients and optimizer state alone, over pipeline.memory_limit = "
        f"{most - 1}; use more ranks"
    ) in done.line


def test_recompute_auto_needs_activations(own: Path, run: Run) -> None:
    done = run(
        own,
        "run.toml",
        "--dry-run",
        sets=of("asks", "train.recompute=auto", "pipeline.memory_limit=1GiB"),
    )
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert (
        "train.recompute = 'auto' needs the layers' activations, which are unknown; use "
        "'all' or a list of layers: "
    ) in done.line


def test_a_run_says_what_a_dry_run_says(work: Path) -> None:
    """A limit that parameters alone exceed is refused before the first step.

    The folder is as it was.
    """
    fill_own(work)
    before = tree(work)
    done = end(train(work, sets=of("asks", "pipeline.memory_limit=10KB")))
    assert (done.status, done.out) == (2, "")
    warned, refused = (line for line in done.err.splitlines() if line.startswith("dynmo:"))
    assert "activations unknown" in warned
    assert (
        "for parameters, gradients and optimizer state alone, over pipeline.memory_limit = 10000"
        in refused
    )
    assert tree(work) == before


def test_shapes_that_are_unknown_are_told(
    own: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(own)
    config = parse({"model": {"kind": "python:own:asks"}})
    model = load_model(config)
    assert shapes_of(config, model) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "(own.py:11)" in record.getMessage()


def test_an_error_of_dynmo_itself_is_not_swallowed() -> None:
    def build(own: Collection[int]) -> list[nn.Module]:
        raise RuntimeError("not the user's")

    config = parse({})
    with pytest.raises(RuntimeError, match="not the user's"):
        shapes_of(config, replace(load_model(config), build=build))


def test_a_model_that_leaves(own: Path, run: Run) -> None:
    done = run(own, "run.toml", "--dry-run", sets=of("leaves"))
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "leaves() raised SystemExit: 0 (own.py:42)" in done.line


# -- what lies in the folder -----------------------------------------------------------------------


def test_files_that_are_called_like_pythons_modules(work: Path) -> None:
    """The user's files hide nothing from dynmo.

    The user's model is imported all the same.
    """
    fill_own(work)
    for name in ("types", "grp", "random", "queue"):
        (work / f"{name}.py").write_text("raise RuntimeError('this is no module of Python')\n")
    changed = [word for text in ("name=main", *of("to")) for word in ("--set", text)]
    done = end(
        start([sys.executable, "-P", "-m", "dynmo", "train", "run.toml", "--json", *changed], work)
    )
    assert (done.status, json.loads(done.out)["steps"]) == (0, 2)


def test_the_cause_of_an_import_error_is_shown(work: Path) -> None:
    (work / "broken.py").write_text(
        "raise ImportError('no backend') from KeyError('the real cause')\n"
    )
    sets = ("model.kind=python:broken:layers", "dynamism.cases=[]")
    done = end(train(work, sets=sets, env={"DYNMO_TRACEBACK": "1"}))
    assert done.status == 2
    assert "KeyError: 'the real cause'" in done.err
    assert done.err.splitlines()[-1].startswith(
        "dynmo: model.kind = 'python:broken:layers': cannot import broken: no backend;"
    )


def test_a_saved_config_that_is_not_text(tmp_path: Path, run: Run) -> None:
    fill(tmp_path)
    saved = tmp_path / "runs" / "main"
    (saved / "checkpoints" / "step-000005").mkdir(parents=True)
    (saved / "checkpoints" / "step-000005" / "manifest.json").write_text("{}")
    (saved / "config.toml").write_bytes(b'name = "caf\xe9"\n')
    done = run(tmp_path, "run.toml", "--resume", sets=("name=main",))
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.line.startswith(
        "dynmo: runs/main/config.toml: not UTF-8 text (byte 11); save it as UTF-8"
    )


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (
            ("parallel.timeout=1e300",),
            "--set: parallel.timeout = 1e+300: must be less than or equal to 1000000000",
        ),
        (
            ("parallel.threads=100000",),
            "--set: parallel.threads = 100000: must be less than or equal to 1024",
        ),
        (
            (*GPT, "parallel.pipeline=1", "parallel.data=1000000", "train.global_batch=2000000"),
            "parallel.pipeline x parallel.data = 1000000 ranks, but at most ",
        ),
    ],
)
def test_numbers_too_large(tmp_path: Path, run: Run, sets: tuple[str, ...], says: str) -> None:
    fill(tmp_path)
    before = tree(tmp_path)
    done = run(tmp_path, "run.toml", sets=sets)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.line.startswith(f"dynmo: {says}")
    assert tree(tmp_path) == before


# -- waits -----------------------------------------------------------------------------------------


def test_compiling_is_told_once(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dynmo",
        "schedule",
        "--schedule",
        "zb-v",
        "--ranks",
        "2",
        "--microbatches",
        "2",
    ]
    command += ["--tf", "1", "--tb", "1", "--tw", "1", "--json"]
    for told in ("compiling dynmo's loops (once, about 20 s) ...\n", ""):
        done = end(start(command, tmp_path, env={"NUMBA_CACHE_DIR": str(tmp_path / "cache")}))
        assert (done.status, done.err) == (0, told)
