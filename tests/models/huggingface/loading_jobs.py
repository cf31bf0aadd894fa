"""Jobs of `test_loading.py`, which run on ranks of the pool."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import dynmo
from dynmo.models.huggingface.model import from_pretrained


def private_bytes() -> int:
    """Returns the resident memory of this process that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Peak:
    """Samples private memory in a thread."""

    def __init__(self) -> None:
        self.bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._end.is_set():
            self.bytes = max(self.bytes, private_bytes())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def memory(world: dynmo.World, folder: str) -> dict[str, Any]:
    """Returns the private memory that a pipeline took until it was made."""
    model = from_pretrained(folder)
    before = private_bytes()
    with Peak() as peak:
        pipeline = dynmo.Pipeline(model, world, microbatches=2)
    after = private_bytes()
    own = sum(x.nbytes for layer in pipeline.modules.values() for x in layer.parameters())
    return {"after": after - before, "peak": peak.bytes - before, "own": own}
