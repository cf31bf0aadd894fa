"""The output layer and the loss in pieces of the sequence, beside whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynmo
from dynmo.config import parse
from dynmo.pipeline.options import grouped
from dynmo.pipeline.shape_costs import shape_costs
from dynmo.train.setup import model_of
from tests.models.huggingface.saved_models import save
from tests.runtime.modules import Net

ROWS, TOKENS, WIDTH, WORDS = 4, 12, 8, 11


def steps(model: dynmo.Model, head_tokens: int | None, **options: Any) -> tuple[Any, ...]:
    """Losses, the held-out loss and the state after three steps of one rank."""
    torch.manual_seed(0)
    ids = torch.randint(0, WORDS, (3, ROWS, TOKENS))
    labels = ids.clone()
    labels[:, 1, 5:] = -100
    with dynmo.init() as world:
        pipeline = dynmo.Pipeline(
            model, world, microbatches=2, seed=1, **grouped({"head_tokens": head_tokens, **options})
        )
        losses = [pipeline.step(x, y).loss for x, y in zip(ids, labels, strict=True)]
        held_out = pipeline.evaluate(ids[0], labels[0])
        return [*losses, getattr(held_out, "loss", held_out)], pipeline.state_dict()


def own(loss: Any = dynmo.next_token_loss) -> dynmo.Model:
    torch.manual_seed(3)
    layers = [nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)]
    return dynmo.Sequential(layers, loss=loss)


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state
    return [t for each in values for t in tensors(each)] if isinstance(state, dict | list) else []


def check_alike(one: Any, other: Any) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert tensors(one[1])
    torch.testing.assert_close(tensors(one[1]), tensors(other[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("head_tokens", [1, 6, 7])
def test_pieces_train_as_the_whole_does(schedule: str, head_tokens: int) -> None:
    options = {"schedule": schedule, "optimizer": dynmo.SGD()}
    check_alike(steps(own(), None, **options), steps(own(), head_tokens, **options))


def test_one_piece_has_the_bits_of_the_whole() -> None:
    whole, piece = steps(own(), None), steps(own(), ROWS * TOKENS)
    assert whole[0] == piece[0]
    assert all(map(torch.equal, tensors(whole[1]), tensors(piece[1])))


def test_loss_that_is_not_known_is_refused() -> None:
    with pytest.raises(dynmo.DynmoError, match="head_tokens needs a loss"):
        steps(own(nn.functional.mse_loss), 4)


class Mean(nn.Linear):
    """One output for all tokens of a row."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.mean(1))


IDS = torch.ones(ROWS, TOKENS, dtype=torch.long)
HEAD = nn.Linear(WIDTH, WORDS)
SEVERAL = {"input": IDS, "first": IDS, "second": IDS}
NAMES = {"targets": ("first", "second"), "count": lambda _: 1}
PAIR = [Net(lambda m, x: (x, x)), Net(lambda m, x, y: m.head(x + y), head=HEAD)]


@pytest.mark.parametrize(
    ("reason", "layers", "batch", "options"),
    [
        (r"a tensor of shape \[2, 8\]", [Mean(WIDTH, WIDTH), HEAD], (IDS, IDS[:, 0]), {}),
        (r"targets have the shape \[2\]", [Mean(WIDTH, WORDS)], (IDS, IDS[:, 0]), {}),
        ("targets are no tensor", [HEAD], (SEVERAL,), NAMES),
        (r"\(Net\) takes 2 inputs", PAIR, (IDS, IDS), {}),
    ],
)
def test_layers_and_targets_without_tokens_are_refused(
    reason: str, layers: list[nn.Module], batch: Any, options: Any
) -> None:
    model = dynmo.Sequential([nn.Embedding(WORDS, WIDTH), *layers], **options)
    with dynmo.init() as world:
        pipeline = dynmo.Pipeline(
            model, world, microbatches=2, training=dynmo.Training(head_tokens=4)
        )
        with pytest.raises(dynmo.DynmoError, match=reason):
            pipeline.step(*batch)


def test_head_of_transformers_runs_in_pieces(tmp_path: Path) -> None:
    from dynmo.huggingface import from_pretrained

    save("mixtral", tmp_path, vocab_size=WORDS)
    options = {"schedule": "zb-h1", "optimizer": dynmo.SGD()}
    model = from_pretrained(tmp_path, output_router_logits=True)
    check_alike(steps(model, None, **options), steps(model, 6, **options))


def test_account_has_the_logits_of_a_piece_alone() -> None:
    def head(tokens: int | None) -> int:
        size = {"blocks": 1, "hidden": 32, "heads": 2, "sequence": 128, "vocab": 4096}
        train = {"global_batch": 8, "micro_batch": 4}
        config = parse({"model": size, "train": train | {"head_tokens": tokens} if tokens else {}})
        last = shape_costs(config.options, model_of(config))[-1]
        return last.activation_bytes + last.stash_bytes + last.workspace_bytes

    logits = 4 * 4 * 128 * 4096
    assert head(None) > logits
    assert head(64) < logits
