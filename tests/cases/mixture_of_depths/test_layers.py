"""A GPT with routed blocks, compared with a computation by single tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given, reject
from hypothesis import strategies as st
from torch import Tensor, nn

from dynmo.cases.mixture_of_depths.layers import RoutedAttentionHalf, Router, selected_tokens
from dynmo.config import Config
from dynmo.train.setup import model_of
from tests.models import plain_blocks as plain


@dataclass
class Routing:
    """The results of a pass. `closest`: least distance of two numbers that are compared."""

    loss: Tensor
    own_losses: Tensor  # of the predictors, with their weight
    selected: list[set[plain.Token]] = field(default_factory=list)
    right: list[int] = field(default_factory=list)  # tokens for which each predictor is right
    closest: float = math.inf


def one_by_one(
    config: Config, modules: Sequence[nn.Module], ids: Tensor, targets: Tensor, by_threshold: bool
) -> Routing:
    layers: dict[str, Any] = dict(zip(model_of(config).names, modules, strict=True))
    routed = config.dynamism.mixture_of_depths.routed_blocks(config.model.blocks)
    tokens = [(row, t) for row in range(ids.shape[0]) for t in range(config.model.sequence)]
    routing = Routing(torch.zeros(()), torch.zeros((), dtype=torch.float64))
    states = {token: layers["embedding"].tokens.weight[ids[token]] for token in tokens}
    for block in range(config.model.blocks):
        attention = layers[f"blocks.{block}.attention"]
        feed_forward = layers[f"blocks.{block}.feed_forward"]
        if block in routed:
            router = attention.router
            selected = route(config, routing, router, states, by_threshold)
            added = block_output(config, attention, feed_forward, states, selected)
            weight = router.weight.weight[0]
            added = {token: weight @ states[token] * x for token, x in added.items()}
        else:
            added = block_output(config, attention, feed_forward, states, set(tokens))
        states = {token: x + added[token] if token in added else x for token, x in states.items()}
    head = layers["head"]
    losses = [plain.token_loss(head, states[token], targets[token])[1] for token in tokens]
    routing.loss = torch.stack(losses).mean()
    return routing


def block_output(
    config: Config,
    attention: Any,
    feed_forward: Any,
    states: dict[plain.Token, Tensor],
    selected: set[plain.Token],
) -> dict[plain.Token, Tensor]:
    heads, queries, keys, values = config.model.heads, plain.Heads(), plain.Heads(), plain.Heads()
    for token in selected:
        normed = plain.rms_norm(states[token], attention.norm.weight)
        q, k, v = (attention.qkv.weight @ normed).chunk(3)
        queries[token] = plain.rotated_heads(q, heads, token)
        keys[token], values[token] = plain.rotated_heads(k, heads, token), list(v.view(heads, -1))
    added: dict[plain.Token, Tensor] = {}
    for token in selected:
        out = plain.attended_heads(token, queries[token], keys, values)
        by_attention = attention.proj.weight @ out
        added[token] = by_attention + plain.fed_forward(feed_forward, states[token] + by_attention)
    return added


def route(
    config: Config,
    routing: Routing,
    router: Any,
    states: dict[plain.Token, Tensor],
    by_threshold: bool,
) -> set[plain.Token]:
    options, tokens = config.dynamism.mixture_of_depths, list(states)
    training: bool = router.training
    scores = {token: router.weight.weight[0] @ states[token] for token in tokens}
    if options.predictor == "bce":
        guesses = scores
    else:
        first, _, second = router.predictor
        inner = {token: first.weight @ states[token].detach() + first.bias for token in tokens}
        guesses = {
            token: (second.weight @ (x / (1 + torch.exp(-x))) + second.bias).squeeze(0)
            for token, x in inner.items()
        }
    best = set[plain.Token]()
    count = min(config.model.sequence, max(1, round(options.capacity * config.model.sequence)))
    for row in {row for row, _ in tokens}:
        own = [token for token in tokens if token[0] == row]
        ranked = sorted(own, key=lambda token: -float(scores[token].detach()))
        best |= set(ranked[:count])
        if training and count < len(ranked):
            last, next_ = scores[ranked[count - 1]], scores[ranked[count]]
            routing.closest = min(routing.closest, float((last - next_).detach()))
    predicted = {token for token in tokens if guesses[token] > 0}
    closest = min(abs(float(guess.detach())) for guess in guesses.values())
    routing.closest = min(routing.closest, closest)
    if training:
        mistaken = [plain.binary_cross_entropy(guesses[token], token in best) for token in tokens]
        mean = torch.stack(mistaken).mean()
        routing.own_losses = routing.own_losses + options.predictor_weight * mean
        routing.right.append(sum((token in best) == (token in predicted) for token in tokens))
    routing.selected.append(best if training and not by_threshold else predicted)
    return routing.selected[-1]


# -- the module ------------------------------------------------------------------------------------


def config_of(
    kind: str, sequence: int = 6, capacity: float = 0.5, blocks: int = 2, heads: int = 2, **own: Any
) -> Config:
    wanted = {"predictor": kind, "capacity": capacity, "predictor_weight": 0.5} | own
    return plain.config_of("mixture_of_depths", wanted, sequence, blocks, heads, vocab=40)


def routers(modules: Sequence[nn.Module]) -> list[Router]:
    return [module.router for module in modules if isinstance(module, RoutedAttentionHalf)]


def build(
    config: Config, seed: int = 0, training: bool = True, by_threshold: bool = False
) -> list[nn.Module]:
    modules = plain.build(config, seed, training)
    for router in routers(modules):
        router.by_threshold = by_threshold
        if router.predictor is not None:  # some guesses are over 0, some under it
            for name, parameter in router.predictor.named_parameters():
                parameter.data *= 0.1 if name.endswith("bias") else 8.0
    return modules


def drawn(config: Config, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids, each once, and targets. Equal tokens would have equal scores."""
    generator, shape = torch.Generator().manual_seed(seed), (batch, config.model.sequence)
    drawn = (torch.randperm(config.model.vocab, generator=generator) for _ in range(2))
    ids, targets = (each[: math.prod(shape)].view(shape) for each in drawn)
    return ids, targets


