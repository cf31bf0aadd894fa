"""Whoever adds a loop sees to it that set-up compiles it."""

from __future__ import annotations

from numba.core.dispatcher import Dispatcher

from dynmo.kernels import csr_loops, hash_attention, shared_qk
from dynmo.kernels.prepare import prepare

INNER = {"_blocks"}  # compiled with the loops that call it


def test_every_loop_is_compiled_for_float32() -> None:
    loops = [loop for module in (csr_loops, hash_attention, shared_qk) for loop in vars(module).values() if isinstance(loop, Dispatcher)]
    loops = [loop for loop in loops if loop.__name__ not in INNER]
    assert len(loops) >= 8
    prepare()
    for loop in loops:
        texts = [str(signature) for signature in loop.signatures]
        assert texts, f"{loop.__name__} is not compiled"
        floating = [text for text in texts if "float" in text]
        assert not floating or any("float32" in text for text in floating), f"{loop.__name__}: {texts}"
