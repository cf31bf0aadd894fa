"""A mask beside packed rows is refused, and padded rows are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynmo
from dynmo.errors import ConfigError, InputError
from dynmo.models.huggingface.rows import check_packing, check_rows
from tests.combinations import mostly_matrix
from tests.models.huggingface.tiny import VOCABULARY, model_of

PACKED = [0, 1, 2, 0, 1, 2, 3]


def _batch(mask: list[int], positions: list[int] | None = None) -> dict[str, Any]:
    ids = torch.arange(len(mask))[None] % VOCABULARY
    given = {"input_ids": ids, "labels": ids, "attention_mask": torch.tensor([mask])}
    return given if positions is None else given | {"position_ids": torch.tensor([positions])}


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        ([1] * 7, PACKED),
        ([1, 1, 1, 2, 2, 2, 2], PACKED),
        ([1, 1, 1, 2, 2, 2, 2], None),
        ([1, 1, 1, 2, 2, 2, 0], None),
        ([0, 1, 1, 0, 1, 1, 1], [0, 0, 1, 5, 0, 1, 2]),
        ([1, 1, 1, 1, 1, 1, 0], PACKED),
    ],
)
def test_mask_of_several_samples_is_refused_before_the_step(
    mask: list[int], positions: list[int] | None
) -> None:
    batch = _batch(mask, positions)
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(model_of(), world, microbatches=1)
        for run in (pipeline.step, pipeline.evaluate):
            for given in (batch, [batch]):
                with pytest.raises(InputError, match="leave out the mask") as caught:
                    run(given)
                assert "\n" not in str(caught.value)
        assert pipeline.steps == 0


@pytest.mark.parametrize("wrong", [5000, -1])
def test_ids_that_the_model_lacks_are_refused_before_the_step(wrong: int) -> None:
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(model_of(), world, microbatches=1)
        ids = torch.tensor([[1, wrong, 2]])
        with pytest.raises(InputError, match=rf"input_ids of the batch has {wrong}; the model has"):
            pipeline.step({"input_ids": ids, "labels": ids.clamp(0, 1)})
        assert pipeline.steps == 0


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        ([1] * 7, None),
        ([1] * 7, list(range(7))),
        ([0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 2, 3, 4]),
        ([1, 1, 1, 1, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0]),
        ([1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 3, 4]),
    ],
)
def test_mask_of_padding_is_taken(mask: list[int], positions: list[int] | None) -> None:
    check_rows(_batch(mask, positions), "the batch")


def test_packed_row_has_the_loss_of_its_samples() -> None:
    ids = torch.arange(7)[None]
    labels = torch.tensor([[-100, 1, 2, -100, 4, 5, 6]])
    row = {"input_ids": ids, "labels": labels, "position_ids": torch.tensor([PACKED])}
    order, counts = torch.tensor([[0, 1, 2, 2], [3, 4, 5, 6]]), torch.tensor([3, 4])
    mask = (torch.arange(4) < counts[:, None]).long()
    padded = {"input_ids": ids[0][order], "attention_mask": mask}
    padded["labels"] = labels[0][order].masked_fill(mask == 0, -100)
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(model_of(), world, microbatches=1)
        found, wanted = pipeline.evaluate(row), pipeline.evaluate(padded)
    assert found == pytest.approx(wanted, rel=1e-6)


PASSING = ["llama", "gpt2", "gpt_neox", "gemma3_text", "deepseek_v3"]
MIXING = [
    ("bloom", r"blocks\.0"),  # ALiBi
    ("roberta", "embedding"),  # positions that begin after the id of padding
    ("mamba", r"blocks\.0"),
    ("qwen3_5_text", r"blocks\.0\.attention"),  # linear attention beside others
    ("lfm2_moe", r"blocks\.0\.attention"),  # a convolution, which adds little to the residual
]


@pytest.mark.parametrize("kind", mostly_matrix(PASSING, PASSING[:2]))
def test_models_that_mask_by_positions_pass(kind: str) -> None:
    model = model_of(kind)
    check_packing(model, range(model.layers))


def test_routers_with_a_loss_pass() -> None:
    model = model_of("mixtral", output_router_logits=True)
    check_packing(model, range(model.layers))


@pytest.mark.parametrize(("kind", "layer"), mostly_matrix(MIXING, [MIXING[1], MIXING[4]]))
def test_models_that_mix_samples_are_refused(kind: str, layer: str) -> None:
    model = model_of(kind)
    with pytest.raises(ConfigError, match=rf"row apart in its layer {layer};") as raised:
        check_packing(model, range(model.layers))
    assert "\n" not in str(raised.value)


def test_each_rank_checks_its_own_layers() -> None:
    model = model_of("lfm2_moe")
    assert model.names[3:5] == ("blocks.1.attention", "blocks.1.feed-forward")
    check_packing(model, (3, 4))
    with pytest.raises(ConfigError, match="does not keep"):
        check_packing(model, (1,))
