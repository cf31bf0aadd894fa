"""Set-up compiles every loop. Whoever adds a loop must add it there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from types import ModuleType

from numba.core.dispatcher import Dispatcher

from dynmo.cases.experts import routing
from dynmo.cases.pruning import csr
from dynmo.cases.sparse_attention import hashed, shared
from dynmo.plan import _kernels, _replay_kernels, bisection, chunks
from dynmo.schedule import graph
from dynmo.schedule.automatic import _list_loops, _vshape_loops, _zero_bubble_loops
from dynmo.train.compile_ahead import prepare


def loops(modules: Iterable[ModuleType]) -> list[Dispatcher]:
    values = (value for module in modules for value in vars(module).values())
    return [value for value in values if isinstance(value, Dispatcher)]


def test_every_jit_loop_is_compiled_at_set_up() -> None:
    """The loops are those of sparse layers, for float32, and of the balancers."""
    layers = loops((csr, hashed, shared))
    users = inspect.getsource(bisection) + inspect.getsource(chunks)
    used = set(re.findall(r"kernels\.(\w+)\(", users))
    used |= {"replay", "run_clocks", "in_order"}
    others = loops((_kernels, _replay_kernels, graph))
    balancers = [loop for loop in others if loop.__name__ in used]
    assert len(layers) >= 4
    assert {loop.__name__ for loop in balancers} == used
    prepare()
    assert all(loop.signatures for loop in loops((routing,)))
    searches = loops((graph, _list_loops, _vshape_loops, _zero_bubble_loops))
    assert all(len(loop.signatures) <= 1 for loop in searches)
    once = {loop.__name__ for loop in searches if loop.signatures}
    assert once >= {"run_list", "cycles", "block", "play", "search", "polish", "run_back"}
    for loop in layers + balancers:
        texts = [str(signature) for signature in loop.signatures]
        assert texts, f"{loop.__name__} is not compiled"
        floating = " ".join(text for text in texts if "float" in text)
        if loop in layers and floating:
            assert "float32" in floating, f"{loop.__name__}: {texts}"