def run(
    config: Config, modules: Sequence[nn.Module], ids: Tensor, targets: Tensor
) -> tuple[Tensor, list[set[plain.Token]]]:
    out: tuple[Any, ...] = (ids,)
    selected: list[set[plain.Token]] = []
    for module in modules:
        before, result = out, module(*out)
        out = result if isinstance(result, tuple) else (result,)
        if len(out) == 4:
            assert (out[3].diff() > 0).all()
            selected.append({divmod(i, config.model.sequence) for i in out[3].tolist()})
        if len(before) == 4:
            others = torch.ones(ids.numel(), dtype=torch.bool).index_fill(0, before[3], False)
            now, then = (x.flatten(0, 1)[others] for x in (out[0], before[0]))
            assert torch.equal(now, then), "the others stay as they are"
    return model_of(config).loss(out[0], targets), selected


def compare(
    config: Config,
    modules: Sequence[nn.Module],
    ids: Tensor,
    targets: Tensor,
    by_threshold: bool = False,
) -> Routing:
    slow = one_by_one(config, modules, ids, targets, by_threshold)
    if slow.closest < 1e-5:
        raise plain.TooCloseError
    loss, selected = run(config, modules, ids, targets)
    assert selected == slow.selected
    # The loss and the rotary tables are of float32.
    torch.testing.assert_close(loss.double(), slow.loss, rtol=1e-5, atol=1e-6)
    expected = plain.gradients(modules, slow.loss + slow.own_losses)
    torch.testing.assert_close(plain.gradients(modules, loss), expected, rtol=1e-4, atol=1e-5)
    seen = [tuple(int(count) for count in router.seen) for router in routers(modules)]
    pairs = zip(slow.selected, slow.right, strict=False)
    counts = [(ids.numel(), len(taken), right) for taken, right in pairs]
    assert seen == (counts if modules[0].training else [(0, 0, 0)] * len(seen))
    return slow


