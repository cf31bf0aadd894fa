"""A GPT with early exits, compared with a computation by single tokens."""

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

from dynmo.cases.early_exit import EarlyExit
from dynmo.cases.early_exit.layers import ExitHead
from dynmo.config import Config
from dynmo.models.options import ModelOptions
from dynmo.train.setup import model_of
from tests.models import plain_blocks as plain

KINDS = ("softmax", "state", "classifier", "adp-c")


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass
class Routing:
    """The results of a pass. `closest`: least distance of a confidence from its threshold."""

    loss: Tensor = field(default_factory=zero)
    own_losses: Tensor = field(default_factory=zero)  # of the classifiers
    left: dict[plain.Token, int] = field(default_factory=dict)  # behind which block
    states: dict[plain.Token, Tensor] = field(default_factory=dict)
    closest: float = math.inf


def one_by_one(
    config: Config, modules: Sequence[nn.Module], ids: Tensor, targets: Tensor, exits_on: bool
) -> Routing:
    layers: dict[str, Any] = dict(zip(model_of(config).names, modules, strict=True))
    tokens = [(row, t) for row in range(ids.shape[0]) for t in range(config.model.sequence)]
    states = {token: layers["embedding"].tokens.weight[ids[token]] for token in tokens}
    slow = SlowPass(config, layers, targets, exits_on, states)
    for block in range(config.model.blocks):
        before = slow.states
        slow.block(block)
        if block in config.dynamism.early_exit.exits_of(config.model.blocks):
            slow.exit(block, before)
    slow.head()
    routing = slow.routing
    routing.loss, routing.states = slow.mean_loss(), slow.states
    if modules[0].training:
        average = sum((w * x for w, x in slow.weighted), torch.zeros(()))
        routing.loss = average / sum(w for w, _ in slow.weighted)
    else:  # no classifier learns
        routing.own_losses = zero()
    return routing


@dataclass
class SlowPass:
    """A pass with a state for each token, and a set of tokens that have left."""

    config: Config
    layers: dict[str, Any]
    targets: Tensor
    exits_on: bool
    states: dict[plain.Token, Tensor]
    routing: Routing = field(default_factory=Routing)
    output_loss: dict[plain.Token, Tensor] = field(default_factory=dict)
    weighted: list[tuple[float, Tensor]] = field(default_factory=list)  # of exits and head

    @property
    def remaining(self) -> list[plain.Token]:
        return [token for token in self.states if token not in self.routing.left]

    def mean_loss(self) -> Tensor:
        return torch.stack([self.output_loss[token] for token in self.states]).mean()

    def block(self, block: int) -> None:
        heads, attention = self.config.model.heads, self.layers[f"blocks.{block}.attention"]
        feed_forward = self.layers[f"blocks.{block}.feed_forward"]
        after, keys, values = dict(self.states), plain.Heads(), plain.Heads()
        for token, state in self.states.items():  # the last state of those that have left counts
            k, v = (attention.kv.weight @ plain.rms_norm(state, attention.norm.weight)).chunk(2)
            keys[token] = plain.rotated_heads(k, heads, token)
            values[token] = list(v.view(heads, -1))
        for token in self.remaining:
            normed = plain.rms_norm(self.states[token], attention.norm.weight)
            query = plain.rotated_heads(attention.q.weight @ normed, heads, token)
            out = plain.attended_heads(token, query, keys, values)
            state = self.states[token] + attention.proj.weight @ out
            after[token] = state + plain.fed_forward(feed_forward, state)
        self.states = after

    def exit(self, block: int, before: dict[plain.Token, Tensor]) -> None:
        """Lets tokens leave behind a block. `before` has the states before the block."""
        head, options = self.layers[f"blocks.{block}.exit"], self.config.dynamism.early_exit
        calm, own_losses = options.policy == "calm", list[Tensor]()
        for token in self.remaining:
            state = self.states[token]
            logits, self.output_loss[token] = plain.token_loss(head, state, self.targets[token])
            if calm and options.confidence == "classifier":
                guess = head.classifier.weight @ state.detach() + head.classifier.bias
                right = int(logits.argmax()) == int(self.targets[token])
                own_losses.append(plain.binary_cross_entropy(guess.squeeze(0), right))
            if self.exits_on:
                above = confidence(self.config, head, logits, state, before[token])
                above -= threshold(self.config, token[1])
                self.routing.closest = min(self.routing.closest, abs(above))
                if above > 0:
                    self.routing.left[token] = block
        self.weighted.append((block + 1.0 if calm else 1.0, self.mean_loss()))
        if own_losses:
            self.routing.own_losses = self.routing.own_losses + torch.stack(own_losses).mean()

    def head(self) -> None:
        calm = self.config.dynamism.early_exit.policy == "calm"
        for token in self.remaining:
            given = self.layers["head"], self.states[token], self.targets[token]
            self.output_loss[token] = plain.token_loss(*given)[1]
        weight = float(self.config.model.blocks) if calm else 1.0
        self.weighted.append((weight, self.mean_loss()))


