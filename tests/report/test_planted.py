"""Runs of two ranks with one planted cause each: the verdict names it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dynmo.plan.evaluate import evaluate
from dynmo.report.run_record import RunRecord
from dynmo.report.verdict import diagnose
from tests.models.huggingface.saved_models import folder_of

pytestmark = pytest.mark.matrix

# Layers that sleep: F, B and W take so many seconds on any machine.
LAYERS = """
import itertools, os, time
import torch
from torch import nn

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        time.sleep(seconds)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None

class Work(nn.Linear):
    def __init__(self, inputs=16, outputs=16, seconds=0.002):
        super().__init__(inputs, outputs)
        self.seconds = seconds

    def forward(self, x):
        slow = 3 if os.environ.get("SLOW") == os.environ.get("RANK", "0") else 1
        return Sleep.apply(super().forward(x), self.seconds * slow)

def layers(blocks=6, head=0.0):
    first, last = nn.Embedding(256, 16), Work(16, 256, head)
    return [first, *(Work() for _ in range(blocks)), last]

def heavy():
    return layers(3, 0.03)

class Rows:
    def __iter__(self):
        for number in itertools.count():
            time.sleep(0.1 * (number >= 128))  # the first ones are held out
            yield {"input_ids": list(range(16))}

def slowly():
    return Rows()
"""
RUN = """
name = "run"
[model]
kind = "python:planted:layers"
sequence = 16
[data]
source = "file:text"
[train]
steps = 12
global_batch = 8
micro_batch = 1
lr = 1e-3
eval_every = 0
[parallel]
pipeline = 2
[pipeline]
schedule = "zb-auto"
[balance]
balancer = "none"
[checkpoint]
every = 0
"""


def trained(folder: Path, *sets: str, env: dict[str, str] | None = None) -> RunRecord:
    """Trains with these keys changed, and reads the run."""
    folder.mkdir()
    (folder / "planted.py").write_text(LAYERS)
    (folder / "run.toml").write_text(RUN)
    (folder / "text").write_bytes(bytes(range(32, 127)) * 200)
    changed = [word for text in sets for word in ("--set", text)]
    subprocess.run(
        [sys.executable, "-m", "dynmo", "train", "run.toml", *changed],
        cwd=folder,
        env={**os.environ, **(env or {})},
        check=True,
        capture_output=True,
        timeout=120,
    )
    return RunRecord.read(folder / "runs" / "run")


def first_cause(run: RunRecord) -> str:
    found = diagnose(run)
    assert found.causes, found.verdict
    assert found.verdict.startswith(found.causes[0].name)
    return found.verdict


def test_slow_rank(tmp_path: Path) -> None:
    verdict = first_cause(trained(tmp_path / "slow", env={"SLOW": "1"}))
    assert verdict.startswith("A slow rank costs"), verdict
    assert "rank 1 takes" in verdict


def test_heavy_head(tmp_path: Path) -> None:
    verdict = first_cause(trained(tmp_path / "head", "model.kind=python:planted:heavy"))
    assert verdict.startswith("A heavy layer costs"), verdict
    assert "(layer 4) alone takes" in verdict


def test_slow_loader(tmp_path: Path) -> None:
    model = folder_of("llama")  # only models of transformers read samples
    sets = ("model.kind=hf", f"model.path={model}", "data.source=python:planted:slowly")
    verdict = first_cause(
        trained(tmp_path / "loader", *sets, "data.streaming=true", "data.block=8")
    )
    assert verdict.startswith("Waiting for data costs"), verdict


def test_no_memory_for_warm_up(tmp_path: Path) -> None:
    wide = ("model.sequence=1024",)
    roomy = trained(tmp_path / "roomy", *wide)
    assert roomy.plan is not None
    mesh = replace(roomy.plan.mesh, schedule="1f1b")  # one that keeps little
    least = max(evaluate(roomy.plan.problem, replace(roomy.plan.choice, mesh=mesh)).memory)
    limit = f"pipeline.memory_limit={round(1.05 * least)}"
    verdict = first_cause(trained(tmp_path / "tight", *wide, limit))
    assert verdict.startswith("No memory for warm-up costs"), verdict


def test_frozen_half_without_balancing(tmp_path: Path) -> None:
    sets = ("dynamism.cases=['freezing']", "dynamism.freezing.schedule=[[2, 4]]")
    verdict = first_cause(trained(tmp_path / "frozen", *sets))
    assert verdict.startswith("A frozen part that is not balanced costs"), verdict
    assert "because layers 0 to 3 are frozen" in verdict
