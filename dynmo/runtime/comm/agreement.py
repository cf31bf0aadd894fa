"""Comparisons and messages among all ranks of all replicas."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from dynmo.errors import DynmoError, RunError
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.waits import first_line

# Most letters of a rank's reason for a failure that the others get.
_REASON_LETTERS = 200
# Less than any digest with its sign turned.
_NONE = -1 << 62


def _short_digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def maxima(world: RankGroup, values: Sequence[float]) -> list[float]:
    """Returns the largest of the ranks' first values, of their second, and so on."""
    table = torch.tensor(values, dtype=torch.float64)
    return world.everyone.largest(table, "a measurement of every rank").tolist()


def agree(world: RankGroup, value: object, what: str) -> None:
    """Compares the text form (`repr`) of a value over all ranks of all replicas.

    Args:
        value: What this rank decided. None if it has no part.
        what: What was decided, for messages.

    Raises:
        RunError: The ranks decided differently. All ranks raise it, those without a part too.
    """
    everyone, digest = world.everyone, 0 if value is None else 1 + _short_digest(repr(value))
    # The largest and the smallest digest take a few bytes, and a table of all grows with the ranks.
    both = torch.tensor([digest, -digest if digest else _NONE])
    largest, smallest = everyone.largest(both, what).tolist()
    if largest in (0, -smallest):
        return
    said_by_all = everyone.gather(torch.tensor(digest), what).tolist()
    said = {r: each for r, each in enumerate(said_by_all) if each}
    first = min(said)
    other = [r for r, each in said.items() if each != said[first]]
    raise RunError(
        f"{everyone.describe_rank(first)} and {everyone.name_ranks(other)} disagree on {what}; "
        "do all run the same dynmo, config and data?"
    )


def first_difference(
    world: RankGroup, parts: Sequence[str], what: str
) -> tuple[int, list[int]] | None:
    """Compares a list of any length over all ranks of all replicas.

    Returns:
        None if all lists are equal. Otherwise the index of the first part that is not, and the
        ranks that have another part there than rank 0, or none. The same on every rank.
    """
    everyone = world.everyone
    digests = torch.tensor([_short_digest(part) for part in parts], dtype=torch.int64)
    row = torch.tensor([len(parts), _short_digest("\0".join(parts))])
    whole = everyone.gather(row, what)
    if bool((whole == whole[0]).all()):
        return None
    shared = int(whole[:, 0].min())
    table = everyone.gather(digests[:shared], what)
    other = table != table[0]
    differing = other.any(0).nonzero().flatten().tolist()
    if differing:
        return differing[0], other[:, differing[0]].nonzero().flatten().tolist()
    return shared, (whole[:, 0] != whole[0, 0]).nonzero().flatten().tolist()


def share_failures(world: RankGroup, error: BaseException | None, what: str) -> dict[int, str]:
    """Returns the reason of each rank that failed, by global rank, on every rank.

    Args:
        error: What this rank could not do. None if all went well.
        what: What the ranks wait for here, for messages.
    """
    text = ""
    if error is not None:
        reason = error.strerror if isinstance(error, OSError) else None
        text = (reason or first_line(error) or type(error).__name__)[:_REASON_LETTERS]
    return {rank: text for rank, text in enumerate(share_texts(world, text, what)) if text}


@contextmanager
def raised_on_all(world: RankGroup, kind: type[DynmoError], what: str) -> Iterator[None]:
    """Runs what some ranks may fail at, and raises such an error on all ranks.

    Args:
        kind: Class of the error.
        what: What the ranks wait for here, for messages.
    """
    failure: DynmoError | None = None
    try:
        yield
    except kind as error:
        failure = error
    failures = share_failures(world, failure, what)
    if failures:
        raise failure or kind(next(iter(failures.values())))


def share_texts(world: RankGroup, text: str, what: str) -> list[str]:
    """Returns the text of each rank, on every rank."""
    return [data.decode() for data in share_bytes(world, text.encode(), what)]


def share_bytes(world: RankGroup, data: bytes, what: str) -> list[bytes]:
    """Returns the bytes of each rank, on every rank."""
    everyone = world.everyone
    sizes = everyone.gather(torch.tensor(len(data)), what).tolist()
    padded = bytearray(data.ljust(max(sizes) or 1, b"\0"))
    table = everyone.gather(torch.frombuffer(padded, dtype=torch.uint8), what)
    return [row.numpy().tobytes()[:size] for row, size in zip(table, sizes, strict=True)]


class NotWritten(RunError):
    """Some rank could not write its part of a folder."""


class Attempt:
    """The parts that ranks write of a folder.

    Args:
        partial: The folder until it is complete. It is removed if a rank fails.
        untouched: What the failure leaves as it was, for the error.
    """

    def __init__(self, world: RankGroup, partial: Path, untouched: str) -> None:
        self._world, self._partial, self._untouched = world, partial, untouched
        self._failure: Exception | None = None

    @contextmanager
    def part(self) -> Iterator[None]:
        """Runs one part. Keeps its error for `agree`, and later parts may fail as well."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    def agree(self, what: str) -> None:
        """Raises NotWritten on every rank if a part failed on any."""
        failures = share_failures(self._world, self._failure, what)
        if not failures:
            return
        if self._world.everyone.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)
        why = "; ".join(f"rank {rank}: {reason}" for rank, reason in failures.items())
        raise NotWritten(
            f"{self._partial} could not be written ({why}); {self._untouched}"
        ) from self._failure
