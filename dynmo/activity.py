"""What this process does at the moment, for ranks that wait for it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


class Activity:
    """The sections that a process is in, and how far it is.

    Attributes:
        ticks: A count that grows whenever something is done.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self._sections: list[str] = []
        self._detail = ""

    @contextmanager
    def doing(self, what: str) -> Generator[None]:
        """Marks a section: "reads its data", say."""
        self._sections.append(what)
        self.ticks += 1
        try:
            yield
        finally:
            self._sections.remove(what)
            self._detail = ""
            self.ticks += 1

    def progress(self, what: str, done: int, total: int) -> None:
        """Says how far the present section is: ("tokenises its text", 41, 100), say."""
        self._detail = f"{what}, {100 * done // max(total, 1)} %"
        self.ticks += 1

    @property
    def text(self) -> str:
        """The innermost section with its progress. Empty outside all sections."""
        what = self._sections[-1] if self._sections else ""
        return f"{what} ({self._detail})" if what and self._detail else what or self._detail


ACTIVITY = Activity()
"""That of this process."""
