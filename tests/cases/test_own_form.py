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
from dynmo.errors import RunError
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
    page = (ROOT / "docs" / "how-to" / "own-case.md").read_text()
    return re.findall(r"```python\n(.*?)```", page.partition("## Layers whose")[2], re.DOTALL)


def test_guide_shows_the_example() -> None:
    assert len(shown()) == 2
    assert all(part.strip() in EXAMPLE.read_text() for part in shown())


@pytest.fixture(scope="module")
def world() -> Iterator[dynmo.World]:
    with dynmo.init(device="cpu") as made:
        yield made


def trained(world: dynmo.World, wraps: bool, packs_moments: bool = True) -> list[nn.Module]:
    """Trains layers that are linears, or sequences of one. The first weight is frozen."""
    names: dict[str, Any] = {}
    code = "\n".join(shown())
    exec(code if packs_moments else code.replace("moment.shape ==", "None =="), names)
    torch.manual_seed(0)
    linears = [nn.Linear(16, 16) for _ in range(2)]
    linears[0].weight.requires_grad_(False)
    parts = [nn.Sequential(linear) for linear in linears] if wraps else linears
    model = dynmo.Sequential(parts, loss=nn.functional.mse_loss)
    case = names["DropBlocks"]()
    pipeline = dynmo.Pipeline(model, world, microbatches=2, cases=[case])
    for step in range(4):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        pipeline.step(data, data.sin())
    modules = pipeline._engine.store.modules
    return [module.get_submodule("0" if wraps else "") for module in modules]


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
