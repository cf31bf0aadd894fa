"""Buffers that a forward writes to, and finds again as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dynmo.errors import RunError
from dynmo.runtime.buffers import FoundBuffers, WrittenBuffers


class Writing(nn.Module):
    count: Tensor
    grown: Tensor
    large: Tensor
    made: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("count", torch.zeros(())), ("grown", torch.ones(2)), ("large", torch.ones(5)), ("made", None)):
            self.register_buffer(name, value)

    def write(self) -> None:
        self.count.add_(1)
        self.grown = torch.cat([self.grown, self.grown[-1:] + 1])
        self.made = torch.ones(3) if self.made is None else self.made + 1

    @property
    def now(self) -> list[object]:
        return [None if b is None else b.tolist() for b in (self.count, self.grown, self.large, self.made)]


def test_a_step_that_begins_again_finds_them_as_they_were() -> None:
    """Also one that has another shape by then, or is another tensor."""
    module = Writing()
    buffers = WrittenBuffers([module])
    buffers.note(keep=True)
    module.write()
    buffers.learn()
    before = module.now
    buffers.note(keep=True)
    module.write()
    buffers.put_back()
    assert module.now == before


def test_an_f_that_runs_again_finds_what_it_found_and_leaves_what_is_there() -> None:
    module, other = Writing(), Writing()
    buffers = FoundBuffers(module, 3)
    found = buffers.watch()
    module.write()
    first = found()
    assert sorted(name for _, name in first) == ["count", "grown", "made"], "what it does not write to is not kept"
    watching = buffers.watch()
    module.write()
    second = watching()
    now, kept = module.now, module.count
    for each, times in ((first, 0), (second, 1)):
        with buffers.put_back(each):
            other.__init__()
            for _ in range(times):
                other.write()
            assert module.now == other.now
            module.write()
        assert module.now == now
        assert module.count is kept, "its version is what autograd saw"


def test_one_that_it_did_not_write_to_at_first() -> None:
    module = Writing()
    buffers = FoundBuffers(module, 3)
    found = buffers.watch()
    module.write()
    found()
    found = buffers.watch()
    module.large.mul_(2)
    with pytest.raises(RunError, match=r"layer 3 has written to the buffer 'large', .*leave it out of train\.recompute"):
        found()
