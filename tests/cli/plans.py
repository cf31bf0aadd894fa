"""What the tests of `dynmo plan` share."""

from __future__ import annotations

import json
from typing import Any

from tests.cli.runs import Run

# Keys of the answer, in order.
FIELDS = ["schedule", "balancer", "ranks", "microbatches", "objective", "partition", "span"]
FIELDS += ["makespan", "bubble_ratio", "idle_ratio", "imbalance", "memory", "recompute"]
FIELDS += ["placement", "stage_cost", "lower_bound", "moves", "moved_bytes", "memory_limit"]
FIELDS += ["speeds", "seconds", "words", "alternatives"]


def answer(plan: Run, *arguments: object) -> dict[str, Any]:
    """Runs a command with --json, and returns the one object that it prints."""
    out = plan(*arguments, "--json").good
    assert out.endswith("}\n")
    assert out.count("\n") == 1
    return json.loads(out)
