"""Mistakes in a user's folder, model or numbers: a one-line error, or the run works anyway."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from dynmo.config import parse
from dynmo.pipeline.shape_costs import shapes_of
from dynmo.train.setup import model_of
from tests.cli.runs import GPT, ONE_RANK, Done, Run, assert_refused, end, tree
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
    plain = ("dynamism.cases=[]", "checkpoint.every=0", "train.steps=2")
    return (f"model.kind=python:own:{function}", *plain, *sets)


@pytest.fixture
def own(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (filled / "own.py").write_text(OWN)
    return filled


# -- models that train, but not on shapes alone ----------------------------------------------------


@pytest.mark.parametrize(("function", "line"), [("asks", 11), ("routes", 17)])
def test_dry_run_works_without_activation_shapes(
    own: Path, run: Run, function: str, line: int
) -> None:
    done = run(own, "run.toml", "--dry-run", "--json", sets=of(function))
    assert (done.status, done.err.count("\n")) == (0, 1)
    assert "activations unknown" in done.line
    assert f"(own.py:{line})" in done.line
    plan = json.loads(done.out)
    assert sum(plan["parameters"]) == 256 * 8 + 72 + 9 * 256
    assert sum(plan["memory"]) >= 16 * sum(plan["parameters"])


@pytest.mark.parametrize(("function", "linears"), [("factories", 1), ("to", 2), ("number", 1)])
def test_layer_that_reads_a_value_is_built_to_learn_shapes(
    own: Path, run: Run, function: str, linears: int
) -> None:
    """Tensors on the meta device have no values, so dynmo builds the layer with memory."""
    done = run(own, "run.toml", "--dry-run", "--json", sets=of(function))
    assert sum(json.loads(done.good)["parameters"]) == 256 * 8 + linears * 72 + 9 * 256


def test_memory_limit_is_checked_against_parameters_alone(own: Path, run: Run) -> None:
    """Recomputation as needed is not possible then."""

    def planned(*sets: str) -> Done:
        return run(own, "run.toml", "--dry-run", "--json", sets=of("asks", *sets))

    most = max(json.loads(planned().out)["memory"])
    assert planned(f"pipeline.memory_limit={most}").status == 0
    done = planned(f"pipeline.memory_limit={most - 1}")
    assert_refused(done, "optimizer state alone", f"pipeline.memory_limit = {most - 1}")
    done = planned("train.recompute=auto", "pipeline.memory_limit=1GiB")
    assert_refused(done, "train.recompute = 'auto'", "unknown")


def test_run_refuses_a_limit_below_its_parameters(own: Path, rank: Run) -> None:
    """The run refuses the limit before the first step and leaves the folder unchanged."""
    before = tree(own)
    done = rank(own, "run.toml", sets=of("asks", "pipeline.memory_limit=10KB", ONE_RANK))
    assert (done.status, done.out) == (2, "")
    warned, refused = (line for line in done.err.splitlines() if line.startswith("dynmo:"))
    assert "activations unknown" in warned
    assert "pipeline.memory_limit = 10000" in refused
    assert tree(own) == before
    assert not list((own / "runs").iterdir())


def test_unknown_shapes_give_a_warning(
    own: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(own)
    config = parse({"model": {"kind": "python:own:asks"}})
    model = model_of(config)
    assert shapes_of(config.options, model) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "(own.py:11)" in record.getMessage()


def test_internal_error_is_not_swallowed() -> None:
    def build(own: Collection[int]) -> list[nn.Module]:
        raise RuntimeError("not the user's")

    config = parse({})
    with pytest.raises(RuntimeError, match="not the user's"):
        shapes_of(config.options, replace(model_of(config), build=build))


def test_model_that_calls_exit_is_refused(own: Path, run: Run) -> None:
    done = run(own, "run.toml", "--dry-run", sets=of("leaves"))
    assert_refused(done, ":leaves'", "SystemExit: 0 (own.py:42)")


# -- what lies in the folder -----------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.usefixtures("own")
def test_user_files_do_not_shadow_standard_modules(work: Path) -> None:
    """The user's model can still be imported."""
    for name in ("types", "grp", "random", "queue"):
        (work / f"{name}.py").write_text("raise RuntimeError('this is no module of Python')\n")
    changed = [part for text in ("name=main", *of("to", ONE_RANK)) for part in ("--set", text)]
    command = [sys.executable, "-P", "-m", "dynmo", "train", "run.toml", "--json", *changed]
    done = end(start(command, work))
    assert (done.status, json.loads(done.out)["steps"]) == (0, 2)


def test_import_error_shows_its_cause(filled: Path, rank: Run) -> None:
    text = "raise ImportError('no backend') from KeyError('the real cause')\n"
    (filled / "broken.py").write_text(text)
    os.environ["DYNMO_TRACEBACK"] = "1"
    sets = ("model.kind=python:broken:layers", "dynamism.cases=[]", ONE_RANK)
    done = rank(filled, "run.toml", sets=sets)
    assert done.status == 2
    assert "KeyError: 'the real cause'" in done.err
    assert "cannot import broken: no backend; run from its folder" in done.err.splitlines()[-1]


def test_saved_config_with_invalid_text_is_refused(filled: Path, run: Run) -> None:
    saved = filled / "runs/main"
    (saved / "checkpoints/step-000005").mkdir(parents=True)
    (saved / "checkpoints/step-000005/manifest.json").write_text("{}")
    (saved / "config.toml").write_bytes(b'name = "caf\xe9"\n')
    done = run(filled, "run.toml", "--resume", sets=("name=main",))
    assert_refused(done, "runs/main/config.toml", "byte 11")


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "mentions"),
    [
        (["parallel.timeout=1e300"], ["parallel.timeout = 1e+300", "1000000000"]),
        (["parallel.threads=100000"], ["parallel.threads = 100000", "1024"]),
        (
            [*GPT, ONE_RANK, "parallel.replicas=1000000", "train.global_batch=2000000"],
            ["parallel.pipeline x parallel.replicas = 1000000"],
        ),
    ],
)
def test_numbers_that_are_too_large_are_refused(
    filled: Path, run: Run, sets: list[str], mentions: list[str]
) -> None:
    before = tree(filled)
    assert_refused(run(filled, "run.toml", sets=sets), *mentions)
    assert tree(filled) == before
