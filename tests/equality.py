"""Small configurations of the equality tests, and what they must give."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from dynmo.runtime.comm.meeting import Meeting
from tests import jobs
from tests.pool import Pool
from tests.runtime.fake_time import emulated_time

RANDOM_MOVES = "python:benchmarks.baselines.placements:random"
"""Moves layers to a random placement at every decision."""

# Every balancer acts: nothing holds it back, for gains in a model this small are noise.
BALANCERS: dict[str, dict[str, Any]] = {
    "none": {"balancer": "none"},
    "exact": {"balancer": "exact", "every": 3, "margin": 0.0, "hysteresis": 0.0},
    "diffusion": {"balancer": "diffusion", "every": 1, "margin": 0.0, "hysteresis": 0.0},
    "random": {"balancer": RANDOM_MOVES, "every": 1},
}


IN_EMULATED_TIME = "tests.equality:in_emulated_time"
STEPS = 7


def config(
    ranks: int,
    schedule: str,
    balance: dict[str, Any],
    freezing: bool,
    clipping: bool,
    dropout: float = 0.1,
    seed: int = 7,
) -> dict[str, Any]:
    """Six layers, five microbatches (no multiple of 2, 3 or 4).

    The norm starts near 2, so that 0.5 always clips. Layers freeze at steps 2 and 4.
    """
    return {
        "seed": seed,
        "model": {"blocks": 2, "hidden": 32, "heads": 2, "sequence": 16, "dropout": dropout},
        "train": {
            "steps": STEPS,
            "global_batch": 10,
            "micro_batch": 2,
            "lr": 1e-2,
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
            "warmup": 2,
            "max_grad_norm": 0.5 * clipping,
        },
        "parallel": {"pipeline": ranks, "timeout": 20.0},
        "pipeline": {"schedule": schedule},
        "balance": balance,
        "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[2, 1], [4, 3]]}}
        if freezing
        else {},
        "trace": {"steps": 0},
    }


def deeper(ranks: int, schedule: str, balance: dict[str, Any], freezing: bool) -> dict[str, Any]:
    """Ten layers, for up to eight stages, and twelve microbatches.

    Twelve is a multiple of 1 to 4 ranks, as interleaving needs. A run that freezes also clips.
    """
    wanted = config(ranks, schedule, balance, freezing, freezing)
    wanted["model"] = {"blocks": 4, "hidden": 16, "heads": 2, "sequence": 8, "dropout": 0.1}
    wanted["train"] = {**wanted["train"], "global_batch": 12, "micro_batch": 1}
    return wanted


def pruned(ranks: int, schedule: str, balance: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Four prunes in seven steps, while the front freezes.

    Layer by layer, weights go from under a mask into CSR. Options are keys of [dynamism.pruning].
    """
    wanted = config(ranks, schedule, balance, True, True)
    wanted["dynamism"] = {
        "cases": ["pruning", "freezing"],
        "freezing": {"schedule": [[5, 2]]},
        "pruning": {"initial_sparsity": 0.5, "start": 1, "end": 6, "every": 2} | options,
    }
    return wanted


def fields_of(events: list[dict[str, Any]], kind: str, *keys: str) -> list[Any]:
    """A tuple of the named fields of each event of this kind."""
    return [tuple(e[key] for key in keys) for e in events if e["event"] == kind]


def same_events(
    events: list[dict[str, Any]], expected: list[dict[str, Any]], **fields: tuple[str, ...]
) -> None:
    """The events of each named kind have equal fields."""
    for kind, keys in fields.items():
        assert fields_of(events, kind, *keys) == fields_of(expected, kind, *keys)


def with_sections(wanted: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """The configuration with more keys in some of its sections."""
    changed = {name: {**wanted.get(name, {}), **section} for name, section in sections.items()}
    return wanted | changed


def decay_groups(layers: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of torch's optimizers. Matrices decay, and vectors do not."""
    trained = [p for p in layers.parameters() if p.requires_grad]
    return [
        {
            "params": [p for p in trained if (p.dim() > 1) == decays],
            "weight_decay": weight_decay * decays,
        }
        for decays in (True, False)
    ]


def run(pool: Pool, config: dict[str, Any], job: str = "train", **arguments: Any) -> list[Any]:
    """Runs a job of `tests/jobs.py` on as many ranks as the configuration has."""
    parallel = config["parallel"]
    ranks = parallel.get("replicas", 1)
    if not parallel.get("slices"):
        ranks *= parallel.get("pipeline", 1)
    return pool.run(job, ranks, config=config, **arguments)


def same(results: list[dict[str, Any]], expected: dict[str, Any], moving: bool = False) -> None:
    """Every rank has the losses and the digest of one rank.

    Args:
        results: Result of each rank.
        expected: Result of one rank.
        moving: True if layers must move at every step.
    """
    assert results[0]["losses"] == expected["losses"]
    assert {r["digest"] for r in results} == {expected["digest"]}
    if moving:
        assert all(a != b for a, b in pairwise(results[0]["layers"])), (
            "the layers did not move at every step"
        )


def resumed(
    pool: Pool, folder: Path, before: dict[str, Any], after: dict[str, Any], stop_after: int
) -> list[dict[str, Any]]:
    """Results of a run that stops after a step and goes on with another configuration."""
    saves = {"checkpoint": {"every": 100}}
    options = {"job": "train_in", "folder": str(folder)}
    stopped = run(pool, before | saves, stop_after=stop_after, **options)
    ended = run(pool, after | saves, resume=True, **options)
    assert [{e["interrupted"] for e in results} for results in (stopped, ended)] == [
        {True},
        {False},
    ]
    return ended


def in_emulated_time(world: Meeting, config: dict[str, Any], wrapped: str = "events") -> Any:
    """A job in which emulated layers take exactly their seconds, and none of the real time."""
    with emulated_time():
        return getattr(jobs, wrapped)(world, config)
