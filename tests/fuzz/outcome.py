"""How a case of the random test ended, and what two runs must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dynmo.cases import CASES
from tests.fuzz.draws import Case, Tables

EQUAL, REFUSED, FAILED = "equal", "refused", "failed"


@dataclass(frozen=True)
class CaseResult:
    """How a case ended: EQUAL, REFUSED or FAILED, and in one line why.

    `end` is what `Observed.digests` says of a case that is equal.
    """

    case: Case
    kind: str
    what: str = ""
    detail: str = ""
    end: dict[str, str] = field(default_factory=dict[str, str])


class Failure(Exception):
    """A case that failed: what, and what more there is to read."""

    def __init__(self, what: str, detail: str = "") -> None:
        super().__init__(what)
        self.what, self.detail = what, detail


class Refusal(Exception):
    """A case that dynmo refuses before its first step."""


@dataclass
class Observed:
    """The results of a run that must not depend on where it ran."""

    steps: dict[int, str] = field(default_factory=dict[int, str])
    evaluations: dict[int, str] = field(default_factory=dict[int, str])
    changes: dict[tuple[int, str], str] = field(default_factory=dict[tuple[int, str], str])
    skipped: dict[int, str] = field(default_factory=dict[int, str])
    end: dict[str, str] = field(default_factory=dict[str, str])

    def read(self, events: Sequence[Tables]) -> None:
        """Adds the events of a run.

        Floats are compared as text, so that NaN equals itself.
        """
        for event in events:
            step = event["step"]
            if event["event"] == "step":
                keys = ("loss", "gradient_norm", "learning_rate", "frozen")
                _add(self.steps, step, {key: event[key] for key in keys})
            elif event["event"] == "eval":
                _add(self.evaluations, step, [event["loss"], event.get("dense_loss")])
            elif event["event"] == "change" and event["case"] in CASES.keys() - {"experts"}:
                _add(self.changes, (step, event["case"]), [event["layers"], event["what"]])
            elif event["event"] == "skipped":
                _add(self.skipped, step, [event["loss_scale"], event["next_scale"]])
            elif event["event"] == "end":
                keys = ("loss", "weights_digest", "buffers_digest")
                self.end = {key: repr(event.get(key)) for key in keys}

    def digests(self) -> dict[str, str]:
        """The end of the run, and a digest of all its steps and evaluations."""
        course = repr([sorted(seen.items()) for seen in (self.steps, self.evaluations)])
        return {**self.end, "course": hashlib.sha256(course.encode()).hexdigest()[:16]}


def _add(seen: dict[Any, str], key: Any, value: object) -> None:
    text = repr(value)
    if seen.setdefault(key, text) != text:
        raise Failure(f"wrong bits: {key} was {seen[key]} before the resume and {text} after it")


def difference(ours: Observed, theirs: Observed) -> str | None:
    """The first difference between a run and its reference, in words, or None."""
    for name in ("steps", "skipped", "evaluations", "changes", "end"):
        a, b = getattr(ours, name), getattr(theirs, name)
        for key in sorted(a.keys() | b.keys(), key=str):
            if a.get(key) != b.get(key):
                return f"wrong bits: {name} at {key}: {a.get(key)}, on one rank {b.get(key)}"
    return None
