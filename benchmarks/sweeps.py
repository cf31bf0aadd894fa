"""Every schedule over models, memory limits and numbers of microbatches.

docs/reference/schedules.md shows the figures.

attention   s / h from 0.1 to 30: the longer the sequence, the larger F and B beside W. Per layer
            and token P = 12 h^2 weights and A = 4 s h operations of attention's products make
            F = 2P + A, B = 2P + 2A, W = 2P, and the activations 34h + 5as, of which W needs 32h
            (a heads of 128; h 4096). p 8, m 24.
memory      zb-auto with memory for p to 3p microbatches, at the published times of four models
            (m = 3p)
few         no more microbatches than ranks, m = 1..p, at the published times and links: by how
            much 1F1B takes longer than zb-auto and ZB-H1; and, without links, zb-auto's and
            ZB-H1's time over (m + p - 1)(F + B) + W
published   the 12 settings of the Zero Bubble paper (table 5) under all schedules

    bubble = 1 - m (F + B + W) / span
    least  = the bubble at the lower bound
    gap    = 1 - lower bound / span

The lower bound is for the memory that the schedule was given. If it was given none, the bound is
for its own peak on every rank.

`--plot` draws docs/pictures/{attention,memory_limit,few_microbatches,published}.svg. `--read FILE`
takes the figures of an earlier `--json` instead of measuring.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple, cast

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
from benchmarks.published import table_5
from dynmo.cost.layer_cost import Costs, split_costs, uniform_costs
from dynmo.schedule.bounds import lower_bound
from dynmo.schedule.catalogue import chunks_of, make, stage_ranks_of
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import simulate

# Number of layers of each model. The published runs interleave single layers.
LAYERS = {"1.5B": 24, "6.2B": 32, "14.6B": 48, "28.3B": 64}


class Side(NamedTuple):
    """A schedule and the memory that it is given, in multiples of p."""

    schedule: str
    limit: float | None = None


SIDES = {name: Side(name) for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2")}
SIDES |= {"zb-auto p": Side("zb-auto", 1), "zb-auto 2p": Side("zb-auto", 2)}
SIDES |= {name: Side(name) for name in ("zb-v", "v-half", "v-min")}


class Setting(NamedTuple):
    """Times of a rank, all alike.

    `w_memory` is the share of a rank's activations that stays until W.
    """

    ranks: int
    f: float
    b: float
    w: float
    link: float
    w_memory: float

    def costs(self) -> Costs:
        return uniform_costs(*self)


def published_rows(per_rank: int | None = None) -> list[dict[str, Any]]:
    """Returns the rows of table 5."""
    return [
        row
        for row in table_5()
        if per_rank is None or row["microbatches"] == per_rank * row["ranks"]
    ]


def chunks_in(row: dict[str, Any], schedule: str) -> int:
    """Returns the stages of a rank. Interleaving has single layers, as in the paper."""
    if schedule == "interleaved-1f1b":
        return LAYERS[row["model"]] // row["ranks"]
    return chunks_of(schedule)


def setting_of(row: dict[str, Any], ranks: int | None = None, links: bool = True) -> Setting:
    """Returns the setting of a row of table 5."""
    link = row["t_comm_ms"] if links else 0.0
    return Setting(
        ranks or row["ranks"],
        row["t_f_ms"],
        row["t_b_ms"],
        row["t_w_ms"],
        link,
        row["w_memory_share"],
    )


def made(side: Side, setting: Setting, m: int, chunks: int | None = None) -> tuple[Schedule, Costs]:
    """Makes a schedule, and the costs of its stages."""
    p = setting.ranks
    costs = split_costs(setting.costs(), stage_ranks_of(side.schedule, p, chunks))
    caps = None if side.limit is None else [side.limit * p] * p
    return make(side.schedule, p, m, costs=costs, chunks=chunks, caps=caps), costs


def simulated(side: Side, setting: Setting, m: int, chunks: int | None = None) -> dict[str, float]:
    """Simulates one schedule."""
    p = setting.ranks
    schedule, costs = made(side, setting, m, chunks)
    # The published figures of interleaving do not count most messages from the last rank to the
    # first. `dynmo schedule` does the same.
    timeline = (
        simulate(schedule, costs, wrap_group=p)
        if side.schedule == "interleaved-1f1b"
        else simulate(schedule, costs)
    )
    peak = max(timeline.peak_memory)
    limit = peak if side.limit is None else side.limit * p
    bound = lower_bound(costs, m, caps=[limit] * p, stage_ranks=schedule.stage_ranks)
    work = m * (setting.f + setting.b + setting.w)
    return {
        "span": timeline.span,
        "bubble": 1 - work / timeline.span,
        # A bound is summed in another order. It may lie a rounding error under the work, or over
        # a span that reaches it.
        "least": max(0.0, 1 - work / bound),
        "gap": max(0.0, 1 - bound / timeline.span),
        "peak": peak,
    }


# -- the sweeps ------------------------------------------------------------------------------------


def attention_setting(ratio: float, ranks: int = 8, hidden: int = 4096, head: int = 128) -> Setting:
    """Returns the times per token in units of h^2, at s / h = ratio."""
    linear, products = 24.0, 4 * ratio  # 2P = 2 * 12 h^2; A = 4 s h
    heads, sequence = hidden / head, ratio * hidden
    share = 32 * hidden / (34 * hidden + 5 * heads * sequence)
    return Setting(ranks, linear + products, linear + 2 * products, linear, 0.0, share)


def attention(stride: int, points: int = 16, m: int = 24) -> list[dict[str, Any]]:
    """Sweeps s / h from 0.1 to 30."""
    out: list[dict[str, Any]] = []
    for i in range(0, points, stride):
        ratio = 0.1 * 300 ** (i / (points - 1))
        setting = attention_setting(ratio)
        out.append(
            {
                "ratio": ratio,
                **{"f": setting.f, "b": setting.b, "w": setting.w, "w_memory": setting.w_memory},
                "sides": {name: simulated(side, setting, m) for name, side in SIDES.items()},
            }
        )
    return out


def memory(stride: int, steps: int = 16) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for row in published_rows(3):
        setting, m = setting_of(row), row["microbatches"]
        limits = [1 + 2 * i / steps for i in range(0, steps + 1, stride)]
        points = [
            {"limit": limit, **simulated(Side("zb-auto", limit), setting, m)} for limit in limits
        ]
        out.append(
            {"model": row["model"], "ranks": setting.ranks, "microbatches": m, "points": points}
        )
    return out


def few(stride: int) -> list[dict[str, Any]]:
    """Sweeps the number of microbatches from 1 to p."""
    out: list[dict[str, Any]] = []
    for row in published_rows(3):
        for p in (8, 16):
            points: list[dict[str, Any]] = []
            for m in range(1, p + 1, stride):
                point: dict[str, Any] = {"microbatches": m}
                setting, bare = setting_of(row, p), setting_of(row, p, links=False)
                formula = (m + p - 1) * (bare.f + bare.b) + bare.w
                base = simulated(SIDES["1f1b"], setting, m)["span"]
                for name in ("zb-h1", "zb-auto p"):
                    gain = base / simulated(SIDES[name], setting, m)["span"] - 1
                    point[name] = {
                        "gain": gain,
                        "of_formula": simulated(SIDES[name], bare, m)["span"] / formula,
                    }
                points.append(point)
            out.append({"model": row["model"], "ranks": p, "points": points})
    return out


def published(stride: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for row in published_rows()[::stride]:
        setting, m = setting_of(row), row["microbatches"]
        sides: dict[str, Any] = {}
        for name, side in SIDES.items():
            chunks = chunks_in(row, side.schedule)
            sides[name] = simulated(side, setting, m, chunks)
        out.append(
            {"model": row["model"], "ranks": setting.ranks, "microbatches": m, "sides": sides}
        )
    return out


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sweeps = {"attention": attention, "memory": memory, "few": few, "published": published}
    figures = {name: sweep(options.stride) for name, sweep in sweeps.items()}
    return cast("dict[str, Any]", rounded(figures))


def rounded(value: object) -> object:
    """Rounds to seven digits, so that the order of a sum changes no result file."""
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [rounded(x) for x in cast("list[object]", value)]
    return float(f"{round(value, 12):.7g}") if isinstance(value, float) else value


# -- tables ----------------------------------------------------------------------------------------


_FEW = (0.125, 0.25, 0.5, 1.0)


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Returns the tables in Markdown by name, in percent except for times and memory."""
    return {
        "attention": _attention_table(result["attention"]),
        "memory": _memory_table(result["memory"]),
        "few": _few_table(result["few"]),
        "published": _published_table("bubble", "bubble", result["published"]),
        "gaps": _published_table("gap to the bound", "gap", result["published"]),
    }


