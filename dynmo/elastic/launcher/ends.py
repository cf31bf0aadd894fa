"""The ends of processes, for the ranks of a run that survives a dead one (`elastic.recover`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from dynmo.elastic.launch import LOST, Store, end_key, ended_key, find
from dynmo.elastic.launcher.process import StartedProcess


class Ends:
    """The launcher's answers to `Arbiter`.

    Args:
        store: The store of the ranks.
        describe: Says how a process has ended.
    """

    def __init__(self, store: Store, describe: Callable[[StartedProcess], str]) -> None:
        self._store, self._describe = store, describe

    def tell(self, processes: Sequence[StartedProcess]) -> None:
        """Tells the ranks which processes have ended."""
        for process in processes:
            if not process.told_end and process.code is not None:
                with suppress(*LOST):
                    self._store.set(ended_key(process.number), self._describe(process))
                    process.told_end = True

    def make(self, processes: Sequence[StartedProcess]) -> None:
        """Ends the processes whose end a rank has asked for. SIGKILL reaches a stopped one."""
        for process in processes:
            with suppress(*LOST):
                if process.code is None and find(self._store, end_key(process.number)):
                    process.killed = True
                    process.handle.kill()

    def lost(self, gone: Sequence[StartedProcess]) -> list[StartedProcess]:
        """Returns those of the former ranks that did not leave. Their recovery has told it."""
        lost = [process for process in gone if process.failed or process.killed]
        for process in lost:
            process.ended = True
        return lost
