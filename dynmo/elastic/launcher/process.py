"""A process that a launcher has started."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from dynmo.elastic.launcher.failure import STOPPED
from dynmo.elastic.manager import RankProcess


@dataclass(eq=False)
class StartedProcess:
    """A started process.

    Attributes:
        number: The launcher's number.
        was_rank: Whether it has ever been a rank of the run.
        told: Whether rank 0 knows that it runs.
        runs: Whether it has entered the run.
        asked: Whether it was asked to stop.
        killed: Whether ranks have asked for its end.
        ended: Whether its end outside of the run was seen.
        released: Whether its resources were given back.
        told_end: Whether the ranks of a run that survives a dead rank know of its end.
    """

    number: int
    handle: RankProcess
    was_rank: bool
    started: float
    told: bool
    runs: bool = False
    asked: bool = False
    killed: bool = False
    ended: bool = False
    released: bool = False
    told_end: bool = False

    @property
    def code(self) -> int | None:
        return self.handle.poll()

    @property
    def failed(self) -> bool:
        """Whether it has ended, neither well nor on request."""
        return self.code not in (None, 0, STOPPED)

    def ask_to_stop(self) -> None:
        if not self.asked and self.code is None:
            self.asked = True
            self.handle.send_signal(signal.SIGTERM)
