"""Spans of a run, as OpenTelemetry's own exporters get them."""

from __future__ import annotations

import http.server
import sys
import threading
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dynmo import spans
from dynmo.change_events import ChangeEvent, RebalanceEvent
from dynmo.errors import ConfigError
from dynmo.events import CheckpointEvent, DataEvent, EndEvent, EvalEvent, Event, StepResult
from dynmo.metrics import open_sink


def step(number: int, time: float) -> StepResult:
    return StepResult(number, 3.5, 100.0, 0.25, 0.5, 2.0, None, 1e-3, (2, 3), 1, time=time)


EVENTS: list[Event] = [
    DataEvent(0, 0.5, 64, 16, 0, time=1000.5),
    step(0, 1002.0),
    EvalEvent(0, 2.5, 200.0, time=1003.0),
    RebalanceEvent(1, 0, (2, 3), (3, 2), 9, 1.0, 0.25, "why", 0.5, 0.75, time=1005.0),
    ChangeEvent(1, "freezing", (0, 1), "frozen", {"rate": 1}, time=1005.0),
    CheckpointEvent(1, "a", 5, 0.5, time=1006.0),
    EndEvent(2, 3.5, "a" * 64, 900.0, "done", time=1007.0),
]


def sent(folder: Path, events: list[Event]) -> None:
    sink = open_sink("opentelemetry", folder, "mine")
    for event in events:
        sink(event)
    sink.close()


def test_each_event_is_a_span_of_its_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(spans, "_exporter", lambda: exporter)
    sent(tmp_path, EVENTS)
    found = exporter.get_finished_spans()
    parents = {x.context.span_id: x.name for x in found if x.context is not None}
    times = {
        x.name: (
            x.parent and parents[x.parent.span_id],
            (x.start_time or 0) / 1e9,
            (x.end_time or 0) / 1e9,
        )
        for x in found
    }
    run = "run mine"
    assert times == {
        "data": (run, 1000.0, 1000.5),
        "step": (run, 1000.0, 1002.0),
        "eval": (run, 1002.0, 1003.0),
        "rebalance": (run, 1004.0, 1005.0),
        "decide": ("rebalance", 1004.0, 1004.75),
        "move": ("rebalance", 1004.75, 1005.0),
        "change": (run, 1005.0, 1005.0),
        "checkpoint": (run, 1005.5, 1006.0),
        "end": (run, 1007.0, 1007.0),
        run: (None, 1000.0, 1007.0),
    }
    named = {x.name: dict(x.attributes or {}) for x in found}
    assert named["step"]["dynmo.loss"] == 3.5
    assert named["step"]["dynmo.step"] == 0
    assert named["step"]["dynmo.layers"] == "[2, 3]"
    assert "dynmo.gradient_norm" not in named["step"], "there was none"
    assert named["change"]["dynmo.options"] == '{"rate": 1}'
    assert all(x.resource.attributes["service.name"] == "dynmo" for x in found)


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans over HTTP, as a collector does."""

    names: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.names += [span.name for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_usual_variables_say_where_spans_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Collector.names = []
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        sent(tmp_path, EVENTS[:2])
        server.shutdown()
    assert Collector.names == ["data", "step", "run mine"]


def test_spans_need_an_exporter_that_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    sent(tmp_path, EVENTS)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ConfigError, match=r"^OTEL_TRACES_EXPORTER=zipkin: .* pip install"):
        sent(tmp_path, EVENTS)
    monkeypatch.delitem(sys.modules, "dynmo.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"^opentelemetry-sdk is not installed; install it with"):
        sent(tmp_path, EVENTS)
