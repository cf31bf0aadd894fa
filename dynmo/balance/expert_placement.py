"""Which replica of a group computes which experts (expert parallelism). Decided by load counts,
never by times.

    4 experts, 2 ranks      holders  (0,) (0,) (1,) (1,)        one rank each
                            holders  (0, 1) (0,) (1,) (1,)      expert 0 is hot, and both have it
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertPlacement:
    """The ranks that hold each expert of a layer.

    Attributes:
        holders: Of each expert, ascending. At least one.
        ranks: Number of ranks of the group.
    """

    holders: tuple[tuple[int, ...], ...]
    ranks: int

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.holders)

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The experts of a rank, ascending."""
        return tuple(expert for expert, holders in enumerate(self.holders) if rank in holders)

    def target(self, expert: int, source: int) -> int:
        """Who computes the tokens of a rank that chose an expert: itself if it holds the expert,
        else its holders in turn.

        Args:
            expert: The expert.
            source: The rank whose tokens they are.
        """
        holders = self.holders[expert]
        return source if source in holders else holders[(source + expert) % len(holders)]


def even_placement(experts: int, ranks: int) -> ExpertPlacement:
    """Equal runs of experts, each on one rank.

    Args:
        experts: Number of experts. The ranks divide it.
        ranks: Number of ranks.
    """
    return ExpertPlacement(tuple((expert * ranks // experts,) for expert in range(experts)), ranks)
