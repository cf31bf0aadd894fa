"""`dynmo.init` in a program that has its own process groups."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from dynmo.errors import ConfigError
from dynmo.pipeline.start import init
from tests.processes import run_script


@pytest.mark.matrix
def test_given_process_groups_and_meshes_train_the_same() -> None:
    out = run_script(Path(__file__).with_name("adopting.py"), ranks=4)
    rows = re.findall(r"(\w+) (\d) of (\d): (\w{64})", out)
    of = {
        where: [(rank, digest) for place, rank, _, digest in sorted(rows) if place == where]
        for where in ("middle", "mesh", "all")
    }
    assert [[rank for rank, _ in of[where]] for where in of] == [
        ["0", "1"],
        ["0", "1", "2", "3"],
        ["0", "1", "2", "3"],
    ]
    assert len({digest for _, digest in of["middle"] + of["all"]}) == 1
    assert len({digest for _, digest in of["mesh"]}) == 1
    assert out.count("a process group that it is not in") == 2
    # The program's own group outlives dynmo's worlds.
    assert out.count("total 4") == 4


def test_group_needs_initialized_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialized"):
        init(dist.group.WORLD or object(), device="cpu")  # type: ignore[arg-type]
