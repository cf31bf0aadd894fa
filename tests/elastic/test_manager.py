"""What ranks say of themselves."""

from __future__ import annotations

import pytest

from dynmo.elastic.manager import own_place


@pytest.mark.parametrize(
    ("launcher", "stays"), [(None, [True, False]), ("n1", [True, True]), ("n2", [False, False])]
)
def test_machine_of_the_store_stays(
    monkeypatch: pytest.MonkeyPatch, launcher: str | None, stays: list[bool]
) -> None:
    """dynmo's launcher serves the store, and rank 0 otherwise."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.delenv("DYNMO_LAUNCHER_NODE", raising=False)
    if launcher is not None:
        monkeypatch.setenv("DYNMO_LAUNCHER_NODE", launcher)
    assert [own_place(rank).stays for rank in range(2)] == stays
