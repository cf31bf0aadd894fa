"""The protocol by which rank 0 gives ranks back, and asks for more.

    rank 0       release(left, stay)         request(2)                      receipts()
    manager        frees their nodes           starts `dynmo train --join`     results of both

Rank 0 calls every method between two steps. No method waits for the manager. Longer work runs
beside the training, and its end is a receipt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Member:
    """The place where one rank runs.

    Attributes:
        rank: Number of the rank in the run.
        host: Name of its machine.
        pid: Number of its process there.
        node: The resource manager's name of the machine or the pod. The default is `host`.
        process: The launcher's number of this process. None if no launcher of dynmo's started it.
    """

    rank: int
    host: str
    pid: int
    node: str = ""
    process: int | None = None


@dataclass(frozen=True)
class Receipt:
    """The result of a release or a request.

    Attributes:
        kind: "released", "started" (ranks that may join soon), or "failed".
        what: One line about the result. After a failure it says what went wrong and what to do.
        ranks: Number of ranks of the release or the request.
        seconds: Seconds that the manager took.
    """

    kind: Literal["released", "started", "failed"]
    what: str
    ranks: int = 0
    seconds: float = 0.0


class Releaser(Protocol):
    """Gives ranks back to a resource manager, and asks it for others."""

    @property
    def name(self) -> str:
        """Name of the releaser in `elastic.releaser`."""
        ...

    @property
    def can_request(self) -> bool:
        """True if `request` starts ranks. If not, the user starts `dynmo train --join`."""
        ...

    def release(self, left: Sequence[Member], stay: Sequence[Member]) -> None:
        """Begins to give ranks back.

        Args:
            left: Ranks that hold nothing any more. Their processes have ended, end now, or are
                parked.
            stay: The ranks that go on.
        """
        ...

    def request(self, count: int) -> None:
        """Begins to ask for more ranks.

        Args:
            count: Number of ranks. Each is a process that runs `dynmo train CONFIG --join`.
        """
        ...

    def receipts(self) -> list[Receipt]:
        """Returns the receipts since the last call."""
        ...

    def close(self) -> None:
        """Ends the work beside the training. Called at the end of the run."""
        ...
