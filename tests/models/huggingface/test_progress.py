"""A rank that reads a large model says how far it is."""

from __future__ import annotations

import logging

import pytest

from dynmo.models.huggingface import progress
from tests.models.huggingface.tiny import model_of


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    model = model_of()
    caplog.clear()
    with caplog.at_level(logging.INFO, progress.__name__):
        model.build(range(2))
    return [record.getMessage() for record in caplog.records]


def test_layers_that_are_read_are_told_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(caplog) == []
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    assert told(caplog) == [f"read {number} of this rank's 2 layers" for number in (1, 2)]
