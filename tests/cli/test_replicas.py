"""`dynmo train` with replicas, as processes.

The error names a killed rank, and every other rank ends.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.runs import LONG, end, steps, train
from tests.processes import ranks, wait_until

REPLICAS = ("parallel.pipeline=1", "parallel.replicas=2", "parallel.zero=1", "train.micro_batch=1")


@pytest.mark.matrix
def test_killed_rank_is_named_by_its_global_rank(work: Path) -> None:
    """The other ranks wait for the killed rank in pipelines and reductions.

    Their own error messages are not printed.
    """
    process = train(work, sets=(*LONG, *REPLICAS, "dynamism.cases=[]", "balance.balancer=none"))
    wait_until(lambda: steps(work, "main") > 2, 200)
    os.kill(ranks(work)[1], signal.SIGKILL)
    done = end(process)
    assert done.status == 1
    assert "rank 1 was ended by SIGKILL" in done.line
