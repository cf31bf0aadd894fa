"""DynMo's figure 3: every case under every side, over the uniform placement and in tokens/s."""

from __future__ import annotations

from typing import Any

from benchmarks.cost_traces import dense_operations, name_of
from benchmarks.output import markdown
from benchmarks.paper_model import MICROBATCH, SEQUENCE
from docs.tools.figures import result_of

BLOCKS, RANKS = 48, 24
_COSTS = ("parameters", "time")
_HEAD = (
    "case",
    "uniform",
    "by parameters, once",
    "another system",
    "DynMo's four",
    "dynmo",
    "optimum",
    "uniform over dense",
    "dynmo over dense",
    "the paper's",
)
# Sides of the table of tokens/s, and their names in the two parts of traces.json.
_RATES = {
    "dense": ("dense", "dense"),
    "uniform": ("uniform", "uniform"),
    "by parameters, once": ("parameters, static", "uniform"),
    "DynMo's four": ("", "last step"),
    "dynmo": ("ours", "ours"),
    "optimum": ("optimum of halves", "optimum"),
}


def sides_table() -> str:
    """Returns the table in Markdown."""
    traces = result_of("traces.json")
    lines = [_placed(row) for row in _deepest(traces["rows"])]
    lines += [_stepwise(row) for row in _deepest(traces["stepwise"])]
    result, group = result_of("experts.json"), {"skew": 0.6, "expert": 16, "per_rank": 4}
    for name, key in (("experts", "rows"), ("depths with experts", "with_depths")):
        (row,) = (x for x in result[key] if group.items() <= x.items())
        lines.append(_experts(name, row))
    return markdown(_HEAD, lines, "l" + "r" * (len(_HEAD) - 1))


def rates_table() -> str:
    """Returns the tokens/s of each side as a table, in thousands."""
    traces = result_of("traces.json")
    rows: list[list[str]] = []
    for part, names in (("rows", 0), ("stepwise", 1)):
        for row in _deepest(traces[part]):
            sequence = row.get("sequence", SEQUENCE)
            tokens = row["microbatches"] / _seconds_per_token(sequence)
            seconds = row["seconds"] | {"": min(_four(row["seconds"]), default=0.0)}
            cells = [f"{tokens / seconds[name[names]] / 1000:.1f}" for name in _RATES.values()]
            rows.append([name_of(row["case"], row.get("sequence", 0)), *cells])
    return markdown(["case", *_RATES], rows, "l" + "r" * len(_RATES))


def _seconds_per_token(sequence: int) -> float:
    """Returns the seconds of a block's dense F per token, on a GPU as fast as the paper's."""
    unit = result_of("scaling.json")["seconds_of_unit"] / (MICROBATCH * SEQUENCE)
    return unit * dense_operations(sequence) / dense_operations(SEQUENCE)


def _four(values: dict[str, float]) -> list[float]:
    """Returns the values of DynMo's four balancers."""
    names = [f"{how}, {cost}" for how in ("partition", "diffusion") for cost in _COSTS]
    return [values[name] for name in names if name in values]


def _deepest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if (row["blocks"], row["ranks"]) == (BLOCKS, RANKS)]


def _placed(row: dict[str, Any]) -> list[str]:
    gain, other = row["gain"], "-"
    if row["case"] == "freezing":
        (halved,) = (
            x for x in result_of("repack.json")["pipetransformer"] if x["blocks"] == BLOCKS
        )
        other = f"PipeTransformer {halved['speedup']['halving']:.2f}"
    return [
        name_of(row["case"], row["sequence"]),
        "1.00",
        f"{gain['parameters, static']:.2f}",
        other,
        f"{max(_four(gain)):.2f}",
        f"{gain['ours']:.2f}",
        f"{gain['optimum of halves']:.2f}",
        *(f"{row['over_dense'][name]:.2f}" for name in ("uniform", "ours")),
        row["published"],
    ]


def _stepwise(row: dict[str, Any]) -> list[str]:
    """Every layer has as many parameters, so placing by them is the uniform placement."""
    gain = row["gain"]
    return [
        name_of(row["case"], 0),
        "1.00",
        "1.00",
        "-",
        f"{gain['last step']:.2f}",
        f"{gain['ours']:.2f}",
        f"{gain['optimum']:.2f}",
        *(f"{row['over_dense'][name]:.2f}" for name in ("uniform", "ours")),
        row["published"],
    ]


def _experts(name: str, row: dict[str, Any]) -> list[str]:
    gain = row["gain"]
    return [
        name,
        "1.00",
        "1.00",
        f"Tutel {gain['experts placed']:.2f}",
        f"{gain['layers balanced']:.2f}",
        f"{gain['both']:.2f}",
        f"{gain['known at once']:.2f}",
        "-",
        "-",
        row["published"],
    ]
