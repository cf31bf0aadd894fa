"""One rank has the bits of a plain loop of torch, or a known reason for others.

Other tests hold any number of ranks to one rank. docs/reference/plain-torch.md has the reasons.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedConfig

import dynmo
from dynmo.huggingface import from_pretrained
from dynmo.kernels.seeds import seed_forward
from dynmo.models.loss import causal_lm_loss, next_token_loss
from dynmo.pipeline.options import grouped
from tests.combinations import mostly_matrix
from tests.equality import decay_groups
from tests.fuzz import trained as trained_module
from tests.fuzz.layers import LAYERS, VOCAB, WIDTH
from tests.fuzz.modules import draw_valid, ended
from tests.fuzz.trained import Pipelined, Plain
from tests.models.huggingface.tiny import VOCABULARY, config
from tests.models.huggingface.trained import FAMILIES, config_of
from tests.runtime.alone import alone

MICROBATCHES, ROWS, STEPS = 3, 4, 2
WAYS: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "zb-h1"},
    {"schedule": "zb-h1", "recompute": "all"},
]

Loss = Callable[[Any, Tensor], Tensor]
Make = Callable[..., torch.optim.Optimizer]
Batch = tuple[Tensor, Tensor]
Results = dict[str, Tensor]


# -- both sides ------------------------------------------------------------------------------------


def noting(kind: Any) -> Any:
    """Returns an optimizer that notes the gradients of each step.

    A step rounds their last bits away, so weights alone would not tell.
    """

    class Noting(kind):
        def step(self, closure: Any = None) -> None:
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None:
                    vars(p).setdefault("noted", []).append(p.grad.clone())
            super().step()

    return Noting


SGD = partial(noting(torch.optim.SGD), lr=0.05, momentum=0.9, weight_decay=0.01)
ADAMW = partial(noting(torch.optim.AdamW), lr=1e-3)


def plain(
    model: nn.Module,
    loss: Loss,
    make: Make,
    batches: Iterable[Batch],
    parts: int = MICROBATCHES,
    weigh: Callable[[Tensor, Tensor], Any] | None = None,
    before_step: Callable[[], object] = lambda: None,
) -> Results:
    """The loop of a tutorial. `weigh` takes the targets of a microbatch and of the batch."""
    optimizer = make(model.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            one = loss(model(x), y)
            (one / parts if weigh is None else one * weigh(y, targets)).backward()
        before_step()
        optimizer.step()
    return results_of(model.state_dict(), dict(model.named_parameters()))


def pipeline_of(
    model: dynmo.Model, make: Make | dynmo.AdamW, parts: int = MICROBATCHES, **options: Any
) -> dynmo.Pipeline:
    given = {"schedule": "zb-h1", "balance": "none", "max_grad_norm": 0.0} | options
    return dynmo.Pipeline(model, alone(), microbatches=parts, optimizer=make, **grouped(given))


def trained(
    model: dynmo.Model, make: Make | dynmo.AdamW, batches: Iterable[Batch], **options: Any
) -> Results:
    return train_on(pipeline_of(model, make, **options), model, batches)


def train_on(pipeline: dynmo.Pipeline, model: dynmo.Model, batches: Iterable[Batch]) -> Results:
    for inputs, targets in batches:
        pipeline.step(inputs, targets)
    parameters = {
        model.full_name(index, name): p
        for index, layer in pipeline.mesh.modules.items()
        for name, p in layer.named_parameters()
    }
    return results_of(pipeline.state_dict(), parameters)


def results_of(state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Results:
    """Weights, buffers, and the gradients that `noting` has noted."""
    noted = {
        f"gradient of {name} in step {step}": gradient
        for name, p in parameters.items()
        for step, gradient in enumerate(vars(p).get("noted", []))
    }
    return {**state, **noted}


def different(ours: Results, theirs: Results) -> list[str]:
    """Names of what has other bits. A whole model may hold more buffers."""
    assert ours.keys() <= theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def make_batches(tokens: int, vocabulary: int = VOCABULARY, steps: int = STEPS) -> list[Batch]:
    """Ids [MICROBATCHES * ROWS, tokens] and their targets. 3 and more, so none is a padding."""
    draw = torch.Generator().manual_seed(tokens)
    shape = (MICROBATCHES * ROWS, tokens)
    pairs = [torch.randint(3, vocabulary, shape, generator=draw) for _ in range(2 * steps)]
    return list(zip(pairs[::2], pairs[1::2], strict=True))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def make_blocks(width: int) -> nn.Sequential:
    torch.manual_seed(width)
    ends = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
    return nn.Sequential(ends[0], Block(width), Block(width), ends[1])


def make_gpt(hidden: int = 32, tokens: int = 8, **options: Any) -> nn.Sequential:
    """The layers of dynmo's GPT, in a plain model."""
    sizes: Any = {"vocab": VOCABULARY, "sequence": tokens, "heads": 2, "blocks": 2}
    model = dynmo.load_model(dynmo.ModelOptions(hidden=hidden, **sizes | options), seed=3)
    return nn.Sequential(*model.build(range(model.layers)))


