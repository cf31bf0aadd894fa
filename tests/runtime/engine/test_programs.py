"""What the program of a step tells the profiler and the cases."""

from __future__ import annotations

from collections.abc import Iterable
from unittest import mock

from dynmo.runtime.comm.clock import HostClock
from tests.runtime.alone import emulated, gpt, ids, run_step, tokens
from tests.runtime.fake_time import emulated_time


def test_share_that_other_processes_take_of_a_step_is_noted() -> None:
    def half(start: float, end: float) -> float:
        return (end - start) / 2

    engine = emulated(f=[1] * 3, b=[1] * 3, w=[1] * 3)
    with emulated_time(), mock.patch.object(HostClock, "seconds", staticmethod(half)):
        run_step(engine, 0, ids(), ids(), lr=0.0)
    assert engine.profiler.preempted == 0.5


def test_layers_from_the_first_in_another_mode_on_have_changed() -> None:
    """Outputs that a case keeps depend on all layers before."""
    engine, changed = gpt(), list[Iterable[int]]()
    engine.programs.frozen_prefix = lambda _: lambda prefix: prefix.run(prefix.inputs)
    engine.store.on_change = changed.append
    run_step(engine, 0, *tokens(0), lr=0.1)
    assert [*changed[-1]] == []
    for index in (2, 4):
        engine.store.own[index][0].eval()
    run_step(engine, 1, *tokens(1), lr=0.1)
    assert [*changed[-1]] == [2, 3, 4, 5]
