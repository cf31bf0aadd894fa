"""Process meshes, and what their replicas reduce and share."""

from __future__ import annotations

from itertools import product

import pytest

from dynmo.errors import ConfigError
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.schedule.memory import REDUCED_AT_ONCE
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.runtime.alone import alone

JOBS = "tests.runtime.mesh_jobs:"


def test_views_of_the_same_ranks(pool: Pool) -> None:
    """Rank r contributes 2^r, so that a sum shows which ranks took part."""
    ranks = pool.run(JOBS + "shape", 4, replicas=[2, 4, 1, 2])
    two, four, one = ([r[i] for r in ranks] for i in range(3))
    assert [r[3] for r in ranks] == two, "the same shape again"
    # rank, size, replica, replicas; sums over pipeline, peers, all; from the rank before; the first
    # replica's sum; name
    assert two == [
        [0, 2, 0, 2, 0b0101, 0b0011, 15, 0b0100, 0b0101, "rank 0 (replica 0)"],
        [0, 2, 1, 2, 0b1010, 0b0011, 15, 0b1000, 0b0101, "rank 1 (replica 1)"],
        [1, 2, 0, 2, 0b0101, 0b1100, 15, 0b0001, 0b0101, "rank 2 (replica 0)"],
        [1, 2, 1, 2, 0b1010, 0b1100, 15, 0b0010, 0b0101, "rank 3 (replica 1)"],
    ]
    assert four == [[0, 1, r, 4, 2**r, 15, 15, 0, 1, f"rank {r} (replica {r})"] for r in range(4)]
    assert one == [
        [r, 4, 0, 1, 15, 2**r, 15, 2 ** ((r - 1) % 4), 15, f"rank {r}"] for r in range(4)
    ]


def test_uneven_number_of_replicas_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 ranks cannot be 2 replicas"):
        arrange(alone(), 2)
    assert arrange(alone(), 1).replicas == 1


def test_disagreement_names_global_ranks_and_replicas(pool: Pool) -> None:
    """Log files are named by global rank."""
    said = pool.run(JOBS + "disagree", 4)
    assert {tuple(x) for x in said} == {
        (
            "RunError",
            (
                "rank 0 (replica 0) and ranks 1 (replica 1), 3 (replica 1) disagree on the plan; "
                "do all run the same dynmo, config and data?"
            ),
        )
    }


def test_missing_reduction_of_a_peer_is_named(pool: Pool) -> None:
    """The limit of the collective, which names the rank, comes first."""
    kind, text = pool.run(JOBS + "reduction_fails", 4)[0]
    waited = "rank 0 (replica 0) waited 0.5 s for rank 1 (replica 1): the gradients of layer 3"
    assert (kind, text) == (
        "WaitTimeout",
        f"{waited}; where it only takes longer, raise parallel.timeout",
    )


@pytest.mark.parametrize(
    ("replicas", "everywhere", "bucket"),
    mostly_matrix(
        product((2, 3, 4), (True, False), (REDUCED_AT_ONCE, 20_000)),
        everyday=[(2, True, REDUCED_AT_ONCE), (3, True, 20_000), (4, False, 20_000)],
    ),
)
def test_gradients_of_replicas_are_summed_in_shares(
    pool: Pool, replicas: int, everywhere: bool, bucket: int
) -> None:
    for result in pool.run(JOBS + "reduce", replicas, everywhere=everywhere, bucket=bucket):
        assert result["bad"] == []
        assert result["cut"], "no parameter was cut"
        assert result["norm"] == result["expected"]


@pytest.mark.parametrize(("replicas", "name"), [(2, "sgd"), (3, "adamw")])
def test_optimizer_state_shares_form_the_whole_state(pool: Pool, replicas: int, name: str) -> None:
    assert pool.run(JOBS + "states", replicas, name=name) == [[]] * replicas
