"""The output layer and its loss, whole and in pieces of the sequence (`train.head_tokens`).

A norm, a linear layer over a large vocabulary and the cross entropy, as dynmo's own GPT has them,
in float32. F, B and W of a microbatch run in one process of one thread, whole and in pieces in
turn.

`seconds` are those of the processor, the median over rounds. `measured` is the most bytes that
torch's allocator held at once for the microbatch, gradients included. `account` is what dynmo's
account of memory says, `longer` the same for rows four times as long. `off` is the greatest
difference of a gradient from that of the whole, over the greatest gradient.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.output import add_number, markdown, parser_of, run
from dynmo.config import Config, parse
from dynmo.cost.layer_cost import LayerCost
from dynmo.pipeline.shape_costs import shape_costs
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.token_pieces import token_pieces_of
from dynmo.schedule.catalogue import full_schedule
from dynmo.schedule.memory import bare, rank_memory, static_bytes
from dynmo.train.setup import model_of

PIECES = (None, 2048, 512)
"""Tokens of a piece. None is the whole microbatch."""


class Head:
    """The last layer of a GPT, and one microbatch for it."""

    def __init__(self, config: Config) -> None:
        self._model = model_of(config)
        last = self._model.layers - 1
        self._layer = Layer(last, self._model.build((last,))[last], HostClock(), 0)
        draws, model, rows = (
            torch.Generator().manual_seed(0),
            config.model,
            config.train.micro_batch,
        )
        self._hidden = torch.randn(rows, model.sequence, model.hidden, generator=draws)
        self._hidden.requires_grad_()
        self._targets = torch.randint(model.vocab, self._hidden.shape[:2], generator=draws)
        self._pieces = token_pieces_of(config.options.head_tokens, self._model)

    def run(self) -> float:
        """Runs F, B and W. Returns the seconds of the processor."""
        self._layer.module.zero_grad()
        cut = None if self._pieces is None else partial(self._pieces.cut, targets=self._targets)
        start = time.process_time()
        (loss,) = self._layer.forward(0, (self._hidden,), 0, finish=self._loss, pieces=cut)
        (self._gradient,) = self._layer.backward_input(0, (torch.ones(()),), deferred=False)
        self._layer.marks.clear()
        self.loss = loss.item()
        return time.process_time() - start

    def _loss(self, output: Tensor) -> Tensor:
        return self._model.loss(output, self._targets)

    def gradients(self) -> list[Tensor]:
        weights = [weight.grad for weight in self._layer.module.parameters()]
        return [self._gradient, *(each for each in weights if each is not None)]

    def most_bytes(self) -> int:
        """Runs once more. Returns the most bytes that it holds at once."""
        self._layer.module.zero_grad()
        del self._gradient
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            self.run()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
        return max(accumulate((e["args"]["Bytes"] for e in changes), initial=0))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    sizes = {name: getattr(options, name) for name in ("hidden", "vocabulary", "rows", "sequence")}
    heads = {pieces: Head(config_of(sizes, pieces)) for pieces in PIECES}
    seconds: dict[int | None, list[float]] = {pieces: [] for pieces in PIECES}
    off: dict[int | None, float] = {}
    for turn in range(options.rounds + 1):
        whole: list[Tensor] = []
        for pieces, head in heads.items():
            passed = head.run()
            whole = whole or head.gradients()
            off[pieces] = max(map(_difference, whole, head.gradients()))
            if turn:  # the first round warms up
                seconds[pieces].append(passed)
    rows = [
        {
            "tokens": pieces or sizes["rows"] * sizes["sequence"],
            "seconds": statistics.median(seconds[pieces]),
            "measured": head.most_bytes(),
            "account": account(config_of(sizes, pieces)),
            "longer": account(config_of(sizes | {"sequence": 4 * sizes["sequence"]}, pieces)),
            "loss": head.loss,
            "off": off[pieces],
        }
        for pieces, head in heads.items()
    ]
    return sizes | {"rounds": options.rounds, "heads": rows}


def table(result: dict[str, Any]) -> str:
    head = ["tokens at a time", "F, B and W, s", "measured, GB", "account, GB", "longer rows, GB"]
    rows = [
        [
            f"{x['tokens']:,}",
            f"{x['seconds']:.1f}",
            *(f"{x[key] / 1e9:.2f}" for key in ("measured", "account", "longer")),
        ]
        for x in result["heads"]
    ]
    return markdown(head, rows, "r" * len(head))


def config_of(sizes: dict[str, int], pieces: int | None) -> Config:
    hidden, rows = sizes["hidden"], sizes["rows"]
    model = {"blocks": 1, "hidden": hidden, "heads": hidden // 64, "sequence": sizes["sequence"]}
    train: dict[str, Any] = {"global_batch": rows, "micro_batch": rows}
    if pieces is not None:
        train["head_tokens"] = pieces
    return parse({"model": model | {"vocab": sizes["vocabulary"]}, "train": train})


def account(config: Config) -> int:
    """Returns the bytes that the account says beside the weights and their optimizer state."""
    head: list[LayerCost] = [shape_costs(config.options, model_of(config))[-1]]
    held = rank_memory(head, (1,), full_schedule("1f1b", 1, 1))[0]
    return held - static_bytes(bare(head), (1,), (0,))[0]


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


if __name__ == "__main__":
    parser = parser_of(__doc__)
    add_number(parser, "hidden", 256, "hidden size")
    add_number(parser, "vocabulary", 131072, "tokens of the vocabulary")
    add_number(parser, "rows", 8, "rows of the microbatch")
    add_number(parser, "sequence", 512, "tokens of a row")
    add_number(parser, "rounds", 3, "rounds in turn")
    run(parser, measure, lambda result: print(table(result)))
