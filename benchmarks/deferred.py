"""Weight gradients that can wait: which weights have one, and what waiting costs.

Shares: of the weights of a family of transformers, in its embedding, blocks and head, those whose
gradient the tape takes in one backward. `before` counts modules of exactly nn.Linear, and of
nn.Embedding without padding. They were all that could wait at first.

Times: B and W of one module beside torch's backward of the same module, for a step of four
microbatches, in one process of one thread, in turn. Seconds are those of the processor. `more` is
the median over rounds of B and W over torch's backward of the round, less 1. `quarters` are its
quartiles. `off` is the greatest difference of a gradient from torch's, over the greatest gradient.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

from benchmarks.output import add_number, markdown, parser_of, run
from dynmo.kernels.split import SplitLinear
from dynmo.models.huggingface.model import from_pretrained
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.joint_graph import Tensors
from dynmo.runtime.layer.layer import Layer

MICROBATCHES = 4
_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"num_local_experts": 8, "num_experts": 8, "moe_intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 32},
    "gpt2": {"n_inner": 512},
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS | {"head_dim": 32},
    "gpt_oss": _EXPERTS | {"head_dim": 32},
}
_NAMES = {
    "llama": "Llama",
    "gemma3_text": "Gemma 3",
    "gpt2": "GPT-2",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "gpt_oss": "gpt-oss",
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return {
        "shares": [{"family": family, **shares(family)} for family in FAMILIES],
        "hidden": options.hidden,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "times": [
            {"kind": kind, **race(module, inputs, options.rounds)}
            for kind, module, inputs in kinds(options.hidden, options.tokens)
        ],
    }


def shares_table(result: dict[str, Any]) -> str:
    rows = [
        [_NAMES[x["family"]], *(f"{x[k]:.0%}" for k in ("before", "after"))]
        for x in result["shares"]
    ]
    return _spaced(markdown(["family", "before", "now"], rows))


def times_table(result: dict[str, Any]) -> str:
    rows = [
        [x["kind"], f"{x['more']:.1%}", " to ".join(f"{quarter:.1%}" for quarter in x["quarters"])]
        for x in result["times"]
    ]
    return _spaced(markdown(["module", "B and W, less 1", "quarters"], rows))


def _spaced(table: str) -> str:
    return table.replace("%", " %")


# -- shares ----------------------------------------------------------------------------------------


def shares(family: str) -> dict[str, float]:
    config = AutoConfig.for_model(family, **_SIZES, **FAMILIES[family])
    model = from_pretrained(config, cut="blocks")
    ids = torch.randint(1, 1024, (3, 16))
    layers = [
        Layer(index, module, HostClock(), 0)
        for index, module in enumerate(model.build(range(model.layers)))
    ]
    tensors: Tensors = (ids,)
    for layer in layers:
        layer.warns = True  # has its tape note what it takes
        finish = (lambda out: model.loss(out, ids)) if layer is layers[-1] else None
        tensors = layer.forward(0, tensors, 0, need_input=layer.index > 0, finish=finish)
    gradients: Tensors = (torch.ones(()),)
    for layer in reversed(layers):
        gradients = layer.backward_input(0, gradients, deferred=True)
    taken = {weight for layer in layers for weight in layer.tape.taken or ()}
    weights: set[Tensor] = {weight for layer in layers for weight in layer.module.parameters()}
    return {"before": _share(_before(layers), weights), "after": _share(taken, weights)}


def _before(layers: Iterable[Layer]) -> set[Tensor]:
    return {
        weight
        for layer in layers
        for module in layer.module.modules()
        if type(module) is SplitLinear or (_is_embedding(module) and module.padding_idx is None)
        for weight in module.parameters()
    }


def _is_embedding(module: nn.Module) -> bool:
    return type(module).__mro__[1] is nn.Embedding and not hasattr(module, "embed_scale")


def _share(some: set[Tensor], weights: set[Tensor]) -> float:
    return sum(x.numel() for x in some) / sum(x.numel() for x in weights)


# -- times -----------------------------------------------------------------------------------------


class OwnLinear(nn.Module):
    """Multiplies by a parameter of its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, hidden) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Routed(nn.Module):
    """Experts of Mixtral with a fixed router: two experts a token."""

    def __init__(self, hidden: int, tokens: int, how: str) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_local_experts": 8}
        config = AutoConfig.for_model("mixtral", **sizes, experts_implementation=how)
        config._experts_implementation = how
        self.experts = MixtralExperts(config)
        for weight in self.experts.parameters():
            nn.init.normal_(weight, std=0.02)
        chosen = torch.rand(tokens, 8).topk(2)
        self.register_buffer("experts_of", chosen.indices)
        self.register_buffer("shares", chosen.values)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.experts_of, self.shares)


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(hidden, hidden // 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def kinds(hidden: int, tokens: int) -> Iterable[tuple[str, nn.Module, Tensor]]:
    """Yields name, module and input of each kind of module whose W waits."""
    x, ids = torch.randn(tokens, hidden), torch.randint(1, 8192, (1, tokens))
    yield "nn.Linear", nn.Linear(hidden, hidden), x
    yield "Conv1D of GPT-2", Conv1D(hidden, hidden), x
    yield "x @ parameter", OwnLinear(hidden), x
    yield "embedding with padding", nn.Embedding(8192, hidden, padding_idx=0), ids
    yield "scaled embedding of Gemma 3", Gemma3TextScaledWordEmbedding(8192, hidden, 0, 2.0), ids
    yield "experts of Mixtral, one by one", Routed(hidden, tokens, "eager"), x
    yield "experts of Mixtral, grouped", Routed(hidden, tokens, "grouped_mm"), x
    yield "nn.MultiheadAttention", Attention(hidden), x.view(4, tokens // 4, hidden)
    block = AutoModelForCausalLM.from_config(
        GPT2Config(n_embd=hidden, n_head=hidden // 64, n_layer=1, attn_pdrop=0, resid_pdrop=0)
    ).transformer.h[0]
    yield "a block of GPT-2", block, x.view(4, tokens // 4, hidden)


def race(module: nn.Module, x: Tensor, rounds: int) -> dict[str, Any]:
    own = Layer(0, deepcopy(module), HostClock(), 0)
    sides: dict[str, Callable[[], float]] = {
        "torch": lambda: plain_backward(module, x),
        "dynmo": lambda: split_backward(own, x),
    }
    seconds: dict[str, list[float]] = {"torch": [], "dynmo": []}
    for turn in range(rounds + 2):
        for name in ("torch", "dynmo") if turn % 2 else ("dynmo", "torch"):
            passed = sides[name]()
            if turn > 1:  # the first rounds warm up
                seconds[name].append(passed)
    ratios = [a / b for a, b in zip(seconds["dynmo"], seconds["torch"], strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    pairs = zip(gradients(module), gradients(own.module), strict=True)
    off = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    return {
        "seconds": statistics.median(seconds["torch"]),
        "more": quarters[1] - 1,
        "quarters": [quarters[0] - 1, quarters[2] - 1],
        "off": off,
    }


def gradients(module: nn.Module) -> list[Tensor]:
    return [each.grad for each in module.parameters() if each.grad is not None]


def plain_backward(module: nn.Module, x: Tensor) -> float:
    """Runs a step. Returns the seconds of its backwards."""
    module.zero_grad()
    x, seconds = x.detach().requires_grad_(x.is_floating_point()), 0.0
    for _ in range(MICROBATCHES):
        x.grad, y = None, module(x)
        start = time.process_time()
        y.backward(torch.ones_like(y))
        seconds += time.process_time() - start
    return seconds


def split_backward(layer: Layer, x: Tensor) -> float:
    """Runs a step. Returns the seconds of its B's and W's."""
    layer.module.zero_grad()
    x, seconds = x.detach().requires_grad_(x.is_floating_point()), 0.0
    for microbatch in range(MICROBATCHES):
        (y,) = layer.forward(microbatch, (x,), 0)
        start = time.process_time()
        layer.backward_input(microbatch, (torch.ones_like(y),), deferred=True)
        layer.backward_weight(microbatch)
        seconds += time.process_time() - start
    layer.marks.clear()
    return seconds


if __name__ == "__main__":
    parser = parser_of(__doc__)
    add_number(parser, "hidden", 512, "hidden size")
    add_number(parser, "tokens", 1024, "tokens of a microbatch")
    add_number(parser, "rounds", 30, "rounds in turn")
    run(
        parser, measure, lambda result: print(shares_table(result), times_table(result), sep="\n\n")
    )
