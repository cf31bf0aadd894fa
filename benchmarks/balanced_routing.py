"""Hottest expert of four routings, on the same scores.

    largest    the largest scores of each token (`aux-loss` without its loss)
    sinkhorn   the largest entries after Sinkhorn's scaling, by rounds and up to the tolerance
    auction    the balanced assignment

Scores are drawn, or a router's own. `spread` is their standard deviation.

    independent   all scores are drawn alike
    hot experts   each expert's scores have an offset with the same spread
    wide experts  scores of later experts have a larger spread, up to three times the first's
    few tokens    a token is one of 64, drawn by Zipf's law, as bytes of a text are
    router        a small GPT's scores of a microbatch after 8 steps on text
    router x10    the same, multiplied by 10

`column` is the largest column sum of the scaled scores over the mean: 1 if the scaling has
converged. All other figures are the hottest expert's load over the mean. They are means over draws,
or over the router's layers. Nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from benchmarks import harness
from benchmarks.output import add_number, markdown, parser_of, run
from benchmarks.quality import config_of
from dynmo.cases.experts.routing import ExpertRouter, sinkhorn
from dynmo.models.options import ModelOptions
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer

SPREADS, TOKENS, EXPERTS, TOP_K = (0.3, 1.0, 3.0), (64, 512, 8192), (8, 16), (1, 2)
ROUNDS = (1, 10, 100)
AUCTION_TOKENS = 512  # the auction of more tokens takes seconds
DRAWS, DISTINCT = 5, 64
ROUTER_STEPS, SCALED = 8, 10.0


# -- scores ----------------------------------------------------------------------------------------


def _independent(tokens: int, experts: int, draw: torch.Generator) -> Tensor:
    return torch.randn(tokens, experts, generator=draw)


def _hot_experts(tokens: int, experts: int, draw: torch.Generator) -> Tensor:
    return _independent(tokens, experts, draw) + torch.randn(experts, generator=draw)


def _wide_experts(tokens: int, experts: int, draw: torch.Generator) -> Tensor:
    return _independent(tokens, experts, draw) * torch.linspace(0.5, 1.5, experts)


def _few_tokens(tokens: int, experts: int, draw: torch.Generator) -> Tensor:
    shares = 1 / torch.arange(1.0, DISTINCT + 1)
    return _independent(DISTINCT, experts, draw)[
        torch.multinomial(shares, tokens, replacement=True, generator=draw)
    ]


KINDS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "independent": _independent,
    "hot experts": _hot_experts,
    "wide experts": _wide_experts,
    "few tokens": _few_tokens,
}


def router_scores(world: Meeting, steps: int, hidden: int) -> list[list[list[float]]]:
    """Returns a microbatch's scores by layer, after some steps. Runs on the one rank."""
    model = {"kind": "moe", "experts": 8, "routing": "sinkhorn"}
    config = config_of(steps, 0, {}, 1, 1, hidden, model)
    trainer = Trainer(config, world, model_of(config), None)
    scores: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, ExpertRouter) and module.training and type(inputs[0]) is Tensor:
            scores[module] = functional.linear(inputs[0].float(), module.weight.float()).detach()

    with register_module_forward_pre_hook(keep):
        trainer.run()
    return [each.tolist() for each in scores.values()]


# -- loads -----------------------------------------------------------------------------------------


def hottest(chosen: Tensor, experts: int) -> float:
    """Returns the busiest expert's load over the mean."""
    return float(torch.bincount(chosen.flatten(), minlength=experts).max()) / (
        chosen.numel() / experts
    )


def loads_of(scores: Tensor, top_k: int) -> dict[str, float]:
    """Returns the hottest expert of each routing on these scores."""
    tokens, experts = scores.shape

    def of(table: Tensor) -> float:
        return hottest(table.topk(top_k, dim=1).indices, experts)

    scaled = sinkhorn(scores)
    figures = {"largest": of(scores)}
    figures |= {f"{n} rounds": of(sinkhorn(scores, n, tolerance=0.0)) for n in ROUNDS}
    figures |= {
        "sinkhorn": of(scaled),
        "column": float(scaled.sum(0).max()) * experts,
    }
    if tokens <= AUCTION_TOKENS:
        options = ModelOptions(
            kind="moe", hidden=experts, heads=1, experts=experts, top_k=top_k, routing="auction"
        )
        router = ExpertRouter(options)
        nn.init.eye_(router.weight)  # its input is the scores
        figures["auction"] = hottest(router(scores)[1], experts)
    return figures


def mean_of(each: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(figures[name] for figures in each) for name in each[0]}


def rows(kind: str, spread: float, drawn: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Returns a row for each `top_k`."""
    tokens, experts = drawn[0].shape
    row = {"scores": kind, "spread": spread, "tokens": tokens, "experts": experts}
    return [
        row | {"top_k": top_k} | mean_of([loads_of(scores, top_k) for scores in drawn])
        for top_k in TOP_K
    ]


def drawn_rows(draws: int, most_tokens: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of each kind and size of drawn scores."""
    sizes = [(tokens, experts) for tokens in TOKENS if tokens <= most_tokens for experts in EXPERTS]
    for (kind, make), spread, size in product(KINDS.items(), SPREADS, sizes):
        draw = torch.Generator().manual_seed(0)
        yield from rows(kind, spread, [spread * make(*size, draw) for _ in range(draws)])


def router_rows(hidden: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of a router's own scores."""
    function = "benchmarks.balanced_routing:router_scores"
    found = harness.run_ranks(function, 1, steps=ROUTER_STEPS, hidden=hidden)
    layers = [torch.tensor(layer) for layer in found]
    spread = fmean(float(x.std()) for x in layers)
    yield from rows("router", spread, layers)
    yield from rows(f"router x{SCALED:.0f}", SCALED * spread, [SCALED * x for x in layers])


def measure(draws: int, most_tokens: int, hidden: int) -> dict[str, Any]:
    """Measures drawn scores and a router's."""
    torch.set_num_threads(1)
    router = list(router_rows(hidden))
    return {"draws": draws, "router": router, "rows": list(drawn_rows(draws, most_tokens))}


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Returns the hottest expert in Markdown."""
    shown = ("largest", *(f"{n} rounds" for n in ROUNDS), "sinkhorn", "column", "auction")
    keys = ("scores", "tokens", "experts", "top_k")
    lines: list[list[str]] = []
    for x in rows:
        figures = (f"{x[name]:.2f}" if name in x else "" for name in shown)
        lines.append([*(str(x[key]) for key in keys), f"{x['spread']:.1f}", *figures])
    head = [name.replace("1 rounds", "1 round") for name in shown]
    return markdown([*keys, "spread", *head], lines)


def of_512_tokens(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of 512 tokens and 8 experts, the drawn ones of one spread."""
    drawn = [x for x in result["rows"] if (x["tokens"], x["experts"], x["spread"]) == (512, 8, 1.0)]
    return [*drawn, *result["router"]]


def show(result: dict[str, Any]) -> None:
    print(table([*result["rows"], *result["router"]]))


def main() -> None:
    parser = parser_of(__doc__, reads=True)
    add_number(parser, "draws", DRAWS, "of each kind of scores")
    add_number(parser, "tokens", TOKENS[-1], "most tokens")
    add_number(parser, "hidden", 128, "hidden size of the router's model")
    run(parser, lambda x: measure(x.draws, x.tokens, x.hidden), show)


if __name__ == "__main__":
    main()