# -- against the slow pass -------------------------------------------------------------------------

WAYS = {"training": (True, False), "by threshold": (True, True), "evaluation": (False, False)}
"""Two flags: the model trains, and the predictor selects."""


@st.composite
def configs(draw: st.DrawFn) -> Config:
    sequence, blocks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    kind, heads = draw(st.sampled_from(["mlp", "bce"])), draw(st.integers(1, 2))
    capacity = max(draw(st.sampled_from([0.2, 0.5, 0.75, 1.0])), 0.5 / sequence)
    every = min(draw(st.integers(1, 2)), blocks)
    return config_of(kind, sequence, capacity, blocks, heads, every=every)


@example(config_of("mlp", sequence=1, every=1), "evaluation", 1, 0)
@example(config_of("mlp", capacity=1.0, every=1), "training", 2, 0)
@example(config_of("mlp", every=2), "training", 2, 0)  # the first block is one of a GPT
@given(configs(), st.sampled_from(sorted(WAYS)), st.integers(1, 2), st.integers(0, 999))
def test_modules_equal_the_slow_pass(config: Config, way: str, batch: int, seed: int) -> None:
    try:
        compare(config, build(config, seed, *WAYS[way]), *drawn(config, batch, seed), WAYS[way][1])
    except plain.TooCloseError:
        reject()


@pytest.mark.parametrize(
    ("predictor", "way"),
    [("bce", "training"), *(("mlp", way) for way in ("training", "by threshold", "evaluation"))],
)
def test_configured_share_of_tokens_is_selected(predictor: str, way: str) -> None:
    config = config_of(predictor, every=1, predictor_weight=0.25)
    routing = compare(config, build(config, 1, *WAYS[way]), *drawn(config, 3), WAYS[way][1])
    assert len(routing.selected) == 2
    for taken in routing.selected:
        counts = [sum(row == r for row, _ in taken) for r in range(3)]
        assert counts == [3] * 3 if way == "training" else 0 < sum(counts) < 18


@pytest.mark.parametrize("count", [0, 1, 12])
def test_predictor_may_select_zero_one_or_all_tokens(count: int) -> None:
    way = "by threshold" if count else "evaluation"
    config = config_of("mlp", blocks=1, every=1)
    modules = build(config, 0, *WAYS[way])
    (router,) = routers(modules)
    assert router.predictor is not None
    ids, targets = drawn(config, 2)
    with torch.no_grad():
        guesses = router.predictor(modules[0](ids.flatten())).flatten()
    first, second = guesses.topk(2).values
    shift = {0: -first - 1, 1: -(first + second) / 2, 12: 1 - guesses.min()}
    router.predictor[2].bias.data += shift[count]
    routing = compare(config, modules, ids, targets, WAYS[way][1])
    assert len(routing.selected[0]) == count


# -- the parts -------------------------------------------------------------------------------------


@given(st.floats(0.001, 1), st.integers(1, 300))
def test_number_of_selected_tokens_is_rounded_capacity(capacity: float, sequence: int) -> None:
    count = selected_tokens(capacity, sequence)
    assert 1 <= count <= sequence
    assert count == 1 or abs(count - capacity * sequence) <= 0.5


def test_counts_add_up_over_microbatches() -> None:
    config = config_of("bce", every=1)
    modules = build(config)
    for seed in range(3):
        run(config, modules, *drawn(config, 2, seed))
    assert [router.seen[:2] for router in routers(modules)] == [(36, 18)] * 2
    assert all(0 <= int(router.seen[2]) <= 36 for router in routers(modules))
