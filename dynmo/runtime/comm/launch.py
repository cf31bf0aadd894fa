"""The names of `dynmo.launch` that a rank uses."""

from dynmo.launch.environment import FOR_RANKS_ON_CUDA, most_local_ranks, rank_environment
from dynmo.launch.rank_side import (
    describe,
    enter_rank,
    is_local_rank,
    quiet_torch,
    report_failure,
)
from dynmo.launch.supervisor import spawn

__all__ = [
    "FOR_RANKS_ON_CUDA",
    "describe",
    "enter_rank",
    "is_local_rank",
    "most_local_ranks",
    "quiet_torch",
    "rank_environment",
    "report_failure",
    "spawn",
]
