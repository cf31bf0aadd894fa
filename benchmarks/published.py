"""Figures of two papers.

Of DynMo these are the idle shares of figure 1, and the speed-ups of figure 3 with the baseline of
each. Of Zero Bubble they are the settings of table 5, and what was measured in them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynmo.cost.layer_cost import Costs, uniform_costs

TABLE_5 = Path(__file__).resolve().parents[1] / "tests" / "facts" / "zero_bubble_table5.json"
MEASURED = Path(__file__).parent / "data" / "zero_bubble.json"


def table_5() -> list[dict[str, Any]]:
    """Returns the 12 settings of Zero Bubble's table 5. Times are in milliseconds."""
    return json.loads(TABLE_5.read_text())["rows"]


def zero_bubble_measured() -> dict[str, Any]:
    """Returns throughput and memory that the Zero Bubble paper measured, by table."""
    return json.loads(MEASURED.read_text())


def costs_of(row: dict[str, Any], ranks: int | None = None) -> Costs:
    """Returns the costs of a row of table 5, in milliseconds."""
    f, b, w, link = (row[f"t_{key}_ms"] for key in ("f", "b", "w", "comm"))
    return uniform_costs(ranks or row["ranks"], f, b, w, link, row["w_memory_share"])


@dataclass(frozen=True)
class Published:
    """A published speed-up.

    Attributes:
        speedup: The figure, or its range over the models.
        baseline: What the paper divides by (figure 3 and section 4.1).
        setup: GPUs, replicas and pipeline ranks.
        over_dense: Whether the baseline lacks the technique. If so, the figure includes the
            technique's own saving.
    """

    speedup: str
    baseline: str
    setup: str
    over_dense: bool = False


_LARGE = "720 H100, 30 replicas of a 24-way pipeline"
_SMALL = "128 H100, 8 replicas of a 16-way pipeline"
_STATIC = "the faster static placement of Megatron-LM and DeepSpeed, with the technique"

PUBLISHED = {
    "freezing": Published("2.23", "Egeria", _LARGE),
    "pruning": Published("3.18", _STATIC, _LARGE),
    "sparse_attention": Published("2.71 to 4.02", "dense attention", _LARGE, over_dense=True),
    "early_exit": Published(
        "4.52",
        "the model without exits, whose tokens all pass every layer",
        _LARGE,
        over_dense=True,
    ),
    "mixture_of_depths": Published("1.17", _STATIC, _SMALL),
    "moe": Published("1.21 to 1.23", _STATIC, _SMALL),
}

# Of a rank, in a static placement. The other cases are multiples of the dense model's.
IDLE = {"experts": 0.25, "freezing": 0.40, "mixture of depths": 0.18}
