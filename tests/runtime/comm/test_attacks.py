"""A process that does not know the token of a run can neither read nor change what ranks say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.comm.attacks import KINDS, attack, regroup

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("kind", KINDS)
def test_attacked_run_has_its_own_digest(tmp_path: Path, kind: str) -> None:
    for name in ("calm", "attacked"):
        (tmp_path / name).mkdir()
    wanted = attack(kind, tmp_path / "calm", disturb=False)
    found = attack(kind, tmp_path / "attacked")
    assert found["digest"] == wanted["digest"] is not None
    assert found["status"] == [0] * len(found["status"])


def test_ranks_that_regroup_drop_strangers() -> None:
    """A stranger gets the nonces and the hashes of the proof, and nothing else."""
    found = regroup(12)
    assert found["same"] == 12
    assert found["met anew"] > 0
    assert found["stranger"]["bytes read"] <= 2 * 64 * found["met anew"]
