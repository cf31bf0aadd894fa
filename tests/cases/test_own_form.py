"""A case that packs weights in a form of its own: `examples/block_sparse.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynmo
from dynmo.cases.pruning.sparse_linear import SparseLinear
from dynmo.errors import CheckpointError, ConfigError, RunError
from dynmo.kernels import packed_weight
from dynmo.pipeline.options import grouped
from dynmo.plan.partition import Move
from dynmo.runtime.state.migration import pack, unpack
from tests.cli.runs import free_port
from tests.pool import Pool

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "block_sparse.py"


def test_packed_layers_move_and_resume_on_other_ranks(pool: Pool, tmp_path: Path) -> None:
    def weights(ranks: int, name: str, steps: int) -> str:
        arguments = [str(tmp_path / name), str(steps)]
        printed = pool.run(
            "script", ranks, path=str(EXAMPLE), port=free_port(), arguments=arguments
        )
        (digest,) = {*re.findall(r"weights (\w{64})", "".join(printed))}
        return digest

    at_start, whole = weights(1, "start", 2), weights(1, "whole", 8)
    moved = weights(2, "moved", 5)
    assert moved == weights(1, "alone", 5) != at_start
    assert weights(3, "moved", 7) == weights(1, "alone", 7)
    assert weights(1, "moved", 8) == whole


def shown() -> list[str]:
    page = (ROOT / "docs" / "reference" / "own-case.md").read_text()
    return re.findall(r"```python\n(.*?)```", page.partition("## Layers whose")[2], re.DOTALL)


def test_guide_shows_the_example() -> None:
    assert len(shown()) == 2
    assert all(part.strip() in EXAMPLE.read_text() for part in shown())


@pytest.fixture(scope="module")
def world() -> Iterator[dynmo.World]:
    with dynmo.init(device="cpu") as made:
        yield made


def make(
    world: dynmo.World, wraps: bool, packs_moments: bool = True, **options: Any
) -> dynmo.Pipeline:
    """Makes layers that are linears, or sequences of one. The first weight is frozen."""
    names: dict[str, Any] = {"__name__": "shown"}
    code = "\n".join(shown())
    exec(code if packs_moments else code.replace("moment.shape ==", "None =="), names)
    torch.manual_seed(0)
    linears = [nn.Linear(16, 16) for _ in range(2)]
    linears[0].weight.requires_grad_(False)
    parts = [nn.Sequential(linear) for linear in linears] if wraps else linears
    model = dynmo.Sequential(parts, loss=nn.functional.mse_loss)
    case = names["DropBlocks"]()
    return dynmo.Pipeline(model, world, microbatches=2, cases=[case], **grouped(options))


def trained(world: dynmo.World, wraps: bool, packs_moments: bool = True) -> list[nn.Module]:
    return modules(train(make(world, wraps, packs_moments)), wraps)


def train(pipeline: dynmo.Pipeline) -> dynmo.Pipeline:
    for step in range(4):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        pipeline.step(data, data.sin())
    return pipeline


def modules(pipeline: dynmo.Pipeline, wraps: bool = False) -> list[nn.Module]:
    return [x.get_submodule("0" if wraps else "") for x in pipeline._engine.store.modules]


def test_a_layer_that_is_a_linear_is_packed_with_its_moments(world: dynmo.World) -> None:
    alone, inner = (trained(world, wraps) for wraps in (False, True))
    for one, other in zip(alone, inner, strict=True):
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.requires_grad == theirs.requires_grad
    assert [next(x.parameters()).requires_grad for x in alone] == [False, True]


def test_moments_that_do_not_fit_are_refused(world: dynmo.World) -> None:
    told = r"layer 1 \(1\.Linear\): rebuild got weight/exp_avg of \[16, 16\], but weight is \[8, "
    with pytest.raises(RunError, match=told):
        trained(world, False, packs_moments=False)


def test_a_saved_form_is_that_of_its_class(
    world: dynmo.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weight, "_FORMS", [*packed_weight._FORMS])
    pipeline = train(make(world, False))
    pipeline.save(tmp_path)
    kind: Any = type(modules(pipeline)[0])
    body = {"form": kind.form, "packed_shape": lambda *_: (1, 1)}
    type("Other", (kind,), body)  # of the same buffers, and the last one
    resumed = make(world, False, resume=tmp_path)
    assert resumed.digest() == pipeline.digest()
    assert [type(x).__name__ for x in modules(resumed)] == ["BlockSparse", "BlockSparse"]


def test_a_form_that_nothing_has_imported_is_named(
    world: dynmo.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = train(make(world, False))
    pipeline.save(tmp_path)
    text, _ = pack(1, pipeline._engine.store.modules[1], {})
    move = Move(1, 0, 0)
    # The class that `make` defines stays unknown.
    monkeypatch.setattr(packed_weight.PackedWeight, "__init_subclass__", lambda: None)
    monkeypatch.setattr(packed_weight, "_FORMS", [SparseLinear])
    with pytest.raises(CheckpointError, match=r"^layer 0 .* as shown:BlockSparse, which is"):
        make(world, False, resume=tmp_path)
    store = pipeline._engine.store
    with pytest.raises(ConfigError, match=r"^layer 1 .* packed as shown:BlockSparse, which this"):
        store.check_arrival(move, unpack(text, move, torch.device("meta")))