def as_model(layers: nn.Sequential, loss: Loss = next_token_loss, **options: Any) -> dynmo.Model:
    return dynmo.Sequential(layers, loss, **options)


# -- the same bits ---------------------------------------------------------------------------------

WIDTHS, TOKENS = (8, 32, 64, 96, 128, 256), (8, 32, 128, 256)
EVERYDAY = [(8, 8), (64, 128), (128, 32)]
EVERYDAY_LAYERS = ["mlp", "lstm", "shared", "transformer_dropout", "tokens", "own_experts"]
ROUTINGS = ["aux-loss", "sinkhorn", "auction", "bias"]


def sizes() -> Iterator[Any]:
    """Widths, and tokens of a row. The kernel of a product depends on both."""
    for size in product(WIDTHS, TOKENS):
        marks = [] if size in EVERYDAY else [pytest.mark.matrix]
        yield pytest.param(*size, marks=marks)


@pytest.mark.parametrize(("width", "tokens"), [*sizes()])
@pytest.mark.parametrize(("make", "optimizer"), [(make_blocks, SGD), (make_gpt, ADAMW)])
def test_models_of_any_size(make: Any, optimizer: Make, width: int, tokens: int) -> None:
    batches = make_batches(tokens)
    if make is make_gpt:
        make = partial(make_gpt, tokens=tokens)
    wanted = plain(make(width), next_token_loss, optimizer, batches)
    for way in WAYS:
        assert not different(trained(as_model(make(width)), optimizer, batches, **way), wanted)


def transformers_model(pipeline: dynmo.Pipeline, made: PreTrainedConfig) -> nn.Module:
    """Returns a model with the pipeline's weights."""
    whole = AutoModelForCausalLM.from_config(made).train()
    whole.load_state_dict(pipeline.state_dict(), strict=False)
    whole.tie_weights()
    whole.config.use_cache = False
    return whole


def transformers_loss(output: Any, labels: Tensor) -> Tensor:
    return causal_lm_loss(output.logits, labels)


@pytest.mark.parametrize("family", mostly_matrix(FAMILIES, everyday=["llama", "gpt2"]))
def test_families_of_transformers(family: str) -> None:
    """A tied weight sums the microbatches of each use apart, so one microbatch has the bits."""
    made, batches = config_of(family), make_batches(16)
    model = from_pretrained(made)
    parts = 1 if model.tied else MICROBATCHES
    pipeline = pipeline_of(model, ADAMW, parts)
    whole = transformers_model(pipeline, made)
    ours = train_on(pipeline, model, batches)
    assert not different(ours, plain(whole, transformers_loss, ADAMW, batches, parts))


@pytest.mark.parametrize("name", mostly_matrix(LAYERS, everyday=EVERYDAY_LAYERS))
def test_layers_of_all_kinds(name: str) -> None:
    """Those of the random tests. What draws has the seeds of dynmo."""
    batches = make_batches(6, VOCAB)
    wanted = plain(seed_like_dynmo(make_odd(name)), next_token_loss, SGD, batches)
    assert not different(trained(as_model(make_odd(name)), SGD, batches), wanted)


