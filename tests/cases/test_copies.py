"""A copy of each case, outside of dynmo and under another name, trains to the same bits."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dynmo
from dynmo.cases import CASES
from dynmo.kernels import packed_weight

FOLDER = Path(dynmo.__file__).parent / "cases"
OPTIONS: dict[str, dict[str, Any]] = {
    "pruning": {"start": 1, "end": 4, "every": 1, "dense_below": 0.6},
    "sparse_attention": {"start": 2, "buckets": 4, "tile": 4},
    "early_exit": {"start": 2, "threshold": 0.01},
    "mixture_of_depths": {"capacity": 0.5, "threshold_from": 3},
    "experts": {"record_every": 2},
    "freezing": {"schedule": [[2, 3]]},
}
MODEL: dict[str, Any] = {"blocks": 3, "hidden": 32, "heads": 2, "vocab": 64, "sequence": 16}


def digest(world: dynmo.World, case: Any) -> str:
    """Trains six steps."""
    moe = {"kind": "moe", "experts": 4, "routing": "bias"} if case.name == "experts" else {}
    model = dynmo.load_model(dynmo.ModelOptions(**MODEL, **moe), seed=1, cases=[case])
    pipeline = dynmo.Pipeline(model, world, microbatches=2, cases=[case], steps=6, balance="none")
    draws = torch.Generator().manual_seed(0)
    for _ in range(6):
        ids = torch.randint(64, (4, 17), generator=draws)
        pipeline.step(ids[:, :-1], ids[:, 1:])
    return pipeline.digest()


@pytest.fixture(scope="module")
def world() -> Iterator[dynmo.World]:
    with dynmo.init(device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A package with copies of all cases. Imports of their own folders are those of the copies."""
    home = tmp_path_factory.mktemp("copies")
    for name in OPTIONS:
        shutil.copytree(FOLDER / name, home / "own_cases" / f"own_{name}")
        for file in (home / "own_cases" / f"own_{name}").rglob("*.py"):
            text = file.read_text().replace(f"dynmo.cases.{name}", f"own_cases.own_{name}")
            assert "dynmo.cases" not in text.split('"""', 2)[-1].replace("as dynmo.cases", "")
            file.write_text(text)
    return str(home)


def test_all_cases_are_copied() -> None:
    assert OPTIONS.keys() == CASES.keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_copy_gives_the_same_digest(
    name: str, copies: str, world: dynmo.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(copies)
    # Later tests find dynmo's own forms of packed weights.
    importlib.import_module("dynmo.cases.forms")
    monkeypatch.setattr(packed_weight, "_FORMS", list(packed_weight._FORMS))
    theirs = importlib.import_module(f"own_cases.own_{name}")
    copy = getattr(theirs, CASES[name].__name__)(**OPTIONS[name])
    assert type(copy) is not CASES[name]
    trained = digest(world, copy)
    assert trained == digest(world, CASES[name](**OPTIONS[name]))
