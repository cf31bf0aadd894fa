"""The Zero Bubble paper's claims, simulated from its published times.

docs/reference/results/zero-bubble.md shows the figures. Settings and times are those of the paper's
table 5. Spans count, so there is no optimizer step, no reduction and no loss of speed in a kernel.

throughput   samples per GPU and second of 1F1B, interleaved 1F1B, ZB-1p and ZB-2p (zb-auto within
             p and 2p), beside those that the paper measured (table 4); and the peak memory
same_batch   gain over 1F1B at equal memory and batch, beside table 6: ZB-2p has twice as many
             microbatches of half the size
few          gain over 1F1B with no more microbatches than ranks, beside table 12
barrier      how much longer a step of ZB-2p takes with an optimizer barrier, beside table 10
planned      bubble of the paper's heuristic, of zb-auto, and the lower bound
uneven       the heuristic on uneven stages (the cases of `benchmarks.planner` without a frozen
             prefix), fed their costs or the median, over zb-auto; all at the true costs
solved       the heuristic over the optimum, in cases that `benchmarks.exact` has solved
replicas     3 replicas with m = 8p, and 8 with m = 3p: the same global batch
disturbed    how much longer a step takes with varying op times, with slow links between nodes of 8
             ranks, and with messages that keep their receiver busy, in the same order of ops

`--plot` draws docs/pictures/zero_bubble_{throughput,noise}.svg.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, cast

from benchmarks import exact
from benchmarks.baselines.zero_bubble import heuristic, median_costs
from benchmarks.noise import Disturbance, Replay
from benchmarks.output import (
    WIDTH,
    add_number,
    legend_above,
    markdown,
    parser_of,
    print_tables,
    pyplot,
    run,
)
from benchmarks.planner import uneven_case
from benchmarks.published import costs_of, zero_bubble_measured
from benchmarks.sweeps import (
    LOOKS,
    SIDES,
    Side,
    chunks_in,
    made,
    published_rows,
    rounded,
    setting_of,
    simulated,
)
from dynmo.cost.layer_cost import Costs
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic.zero_bubble import automatic
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.simulator import simulate

EXACT = Path(__file__).parent / "results" / "exact.json"
# Names in the paper's tables, and here.
MEASURED = {
    "1f1b": "1f1b",
    "interleaved-1f1b": "interleaved-1f1b",
    "zb-1p": "zb-auto p",
    "zb-2p": "zb-auto 2p",
}
DISTURBED = {name: SIDES[name] for name in (*MEASURED.values(), "zb-v")} | {
    "v-auto 2p": Side("v-auto", 2)
}
SPREADS = (0.05, 0.1, 0.2, 0.3)
DELAYS = (0.01, 0.02, 0.05)  # of F of a rank
LINKS = (3.0, 10.0, 30.0)


# -- beside the paper's measurements ---------------------------------------------------------------


def throughput(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = zero_bubble_measured()
    tables = {x["model"]: x for x in measured["table_4"]}
    twice = {x["model"]: x for x in measured["table_11_twice_the_microbatch_size"]}
    out: list[dict[str, Any]] = []
    for row in rows:
        model, p, m = row["model"], row["ranks"], row["microbatches"]
        table = tables[model]
        place = table["microbatches"].index(m)
        published = {name: table["samples"][name][place] for name in MEASURED}
        sides: dict[str, Any] = {}
        for name, own in MEASURED.items():
            side = SIDES[own]
            figures = simulated(side, setting_of(row), m, chunks_in(row, side.schedule))
            samples = 1000 * measured["microbatch_size"][model] * m / figures["span"] / p
            sides[own] = {
                "samples": samples,
                "published": published[name],
                "reached": published[name] / samples,
                "gain": 0.0,
                "published_gain": published[name] / published["1f1b"] - 1,
                "peak": figures["peak"] / p,
                "published_memory": table["memory"][name] / table["memory"]["1f1b"],
            }
        for side in sides.values():
            side["gain"] = side["samples"] / sides["1f1b"]["samples"] - 1
        bigger = twice[model]["samples"]["1f1b"][place]
        out.append(
            {
                "model": model,
                "ranks": p,
                "microbatches": m,
                "sides": sides,
                # At equal memory 1F1B has microbatches of twice the size.
                "twice_size_gain": published["zb-2p"] / bigger - 1,
                "twice_size_speeds_up_1f1b": bigger / published["1f1b"] - 1,
            }
        )
    return out


def throughput_summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def over(rows: Iterable[dict[str, Any]], name: str, key: str) -> list[float]:
        return [row["sides"][name][key] for row in rows]

    large = [row for row in rows if row["ranks"] > 8] or rows
    return {
        "mean_1p": mean(over(rows, "zb-auto p", "gain")),
        "mean_1p_published": mean(over(rows, "zb-auto p", "published_gain")),
        "mean_1p_large": mean(over(large, "zb-auto p", "gain")),
        "mean_1p_large_published": mean(over(large, "zb-auto p", "published_gain")),
        "most_2p": max(over(rows, "zb-auto 2p", "gain")),
        "most_2p_published": max(over(rows, "zb-auto 2p", "published_gain")),
        "mean_2p": mean(over(rows, "zb-auto 2p", "gain")),
        "mean_2p_published": mean(over(rows, "zb-auto 2p", "published_gain")),
        "reached_large": {name: mean(over(large, name, "reached")) for name in MEASURED.values()},
        "mean_twice_size_gain": mean(row["twice_size_gain"] for row in rows),
    }


def same_batch(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compares schedules that have the same memory and the same batch."""
    measured = zero_bubble_measured()
    table = measured["table_6_same_memory_and_batch"]
    settings = [setting_of(row) for row in rows if row["model"] == table["model"]]
    slow, fast = measured["table_7_1f1b_of_28.3B_with_microbatches_of_1_and_2"]
    out: list[dict[str, Any]] = []
    for place, m in enumerate(table["microbatches"] if settings else ()):
        plain = simulated(SIDES["1f1b"], settings[0], m)["span"]
        # A microbatch of half the size takes half of the time here.
        spans = {
            "zb-1p": simulated(SIDES["zb-auto p"], settings[0], m)["span"],
            "zb-v": simulated(SIDES["zb-v"], settings[0], m)["span"],
            "zb-2p": simulated(SIDES["zb-auto 2p"], settings[0], 2 * m)["span"] / 2,
        }
        sides: dict[str, Any] = {}
        for name, span in spans.items():
            kernels = fast / slow if name == "zb-2p" else 1.0
            old, new = (table["samples"][x][place] for x in ("1f1b", name))
            sides[name] = {
                "gain": plain / span - 1,
                "gain_with_kernels": plain / span / kernels - 1,
                "published": new / old - 1,
            }
        out.append({"model": table["model"], "ranks": table["ranks"], "microbatches": m, **sides})
    return out