def _attention_table(rows: list[dict[str, Any]]) -> str:
    head = ["s / h", "F", "B", "W", "W's memory", *SIDES, "least p", "least 2p"]
    lines: list[list[str]] = []
    for row in rows:
        times = [f"{row[kind] / 24:.2f}" for kind in "fbw"]
        shares = [row["w_memory"], *(row["sides"][name]["bubble"] for name in SIDES)]
        shares += [row["sides"][name]["least"] for name in ("zb-auto p", "zb-auto 2p")]
        lines.append([f"{row['ratio']:.2g}", *times, *map(_percent, shares)])
    return markdown(head, lines)


def _memory_table(rows: list[dict[str, Any]]) -> str:
    limits = [point["limit"] for point in rows[0]["points"]][::2]
    lines: list[list[str]] = []
    for row in rows:
        points = [x for x in row["points"] if x["limit"] in limits]
        pairs = [f"{_percent(x['bubble'])} / {_percent(x['least'])}" for x in points]
        lines.append([_case(row), *pairs])
    return markdown(["bubble / least", *(f"{limit:g}p" for limit in limits)], lines)


def _few_table(rows: list[dict[str, Any]]) -> str:
    sizes = ["m = p" if x == 1 else f"m = p / {round(1 / x)}" for x in _FEW]
    lines: list[list[str]] = []
    for row in rows:
        points = [x for x in row["points"] if x["microbatches"] / row["ranks"] in _FEW]
        gains = [[_percent(x[name]["gain"]) for name in ("zb-auto p", "zb-h1")] for x in points]
        lines.append([f"{row['model']}, p {row['ranks']}", *map(" / ".join, gains)])
    return markdown(["1F1B takes longer than zb-auto / ZB-H1", *sizes], lines)