def threshold(config: Config, t: int) -> float:
    options = config.dynamism.early_exit
    top = options.threshold
    assert top is not None
    decay = 1.0 if options.policy == "adp-c" else math.exp(-4 * t / config.model.sequence)
    return top * (0.9 + 0.1 * decay)


@torch.no_grad()
def confidence(config: Config, head: Any, logits: Tensor, state: Tensor, before: Tensor) -> float:
    options = config.dynamism.early_exit
    chances = sorted((torch.exp(logits) / torch.exp(logits).sum()).tolist(), reverse=True)
    if options.policy == "adp-c":
        return chances[0]
    if options.confidence == "softmax":
        return chances[0] - sum(chances[1:2])
    if options.confidence == "state":
        return float(state @ before / (state.norm() * before.norm()))
    return float(torch.sigmoid(head.classifier.weight @ state + head.classifier.bias))


# -- the module ------------------------------------------------------------------------------------


def config_of(
    kind: str,
    sequence: int = 5,
    threshold: float = 0.5,
    blocks: int = 3,
    heads: int = 2,
    **more: Any,
) -> Config:
    policy = {"policy": "adp-c"} if kind == "adp-c" else {"confidence": kind}
    options = more | policy | {"threshold": threshold}
    return plain.config_of("early_exit", options, sequence, blocks, heads, vocab=5)


def build(
    config: Config, seed: int = 0, exits_on: bool = True, training: bool = True
) -> list[nn.Module]:
    modules = plain.build(config, seed, training)
    for module in modules:
        if isinstance(module, ExitHead):
            module.exits = exits_on
    return modules


def drawn(config: Config, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = batch, config.model.sequence
    ids, targets = (torch.randint(config.model.vocab, shape, generator=generator) for _ in range(2))
    return ids, targets


def run(config: Config, modules: Sequence[nn.Module], ids: Tensor, targets: Tensor) -> Routing:
    """The modules one after the other. `left` and `states` are read off what they hand on."""
    routing, there = Routing(), set[plain.Token]()
    out: tuple[Any, ...] = (model_of(config).first_inputs(ids, targets),)
    sequence = config.model.sequence
    for name, module in zip(model_of(config).names, modules[:-1], strict=False):
        out = module(*out)
        assert (out[1].diff() > 0).all()
        left = there - {divmod(i, sequence) for i in out[1].tolist()}
        assert not left or name.endswith(".exit")
        routing.left |= {token: int(name.split(".")[1]) for token in left}
        there = {divmod(i, sequence) for i in out[1].tolist()}
    x, index, exited, places = out[:4]
    order = [divmod(i, sequence) for i in (*index.tolist(), *places.tolist())]
    routing.states = dict(zip(order, [*x.detach(), *exited.detach()], strict=True))
    assert len(routing.states) == ids.numel(), "every token is in one place"
    routing.loss = modules[-1](*out)
    return routing


def compare(
    config: Config, batch: int, seed: int = 0, exits_on: bool = True, training: bool = True
) -> Routing:
    modules = build(config, seed, exits_on, training)
    ids, targets = drawn(config, batch, seed)
    slow = one_by_one(config, modules, ids, targets, exits_on)
    if slow.closest < 1e-5:
        raise plain.TooCloseError
    ours = run(config, modules, ids, targets)
    assert ours.left == slow.left
    # Logits, loss and the rotary tables are of float32.
    torch.testing.assert_close(ours.loss.double(), slow.loss.double(), rtol=1e-5, atol=1e-6)
    states = {token: slow.states[token].detach() for token in ours.states}
    torch.testing.assert_close(ours.states, states, rtol=1e-5, atol=1e-5)
    expected = plain.gradients(modules, slow.loss + slow.own_losses)
    torch.testing.assert_close(plain.gradients(modules, ours.loss), expected, rtol=1e-4, atol=1e-5)
    counts = [module.seen for module in modules if isinstance(module, ExitHead)]
    exits = config.dynamism.early_exit.exits_of(config.model.blocks)
    of_block = [sum(block == at for block in slow.left.values()) for at in exits]
    assert counts == [(ids.numel(), left) if exits_on and training else (0, 0) for left in of_block]
    return slow


# -- against the slow pass -------------------------------------------------------------------------


@st.composite
def configs(draw: st.DrawFn) -> Config:
    exits = sorted(draw(st.sets(st.integers(0, 1), min_size=1)))
    kind, sequence = draw(st.sampled_from(KINDS)), draw(st.integers(1, 5))
    threshold = draw(st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0]))
    blocks, heads = exits[-1] + 1 + draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return config_of(kind, sequence, threshold, blocks, heads, exits=exits)