def few(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    settings = {row["model"]: setting_of(row) for row in rows}
    out: list[dict[str, Any]] = []
    for table in zero_bubble_measured()["table_12_few_microbatches"]:
        if table["model"] not in settings:
            continue
        setting = settings[table["model"]]
        for place, m in enumerate(table["microbatches"]):
            plain, zero = (simulated(SIDES[x], setting, m)["span"] for x in ("1f1b", "zb-auto p"))
            old, new = (table["samples"][x][place] for x in ("1f1b", "zb-2p"))
            out.append(
                {
                    "model": table["model"],
                    "ranks": setting.ranks,
                    "microbatches": m,
                    "gain": plain / zero - 1,
                    "published": new / old - 1,
                }
            )
    return out


def barrier(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = zero_bubble_measured()
    without = {x["model"]: x["samples"]["zb-2p"][0] for x in measured["table_4"]}
    out: list[dict[str, Any]] = []
    for row in rows:
        costs, p, m = costs_of(row), row["ranks"], row["microbatches"]
        caps = [2.0 * p] * p
        lengths = [
            simulate(automatic(costs, m, caps=caps, objective=x), costs).length(x)
            for x in (Objective.SPAN, Objective.MAKESPAN)
        ]
        model = row["model"]
        out.append(
            {
                "model": model,
                "ranks": p,
                "microbatches": m,
                "longer": lengths[1] / lengths[0] - 1,
                "published": without[model] / measured["table_10_with_a_barrier"][model] - 1,
            }
        )
    return out


# -- the published heuristic -----------------------------------------------------------------------


def planned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for row in rows:
        costs, p, m = costs_of(row), row["ranks"], row["microbatches"]
        work = m * costs.stages[0].seconds
        limits: dict[str, Any] = {}
        for k in (1, 2):
            caps = [float(k * p)] * p
            limits[f"{k}p"] = {
                "published": row["bubble"][f"zb-{k}p"],
                "heuristic": simulate(heuristic(costs, m, caps), costs).bubble_ratio,
                "auto": simulate(automatic(costs, m, caps=caps), costs).bubble_ratio,
                "least": max(0.0, 1 - work / lower_bound(costs, m, caps=caps)),
            }
        out.append({"model": row["model"], "ranks": p, "microbatches": m, **limits})
    return out


def planned_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    cells = [row[limit] for row in rows for limit in ("1p", "2p")]
    return {
        "heuristic_off_published": max(abs(x["heuristic"] - x["published"]) for x in cells),
        "auto_below_heuristic": max(x["heuristic"] - x["auto"] for x in cells),
        "auto_above_heuristic": max(x["auto"] - x["heuristic"] for x in cells),
        "heuristic_above_least": max(x["heuristic"] - x["least"] for x in cells),
        "auto_above_least": max(x["auto"] - x["least"] for x in cells),
    }


def uneven(cases: int) -> dict[str, Any]:
    """Compares on random uneven stages, apart for much and little memory."""
    random = Random(0)
    groups: dict[str, list[dict[str, Any]]] = {"memory for p": [], "less memory": []}
    while sum(map(len, groups.values())) < cases:
        costs, _, m, caps, first = uneven_case(random)
        if first:
            continue
        p = len(costs.stages)
        enough = all(cap >= p * x.held for cap, x in zip(caps, costs.stages, strict=True))
        auto = simulate(automatic(costs, m, caps=caps), costs).span
        groups["memory for p" if enough else "less memory"].append(
            {
                "own": _heuristic_over(auto, costs, m, caps, costs),
                "median": _heuristic_over(auto, costs, m, caps, median_costs(costs)),
                "gap": auto / lower_bound(costs, m, caps=caps) - 1,
            }
        )
    return {name: _compared(rows) for name, rows in groups.items()}


def _heuristic_over(
    base: float, costs: Costs, m: int, caps: Sequence[float], fed: Costs
) -> float | None:
    """Returns the heuristic's span over another one, or None if it fails."""
    try:
        return simulate(heuristic(fed, m, caps), costs).span / base
    except ScheduleError:
        return None


def _compared(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "cases": len(rows),
        "failures": sum(row["own"] is None for row in rows),
        "auto_over_bound": mean([row["gap"] for row in rows] or [0.0]),
    }
    for fed in ("own", "median"):
        ratios = [row[fed] for row in rows if row[fed] is not None] or [1.0]
        out[fed] = {
            "mean": mean(ratios) - 1,
            "worst": max(ratios) - 1,
            "best": min(ratios) - 1,
            "shorter_than_auto": sum(x < 1 - 1e-9 for x in ratios),
        }
    return out


def solved(uneven_count: int) -> dict[str, Any]:
    """Compares the heuristic and zb-auto with the optimum that a solver has proved."""
    result = json.loads(EXACT.read_text())
    known = {row["case"]: row for row in [*result["published"], *result["uneven"]]}
    count = min(uneven_count, result["uneven_summary"]["cases"])
    published = list(exact.published_cases())
    groups = {
        "small": [case for case in published if len(case.costs.stages) < 8],
        "full size": [case for case in published if len(case.costs.stages) >= 8],
        "uneven": [case for case in exact.uneven_cases(count) if not case.first_trainable],
    }
    return {name: _over_optimum(cases, known) for name, cases in groups.items()}


def _over_optimum(cases: Sequence[exact.Case], known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ratios: dict[str, list[float]] = {"heuristic": [], "auto": []}
    failures = 0
    for case in cases:
        costs, m = case.costs, case.microbatches
        auto = simulate(automatic(costs, m, caps=case.caps), costs).span
        # The file leaves out the uneven cases in which zb-auto is optimal.
        best = known[case.name]["exact"] if case.name in known else auto
        ratios["auto"].append(auto / best)
        over = _heuristic_over(best, costs, m, case.caps, costs)
        failures += over is None
        ratios["heuristic"] += [] if over is None else [over]
    return {"cases": len(cases), "failures": failures} | {
        name: {
            "mean": mean(values or [1.0]) - 1,
            "most": max(values or [1.0]) - 1,
            "optimal": sum(x < 1 + 1e-9 for x in values),
        }
        for name, values in ratios.items()
    }


# -- fewer microbatches and more replicas ----------------------------------------------------------


def replicas(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for row in rows:
        p, setting = row["ranks"], setting_of(row)
        base = simulated(SIDES["1f1b"], setting, 8 * p)["span"]
        sides: dict[str, Any] = {}
        for name in ("1f1b", "zb-auto p", "zb-auto 2p"):
            for m, more in ((8 * p, 1.0), (3 * p, 8 / 3)):
                span = simulated(SIDES[name], setting, m)["span"]
                sides[f"{name}, {m // p}p"] = {
                    "ms": span,
                    "speed_up": base / span,
                    "per_gpu": base / span / more,
                }
        # From here on ZB-2p with 3p would take more GPU time for a sample than 1F1B with 8p.
        slack = base * 3 / 8 - sides["zb-auto 2p, 3p"]["ms"]
        out.append(
            {
                "model": row["model"],
                "ranks": p,
                "gpus": [3 * p, 8 * p],
                "sides": sides,
                "slack_ms": slack,
            }
        )
    return out


# -- disturbed -------------------------------------------------------------------------------------


def disturbed(rows: Sequence[dict[str, Any]], draws: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for row in rows:
        setting, m = setting_of(row), row["microbatches"]
        kinds: dict[str, Callable[[float], Disturbance]] = {
            "spread": lambda x: Disturbance(spread=x),
            "delay": lambda x, f=setting.f: Disturbance(delay=x * f),
            "links": lambda x: Disturbance(slower_links=x),
            "busy": lambda _: Disturbance(busy=True),
            "all": lambda x, f=setting.f: Disturbance(x, DELAYS[1] * f, LINKS[1]),
        }
        values = {
            "spread": SPREADS,
            "delay": DELAYS,
            "links": LINKS,
            "busy": (1.0,),
            "all": (SPREADS[1],),
        }
        random = ("spread", "delay", "all")
        sides: dict[str, Any] = {}
        for name, side in DISTURBED.items():
            replay = Replay(*made(side, setting, m, chunks_in(row, side.schedule)))
            calm = replay.span()
            over = {
                kind: [
                    replay.span(make(x), draws if kind in random else 1) / calm - 1
                    for x in values[kind]
                ]
                for kind, make in kinds.items()
            }
            sides[name] = {"span": calm, **over}
        base, measured = sides["1f1b"], _measured_gains(row)
        for name, side in sides.items():
            side["gain_measured"] = measured.get(name)
            side["gain"] = base["span"] / side["span"] - 1
            for kind in ("busy", "all"):
                side[f"gain_{kind}"] = (1 + side["gain"]) * (1 + base[kind][0]) / (
                    1 + side[kind][0]
                ) - 1
        out.append(
            {"model": row["model"], "ranks": setting.ranks, "microbatches": m, "sides": sides}
        )
    return out


def _measured_gains(row: dict[str, Any]) -> dict[str, float]:
    table = next(x for x in zero_bubble_measured()["table_4"] if x["model"] == row["model"])
    place = table["microbatches"].index(row["microbatches"])
    samples = {own: table["samples"][name][place] for name, own in MEASURED.items()}
    return {name: value / samples["1f1b"] - 1 for name, value in samples.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = published_rows()[:: options.stride]
    smallest = published_rows(3)[:: options.stride]
    paper = throughput(rows)
    plans = planned(rows)
    several_nodes = [row for row in published_rows(3) if row["ranks"] > 8][:: options.stride]
    figures = {
        "throughput": paper,
        "throughput_summary": throughput_summary(paper),
        "same_batch": same_batch(smallest),
        "few": few(smallest),
        "barrier": barrier(smallest),
        "planned": plans,
        "planned_summary": planned_summary(plans),
        "uneven": uneven(options.cases),
        "solved": solved(options.cases),
        "replicas": replicas(smallest),
        "disturbed": disturbed(several_nodes, options.draws),
        "disturbances": {"spread": [*SPREADS], "delay": [*DELAYS], "links": [*LINKS]},
        "draws": options.draws,
    }
    return cast("dict[str, Any]", rounded(figures))


# -- tables ----------------------------------------------------------------------------------------

_NAMES = {
    "1f1b": "1F1B",
    "interleaved-1f1b": "interleaved",
    "zb-auto p": "ZB-1p",
    "zb-auto 2p": "ZB-2p",
    "zb-v": "ZB-V",
    "v-auto 2p": "v-auto 2p",
}


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Returns the tables in Markdown by name."""
    return {
        "throughput": _throughput_table(result["throughput"]),
        "gains": _gains_table(result["throughput"]),
        "memory": _memory_table(result["throughput"]),
        "same batch": _same_batch_table(result["same_batch"]),
        "few": _pairs_table("ZB over 1F1B", "gain", result["few"]),
        "barrier": _pairs_table("a barrier takes longer", "longer", result["barrier"]),
        "planned": _planned_table(result["planned"]),
        "uneven": _uneven_table(result["uneven"]),
        "solved": _solved_table(result["solved"]),
        "replicas": _replicas_table(result["replicas"]),
        "disturbed": _disturbed_table(result["disturbed"], result["disturbances"]),
    }


def _throughput_table(rows: list[dict[str, Any]]) -> str:
    def cell(row: dict[str, Any], name: str) -> str:
        side = row["sides"][name]
        digits = 1 if row["model"] == "1.5B" else 2
        return f"{side['samples']:.{digits}f} / {side['published']:.{digits}f}"

    names = list(MEASURED.values())
    head = ["simulated / measured", *(_NAMES[name] for name in names)]
    return markdown(head, [[_case(row), *(cell(row, x) for x in names)] for row in rows])


def _gains_table(rows: list[dict[str, Any]]) -> str:
    names = [name for name in MEASURED.values() if name != "1f1b"]
    lines: list[list[str]] = []
    for row in rows:
        sides = [row["sides"][name] for name in names]
        pairs = [f"{_percent(x['gain'])} / {_percent(x['published_gain'])}" for x in sides]
        lines.append([_case(row), *pairs, _percent(row["twice_size_gain"])])
    head = ["over 1F1B, %", *(_NAMES[name] for name in names), "ZB-2p, equal memory"]
    return markdown(head, lines)


def _memory_table(rows: list[dict[str, Any]]) -> str:
    names = [name for name in MEASURED.values() if name != "1f1b"]
    lines = [
        [
            f"{row['model']}, p {row['ranks']}",
            *(
                f"{row['sides'][x]['peak']:.2f} / {row['sides'][x]['published_memory']:.2f}"
                for x in names
            ),
        ]
        for place, row in enumerate(rows)
        if row["model"] not in [before["model"] for before in rows[:place]]
    ]
    return markdown(["memory over 1F1B's", *(_NAMES[name] for name in names)], lines)


def _same_batch_table(rows: list[dict[str, Any]]) -> str:
    keys = {"zb-1p": "ZB-1p", "zb-v": "ZB-V", "zb-2p": "ZB-2p"}
    lines = [
        [
            _case(row),
            *(f"{_percent(row[x]['gain'])} / {_percent(row[x]['published'])}" for x in keys),
            _percent(row["zb-2p"]["gain_with_kernels"]),
        ]
        for row in rows
    ]
    head = ["over 1F1B, simulated / measured, %", *keys.values(), "ZB-2p, larger kernels faster"]
    return markdown(head, lines)


def _pairs_table(title: str, key: str, rows: list[dict[str, Any]]) -> str:
    lines = [[_case(row), _percent(row[key]), _percent(row["published"])] for row in rows]
    return markdown([f"{title}, %", "simulated", "measured"], lines)


def _planned_table(rows: list[dict[str, Any]]) -> str:
    keys = ("published", "heuristic", "auto", "least")
    lines = [
        [_case(row), *(f"{100 * row[limit][key]:.2f}" for limit in ("1p", "2p") for key in keys)]
        for row in rows
    ]
    words = ("published", "heuristic", "zb-auto", "least")
    head = ["bubble, %", *(f"{word}, {limit}" for limit in ("p", "2p") for word in words)]
    return markdown(head, lines)


def _uneven_table(groups: dict[str, dict[str, Any]]) -> str:
    lines: list[list[str]] = []
    for name, group in groups.items():
        for fed, words in (("own", "own costs"), ("median", "median costs")):
            side = group[fed]
            lines.append(
                [
                    f"{name}, fed {words}",
                    f"{group['cases']}",
                    f"{group['failures']}",
                    *(_percent(side[key]) for key in ("mean", "worst", "best")),
                    f"{side['shorter_than_auto']}",
                ]
            )
    head = ["heuristic over zb-auto, %", "cases", "fails", "mean", "most", "least", "shorter"]
    return markdown(head, lines)


def _solved_table(groups: dict[str, dict[str, Any]]) -> str:
    words = {
        "small": "p 3 and 4, equal ranks",
        "full size": "1.5B and 6.2B, p 8, m 24",
        "uneven": "uneven, p 3 to 8",
    }
    lines = [
        [
            words[name],
            f"{group['cases']}",
            f"{group['failures']}",
            *(
                f"{side['optimal']}" if key == "optimal" else f"{100 * abs(side[key]):.2f}"
                for side in (group["heuristic"], group["auto"])
                for key in ("optimal", "mean", "most")
            ),
        ]
        for name, group in groups.items()
    ]
    head = ["over the optimum, %", "cases", "heuristic fails", "is optimal", "mean", "most"]
    return markdown([*head, "zb-auto is optimal", "mean", "most"], lines)


def _replicas_table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["sides"])
    lines = [
        [
            f"{row['model']}, p {row['ranks']}",
            f"{row['gpus'][0]}, {row['gpus'][1]}",
            *(
                f"{row['sides'][name]['speed_up']:.2f} ({row['sides'][name]['per_gpu']:.2f})"
                for name in names
            ),
        ]
        for row in rows
    ]
    heads = [f"{_NAMES[name.split(',')[0]]}, m = {name.split(', ')[1]}" for name in names]
    return markdown(["speed-up (per GPU)", "GPUs at 8p, 3p", *heads], lines)


def _disturbed_table(rows: list[dict[str, Any]], values: dict[str, list[float]]) -> str:
    lines: list[list[str]] = []
    for row in rows:
        for name, side in row["sides"].items():
            shares = [x for kind in (*values, "busy", "all") for x in side[kind]]
            shares += [side[key] for key in ("gain", "gain_all", "gain_busy")]
            measured = "-" if side["gain_measured"] is None else _percent(side["gain_measured"])
            lines.append([f"{row['model']}, {_NAMES[name]}", *map(_percent, shares), measured])
    head = [
        "step longer, %",
        *(f"spread {100 * x:.0f} %" for x in values["spread"]),
        *(f"delay {100 * x:.0f} %" for x in values["delay"]),
        *(f"links x{x:.0f}" for x in values["links"]),
        *("busy", "all three", "over 1F1B", "with all three", "with busy", "measured"),
    ]
    return markdown(head, lines)


def _case(row: dict[str, Any]) -> str:
    return f"{row['model']}, p {row['ranks']}, m {row['microbatches']}"


def _percent(share: float) -> str:
    return f"{100 * share + 0.0:.1f}".replace("-0.0", "0.0")


# -- pictures --------------------------------------------------------------------------------------


def draw(result: dict[str, Any]) -> dict[str, Any]:
    plt = pyplot()
    return {
        "zero_bubble_throughput": _draw_throughput(plt, result["throughput"]),
        "zero_bubble_noise": _draw_disturbed(plt, result["disturbed"], result["disturbances"]),
    }


def _draw_throughput(plt: Any, rows: list[dict[str, Any]]) -> Any:
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(2, -(-len(models) // 2), figsize=(WIDTH, 5.4), squeeze=False)
    for panel, model in zip(panels.flat, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        x = range(len(own))
        for name in MEASURED.values():
            colour, marker, _ = LOOKS[name]
            sides = [row["sides"][name] for row in own]
            panel.plot(
                *(x, [side["samples"] for side in sides], "-"),
                color=colour,
                marker=marker,
                label=f"{_NAMES[name]}, simulated",
            )
            panel.plot(
                *(x, [side["published"] for side in sides], ":"),
                color=colour,
                marker=marker,
                markerfacecolor="white",
                label=f"{_NAMES[name]}, measured",
            )
        panel.set_xticks(x, [row["microbatches"] for row in own])
        panel.set(xlabel="microbatches", title=f"{model}, p {own[0]['ranks']}")
    for panel in panels[:, 0]:
        panel.set_ylabel("samples per GPU and second")
    legend_above(figure, 4)
    return figure


def _draw_disturbed(plt: Any, rows: list[dict[str, Any]], values: dict[str, list[float]]) -> Any:
    row = rows[-1]
    figure, panels = plt.subplots(1, 3, figsize=(WIDTH, 3.4), sharey=True)
    labels = {
        "spread": "spread of op times, %",
        "delay": "mean delay of an op, % of F",
        "links": "links between nodes slower by",
    }
    for panel, (kind, label) in zip(panels, labels.items(), strict=True):
        calm, scale = (1.0, 1) if kind == "links" else (0.0, 100)
        x = [scale * value for value in (calm, *values[kind])]
        for name, side in row["sides"].items():
            colour, marker, dashes = LOOKS.get(name, LOOKS["v-half"])
            y = [100 * longer for longer in (0.0, *side[kind])]
            panel.plot(x, y, dashes, color=colour, marker=marker, label=_NAMES[name])
        panel.set(xlabel=label)
    panels[0].set_ylabel("step longer, %")
    panels[1].set_title(_case(row))
    legend_above(figure, 6)
    return figure


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "stride", 1, "of the settings, every so many-th")
    add_number(parser, "cases", 100, "cases of uneven stages")
    add_number(parser, "draws", 20, "random draws of the op times")
    run(parser, measure, lambda result: print_tables(tables(result)), draw)


if __name__ == "__main__":
    main()
