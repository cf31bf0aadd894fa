"""The trace file in Chrome's Trace Event Format."""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dynmo.pipeline.trace import Tracer, chrome_trace
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.engine.executor import SEND, WAIT, Interval
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


def ops(folder: Path) -> list[dict[str, Any]]:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [e for e in events if e["ph"] != "M"]


def test_run_writes_a_valid_trace(pool: Pool, tmp_path: Path) -> None:
    pool.run("train_in", 2, config=CONFIG, folder=str(tmp_path))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    events = trace["traceEvents"]
    named = {
        e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert named == {0: "rank 0", 1: "rank 1"}
    slices = ops(tmp_path)
    for e in slices:
        assert (e["ph"], e["pid"]) == ("X", 0)
        assert e["tid"] in named
        assert e["ts"] >= 0
        assert e["dur"] >= 0
        assert isinstance(e["name"], str)
    # The last two steps before the layers freeze at step 6, the first two after, and the last two
    # of the run.
    assert {e["args"]["step"] for e in slices} == {4, 5, 6, 7, 10, 11}
    seen = Counter(
        (e["tid"], e["args"]["step"], part, e["args"]["microbatch"])
        for e in slices
        for part in _parts(e["cat"])
    )
    # Layers 0 to 3 of 6 freeze: all of rank 0's three.
    expected = {
        (rank, s, "F", j) for rank in (0, 1) for s in (4, 5, 6, 7, 10, 11) for j in range(4)
    }
    expected |= {(1, s, kind, j) for s in (4, 5, 6, 7, 10, 11) for kind in "BW" for j in range(4)}
    expected |= {(0, s, kind, j) for s in (4, 5) for kind in "BW" for j in range(4)}
    assert set(seen) == expected
    assert set(seen.values()) == {1}
    for rank in (0, 1):
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == rank)
        assert all(after[0] >= before[1] - 1e-6 for before, after in pairwise(row))
    # One clock for all ranks, to a millisecond: nothing is computed before its input was.
    at = {(e["tid"], e["cat"], e["args"]["step"], e["args"]["microbatch"]): e for e in slices}
    for s in (4, 11):
        for j in range(4):
            first, second = at[0, "F", s, j], at[1, "F", s, j]
            assert second["ts"] + second["dur"] > first["ts"] - 1000


def _parts(kind: str) -> str:
    return "" if kind in (WAIT, SEND) else kind


def test_trace_events_have_names_and_categories() -> None:
    rows = [[3, 0, 1, 7, 0.5, 0.75], [3, 4, 1, 7, 0.75, 0.75]]
    *_, f, wait = chrome_trace([rows])["traceEvents"]
    assert (f["name"], f["cat"], f["ts"], f["dur"]) == ("F7", "F", 500000.0, 250000.0)
    assert (wait["name"], wait["cat"], wait["dur"]) == ("wait 7", "wait", 0.0)
    assert f["args"] == {"step": 3, "stage": 1, "microbatch": 7}


def test_rounding_makes_no_overlap() -> None:
    """An end that is rounded up may meet a start that is rounded down."""
    bounds = [i * 1.77777e-7 for i in range(2000)]
    rows = [[0, 0, 0, j, a, b] for j, (a, b) in enumerate(pairwise(bounds))]
    slices = [e for e in chrome_trace([rows])["traceEvents"] if e["ph"] == "X"]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-9 for a, b in pairwise(slices))


@pytest.mark.parametrize(
    ("steps", "kept"), [(0, []), (1, [3, 4, 9]), (3, [1, 2, 3, 4, 5, 6, 7, 8, 9])]
)
def test_tracer_keeps_the_requested_steps(tmp_path: Path, steps: int, kept: list[int]) -> None:
    tracer = Tracer(alone(), HostClock(), steps)
    for step in range(10):
        if step == 4:
            tracer.keep_around()
        start = HostClock.mark()
        tracer.observe(step, [Interval("F", 0, 0, start, HostClock.mark())])
    tracer.finish(tmp_path / "trace.json")
    if not steps:
        assert not (tmp_path / "trace.json").exists()
        return
    assert [e["args"]["step"] for e in ops(tmp_path)] == kept


def test_number_of_kept_steps_is_bounded(tmp_path: Path) -> None:
    tracer = Tracer(alone(), HostClock(), 3)
    for step in range(500):
        tracer.keep_around()
        tracer.observe(step, [Interval("F", 0, 0, HostClock.mark(), HostClock.mark())])
    tracer.finish(tmp_path / "trace.json")
    kept = [e["args"]["step"] for e in ops(tmp_path)]
    assert len(kept) <= 64 + 3
    assert kept[-1] == 499


class CoarseClock(HostClock):
    """A clock of seconds that tells times between marks as CUDA does: float32 milliseconds."""

    @staticmethod
    def elapsed(start: float, end: float) -> float:
        return float(torch.tensor((end - start) * 1000, dtype=torch.float32)) / 1000


def test_a_long_run_keeps_its_resolution(tmp_path: Path) -> None:
    """The resolution of float32 would be 8 ms after a day."""
    tracer = Tracer(alone(), CoarseClock(), 1)
    day = time.perf_counter() + 86400
    for second in (day, day + 1):
        marks = [second + j * 1e-4 for j in range(6)]
        spans = enumerate(pairwise(marks))
        tracer.observe(int(second - day), [Interval("F", 0, j, a, b) for j, (a, b) in spans])
    tracer.finish(tmp_path / "trace.json")
    assert [e["dur"] for e in ops(tmp_path)] == pytest.approx([100.0] * 5, abs=0.2)


def test_unwritable_trace_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "nowhere" / "trace.json"
    Tracer(alone(), HostClock(), 3).finish(path)
    assert caplog.messages == [f"{path} cannot be written: No such file or directory"]
