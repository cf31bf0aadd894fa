"""Only parameters that train have a float32 master, with moves, freezing and resumes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import dynmo
from tests.pipeline.adapters import batch, layers, make, masters, store_of
from tests.pool import Pool

JOBS = "tests.pipeline.adapters:"
TRAINED = [f"{index}.{name}.weight" for index in (1, 2, 3) for name in ("down", "up")]


def test_masters_agree_over_ranks_moves_and_resumes(pool: Pool, tmp_path: Path) -> None:
    """Adapters that were frozen meanwhile keep their masters and go on with the same bits."""
    whole = pool.run(JOBS + "train", 1, folder=str(tmp_path / "1"), resumes=False)[0]
    assert whole["saved"] == whole["masters"] == TRAINED
    assert whole["optimizer_bytes"] == [0, *[3 * 4 * 48 + 2 * 4] * 3]
    for ranks, folder, resumes in ((2, "2", False), (3, "1", True), (2, "1", True)):
        said = pool.run(JOBS + "train", ranks, folder=str(tmp_path / folder), resumes=resumes)
        assert {each["weights"] for each in said} == {whole["weights"]}
        assert said[0]["losses"] == whole["losses"]
        assert sorted(name for each in said for name in each["saved"]) == TRAINED
        assert said[0]["optimizer_bytes"] == whole["optimizer_bytes"]


def test_thawed_parameter_gets_its_master_from_the_rounded_value(world: dynmo.World) -> None:
    pipeline = make(world)
    pipeline.step(*batch(0))
    weight = pipeline.mesh.modules[3].get_parameter("base.weight")
    rounded = layers()[3].get_parameter("base.weight").to(torch.bfloat16)
    assert torch.equal(weight, rounded)
    before = pipeline.digest()
    weight.requires_grad_(True)
    account = pipeline.measured.costs()[3].optimizer_bytes
    assert "3.base.weight" not in masters(pipeline)
    assert pipeline.digest() == before
    pipeline.step(*batch(1))
    optimizer = store_of(pipeline).optimizers[3]
    assert "3.base.weight" in masters(pipeline)
    assert torch.equal(optimizer.masters["base.weight"].bfloat16(), weight)
    assert pipeline.measured.costs()[3].optimizer_bytes == account + 4  # the step count


def test_resume_keeps_the_layers_that_train_now(world: dynmo.World, tmp_path: Path) -> None:
    """A checkpoint of a model whose layer 1 trained whole: its masters stay."""

    def whole() -> list[nn.Module]:
        return [layer.requires_grad_(index > 0) for index, layer in enumerate(layers())]

    first = make(world, whole())
    first.step(*batch(0))
    first.save(tmp_path)
    second = make(world, resume=tmp_path)
    assert second.digest() == first.digest()
    frozen = second.mesh.modules[1].get_parameter("base.weight")
    assert not frozen.requires_grad
    assert "1.base.weight" in masters(second)
    second.step(*batch(1))
    assert torch.equal(second.state_dict()["1.base.weight"], first.state_dict()["1.base.weight"])
    third = make(world, whole(), resume=tmp_path)
    assert third.mesh.modules[1].get_parameter("base.weight").requires_grad


def test_replica_without_a_share_gathers_masters_too(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(JOBS + "resume_frozen", 2, folder=str(tmp_path))
    assert one == other
