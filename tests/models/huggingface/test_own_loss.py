"""A loss of one's own on a model of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

import dynmo
from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.huggingface import from_pretrained
from dynmo.train.setup import model_of
from tests.models.huggingface.saved_models import folder_of
from tests.models.huggingface.small import make_batch
from tests.models.huggingface.tiny import config


def smoothed(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1),
        labels[:, 1:].flatten(),
        label_smoothing=0.1,
        reduction=reduction,
    )


def plain_loss(loss: Any, batch: dict[str, Tensor]) -> float:
    """The loss of the whole batch in one piece."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config("llama"))
    found = from_pretrained(config("llama")).build(range(8))
    model.load_state_dict({n: t for layer in found for n, t in layer.state_dict().items()})
    with torch.no_grad():
        return float(loss(model(batch["input_ids"]).logits, batch["labels"]))


@pytest.mark.parametrize("loss", [smoothed, partial(smoothed, reduction="sum")])
def test_loss_counts_as_in_one_piece(loss: Any) -> None:
    batch = make_batch(0, padded=False)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][0, :5] = -100  # microbatches count otherwise
    with dynmo.init(device="cpu") as world:
        model = from_pretrained(config("llama"), loss=loss)
        pipeline = dynmo.Pipeline(model, world, microbatches=4)
        result = pipeline.step(batch)
        assert result.loss == pytest.approx(plain_loss(loss, batch), rel=1e-6)
        with pytest.raises(ConfigError, match="loss"):
            dynmo.Pipeline(model, world, microbatches=4, training=dynmo.Training(head_tokens=2))


def test_router_loss_is_added() -> None:
    router = {"output_router_logits": True}
    own = from_pretrained(config("mixtral", **router), loss=smoothed)
    output = torch.randn(2, 4, 8), torch.tensor(3.0)
    labels = torch.tensor([[1, 2, 3, 4]] * 2)
    assert own.router_loss is not None
    assert own.loss(output, labels) == smoothed(output[0], labels) + own.router_loss(output)
    with pytest.raises(ConfigError, match="the loss is a sum"):
        from_pretrained(config("mixtral", **router), loss=partial(smoothed, reduction="sum"))


def test_file_names_the_loss() -> None:
    name = f"python:{__name__}:smoothed"
    folder = folder_of("llama", vocab_size=256)
    given = {"model": {"kind": "hf", "path": str(folder), "sequence": 8}, "train": {"loss": name}}
    assert model_of(parse(given)).loss is smoothed
    with pytest.raises(ConfigError, match=r'train.loss needs model.kind = "hf", not "gpt"'):
        parse({"train": {"loss": name}})
    with pytest.raises(ConfigError, match="has no function other"):
        model_of(parse(given | {"train": {"loss": f"python:{__name__}:other"}}))
