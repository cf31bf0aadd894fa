"""The end of a step without a barrier (Zero Bubble, section 4).

Each rank steps first and checks later. It takes the step back if the check fails.

    rank 0 | .. W W |u F F F ? B W ..
    rank 1 |  .. W W |u F F ? B W ..
    rank 2 |    .. W W |u F ? B W ..

    u  The rank's gradients are complete. It adds its part to the prefix, which holds the parts of
       the ranks before. It steps if the prefix is finite and does not clip, and hands it on.
    ?  The whole table comes back from the last rank. The step stands, or is taken back.

A squared norm only grows as parts are added, and a value that is not finite stays so. If the whole
is finite and does not clip, every rank has therefore stepped. A rank whose own gradient is bad
never steps. So every step that is taken back had a good gradient and can be inverted.

Several stages on a rank are one part: the rank has one prefix, one decision and one verdict.
Nothing above depends on the order in which parts are added. The rank begins its next step with the
F of its first stage. `lowering.routes` shows that the prefix delays nobody there. The layers of the
other stages are ready sooner than they are needed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.runtime.comm.headers import TAG_PREFIX, TAG_VERDICT
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.schedule.lowering import routes


class NormRing:
    """Passes the table of a step's end along the ranks (`lowering.routes`).

    A replica's row of it travels down as a prefix, and the whole up as the verdict. Receives are
    posted ahead.
    """

    def __init__(
        self, world: RankGroup, stage_ranks: tuple[int, ...], shape: tuple[int, int]
    ) -> None:
        self._world, self._shape = world, shape
        down, up = routes(stage_ranks)
        rank = world.rank
        place = down.index(rank)
        self.completes = completes = place + 1 == len(down)
        self._prefix_from = down[place - 1] if place else None
        self._prefix_to = None if completes else down[place + 1]
        place = up.index(rank)
        # The first rank on the way up gets the whole table from the rank that completed it. That
        # may be the rank itself.
        self._verdict_from = up[place - 1] if place else (None if completes else down[-1])
        self._verdict_to = up[place + 1] if place + 1 < len(up) else None
        self._starts_at = up[0] if completes and up[0] != rank else None
        self._posted: dict[int, tuple[Tensor, dist.Work]] = {}
        self._sent: list[tuple[Tensor, dist.Work, int]] = []
        self._whole: Tensor | None = None

    def expect(self) -> None:
        """Posts the receive of the prefix, so that it lands while the rank computes."""
        self._post(TAG_PREFIX, self._prefix_from, self._shape[1:])

    def _post(self, tag: int, source: int | None, shape: tuple[int, ...]) -> None:
        if source is not None:
            table = torch.zeros(shape, dtype=torch.float64)
            self._posted[tag] = table, self._world.receive(table, source, tag)

    def prefix(self, row: Tensor) -> Tensor:
        return (
            row
            if self._prefix_from is None
            else row + self._take(TAG_PREFIX, self._prefix_from, "the norms of the ranks before it")
        )

    def pass_on(self, prefix: Tensor) -> None:
        """Hands the prefix to the next rank. The last rank gives the whole, and sends it back."""
        self.close()
        self._post(TAG_VERDICT, self._verdict_from, self._shape)
        if self._prefix_to is not None:
            self._send(prefix, self._prefix_to, TAG_PREFIX)
        else:
            self._whole = prefix
            if self._starts_at is not None:
                self._send(prefix, self._starts_at, TAG_VERDICT)

    def verdict(self) -> Tensor:
        """Returns the whole table. It is handed on before it is read."""
        if self._verdict_from is None:
            assert self._whole is not None
            table = self._whole
        else:
            table = self._take(TAG_VERDICT, self._verdict_from, "the verdict on the step before")
        self._whole = None
        if self._verdict_to is not None:
            self._send(table, self._verdict_to, TAG_VERDICT)
        return table

    def drop(self) -> None:
        """Drops messages under way, after an error."""
        self._posted.clear()
        self._sent.clear()

    def _take(self, tag: int, source: int, what: str) -> Tensor:
        table, work = self._posted.pop(tag)
        self._world.wait(work, source, what)
        return table

    def _send(self, table: Tensor, target: int, tag: int) -> None:
        self._sent.append((table, self._world.send(table, target, tag), target))

    def close(self) -> None:
        """Waits for the sends of the step before, which were taken long ago.

        Also called before another ring takes its place. No verdict may be out then.
        """
        for _, work, target in self._sent:
            self._world.wait(work, target, "room to send a step's table")
        self._sent.clear()
