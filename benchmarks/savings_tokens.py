"""The savings of early exit and mixture of depths in F, B and W of a half.

A half whose tokens have partly left, or pass by, is measured against the half with all tokens.
Microbatches of 2 rows, one thread, in the runtime's own `Layer`. The sides take turns; medians.
Seconds are the thread's own. Tokens leave, or are selected, at random places.

The ideal, with `a` the share of tokens that remain (or the capacity):

    early exit, attention       linears (1 + a) / 2 (keys and values of all tokens), attention by
                                its pairs
    early exit, feed-forward    a
    depths, attention           linears a, attention by its pairs: about a^2
    depths, feed-forward        a

The seconds of the attention are measured alone. The linears' are the rest of the dense half.

    share_of_ideal = (dense - ours) / (dense - ideal)        over F + B + W

`lost` is the seconds over the ideal, by where:

    rows        taking rows from the stream and putting them back, measured alone
    attention   the attention alone over its ideal
    router      scores, choice and predictor alone
    elsewhere   small products, and what each call costs

`bounded_by` names the largest where the share of the ideal is under 85 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import alternate, bound_of, part_medians, run_ranks, time_layer
from benchmarks.output import main, markdown
from benchmarks.savings_attention import ThreadClock
from dynmo.cases.early_exit import EarlyExit
from dynmo.cases.early_exit.kernels import attend_kept, merge
from dynmo.cases.early_exit.layers import ExitAttentionHalf, ExitHead
from dynmo.cases.mixture_of_depths import MixtureOfDepths
from dynmo.cases.mixture_of_depths.kernels import attend_packed, select
from dynmo.cases.mixture_of_depths.layers import RoutedAttentionHalf, Router, add_selected
from dynmo.models.gpt import AttentionHalf, FeedForwardHalf
from dynmo.models.options import ModelOptions
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.layer.layer import Layer

BATCH, HEADS, VOCAB = 2, 4, 256
SIZES = ((256, 256), (256, 1024), (512, 256), (512, 1024))  # hidden, sequence
REMAINING = (0.75, 0.5, 0.25, 0.1)
CAPACITIES = (0.5, 0.25, 0.125)

Seconds = tuple[float, float, float]
Side = Callable[[], Seconds]
Tensors = tuple[Tensor, ...]


def layer_side(module: nn.Module, inputs: Tensors) -> Side:
    """Returns a side that times F, B and W of a module as a layer."""
    clock = ThreadClock()
    layer = Layer(0, module, clock, 0)
    inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
    outputs = layer.forward(0, inputs, 0)
    gradients = tuple(torch.randn_like(y) for y in outputs if y.requires_grad)
    layer.clear()

    def once() -> Seconds:
        module.zero_grad()
        return time_layer(layer, inputs, gradients)

    return once


def function_side(function: Callable[..., Tensor | Tensors], *inputs: Tensor) -> Side:
    """Returns a side that times F and B of a function of tensors."""

    def once() -> Seconds:
        given = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        start = ThreadClock.mark()
        out = function(*given)
        middle = ThreadClock.mark()
        outputs = [y for y in (out if isinstance(out, tuple) else (out,)) if y.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        return middle - start, ThreadClock.mark() - middle, 0.0

    return once


def places_of(tokens: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draws random places of the tokens that remain, and of the others, ascending."""
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    count = round(share * tokens)
    return order[:count].sort().values, order[count:].sort().values