@example(config_of("state", 1, 0.0), 1, 0, True)
@given(configs(), st.integers(1, 2), st.integers(0, 999), st.booleans())
def test_modules_equal_the_slow_pass(config: Config, batch: int, seed: int, training: bool) -> None:
    try:
        compare(config, batch, seed, training=training)
    except plain.TooCloseError:
        reject()


@pytest.mark.parametrize(
    ("kind", "threshold", "seed", "training"),
    [
        ("softmax", 0.7, 4, True),
        ("state", 0.7, 1, False),
        ("classifier", 0.9, 5, True),
        ("adp-c", 0.7, 4, False),
    ],
)
def test_tokens_leave_at_each_exit(kind: str, threshold: float, seed: int, training: bool) -> None:
    routing = compare(config_of(kind, 6, threshold, exits=[0, 1]), 2, seed, training=training)
    assert 0 < len(routing.left) < 12
    assert set(routing.left.values()) == {0, 1}


@pytest.mark.parametrize(("kind", "training"), [("softmax", False), ("classifier", True)])
def test_all_tokens_leave_at_threshold_zero(kind: str, training: bool) -> None:
    routing = compare(config_of(kind, threshold=0.0, exits=[0, 1]), 2, training=training)
    assert list(routing.left.values()) == [0] * 10, "the later blocks compute no token"


@pytest.mark.parametrize(("sequence", "training"), [(1, True), (4, True), (4, False)])
def test_no_token_leaves_at_threshold_one(sequence: int, training: bool) -> None:
    """The bits are those of a model with disabled exits."""
    config = config_of("adp-c", sequence, threshold=1.0)
    assert not compare(config, 2, training=training).left
    results = []
    for exits_on in (True, False):
        modules = build(config, exits_on=exits_on, training=training)
        loss = run(config, modules, *drawn(config, 2)).loss
        results.append([loss, *plain.gradients(modules, loss).values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("kind", "training"), [("softmax", True), ("classifier", True), ("state", False)]
)
def test_disabled_exits_only_add_their_losses(kind: str, training: bool) -> None:
    """In evaluation, disabled exits add no loss."""
    config = config_of(kind, threshold=0.0)
    assert not compare(config, 2, exits_on=False, training=training).left
    if not training:
        modules, (ids, targets) = build(config, exits_on=False, training=False), drawn(config, 2)
        out: Any = (model_of(config).first_inputs(ids, targets),)
        for module, name in zip(modules, model_of(config).names, strict=True):
            out = out if name.endswith(".exit") else module(*out[:6])
        assert torch.equal(out, run(config, modules, ids, targets).loss), "as a model without exits"


# -- the parts -------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.integers(1, 20), st.integers(1, 3))
def test_threshold_decays_along_a_row(top: float, sequence: int, rows: int) -> None:
    places = torch.arange(rows * sequence)
    model = ModelOptions(blocks=3, hidden=8, sequence=sequence)
    falling = ExitHead(model, EarlyExit(threshold=top), 0).thresholds(places, sequence)
    row = [0.9 * top + 0.1 * top * math.exp(-4 * t / sequence) for t in range(sequence)]
    expected = torch.tensor(row * rows, dtype=torch.float64)
    torch.testing.assert_close(falling.double(), expected, rtol=1e-5, atol=1e-7)
    same = ExitHead(model, EarlyExit(policy="adp-c", threshold=top), 0).thresholds(places, sequence)
    assert torch.equal(same, torch.full((rows * sequence,), top))


def test_bfloat16_stays_close() -> None:
    config = config_of("classifier", sequence=6, threshold=1.0)
    exact, (ids, targets) = build(config, exits_on=False), drawn(config, 2)
    low = [module.to(torch.bfloat16) for module in build(config, exits_on=False)]
    loss, wanted = (run(config, modules, ids, targets).loss for modules in (low, exact))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted.double(), rtol=0.02, atol=0.02)
