"""Decisions of a run: written, read, and asked again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dynmo.cost.input_file import read_text
from dynmo.errors import InputError
from dynmo.files import parse_json
from dynmo.plan.decide import Decision, Kind, Readings, Rules, decide
from dynmo.plan.evaluate import evaluate
from dynmo.plan.problem import Choice, Problem

IN_RUN = "decisions.jsonl"  # name of the records' file in a run's folder


@dataclass(frozen=True)
class DecisionRecord:
    """One decision: what was known, and the answer as JSON.

    Attributes:
        now: The choice with which the run trained.
    """

    problem: Problem
    now: Choice
    rules: Rules
    readings: Readings
    answer: dict[str, Any]

    @property
    def kind(self) -> Kind:
        return self.rules.kind

    @property
    def stays(self) -> bool:
        """Whether nothing changes."""
        return not (self.answer["change"] or self.answer["remade"])

    def again(self) -> Decision:
        """Decides again from what the run had known."""
        problem = self.problem
        return decide(problem, evaluate(problem, self.now), self.rules, self.readings)

    def to_text(self) -> str:
        """Returns the record as one line of JSON without defaults. Floats read back exactly."""
        data = _RECORD.dump_python(self, mode="json", exclude_defaults=True)
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> DecisionRecord:
        return _RECORD.validate_python(parse_json(text))


_RECORD = TypeAdapter(DecisionRecord)


def read_records(path: Path) -> Iterator[DecisionRecord]:
    """Reads the decisions that a run wrote. A torn last line (the run was cut off) is left out."""
    lines = read_text(path, str(path)).split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                yield DecisionRecord.from_text(line)
        except ValueError as error:
            if line.startswith('{"kind":') and '"situation":' in line:
                raise InputError(
                    f"{path} is of an earlier version of dynmo, which alone can ask its decisions "
                    "again; read it with that version"
                ) from None
            if number == len(lines):
                return
            first = str(error).splitlines()[0]
            raise InputError(f"{path}, line {number} is no decision of a run: {first}") from None
