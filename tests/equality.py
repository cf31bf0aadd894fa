"""Configurations that the equality tests train.

They are small, with clipping, dropout, freezing and pruning.
"""

from __future__ import annotations

from typing import Any

RANDOM_MOVES = "python:benchmarks.baselines.placements:random"
"""Moves layers to a random placement at every decision."""

# Every balancer acts: nothing holds it back, for gains in a model this small are noise.
BALANCERS: dict[str, dict[str, Any]] = {
    "none": {"balancer": "none"},
    "exact": {"balancer": "exact", "every": 3, "margin": 0.0, "hysteresis": 0.0},
    "diffusion": {"balancer": "diffusion", "every": 1, "margin": 0.0, "hysteresis": 0.0},
    "random": {"balancer": RANDOM_MOVES, "every": 1},
}


STEPS = 7


def config(
    ranks: int,
    schedule: str,
    balance: dict[str, Any],
    freezing: bool,
    clipping: bool,
    dropout: float = 0.1,
) -> dict[str, Any]:
    """Six layers, five microbatches (no multiple of 2, 3 or 4).

    The norm starts near 2, so that 0.5 always clips.

    Args:
        ranks: Number of pipeline ranks.
        schedule: Name of the schedule.
        balance: The section [balance].
        freezing: True freezes layers at steps 2 and 4.
        clipping: True clips gradients to a norm of 0.5.
        dropout: Share of activations that are dropped.

    Returns:
        The sections of the configuration.
    """
    return {
        "seed": 7,
        "model": {"blocks": 2, "hidden": 32, "heads": 2, "sequence": 16, "dropout": dropout},
        "train": {
            "steps": STEPS,
            "global_batch": 10,
            "micro_batch": 2,
            "lr": 1e-2,
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

    Twelve is a multiple of 1 to 4 ranks, as interleaving needs.

    Args:
        ranks: Number of pipeline ranks.
        schedule: Name of the schedule.
        balance: The section [balance].
        freezing: True freezes layers and clips gradients.

    Returns:
        The sections of the configuration.
    """
    wanted = config(ranks, schedule, balance, freezing, freezing)
    wanted["model"] = {"blocks": 4, "hidden": 16, "heads": 2, "sequence": 8, "dropout": 0.1}
    wanted["train"] = {**wanted["train"], "global_batch": 12, "micro_batch": 1}
    return wanted


def pruned(ranks: int, schedule: str, balance: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Four prunes in seven steps, while the front freezes.

    Layer by layer, weights go from under a mask into CSR.

    Args:
        ranks: Number of pipeline ranks.
        schedule: Name of the schedule.
        balance: The section [balance].
        **options: Keys of [dynamism.pruning].

    Returns:
        The sections of the configuration.
    """
    wanted = config(ranks, schedule, balance, True, True)
    wanted["dynamism"] = {
        "cases": ["pruning", "freezing"],
        "freezing": {"schedule": [[5, 2]]},
        "pruning": {"initial_sparsity": 0.5, "start": 1, "end": 6, "every": 2} | options,
    }
    return wanted


def fields_of(events: list[dict[str, Any]], kind: str, *keys: str) -> list[Any]:
    """The named fields of each event of this kind.

    Args:
        events: Events as JSON objects.
        kind: Value of the field `event`.
        *keys: Names of the fields.

    Returns:
        A tuple of values for each event.
    """
    return [tuple(e[key] for key in keys) for e in events if e["event"] == kind]
