"""How rank 0 tells a resource manager that ranks have left, and asks for more.

    rank 0       release(left, stay)         request(2)                      receipts()
    manager        frees their nodes           starts `dynmo train --join`     what has come of it

Rank 0 calls every method between two steps. No method waits for the manager: what takes longer runs
beside the training, and its end is a receipt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Member:
    """Where one rank runs.

    Attributes:
        rank: Its number while it was a rank of the run.
        host: Name of its machine.
        pid: Its process there.
        node: What the resource manager calls the machine or the pod. The default is `host`.
        process: The launcher's number of this process. None: no launcher of dynmo's started it.
    """

    rank: int
    host: str
    pid: int
    node: str = ""
    process: int | None = None


@dataclass(frozen=True)
class Receipt:
    """What has come of a release or a request.

    Attributes:
        kind: "released", "started" (ranks that may join soon), or "failed".
        what: One line. What was given back or started, or what went wrong and what to do.
        ranks: How many ranks it is about.
        seconds: How long the manager took.
    """

    kind: Literal["released", "started", "failed"]
    what: str
    ranks: int = 0
    seconds: float = 0.0


class Releaser(Protocol):
    """Gives ranks back to a resource manager, and asks it for others."""

    @property
    def name(self) -> str:
        """The word of `elastic.releaser`."""
        ...

    @property
    def can_request(self) -> bool:
        """Whether `request` starts ranks. If not, somebody else starts `dynmo train --join`."""
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
            count: How many. Each is a process that runs `dynmo train CONFIG --join`.
        """
        ...

    def receipts(self) -> list[Receipt]:
        """Returns what has happened since the last call."""
        ...

    def close(self) -> None:
        """Ends what runs beside the training. Called at the end of the run."""
        ...
