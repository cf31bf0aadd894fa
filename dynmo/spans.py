"""Spans of a run as OpenTelemetry (`metrics.to = ["opentelemetry"]`).

    run NAME
      step         each step
      rebalance    a decision that moves layers, with its parts `decide` and `move`
      checkpoint, eval, reshape, ...

Each event of the log is a span with the event's fields. It ends at the event's time. The variables
OTEL_* say where spans go, as for any program.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import entry_points
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, set_span_in_context

from dynmo.change_events import RebalanceEvent
from dynmo.errors import ConfigError, not_installed
from dynmo.event_log import to_json
from dynmo.events import EndEvent, EvalEvent, Event


class Spans:
    """Makes spans of the events of a run, and sends them in the background.

    Args:
        name: Name of the run.

    Raises:
        ConfigError: No exporter has the name in OTEL_TRACES_EXPORTER.
    """

    def __init__(self, name: str) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "dynmo"}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        exporter = _exporter()
        if exporter is not None:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("dynmo")
        self._name = f"run {name}"
        self._run: Span | None = None
        self._last = 0.0  # time of the last event

    def __call__(self, event: Event) -> None:
        end, fields = event.time, to_json(event)
        seconds = fields.get("waited" if event.event == "data" else "seconds", 0.0)
        if isinstance(event, EvalEvent):  # it follows the event of its step
            seconds = end - self._last
        if isinstance(event, EndEvent):
            seconds = 0.0  # the whole run's
        self._last = end
        if self._run is None:
            self._run = self._tracer.start_span(self._name, start_time=_ns(end - seconds))
        span = self._span(event.event, end - seconds, end, self._run, fields)
        if isinstance(event, RebalanceEvent):
            decided = end - seconds + event.decide_seconds
            self._span("decide", end - seconds, decided, span)
            self._span("move", decided, end, span)

    def _span(
        self,
        name: str,
        start: float,
        end: float,
        parent: Span,
        fields: dict[str, Any] | None = None,
    ) -> Span:
        """Makes a span of a past time."""
        attributes = {
            f"dynmo.{key}": value if isinstance(value, str | float | int) else json.dumps(value)
            for key, value in (fields or {}).items()
            if value is not None and key not in ("event", "time")
        }
        span = self._tracer.start_span(
            name, set_span_in_context(parent), attributes=attributes, start_time=_ns(start)
        )
        span.end(_ns(end))
        return span

    def close(self) -> None:
        """Ends the run's span, and waits a limited time for all spans to be sent."""
        if self._run is not None:
            self._run.end(_ns(self._last))
        self._provider.shutdown()


def _exporter() -> SpanExporter | None:
    """Returns the exporter that OTEL_TRACES_EXPORTER names. None for "none"."""
    name = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "none":
        return None
    entry = name
    if name == "otlp":
        is_grpc = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") == "grpc"
        entry = "otlp_proto_grpc" if is_grpc else "otlp_proto_http"
    for found in entry_points(group="opentelemetry_traces_exporter", name=entry):
        return found.load()()
    package = f"opentelemetry-exporter-{entry.replace('_', '-')}"
    raise ConfigError(
        f"OTEL_TRACES_EXPORTER={name}: {not_installed(package)}, or set console or none"
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