def _published_table(title: str, figure: str, rows: list[dict[str, Any]]) -> str:
    lines = [[_case(x), *(_percent(x["sides"][name][figure]) for name in SIDES)] for x in rows]
    return markdown([title, *SIDES], lines)


def _case(row: dict[str, Any]) -> str:
    return f"{row['model']}, p {row['ranks']}, m {row['microbatches']}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if abs(share) < 0.9995 else "100"


# -- pictures --------------------------------------------------------------------------------------

# Colours that the colour-blind can tell apart. Marker and dashes say the same without colour.
LOOKS: dict[str, tuple[str, str, str]] = {
    "1f1b": ("#000000", "s", "-"),
    "interleaved-1f1b": ("#7f7f7f", "D", "--"),
    "zb-h1": ("#0072b2", "o", "-"),
    "zb-h2": ("#56b4e9", "o", "--"),
    "zb-auto p": ("#d55e00", "^", "-"),
    "zb-auto 2p": ("#e69f00", "^", "--"),
    "zb-v": ("#009e73", "v", "-"),
    "v-half": ("#cc79a7", "P", ":"),
    "v-min": ("#a0522d", "X", ":"),
}
_MODELS = dict(
    zip(
        LAYERS,
        (
            ("#000000", "s", "-"),
            ("#0072b2", "o", "--"),
            ("#d55e00", "^", "-."),
            ("#009e73", "v", ":"),
        ),
        strict=True,
    )
)


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws the pictures of docs/reference/schedules.md."""
    plt = pyplot()
    return {
        "attention": _draw_attention(plt, result["attention"]),
        "memory_limit": _draw_memory(plt, result["memory"]),
        "few_microbatches": _draw_few(plt, result["few"]),
        "published": _draw_published(plt, result["published"]),
    }


def _draw_attention(plt: Any, rows: list[dict[str, Any]]) -> Any:
    figure, (left, right) = plt.subplots(
        2, figsize=(WIDTH, 6.4), height_ratios=(1, 1.5), sharex=True
    )
    x = [row["ratio"] for row in rows]
    for kind, marker, dashes in (("f", "o", "-"), ("b", "s", "--"), ("w", "^", ":")):
        whole = [row["f"] + row["b"] + row["w"] for row in rows]
        label = f"{kind.upper()}, part of F + B + W"
        left.plot(
            x,
            [row[kind] / total for row, total in zip(rows, whole, strict=True)],
            dashes,
            marker=marker,
            color="#333333",
            label=label,
        )
    left.plot(
        x,
        [row["w_memory"] for row in rows],
        "-.",
        marker="x",
        color="#d55e00",
        label="activations that W needs",
    )
    left.set(xscale="log", ylim=(0, 1), title="what a microbatch takes")
    left.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for name, (colour, marker, dashes) in LOOKS.items():
        right.plot(
            x,
            [row["sides"][name]["bubble"] for row in rows],
            dashes,
            marker=marker,
            color=colour,
            label=name,
        )
    for name, text, alpha in (
        ("zb-auto p", "least at p", 0.5),
        ("zb-auto 2p", "least at 2p", 0.25),
    ):
        right.plot(
            x,
            [row["sides"][name]["least"] for row in rows],
            color=LOOKS[name][0],
            linewidth=5,
            alpha=alpha,
            label=text,
        )
    right.set(
        xscale="log",
        xlabel="sequence / hidden",
        ylabel="bubble",
        ylim=(0, None),
        title="bubble, p = 8, m = 24 (gpipe: as 1f1b)",
    )
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_memory(plt: Any, rows: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(figsize=(WIDTH, 4))
    for row in rows:
        colour, marker, dashes = _MODELS[row["model"]]
        x = [point["limit"] for point in row["points"]]
        axes.plot(
            x,
            [point["bubble"] for point in row["points"]],
            dashes,
            marker=marker,
            color=colour,
            label=_case(row),
        )
        axes.plot(
            x, [point["least"] for point in row["points"]], color=colour, linewidth=5, alpha=0.25
        )
    axes.plot([], [], color="#000000", linewidth=5, alpha=0.25, label="least (lower bound) of each")
    axes.set(
        xlabel="memory limit, in p activations of a rank",
        ylabel="bubble of zb-auto",
        ylim=(0, None),
    )
    legend_above(figure, 2)
    return figure


def _draw_few(plt: Any, rows: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4), sharey=True)
    for row in rows:
        panel = axes[(8, 16).index(row["ranks"])]
        colour, marker, dashes = _MODELS[row["model"]]
        x = [point["microbatches"] for point in row["points"]]
        for name, shown, fill in (("zb-auto p", "zb-auto", colour), ("zb-h1", "ZB-H1", "white")):
            y = [100 * point[name]["gain"] for point in row["points"]]
            panel.plot(
                x,
                y,
                dashes,
                marker=marker,
                markerfacecolor=fill,
                color=colour,
                label=f"{shown}, {row['model']}",
            )
        panel.set(xlabel="microbatches", title=f"p = {row['ranks']}", xticks=x[1::2])
    axes[0].set_ylabel("1F1B takes longer by, %")
    legend_above(figure, 4)
    return figure


def _draw_published(plt: Any, rows: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(figsize=(WIDTH, 4.2))
    for name, (colour, marker, dashes) in LOOKS.items():
        for start in range(0, len(rows), 3):
            x = range(start, start + 3)
            y = [rows[i]["sides"][name]["bubble"] for i in x]
            axes.plot(x, y, dashes, marker=marker, color=colour, label=name if start == 0 else None)
    for name, text, alpha in (
        ("zb-auto p", "least at p", 0.5),
        ("zb-auto 2p", "least at 2p", 0.25),
    ):
        y = [row["sides"][name]["least"] for row in rows]
        axes.plot(
            range(len(rows)),
            y,
            "_",
            markersize=22,
            markeredgewidth=3,
            color=LOOKS[name][0],
            alpha=alpha,
            label=text,
        )
    axes.set_xticks(
        range(len(rows)),
        [f"{row['model']}\np {row['ranks']}\nm {row['microbatches']}" for row in rows],
    )
    axes.set(ylabel="bubble (gpipe: as 1f1b)", ylim=(0, None))
    legend_above(figure, 5)
    return figure


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "stride", 1, "of the settings, every so many-th")
    run(parser, measure, lambda result: print_tables(tables(result)), draw)


if __name__ == "__main__":
    main()
