"""A model of transformers cut into layers, beside the model as it is.

Forward and backward of a Llama shape run in one process of one thread. The three sides run in turn,
in an order that turns with each round. Seconds are those of the processor, so that other processes
hardly count.

    plain    the model itself
    blocks   dynmo's layers, with whole blocks
    halves   dynmo's layers, with blocks in halves

`overhead` is the median over rounds of a side's seconds over the plain seconds of its round, less
1. `quarters` are its quartiles. `same` says that outputs have the same bits. `padded` has an
attention mask with padding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.output import main
from dynmo.models.huggingface.model import BlockCut, from_pretrained

Side = Callable[[Tensor, Tensor | None], Tensor]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    sizes = {name: getattr(options, name) for name in ("hidden", "blocks", "sequence")}
    sides = _sides(sizes["hidden"], sizes["blocks"])
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(1024, (options.rows, sizes["sequence"]), generator=draws)
    padded = torch.ones_like(ids)
    padded[0, : sizes["sequence"] // 4] = 0
    cases = {"plain": None, "padded": padded}
    return sizes | {
        "rows": options.rows,
        "rounds": options.rounds,
        **{name: _race(sides, ids, mask, options.rounds) for name, mask in cases.items()},
    }


def _sides(hidden: int, blocks: int) -> dict[str, Side]:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    sides: dict[str, Side] = {
        "plain": lambda ids, mask: plain(ids, attention_mask=mask, use_cache=False).logits
    }
    cuts: dict[str, BlockCut] = {"blocks": "blocks", "halves": "auto"}
    for name, cut in cuts.items():
        sides[name] = _layers(config, cut, plain.state_dict())
    return sides


def _layers(config: LlamaConfig, cut: BlockCut, state: dict[str, Tensor]) -> Side:
    model = from_pretrained(config, cut=cut)
    layers = model.build(range(model.layers))
    for layer in layers:
        layer.load_state_dict({name: state[name] for name in layer.state_dict()})

    def run(ids: Tensor, mask: Tensor | None) -> Tensor:
        out: Any = (ids, mask)
        for layer in layers:
            out = layer(*out)
        return out

    return run


def _race(sides: dict[str, Side], ids: Tensor, mask: Tensor | None, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    outputs: dict[str, Tensor] = {}
    names = list(sides)
    for turn in range(rounds + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.process_time()
            out = sides[name](ids, mask)
            out.sum().backward()
            seconds[name].append(time.process_time() - start)
            outputs[name] = out.detach()
    del seconds["plain"][0], seconds["blocks"][0], seconds["halves"][0]  # the first round warms up
    figures: dict[str, Any] = {"seconds": statistics.median(seconds["plain"])}
    for name in ("blocks", "halves"):
        ratios = [a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        figures[name] = {
            "overhead": quarters[1] - 1,
            "quarters": [quarters[0] - 1, quarters[2] - 1],
            "same": torch.equal(outputs[name], outputs["plain"]),
        }
    return figures


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        (
            ("hidden", 512, "hidden size"),
            ("blocks", 8, "blocks"),
            ("sequence", 256, "tokens of a row"),
            ("rows", 2, "rows of the batch"),
            ("rounds", 20, "rounds in turn"),
        ),
    )
