"""The trace file in Chrome's Trace Event Format: what ranks did, beside the plan."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.pipeline.trace import Tracer
from dynmo.pipeline.trace_events import KINDS, Row, TracedStep, chrome_trace
from dynmo.plan.partition import Layout, Partition
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.engine.executor import WAIT, Interval, StepOutput
from dynmo.runtime.engine.step_reduction import StepRecord
from tests.perfetto import query
from tests.pool import Pool
from tests.runtime.alone import alone

CONFIG: dict[str, Any] = {
    "model": {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 8},
    "train": {"steps": 12, "global_batch": 8, "micro_batch": 2},
    "parallel": {"pipeline": 2},
    "pipeline": {"schedule": "zb-h1"},
    "balance": {"balancer": "none"},
    "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[6, 4]]}},
    "trace": {"steps": 2},
}
PASSES = ("F", "B", "W", "BW")
MEASURED, PLANNED = 2, 3


def spans(folder: Path, process: int = MEASURED) -> list[dict[str, Any]]:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    found = [e for e in events if e["ph"] == "X" and e["pid"] == process]
    prefix = "planned " if process == PLANNED else ""
    return [e | {"cat": e["cat"].removeprefix(prefix)} for e in found]


@pytest.fixture(scope="module")
def ran(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ran")
    pool.run("train_in", 2, config=CONFIG, folder=str(folder))
    return folder


@pytest.mark.parametrize("process", [MEASURED, PLANNED])
def test_run_writes_what_its_ranks_did_and_the_plan(ran: Path, process: int) -> None:
    trace = json.loads((ran / "trace.json").read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    slices = spans(ran, process)
    ranks = {
        e["tid"]: int(e["args"]["name"].removeprefix("rank "))
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == process
    }
    assert sorted(ranks.values()) == [0, 1]
    assert all(e["ts"] >= 0 <= e["dur"] for e in slices)
    # The last two steps before the layers freeze at step 6, the first two after, and the last two
    # of the run.
    assert {e["args"]["step"] for e in slices} == {4, 5, 6, 7, 10, 11}
    seen = Counter(
        (ranks[e["tid"]], e["args"]["step"], part, e["args"]["microbatch"])
        for e in slices
        for part in e["cat"]
        if e["cat"] in PASSES
    )
    # Layers 0 to 3 of 6 freeze: all of rank 0's three.
    expected = {
        (rank, s, "F", j) for rank in (0, 1) for s in (4, 5, 6, 7, 10, 11) for j in range(4)
    }
    expected |= {(1, s, kind, j) for s in (4, 5, 6, 7, 10, 11) for kind in "BW" for j in range(4)}
    expected |= {(0, s, kind, j) for s in (4, 5) for kind in "BW" for j in range(4)}
    assert set(seen) == expected
    assert set(seen.values()) == {1}
    for thread in ranks:
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == thread)
        assert all(after[0] >= before[1] - 2e-3 for before, after in pairwise(row))
    # One clock for all ranks, to a millisecond: nothing is computed before its input was.
    at = {
        (ranks[e["tid"]], e["cat"], e["args"]["step"], e["args"].get("microbatch")): e
        for e in slices
    }
    for s in (4, 11):
        for j in range(4):
            first, second = at[0, "F", s, j], at[1, "F", s, j]
            assert second["ts"] + second["dur"] > first["ts"] - 1000
    if process == MEASURED:
        updates = {key[:3] for key in at if key[1] == "optimizer"}
        assert updates == {(rank, "optimizer", s) for rank in (0, 1) for s in (4, 5, 6, 7, 10, 11)}


def test_perfetto_reads_the_figures_that_the_log_has(ran: Path) -> None:
    """Span and idle share are computed in PerfettoSQL from the passes, and so are the messages."""
    log = map(json.loads, (ran / "events.jsonl").read_text().splitlines())
    logged = {e["step"]: e for e in log if e["event"] == "step"}
    wrong, figures, told, messages = query(
        ran / "trace.json",
        "SELECT name, value FROM stats WHERE severity != 'info' AND value > 0",
        """
        WITH rank AS (
            SELECT
                extract_arg(slice.arg_set_id, 'args.step') AS step,
                sum(iif(category IN ('F', 'B', 'W', 'BW'), thread_dur, 0)) AS busy,
                max(slice.ts + slice.dur) - min(slice.ts) AS span
            FROM slice
            JOIN thread_track ON track_id = thread_track.id
            JOIN thread USING (utid)
            JOIN process USING (upid)
            WHERE process.name = 'measured' AND category NOT IN ('optimizer', 'sums over ranks')
            GROUP BY step, utid
        )
        SELECT step, max(span) / 1e9 AS span, 1 - avg(busy) / max(span) AS idle FROM rank
        GROUP BY step
        """,
        """
        SELECT
            extract_arg(arg_set_id, 'args.step') AS step,
            extract_arg(arg_set_id, 'args.loss') AS loss,
            extract_arg(arg_set_id, 'args.span ms') / 1e3 AS span,
            extract_arg(arg_set_id, 'args.idle share, measured') AS idle,
            extract_arg(arg_set_id, 'args.idle share, planned') AS planned_idle,
            extract_arg(arg_set_id, 'args.makespan ms, planned') / 1e3 AS planned
        FROM slice WHERE category = 'step'
        """,
        """
        SELECT process.name AS what, source.name AS source, target.name AS target,
            extract_arg(source.arg_set_id, 'args.step') AS step, count(*) AS messages
        FROM flow
        JOIN slice source ON slice_out = source.id
        JOIN slice target ON slice_in = target.id
        JOIN thread_track ON source.track_id = thread_track.id
        JOIN thread USING (utid) JOIN process USING (upid)
        WHERE extract_arg(source.arg_set_id, 'args.stage')
            != extract_arg(target.arg_set_id, 'args.stage')
        GROUP BY what, source, target, step
        """,
    )
    assert not wrong, "Perfetto reads every event"
    assert {row["step"] for row in figures} == {row["step"] for row in told}
    assert {row["step"] for row in figures} == {4, 5, 6, 7, 10, 11}
    for row in (*figures, *told):
        step = logged[row["step"]]
        span = sum(step["busy"]) / len(step["busy"]) / (1 - step["idle_ratio"])
        assert row["idle"] == pytest.approx(step["idle_ratio"], abs=1e-4)
        assert row["span"] == pytest.approx(span, rel=1e-4)
        assert row.get("loss", step["loss"]) == step["loss"]
        assert row.get("planned", 1) > 0
        assert 0 < row.get("planned_idle", 0.5) < 1
    found = {
        (row["what"], row["step"], row["source"][-1], row["target"][-1], "forward" in row["source"])
        for row in messages
        if ("forward" in row["source"]) == ("forward" in row["target"])
    }
    assert len(found) == len(messages) == sum(row["messages"] for row in messages)
    assert found == {
        (what, step, str(j), str(j), is_forward)
        for what in ("measured", "planned")
        for step in (4, 5, 6, 7, 10, 11)
        for is_forward in (True, *[False] * (step < 6))
        for j in range(4)
    }


def traced(number: int = 3, ranks: int = 1, links: dict[Any, Any] | None = None) -> TracedStep:
    layout = Layout("1f1b", ranks, 1, 2, Partition((1,) * ranks), (*range(ranks),), frozenset())
    return TracedStep(number, math.nan, 0.25, 1.0, layout, links or {})


def row(kind: str, stage: int, microbatch: int, start: float, end: float) -> Row:
    return Row(3, KINDS.index(kind), stage, microbatch, 0, start, end, end - start)


def test_the_plan_is_the_same_order_at_the_median_of_each_stage() -> None:
    """Rank 1 was held up in its first forward, and a message takes half a second."""
    first = [row("F", 0, 0, 7, 8), row("F", 0, 1, 8, 9), row("B", 0, 0, 30, 31)]
    first += [row("B", 0, 1, 40, 41), row("W", 0, 0, 41, 42), row("W", 0, 1, 42, 43)]
    second = [row("F", 1, 0, 9, 20), row("BW", 1, 0, 20, 22), row("F", 1, 1, 22, 23)]
    second += [row("BW", 1, 1, 23, 25)]
    link = {(0, 1): LinkCost(0.25, 4.0)}
    layers = [LayerCost(0, 0, 0, output_bytes=1)] * 2
    events = chrome_trace([first, second], [traced(ranks=2, links=link)], layers)["traceEvents"]
    planned = {
        (e["tid"] % 10_000, e["name"]): (e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events
        if e["ph"] == "X" and e["pid"] == PLANNED
    }
    assert planned == {
        (0, "forward 0"): (7, 1),
        (0, "forward 1"): (8, 1),
        (1, "forward 0"): (8.5, 6),
        (1, "backward 0"): (14.5, 2),
        (1, "forward 1"): (16.5, 6),
        (1, "backward 1"): (22.5, 2),
        (0, "input gradient 0"): (17, 1),
        (0, "input gradient 1"): (25, 1),
        (0, "weight gradient 0"): (26, 1),
        (0, "weight gradient 1"): (27, 1),
    }
    (step,) = [e for e in events if e["pid"] == 1 and e["ph"] == "X"]
    assert step["args"]["makespan ms, planned"] == pytest.approx(21e3)
    assert step["args"]["makespan ms, measured"] == pytest.approx(36e3)
    assert "loss" not in step["args"], "JSON has no NaN"


def test_steps_do_not_overlap_although_ranks_do() -> None:
    """Rank 0 begins step 4 while the optimizer of rank 1 is still in step 3."""
    first = [row("F", 0, 0, 7, 8), row("F", 0, 0, 10, 12)._replace(step=4)]
    second = [row("F", 1, 0, 8, 9), row("optimizer", 1, 0, 9, 11)]
    steps = [traced(3, ranks=2), traced(4, ranks=2)]
    events = chrome_trace([first, second], steps)["traceEvents"]
    found = [(e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e.get("cat") == "step"]
    assert found == [(7, 3), (10, 2)]


def test_a_plan_that_is_longer_than_its_step_delays_the_next_plan() -> None:
    """The link was measured at six seconds. Messages took none."""
    first = [row("F", 0, 0, 0, 1), row("F", 0, 1, 1, 2), row("BW", 0, 0, 4, 5)]
    first += [row("BW", 0, 1, 6, 7)]
    second = [row("F", 1, 0, 1, 2), row("BW", 1, 0, 2, 3), row("F", 1, 1, 3, 4)]
    second += [row("BW", 1, 1, 4, 5)]
    tables = [
        [*table, *(x._replace(step=4, start=x.start + 8, end=x.end + 8) for x in table)]
        for table in (first, second)
    ]
    steps = [traced(step, ranks=2, links={(0, 1): LinkCost(6.0, 1.0)}) for step in (3, 4)]
    events = chrome_trace(tables, steps, [LayerCost(0, 0, 0)] * 2)["traceEvents"]
    planned = [e for e in events if e["ph"] == "X" and e["pid"] == PLANNED]
    begins = [min(e["ts"] / 1e6 for e in planned if e["args"]["step"] == step) for step in (3, 4)]
    assert begins == [0, 18]


def test_tracing_changes_no_bit(pool: Pool, ran: Path, tmp_path: Path) -> None:
    pool.run("train_in", 2, config=CONFIG | {"trace": {"steps": 0}}, folder=str(tmp_path))
    assert not (tmp_path / "trace.json").exists()
    with_it, without = (
        json.loads((folder / "events.jsonl").read_text().splitlines()[-1])["weights_digest"]
        for folder in (ran, tmp_path)
    )
    assert with_it == without


def test_a_step_that_a_rank_took_along_has_no_plan() -> None:
    events = chrome_trace([[row("F", 0, 0, 7, 8)]], [traced(ranks=2)])["traceEvents"]
    assert [e["pid"] for e in events if e["ph"] == "X"] == [MEASURED, 1]
    assert not [e for e in events if e["ph"] in "sf"]


def test_trace_events_have_names_and_categories() -> None:
    rows = [Row(3, 0, 1, 7, 0, 0.5, 0.75, 0.2), row(WAIT, 1, 7, 0.75, 0.75)]
    rows += [row("optimizer", 1, 0, 1.0, 1.5)]
    f, wait, optimizer, sums = [e for e in chrome_trace([rows], [])["traceEvents"] if "ts" in e]
    assert (f["name"], f["cat"], f["ts"], f["dur"]) == ("forward 7", "F", 500000.0, 250000.0)
    assert f["tdur"] == 200000.0
    assert (wait["name"], wait["cat"], wait["dur"]) == ("wait 7", "wait", 0.0)
    assert f["args"] == {"step": 3, "stage": 1, "microbatch": 7}
    assert optimizer["name"] == "optimizer"
    assert (sums["name"], sums["ts"], sums["dur"]) == ("sums over ranks", 750000.0, 250000.0)


def test_rounding_makes_no_overlap() -> None:
    """An end that is rounded up may meet a start that is rounded down."""
    bounds = [i * 1.77777e-9 for i in range(2000)]
    rows = [row("F", 0, j, a, b) for j, (a, b) in enumerate(pairwise(bounds))]
    slices = [e for e in chrome_trace([rows], [])["traceEvents"] if e["ph"] == "X"]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-9 for a, b in pairwise(slices))


def observe(tracer: Tracer, step: int, intervals: list[Interval]) -> None:
    output, layout = StepOutput(intervals=intervals), traced().layout
    tracer.observe(StepRecord(step, 1.0, 1.0, (), (1.0,), (1.0,), (0,), output), layout, {})


def pass_now() -> list[Interval]:
    start = HostClock.mark()
    return [Interval("F", 0, 0, start, HostClock.mark())]


@pytest.mark.parametrize(
    ("steps", "kept"), [(0, []), (1, [3, 4, 9]), (3, [1, 2, 3, 4, 5, 6, 7, 8, 9])]
)
def test_tracer_keeps_the_requested_steps(tmp_path: Path, steps: int, kept: list[int]) -> None:
    tracer = Tracer(alone(), HostClock(), steps)
    for step in range(10):
        if step == 4:
            tracer.keep_around()
        observe(tracer, step, pass_now())
    tracer.finish(tmp_path / "trace.json")
    if not steps:
        assert not (tmp_path / "trace.json").exists()
        return
    assert [e["args"]["step"] for e in spans(tmp_path)] == kept


def test_number_of_kept_steps_is_bounded(tmp_path: Path) -> None:
    tracer = Tracer(alone(), HostClock(), 3)
    for step in range(500):
        tracer.keep_around()
        observe(tracer, step, pass_now())
    tracer.finish(tmp_path / "trace.json")
    kept = [e["args"]["step"] for e in spans(tmp_path)]
    assert len(kept) <= 64 + 3
    assert kept[-1] == 499


class CoarseClock(HostClock):
    """A clock of seconds that tells times between marks as CUDA does: float32 milliseconds."""

    @staticmethod
    def elapsed(start: float, end: float) -> float:
        return float(torch.tensor((end - start) * 1000, dtype=torch.float32)) / 1000

    @staticmethod
    def seconds(start: float, end: float) -> float:
        return end - start


def test_a_long_run_keeps_its_resolution(tmp_path: Path) -> None:
    """The resolution of float32 would be 8 ms after a day."""
    tracer = Tracer(alone(), CoarseClock(), 1)
    day = time.perf_counter() + 86400
    for second in (day, day + 1):
        marks = [second + j * 1e-4 for j in range(6)]
        ends = enumerate(pairwise(marks))
        observe(tracer, int(second - day), [Interval("F", 0, j, a, b) for j, (a, b) in ends])
    tracer.finish(tmp_path / "trace.json")
    assert [e["dur"] for e in spans(tmp_path)] == pytest.approx([100.0] * 5, abs=0.2)


def test_unwritable_trace_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "nowhere" / "trace.json"
    Tracer(alone(), HostClock(), 3).finish(path)
    assert caplog.messages == [f"{path} cannot be written: No such file or directory"]
