"""User models, and the properties of every model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.models.loss import next_token_loss
from dynmo.models.model import Model
from dynmo.train.setup import model_of
from tests.models import user_model

HERE = "python:tests.models.user_model:"
GPT = {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 8}
LOGITS, TARGETS = torch.randn(3, 256), torch.tensor([0, 5, 200])


def weighted() -> torch.Tensor:
    return functional.cross_entropy(LOGITS, TARGETS, weight=torch.arange(256.0))


def load(name: str, seed: int = 0) -> Model:
    return model_of(parse({"seed": seed, "model": {"kind": name}}))


def test_own_list_of_layers_is_a_model() -> None:
    model = load(HERE + "layers")
    assert model.names == ("0.First", "1.Scaled", "2.Scaled", "3.Scaled", "4.Last")
    assert model.loss is next_token_loss
    built = model.build({1, 3})
    assert [next(x.parameters()).is_meta for x in built] == [True, False, True, False, True]
    assert not any(x.get_parameter("fixed.weight").requires_grad for x in built[1:4])


def test_own_loss_is_used() -> None:
    model = load(HERE + "with_a_loss")
    assert model.layers == 2
    assert torch.equal(model.loss(LOGITS, TARGETS), user_model.squared(LOGITS, TARGETS))


def test_rank_runs_only_its_own_factories() -> None:
    """Other layers are built without memory."""
    model = load(HERE + "factories")
    assert model.names == ("0.Embedding", "1.Counted", "2.Counted", "3.Linear")
    user_model.Counted.created.clear()
    built = model.build([2])
    assert [next(x.parameters()).is_meta for x in built] == [True, True, False, True]
    assert user_model.Counted.created.count("cpu") == 1
    one, other = (each[2].get_parameter("weight") for each in (built, model.build([1, 2])))
    assert torch.equal(one, other)
    assert torch.equal(model.loss(LOGITS, TARGETS), weighted())


@pytest.mark.parametrize("name", ["layers", "weighted"])
def test_function_is_called_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Later builds without values are copies, and no rank keeps the memory of other layers."""
    made, function = list[Any](), getattr(user_model, name)

    def counted() -> Any:
        returned = function()
        made.extend(returned[0] if isinstance(returned, tuple) else returned)
        return returned

    monkeypatch.setattr(user_model, f"counted_{name}", counted, raising=False)
    model = load(f"{HERE}counted_{name}")
    with torch.device("meta"):
        assert all(p.is_meta for layer in model.build(()) for p in layer.parameters())
    built = model.build([0])
    assert [layer is own for layer, own in zip(built, made, strict=True)] == [True] * model.layers
    assert [p.is_meta for layer in made[1:] for p in layer.parameters()].count(False) == 0
    with FakeTensorMode():
        ids = torch.zeros((3, 4), dtype=torch.int64)
        out: Any = ids
        for layer in model.build(range(model.layers)):
            out = layer(*out) if isinstance(out, tuple) else layer(out)
    assert len(made) == model.layers
    assert not next(built[0].parameters()).is_meta


def test_layers_may_compute_in_their_constructor() -> None:
    """The meta device has neither tensor values nor the class weights of a loss."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = load(HERE + "weighted")
    built = model.build([1])
    assert model.names == ("0.Embedding", "1.Linear", "2.Dropout", "3.Dropout")
    assert [x.p for x in built[2:] if isinstance(x, nn.Dropout)] == [0.0, 0.25]
    assert torch.equal(model.loss(LOGITS, TARGETS), weighted())
    torch.set_rng_state(before)
    model_of(parse({"model": GPT})).build(range(6))
    assert torch.equal(torch.get_rng_state(), before)


def test_loss_with_tensors_works_on_shapes_alone() -> None:
    model = load(HERE + "with_weights")
    model.build([1])
    with FakeTensorMode():
        model.build([0, 1])
        assert model.loss(torch.randn(3, 256), torch.zeros(3, dtype=torch.int64)).shape == ()
    assert torch.equal(model.loss(LOGITS, TARGETS), weighted())


@pytest.mark.parametrize("model", [GPT, {"kind": HERE + "layers"}])
def test_initial_weights_do_not_depend_on_the_placement(model: Any) -> None:
    wanted: dict[str, Any] = {"model": model}
    model = model_of(parse({**wanted, "seed": 3}))
    whole = [x.state_dict() for x in model.build(range(model.layers))]
    for owned in ([1], [3, 2], range(2)):
        torch.rand(7)  # whatever was drawn before
        for index, layer in enumerate(model.build(frozenset(owned))):
            for name, value in layer.state_dict().items():
                if index in owned:
                    assert torch.equal(value, whole[index][name])
                else:
                    assert value.is_meta
    other = model_of(parse({**wanted, "seed": 4})).build(range(model.layers))
    for pair in zip(other[1:3], model.build([1, 2])[1:3], strict=True):
        a, b = (torch.cat([p.flatten() for p in x.parameters() if p.dim() == 2]) for x in pair)
        assert not torch.equal(a, b), "another seed gives other weights"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("sharing", r"layers 1 and 2 share the parameter line\.weight"),
        ("sharing_later", r"layers 1 and 2 share the buffer last; .*, so give each its own"),
        ("sharing_inside", r"layer 1 has one parameter under two names, a\.weight and b\.weight"),
        ("hooked", "the parameter weight of layer 1 has a hook"),
        ("no_list", r"no_list\(\) returns: Sequential needs a list"),
        ("mixed", r"mixed\(\) returns: Sequential needs a list"),
        ("broken_factory", r"layer 1 raised ValueError: no such width \(user_model.py:\d+\)"),
        ("odd_factory", "make layer 1 returned a int"),
        ("empty", r"empty\(\) returns: Sequential needs a list"),
        ("not_modules", r"not_modules\(\) returns: Sequential needs a list"),
        ("broken", "user_model:broken': raised KeyError: 'nothing here'"),
        ("complex_weight", r"the parameter 0 of layer 1 is torch\.complex64 and trains"),
        ("lazy", "the parameter weight of layer 1 has no shape yet"),
        ("sparse", "the embedding 0 of layer 0 has sparse gradients"),
        ("trained_loss", "the loss .* has the parameter head.weight"),
        ("number", r"user_model has no function number \(.*user_model\.py\)"),
        ("missing", r"user_model has no function missing \(.*user_model\.py\)"),
        ("python:tests.models.nowhere:layers", "cannot import"),
        ("python:nowhere.at.all:layers", "cannot import"),
    ],
)
def test_unmovable_models_are_refused(name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(name if ":" in name else HERE + name)


def test_next_token_loss_is_the_mean_cross_entropy() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    pairs = zip(logits.flatten(0, 1), targets.flatten(), strict=True)
    rows = [functional.cross_entropy(*pair) for pair in pairs]
    torch.testing.assert_close(next_token_loss(logits, targets), torch.stack(rows).mean())


def test_module_shared_within_a_layer_is_allowed() -> None:
    shared = nn.Linear(2, 2)
    user_model.number = lambda: [nn.Sequential(shared, shared), nn.Linear(2, 2)]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        assert load(HERE + "number").layers == 2
    finally:
        user_model.number = 3
