"""The loss of routers, whose sums go from layer to layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import dynmo
from dynmo.errors import ConfigError
from dynmo.events import Event, StepResult
from dynmo.metrics import numbers_of
from dynmo.models.huggingface.router import router_loss_of
from tests.combinations import mostly_matrix
from tests.models.huggingface.small import make_batch, shared_model_of
from tests.models.huggingface.tiny import config, model_of
from tests.pool import Pool

TRAIN = "tests.models.huggingface.small:train"
ROUTER = {"output_router_logits": True}


@pytest.mark.parametrize("kind", mostly_matrix(["mixtral", "qwen3_moe", "gpt_oss"], ["mixtral"]))
@pytest.mark.parametrize("padded", [False, True])
def test_loss_and_gradients_are_those_of_transformers(kind: str, padded: bool) -> None:
    model = model_of(kind, **ROUTER)
    layers = model.build(range(model.layers))
    plain = AutoModelForCausalLM.from_config(config(kind, **ROUTER))
    plain.load_state_dict({n: t for layer in layers for n, t in layer.state_dict().items()})
    batch = {name: tensor[:3] for name, tensor in make_batch(0, padded).items()}
    wanted = plain(**batch, use_cache=False)
    wanted.loss.backward()
    out: Any = (batch["input_ids"], batch.get("attention_mask"))
    for layer in layers:
        out = layer(*out)
    loss = model.loss(out, batch["labels"])
    loss.backward()
    assert wanted.aux_loss.detach() > 0
    assert torch.equal(loss, wanted.loss)
    found = {n: p.grad for layer in layers for n, p in layer.named_parameters()}
    for name, parameter in plain.named_parameters():
        gradient = found[name]
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad), name


def test_a_config_without_it_has_no_router_loss() -> None:
    assert shared_model_of(model_of("mixtral")).router is None


def test_an_unknown_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config("mixtral", **ROUTER))
    module = "transformers.models.mixtral.modeling_mixtral"
    monkeypatch.setattr(f"{module}.load_balancing_loss_func", lambda *_: torch.ones(()))
    with pytest.raises(ConfigError, match="in a way that dynmo does not know"):
        router_loss_of(model)


@pytest.mark.parametrize("head_tokens", [None, 6])
def test_step_tells_what_routers_add(head_tokens: int | None) -> None:
    """Each microbatch weighs as in the loss, by its counted targets."""
    events: list[Event] = []
    model, batch = model_of("mixtral", **ROUTER), make_batch(0, padded=True)
    plain = AutoModelForCausalLM.from_config(config("mixtral", **ROUTER))
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(
            model,
            world,
            microbatches=3,
            training=dynmo.Training(head_tokens=head_tokens),
            log=dynmo.Log(listen=events.append),
        )
        plain.load_state_dict(pipeline.state_dict())
        told = pipeline.step(batch).router_loss
    parts = [{name: rows.chunk(3)[i] for name, rows in batch.items()} for i in range(3)]
    wanted = torch.stack([plain(**part, use_cache=False).aux_loss.detach() for part in parts])
    counts = torch.stack([(part["labels"][:, 1:] != -100).sum() for part in parts])
    mean = plain.config.router_aux_loss_coef * (wanted * counts).sum() / counts.sum()
    assert len(set(counts.tolist())) > 1
    assert told == pytest.approx(float(mean), rel=1e-5)
    [event] = [each for each in events if isinstance(each, StepResult)]
    assert dict(numbers_of(event))["step/router_loss"] == told


def test_any_ranks_have_the_bits_of_one(pool: Pool) -> None:
    options = {"schedule": "zb-v", "recompute": "all", "move": [1, 3, 2, 2]}
    found = pool.run(TRAIN, 2, kind="mixtral", config=ROUTER, **options)
    assert found == pool.run(TRAIN, 1, kind="mixtral", config=ROUTER) * 2