def make_odd(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    ends = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
    return nn.Sequential(ends[0], LAYERS[name].make(), LAYERS[name].make(), ends[1])


def seed_like_dynmo(layers: nn.Sequential) -> nn.Sequential:
    """A seed for each layer and microbatch."""
    for index, layer in enumerate(layers):
        calls = count()

        def seed(*_: Any, index: int = index, calls: Iterator[int] = calls) -> None:
            step, part = divmod(next(calls), MICROBATCHES)
            seed_forward(torch.device("cpu"), 0, step, index, part)

        layer.register_forward_pre_hook(seed)
    return layers


@pytest.mark.parametrize("first", mostly_matrix(range(0, 120, 10), everyday=[0]))
def test_drawn_modules(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `python -m tests.fuzz --modules`, without clipping."""
    plain_sgd = trained_module.sgd_of
    monkeypatch.setattr(
        trained_module, "sgd_of", lambda names: partial(SGD, **plain_sgd(names).keywords)
    )
    kinds = Counter[str]()
    for number in range(first, first + 10):
        kinds[kind_of(draw_valid(1, number))] += 1
    assert kinds["equal"] > 1, kinds


def kind_of(case: dict[str, Any]) -> str:
    """Trains a case on both sides."""
    case["options"]["max_grad_norm"] = 0.0
    sides = list[Any]()

    def train(make: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        def keep(names: dict[str, Any]) -> Any:
            sides.append(make(names))
            return sides[-1]

        return ended(case, keep)

    wanted = train(lambda names: Watched(names, case))
    with tempfile.TemporaryDirectory() as folder:
        ours = train(lambda names: Pipelined(names, case, alone(), Path(folder)))
    if "error" in ours:
        return "refused"
    noted = [results_of({}, dict(nn.ModuleList(side.layers).named_parameters())) for side in sides]
    if ours["state"] == wanted["state"] and not different(noted[1], noted[0]):
        return "equal"
    assert sides[0].reasons, case["number"]
    return "other bits"


class Watched(Plain):
    """Plain torch, and the reasons for other bits."""

    def _make(self) -> None:
        super()._make()
        self.reasons = {"a tied weight sums each use apart"} if self._case["tied"] else set[str]()
        watch(self.layers, self.reasons)


TWICE = "each use of a part of a parameter within a layer adds to its gradient"
STRIDED = "tensors between layers, weights and buffers are contiguous in a pipeline"


def watch(layers: Iterable[nn.Module], reasons: set[str]) -> None:
    """Notes what has other bits in a pipeline, while the layers run."""

    def look(layer: nn.Module, inputs: Any, output: Any) -> None:
        several = output if isinstance(output, tuple | list) else (output,)
        outputs = [y for y in several if isinstance(y, Tensor)]
        if not all(x.is_contiguous() for x in (*outputs, *layer.parameters(), *layer.buffers())):
            reasons.add(STRIDED)
        if used_twice(outputs):
            reasons.add(TWICE)

    for layer in layers:
        layer.register_forward_hook(look)


def used_twice(outputs: Iterable[Tensor]) -> bool:
    """Whether the graph reaches a parameter by several edges."""
    nodes = [y.grad_fn for y in outputs if y.grad_fn is not None]
    seen, uses = set(nodes), Counter[Any]()
    while nodes:
        for below, _ in nodes.pop().next_functions:
            if hasattr(below, "variable"):
                uses[below] += 1
            elif below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
    return max(uses.values(), default=0) > 1


# -- what changes the bits, or not -----------------------------------------------------------------

BATCHES = make_batches(8)


def of_gpt(make: Any = SGD, **options: Any) -> Results:
    return trained(as_model(make_gpt()), make, BATCHES, **options)


def plain_gpt(make: Any = SGD, **options: Any) -> Results:
    return plain(make_gpt(), next_token_loss, make, BATCHES, **options)


def difference(ours: Results, theirs: Results) -> float:
    """Returns the largest difference, relative to the largest value of its tensor."""
    pairs = [(each, theirs[name]) for name, each in ours.items()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def test_each_microbatch_weighs_by_its_counted_targets() -> None:
    batches = make_batches(8)
    for _, targets in batches:
        targets[:5, 2:] = -100

    def weigh(part: Tensor, whole: Tensor) -> Tensor:
        return (part != -100).sum() / (whole != -100).sum()

    wanted = plain(make_gpt(), next_token_loss, SGD, batches, weigh=weigh)
    assert not different(trained(as_model(make_gpt()), SGD, batches), wanted)


def test_dropout_has_the_bits_of_a_loop_with_dynmos_seeds() -> None:
    make = partial(make_gpt, dropout=0.1)
    ours = trained(as_model(make()), SGD, BATCHES)
    wanted = plain(seed_like_dynmo(make()), next_token_loss, SGD, BATCHES)
    assert not different(ours, wanted)
    assert different(ours, plain(make(), next_token_loss, SGD, BATCHES))


@pytest.mark.parametrize(
    ("own", "decays"), [(dynmo.AdamW(lr=1e-3, weight_decay=0.1), True), (dynmo.SGD(lr=0.1), False)]
)
def test_dynmos_optimizers_are_torchs_fused_ones(own: Any, decays: bool) -> None:
    """Weight decay acts on matrices."""
    layers = make_gpt()
    kind = torch.optim.AdamW if decays else torch.optim.SGD
    groups = decay_groups(layers, own.weight_decay)
    options = {"lr": own.lr, "fused": True} | ({} if decays else {"momentum": own.momentum})
    wanted = plain(layers, next_token_loss, lambda _: kind(groups, **options), BATCHES)
    assert not different(of_gpt(own), wanted)


def test_a_limit_that_no_gradient_reaches_changes_no_bits() -> None:
    wanted = plain_gpt()
    assert not different(of_gpt(max_grad_norm=1e3), wanted)
    assert not different(of_gpt(loss_scale=1024.0), wanted)
    assert not different(of_gpt(head_tokens=ROWS * 8), wanted)


NEAR = 1e-5


def test_what_sums_in_another_order_is_near() -> None:
    """Groups of microbatches, pieces of the last layer, and uses of a tied weight."""
    assert 0 < difference(of_gpt(parts=4, reduction_slots=2), plain_gpt(parts=4)) < NEAR
    assert 0 < difference(of_gpt(head_tokens=ROWS * 4), plain_gpt()) < NEAR
    owner, user = (0, "tokens.weight"), (5, "logits.weight")
    layers = make_gpt()
    cast(Any, layers[5]).logits.weight = layers[0].get_parameter("tokens.weight")
    wanted = plain(layers, next_token_loss, SGD, BATCHES)
    ours = trained(as_model(make_gpt(), tied=[(owner, user)]), SGD, BATCHES)
    assert 0 < difference(ours, wanted) < NEAR


def test_clipped_gradients_are_near() -> None:
    layers = make_gpt()
    clip = partial(nn.utils.clip_grad_norm_, [*layers.parameters()], 0.1)
    wanted = plain(layers, next_token_loss, SGD, BATCHES, before_step=clip)
    assert difference(of_gpt(max_grad_norm=0.1), wanted) < NEAR


@pytest.mark.matrix
def test_compiled_code_is_near() -> None:
    assert difference(of_gpt(compile=True), plain_gpt()) < NEAR


def test_low_precision_sums_vectors_and_rows_in_float32() -> None:
    """The loop sums microbatches in float32, but not the tokens of one."""
    lr, half = 1.0, make_gpt().bfloat16()
    (inputs, targets), sums = BATCHES[0], {name: 0.0 for name, _ in half.named_parameters()}
    for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        half.zero_grad()
        (next_token_loss(half(x), y) / MICROBATCHES).backward()
        sums = {n: sums[n] + cast(Tensor, p.grad).float() for n, p in half.named_parameters()}
    wanted = {name: p - lr * sums[name] for name, p in make_gpt().named_parameters()}
    make = partial(torch.optim.SGD, lr=lr)
    ours = trained(as_model(make_gpt()), make, BATCHES[:1], precision="bfloat16")
    others = [name for name in wanted if "norm" in name or "tokens" in name]
    assert different(ours, wanted) == others


@pytest.mark.parametrize("routing", mostly_matrix(ROUTINGS, everyday=["bias"]))
def test_experts(routing: str) -> None:
    """A layer of dynmo adds its own loss in B, with the weight of a microbatch."""
    make = partial(make_gpt, kind="moe", experts=4, routing=routing)
    ours = trained(as_model(make(router_loss=0.1)), SGD, BATCHES)
    wanted = plain(make(router_loss=0.1 / MICROBATCHES), next_token_loss, SGD, BATCHES)
    assert not different(ours, wanted)


def test_router_loss_of_transformers() -> None:
    made = config("mixtral", output_router_logits=True)
    model = from_pretrained(made)
    pipeline = pipeline_of(model, SGD)
    whole = transformers_model(pipeline, made)

    def loss(output: Any, labels: Tensor) -> Tensor:
        return transformers_loss(output, labels) + made.router_aux_loss_coef * output.aux_loss

    assert not different(train_on(pipeline, model, BATCHES), plain(whole, loss, SGD, BATCHES))
