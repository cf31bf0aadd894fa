"""GPT-2 and Mixtral under dynmo's schedules and torch's: what more deferred W's bring.

Models of transformers, 2 ranks of one thread, 6 blocks without dropout, microbatches of 2 x 128
tokens, a step from a start together to the end of the slowest rank's last op. No optimizer.

    dynmo    all weight gradients can wait
    before   only those of nn.Linear and nn.Embedding can, as at first
    torch    torch's schedules, with the whole block where a stage has both of its halves

Each side of dynmo and of torch is cut by the seconds of its layers. `over_torch` is torch's best
over dynmo's best, `before_over_torch` the same for `before`. `limit` is torch's best over the
simulated seconds of dynmo's fastest schedule.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig

from benchmarks.executor import own_pipelines, timed
from benchmarks.finetune_torch import FUSED, Stages
from benchmarks.harness import alternate, medians, run_ranks
from benchmarks.output import add_number, markdown, parser_of, run
from benchmarks.torch_peer import PEERS, TorchPeer
from dynmo.kernels import deferral
from dynmo.models.huggingface.model import from_pretrained
from dynmo.models.loss import causal_lm_loss
from dynmo.plan.bisection import exact
from dynmo.runtime.comm.meeting import Meeting

BLOCKS, VOCABULARY = 6, 1024
ROWS, TOKENS = 2, 128  # of a microbatch


def config_of(family: str, hidden: int) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": hidden // 64,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "gpt2":
        return AutoConfig.for_model(
            "gpt2", **sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
        )
    return AutoConfig.for_model(
        "mixtral",
        **sizes,
        num_key_value_heads=hidden // 64,
        intermediate_size=2 * hidden,
        num_local_experts=8,
    )


@contextmanager
def linears_alone() -> Iterator[None]:
    """Has layers that are made meanwhile defer the W of nn.Linear and nn.Embedding alone."""
    with patch.object(deferral, "_owns_matrix", lambda _: False):
        yield


def race(
    world: Meeting, family: str, microbatches: int, rounds: int, hidden: int
) -> dict[str, Any]:
    """Runs on each rank."""
    config, draws = config_of(family, hidden), torch.Generator().manual_seed(0)
    model = from_pretrained(config)
    ids = torch.randint(VOCABULARY, (microbatches, ROWS, TOKENS), generator=draws)
    pipelines, weights, predicted = own_pipelines(world, model, ids, ids)
    with linears_alone():
        earlier, _, _ = own_pipelines(world, model, ids, ids)
    sides = {f"dynmo {name}": timed(world, each, ids, ids) for name, each in pipelines.items()}
    sides |= {f"before {name}": timed(world, each, ids, ids) for name, each in earlier.items()}
    stages, flat = Stages(model, from_pretrained(config, cut="blocks")), ids.flatten(0, 1)
    for name, kind in PEERS.items():
        splits = kind.make not in FUSED

        def build(stage: int, stages_of: int, splits: bool = splits) -> torch.nn.Module:
            return stages.make(exact(weights, stages_of).range_of(stage), needs_gradient=splits)

        peer = TorchPeer(name, microbatches, build, flat, flat, causal_lm_loss)
        sides[f"torch {name}"] = peer.step
    measured = medians(alternate(sides, rounds, warmup=1))
    best = {
        side: min((name for name in measured if name.startswith(side)), key=measured.__getitem__)
        for side in ("dynmo", "before", "torch")
    }
    simulated = predicted()
    return {
        "family": family,
        "microbatches": microbatches,
        "layers_per_rank": list(exact(weights, world.size).counts),
        "measured": measured,
        "predicted": simulated,
        "best": best,
        "over_torch": measured[best["torch"]] / measured[best["dynmo"]],
        "before_over_torch": measured[best["torch"]] / measured[best["before"]],
        "over_before": measured[best["before"]] / measured[best["dynmo"]],
        "limit": measured[best["torch"]] / min(simulated.values()),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = [
        run_ranks(
            "benchmarks.executor_families:race",
            2,
            family=family,
            microbatches=microbatches,
            rounds=options.rounds,
            hidden=options.hidden,
        )
        for family in ("gpt2", "mixtral")
        for microbatches in (4, 8)
    ]
    return {"hidden": options.hidden, "rounds": options.rounds, "rows": rows}


def table(result: dict[str, Any]) -> str:
    names = {"gpt2": "GPT-2", "mixtral": "Mixtral"}
    rows = [
        [
            names[x["family"]],
            str(x["microbatches"]),
            *(f"x{x[key]:.2f}" for key in ("before_over_torch", "over_torch", "limit")),
        ]
        for x in result["rows"]
    ]
    return markdown(["model", "microbatches", "before", "now", "limit"], rows)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    add_number(parser, "hidden", 256, "hidden size")
    add_number(parser, "rounds", 5, "rounds in turn")
    run(parser, measure, lambda result: print(table(result)))