def pairs_of(index: Tensor, sequence: int) -> float:
    """Returns the share of the causal pairs that queries at these places have."""
    return float((index % sequence + 1).sum()) / (BATCH * sequence * (sequence + 1) / 2)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes dense attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def exit_sides(hidden: int, sequence: int) -> tuple[dict[str, Side], dict[str, float]]:
    """Returns the sides of early exit, and the share of pairs by the share of tokens."""
    tokens, generator = BATCH * sequence, torch.Generator().manual_seed(1)
    stream = torch.randn(tokens, hidden, generator=generator)
    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    model = ModelOptions(hidden=hidden, heads=HEADS, sequence=sequence, vocab=VOCAB)
    attention, feed_forward = ExitAttentionHalf(model), FeedForwardHalf(model)
    head = ExitHead(model, EarlyExit(exits=[0]), 0)
    every = torch.arange(tokens)

    def state(index: Tensor, gone: Tensor) -> Tensors:
        return stream[index], index, stream[gone], gone, targets, torch.zeros(())

    heads = torch.randn(BATCH, sequence, HEADS, hidden // HEADS, generator=generator)
    sides = {
        "dense attention": layer_side(attention, state(every, every[:0])),
        "dense feed-forward": layer_side(feed_forward, state(every, every[:0])),
        "exit head": layer_side(head, state(every, every[:0])),
        "pairs": function_side(dense_attention, heads, heads.clone(), heads.clone()),
    }
    pairs = dict[str, float]()
    for share in REMAINING:
        index, gone = places_of(tokens, share, 2)
        pairs[f"{share}"] = pairs_of(index, sequence)
        sides[f"attention {share}"] = layer_side(attention, state(index, gone))
        sides[f"feed-forward {share}"] = layer_side(feed_forward, state(index, gone))
        sides[f"rows {share}"] = function_side(merge, stream[index], index, stream[gone], gone)
        sides[f"pairs {share}"] = function_side(
            attend_kept, heads.flatten(0, 1)[index], heads, heads.clone(), index
        )
    return sides, pairs


def depth_sides(hidden: int, sequence: int) -> tuple[dict[str, Side], dict[str, float]]:
    """Returns the sides of mixture of depths, and the share of pairs by capacity."""
    tokens, generator = BATCH * sequence, torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, sequence, hidden, generator=generator)
    heads = torch.randn(BATCH, sequence, HEADS, hidden // HEADS, generator=generator)
    model = ModelOptions(hidden=hidden, heads=HEADS, sequence=sequence)
    sides = {
        "dense attention": layer_side(AttentionHalf(model), (x,)),
        "dense feed-forward": layer_side(FeedForwardHalf(model), (x,)),
        "pairs": function_side(dense_attention, heads, heads.clone(), heads.clone()),
    }
    pairs = dict[str, float]()
    for share in CAPACITIES:
        router = Router(hidden, model.init_std, MixtureOfDepths(capacity=share))
        half = RoutedAttentionHalf(model, router)
        back = FeedForwardHalf(model)
        back.residual = add_selected
        with torch.no_grad():
            handed = half(x)
        count, index = round(share * sequence), handed[3]
        pairs[f"{share}"] = count * (count + 1) / (sequence * (sequence + 1))
        sides[f"attention {share}"] = layer_side(half, (x,))
        sides[f"feed-forward {share}"] = layer_side(back, handed)
        sides[f"rows {share}"] = function_side(
            lambda t, index=index: select(t, index), x.view(tokens, hidden)
        )
        sides[f"back {share}"] = function_side(
            lambda t, u, index=index: select(t, index)[0].index_add(0, index, u),
            x.view(tokens, hidden),
            handed[1],
        )
        sides[f"router {share}"] = function_side(
            lambda t, router=router: router(t, BATCH), x.view(tokens, hidden)
        )
        packed = heads.flatten(0, 1)[index]
        sides[f"pairs {share}"] = function_side(
            lambda q, k, v, count=count: attend_packed(q, k, v, [count] * BATCH),
            packed,
            packed,
            packed,
        )
    return sides, pairs


def compare(
    dense: Sequence[float], ours: Sequence[float], ideal: Sequence[float], lost: dict[str, float]
) -> dict[str, Any]:
    """Returns a row: seconds, speed-up, share of the ideal, and what is lost."""
    whole = (sum(dense) - sum(ours)) / (sum(dense) - sum(ideal))
    lost = lost | {"elsewhere": sum(ours) - sum(ideal) - sum(lost.values())}
    return {
        **dict(zip("fbw", ours, strict=True)),
        "ideal": dict(zip("fbw", ideal, strict=True)),
        "speedup": sum(dense) / sum(ours),
        "share_of_ideal": whole,
        **bound_of(whole, lost),
    }


def size_row(case: str, hidden: int, sequence: int, rounds: int) -> dict[str, Any]:
    """Measures all shares of one case at one size."""
    exits = case == "early_exit"
    sides, pairs = (exit_sides if exits else depth_sides)(hidden, sequence)
    seconds = part_medians(alternate(sides, rounds, warmup=2))
    attention, linear = (
        seconds["dense attention"],
        [d - p for d, p in zip(seconds["dense attention"], seconds["pairs"], strict=True)],
    )
    rows: dict[str, Any] = {}
    for key, part in pairs.items():
        share = float(key)
        linear_share = (1 + share) / 2 if exits else share
        ideal = [
            linear_share * rest + part * p for rest, p in zip(linear, seconds["pairs"], strict=True)
        ]
        lost = {
            "rows": sum(seconds[f"rows {key}"]),
            "attention": sum(seconds[f"pairs {key}"]) - part * sum(seconds["pairs"]),
        }
        if not exits:
            lost["router"] = sum(seconds[f"router {key}"]) - sum(seconds[f"rows {key}"])
        rows[f"attention {key}"] = compare(attention, seconds[f"attention {key}"], ideal, lost)
        dense = seconds["dense feed-forward"]
        moved = {} if exits else {"rows": sum(seconds[f"back {key}"])}
        rows[f"feed-forward {key}"] = compare(
            dense, seconds[f"feed-forward {key}"], [share * d for d in dense], moved
        )
    block = sum(attention) + sum(seconds["dense feed-forward"])
    result = {
        "case": case,
        "hidden": hidden,
        "sequence": sequence,
        "dense_block": block,
        "rows": rows,
    }
    if exits:
        result["exit_head_in_blocks"] = {
            "measured": sum(seconds["exit head"]) / block,
            "arithmetic": VOCAB / (12 * hidden),
        }
    return result


def on_a_rank(world: Meeting, rounds: int, cases: int = len(SIZES)) -> list[dict[str, Any]]:
    """Runs on the one rank."""
    return [
        size_row(case, *size, rounds)
        for case in ("early_exit", "mixture_of_depths")
        for size in SIZES[:cases]
    ]


def table(sizes: Sequence[dict[str, Any]]) -> str:
    """Returns the range over all sizes in Markdown, for docs/reference/results/layers.md."""
    head = [
        "case",
        "half",
        "tokens that remain",
        "speed-up of F + B + W",
        "share of the ideal",
        "bounded by",
    ]
    lines: list[list[str]] = []
    for case in ("early_exit", "mixture_of_depths"):
        rows = [size["rows"] for size in sizes if size["case"] == case]
        for key in rows[0] if rows else ():
            half, share = key.rsplit(" ", 1)
            speed = [row[key]["speedup"] for row in rows]
            part = [row[key]["share_of_ideal"] for row in rows]
            bounds = sorted({row[key]["bounded_by"] for row in rows} - {None})
            ranges = f"{min(speed):.2f} to {max(speed):.2f}", f"{min(part):.0%} to {max(part):.0%}"
            lines.append(
                [case.replace("_", " "), half, f"{float(share):.1%}", *ranges, ", ".join(bounds)]
            )
    return markdown(head, lines, "llrrrl")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "microbatch": BATCH,
        "heads": HEADS,
        "sizes": run_ranks(
            "benchmarks.savings_tokens:on_a_rank", 1, rounds=options.rounds, cases=options.cases
        ),
    }


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [("rounds", 7, "counted turns"), ("cases", len(SIZES), "so many of the sizes")],
    )
