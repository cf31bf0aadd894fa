"""Batches that are made ahead of need."""

from __future__ import annotations

import threading

import pytest

from dynmo.data.ahead import Ahead


def test_each_number_is_made_once_and_ahead() -> None:
    made, third = list[int](), threading.Event()

    def make(number: int) -> int:
        made.append(number)
        if number == 5:
            third.set()
        return 10 * number

    ahead = Ahead(make, depth=2)
    assert ahead.take(3) == 30
    assert third.wait(10), "the next two are made without being asked for"
    assert ahead.take(4) == 40
    assert ahead.take(4) == 40
    assert ahead.error(5) is None
    assert ahead.waited > 0
    ahead.close()
    assert made[:3] == [3, 4, 5]
    assert len(set(made)) == len(made)


def test_error_is_known_before_its_number_is_taken() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise ValueError("no sample")
        return number

    ahead = Ahead(make)
    assert ahead.take(1) == 1
    assert str(ahead.error(2)) == "no sample"
    with pytest.raises(ValueError, match="no sample"):
        ahead.take(2)
    ahead.close()
