"""Sums gradients over the replicas, layer by layer.

The rank works on other layers meanwhile.

    the rank's thread   ... B W | B W | B W ── norms ── step
    the reducer's                └ layer 7 ┘└ layer 6 ┘└ layer 5 ┘

Each layer's gradients are cut into a share per replica. A share goes to its replica. That adds the
shares of all replicas as a fixed tree (`accumulation.py`), in the order of replicas. It is no
all-reduce, because that has its own order of sums. Then the sums go back to everyone. With ZeRO-1
they stay: the optimizer updates its share of the parameters, and these go to everyone.

One bucket is under way at once. It is a part of every share (`memory.REDUCED_AT_ONCE` bytes of all
shares). So a large layer needs no more memory for its reduction than a small one.

    shares of 2 replicas   | 0 0 0 0 0 | 1 1 1 1 1 |
    buckets                | a a b b c | a a b b c |
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from dynmo.kernels.split import gradient_dtype, zero_gradient
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.worker import Worker
from dynmo.runtime.layer.accumulation import tree_sum
from dynmo.runtime.optim.optimizer import NORM_BLOCK, Share, block_sums, fold_blocks, share_ranges
from dynmo.schedule.memory import REDUCED_AT_ONCE


@dataclass(frozen=True)
class ReplicatedWeight:
    """A weight of a layer that several replicas hold.

    Attributes:
        parameter: One like it, if this replica does not hold it.
        ranges: Range of its elements in each replica's share.
        sources: Replicas whose rows each replica computes, by replica. Empty: the replica does not
            hold the weight.
        owned: Whether this layer's optimizer updates it.
        is_spread: Whether a placement says which replicas hold it.
        gradients: Parameters with the gradients of rows computed here, by replica of the rows. The
            default is `parameter`.
    """

    name: str
    parameter: nn.Parameter
    ranges: tuple[tuple[int, int], ...]
    sources: tuple[tuple[int, ...], ...]
    owned: bool = True
    is_spread: bool = False
    gradients: Mapping[int, nn.Parameter] = field(default_factory=dict)

    def length(self, replica: int) -> int:
        low, high = self.ranges[replica]
        return high - low

    def rows(self, replica: int) -> dict[int, nn.Parameter]:
        """Returns the parameters whose gradients this replica has computed, by source."""
        return {
            source: self.gradients.get(source, self.parameter) for source in self.sources[replica]
        }

    @property
    def holders(self) -> int:
        return sum(map(bool, self.sources))


def replicated_weights(
    module: nn.Module, shared: frozenset[str], replicas: int, undivided: Collection[str] = ()
) -> list[ReplicatedWeight]:
    """Cuts a layer that all replicas hold into shares, as its optimizer does."""
    named = {name: p for name, p in module.named_parameters() if name not in undivided}
    owned = [name for name in named if name not in shared]
    sources = tuple((replica,) for replica in range(replicas))
    out: list[ReplicatedWeight] = []
    for group in (owned, *([name] for name in named if name in shared)):
        cuts = [
            share_ranges([named[name].numel() for name in group], Share(replica, replicas))
            for replica in range(replicas)
        ]
        for name, *ranges in zip(group, *cuts, strict=True):
            out.append(ReplicatedWeight(name, named[name], tuple(ranges), sources, group is owned))
    return out


class Reducer:
    """Runs collectives over the peers in the order of submission.

    With gloo they run in a thread of their own, with NCCL in a stream.
    """

    def __init__(self, peers: RankGroup) -> None:
        self.peers = peers
        self._worker = Worker("reducer", threaded=not peers.enqueues)
        self._stream = torch.cuda.Stream(peers.device) if peers.enqueues else None
        # Functions to call in the rank's thread once the submitted work is done.
        self._settle: list[Callable[[], None]] = []
        # Seconds of all collectives so far (on CPU), and seconds of waiting for them at a step's
        # end. The rank's own work did not hide the latter.
        self.worked = self.waited = 0.0
        # The thread ends with the reducer, even if nobody closes it.
        self._finish = weakref.finalize(self, self._worker.close)
        peers.everyone.channels.add(self)

    def submit(self, work: Callable[[], Callable[[], None] | None]) -> None:
        """Submits work. It may return a function for the rank's own thread at `finish`."""

        def run() -> None:
            start = time.perf_counter()
            with torch.no_grad():
                rest = work()
            self.worked += time.perf_counter() - start
            if rest is not None:
                self._settle.append(rest)

        if self._stream is None:
            self._worker.submit(run)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.peers.device))
            with (
                torch.cuda.stream(self._stream),
                self.peers.waits.around(self.peers.device, None, "sums over the replicas"),
            ):
                run()

    def finish(self, what: str) -> None:
        """Waits until all submitted work is done."""
        start = time.perf_counter()
        if self._stream is not None:
            torch.cuda.current_stream(self.peers.device).wait_stream(self._stream)
            self.peers.settle()
        else:
            done = threading.Event()
            self._worker.submit(done.set)
            # A failed worker runs nothing more, so its error is checked.
            with self.peers.waiting(None, what) as wait:
                while not done.wait(0.05) and self._worker.error is None and not wait.is_over:
                    pass
                if not done.is_set():
                    raise self._worker.error or self.peers.late(None, what, wait)
        self.waited += time.perf_counter() - start
        settle, self._settle = self._settle, []
        for rest in settle:
            rest()

    def close(self) -> None:
        self._finish()


# -- sums ------------------------------------------------------------------------------------------
#
#     weight 3 on replica 0                  replica 0   gradients of the rows of replicas 0, 1
#     weight 3 on replica 2 (other group)    replica 2   gradients of the rows of replicas 2, 3
#                                            both        the sum, as a tree over replicas 0, 1, 2, 3
#
# Each replica's rows have a gradient of their own, wherever they were computed. So the sums have
# the same bits for every placement of the weights. Most weights are on all replicas, which compute
# their own rows.


def reduce_gradients(
    peers: RankGroup,
    layer: int,
    weights: Sequence[ReplicatedWeight],
    everywhere: bool = True,
    bucket: int = REDUCED_AT_ONCE,
) -> list[tuple[nn.Parameter, Tensor]]:
    """Sums the gradients of a layer's weights over the peers, in place.

    Args:
        everywhere: Whether all holders get the sums. If not, each gets those of its own share.

    Returns:
        The parameters without a gradient here, and whether any replica has one.
    """
    for weight in weights:
        if weight.holders == 1 and weight.sources[peers.rank] and weight.parameter.requires_grad:
            rows = [(source, p.grad) for source, p in weight.rows(peers.rank).items()]
            weight.parameter.grad = tree_sum(rows, peers.size)
    several = [weight for weight in weights if weight.holders > 1]
    # A holder sends a row for each replica that it computes.
    most_rows = max((len(sources) for weight in several for sources in weight.sources), default=1)
    what = f"the gradients of layer {layer}"
    missing: list[tuple[nn.Parameter, Tensor]] = []
    for group in buckets(several, bucket // most_rows):
        missing += reduce_bucket(peers, group, everywhere, what)
    for weight in weights:
        for parameter in weight.gradients.values():
            if parameter is not weight.parameter:
                parameter.grad = None
    return missing


def drop_missing(missing: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Sets a gradient to None again if no replica had it."""
    for parameter, present in missing:
        if not float(present):
            parameter.grad = None


def reduce_bucket(
    peers: RankGroup, weights: Sequence[ReplicatedWeight], everywhere: bool, what: str
) -> list[tuple[nn.Parameter, Tensor]]:
    """Reduces one bucket, as `reduce_gradients` does.

    A flag behind each row of gradients says whether the row is there.
    """
    me, replicas, like = peers.rank, range(peers.size), weights[0].parameter
    empty = torch.empty(0, dtype=gradient_dtype(like), device=like.device)
    held = [weight for weight in weights if weight.sources[me]]
    absent = [all(p.grad is None for p in weight.rows(me).values()) for weight in held]
    # A flag is filled in: on CUDA the host would wait for one from a list.
    rows = [
        (weight, empty.new_full((1,), p.grad is not None), flat_gradient(p))
        for weight in held
        for p in weight.rows(me).values()
    ]
    parts = [
        [
            empty,
            *(
                piece
                for weight, flag, flat in rows
                if weight.sources[replica]
                for piece in (flat[slice(*weight.ranges[replica])], flag)
            ),
        ]
        for replica in replicas
    ]
    # A row and its flag for each replica whose rows the sender computes.
    sizes = [sum((w.length(me) + 1) * len(w.sources[i]) for w in held) for i in replicas]
    sums = _sums(held, peers.exchange(parts, sizes, what), me)
    flats = [flat_gradient(weight.parameter) for weight in held]
    _write(held, flats, me, [total[:-1] for total in sums])
    missing = [
        (weight.parameter, total[-1].clone())
        for weight, total, is_absent in zip(held, sums, absent, strict=True)
        if is_absent
    ]
    del sums  # which may be a part of all that has arrived
    if everywhere:
        pairs = list(zip(held, _ranges(held, flats, me), strict=True))
        parts = [[empty, *(share for w, share in pairs if w.sources[i])] for i in replicas]
        _gather(peers, held, flats, parts, what)
    return missing


def _sums(weights: Sequence[ReplicatedWeight], arrived: Sequence[Tensor], me: int) -> list[Tensor]:
    """Returns the sum over this replica's range of each weight, with the sum of the flags."""
    rows: list[dict[int, Tensor]] = [{} for _ in weights]
    for replica, received in enumerate(arrived):
        start = 0
        for weight, by_source in zip(weights, rows, strict=True):
            for source in weight.sources[replica]:
                end = start + weight.length(me) + 1
                by_source[source], start = received[start:end], end
    totals = (tree_sum(sorted(by_source.items()), len(arrived)) for by_source in rows)
    # Every replica's rows are computed somewhere.
    return [total for total in totals if total is not None]


def gather_parameters(
    peers: RankGroup, layer: int, shares: Sequence[ReplicatedWeight], bucket: int = REDUCED_AT_ONCE
) -> None:
    """Gives all replicas every replica's share of one layer's parameters."""
    for group in buckets((s for s in shares if s.owned), bucket):
        flats = [s.parameter.detach().view(-1) for s in group]
        own = _ranges(group, flats, peers.rank)
        _gather(peers, group, flats, [own] * peers.size, f"the parameters of layer {layer}")


def _gather(
    peers: RankGroup,
    weights: Sequence[ReplicatedWeight],
    flats: Sequence[Tensor],
    parts: Sequence[Sequence[Tensor]],
    what: str,
) -> None:
    """Fills in the weights' flats from the shares of all holders."""
    sizes = [sum(weight.length(i) for weight in weights) for i in range(peers.size)]
    for replica, received in enumerate(peers.exchange(parts, sizes, what)):
        lengths = [weight.length(replica) for weight in weights]
        _write(weights, flats, replica, received.split(lengths))


def squared_norms(
    peers: RankGroup, layers: Mapping[int, Sequence[ReplicatedWeight]]
) -> dict[int, float]:
    """Returns the squared norms of layers in shares, with the bits of `squared_norm`."""
    lengths = {index: sum(_blocks(s) for s in shares) for index, shares in layers.items()}
    table = torch.zeros(sum(lengths.values()), dtype=torch.float64)
    start = 0
    for shares in layers.values():
        for s in shares:
            if s.parameter.grad is not None:
                low, high = s.ranges[peers.rank]
                sums = block_sums(s.parameter.grad.reshape(-1)[low:high])
                table[start + low // NORM_BLOCK :][: len(sums)] = torch.tensor(
                    sums, dtype=torch.float64
                )
            start += _blocks(s)
    blocks = peers.sum(table, "the norms of the gradients").split(list(lengths.values()))
    return {index: fold_blocks(part.tolist()) for index, part in zip(lengths, blocks, strict=True)}


def _blocks(shared: ReplicatedWeight) -> int:
    return -(-shared.parameter.numel() // NORM_BLOCK)


def buckets(shares: Iterable[ReplicatedWeight], size: int) -> Iterator[list[ReplicatedWeight]]:
    """Groups parameters that train by dtype. A bucket takes a part of every share."""
    groups: dict[torch.dtype, list[ReplicatedWeight]] = {}
    for s in shares:
        if s.parameter.requires_grad:
            groups.setdefault(s.parameter.dtype, []).append(s)
    for dtype, group in groups.items():
        replicas = len(group[0].ranges)
        # Start of each parameter's part in a share, and behind them the length of the share.
        starts = [[0, *accumulate(s.length(i) for s in group)] for i in range(replicas)]
        # Gradients are float32 if parameters are of lower precision.
        step = max(1, size // max(4, dtype.itemsize) // replicas)
        for first in range(0, max(1, *(share[-1] for share in starts)), step):
            bucket: list[ReplicatedWeight] = []
            for k, s in enumerate(group):
                ranges: list[tuple[int, int]] = []
                for (low, high), share in zip(s.ranges, starts, strict=True):
                    begin = low + first - share[k]
                    ranges.append((min(high, max(low, begin)), max(low, min(high, begin + step))))
                if any(high > low for low, high in ranges) or (
                    first == 0 and not s.parameter.numel()
                ):
                    bucket.append(replace(s, ranges=tuple(ranges)))
            yield bucket


def flat_gradient(parameter: nn.Parameter) -> Tensor:
    """Returns the gradient's own memory as a vector: zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = zero_gradient(parameter)
    if not parameter.grad.is_contiguous():
        old, parameter.grad = parameter.grad, parameter.grad.contiguous()
        # This stream still reads the old memory. The stream that made it would reuse it at once.
        if old.is_cuda:
            old.record_stream(torch.cuda.current_stream(old.device))
    return parameter.grad.view(-1)


def _ranges(
    shares: Sequence[ReplicatedWeight], flats: Sequence[Tensor], replica: int
) -> list[Tensor]:
    return [flat[slice(*s.ranges[replica])] for s, flat in zip(shares, flats, strict=True)]


def _write(
    shares: Sequence[ReplicatedWeight],
    flats: Sequence[Tensor],
    replica: int,
    values: Iterable[Tensor],
) -> None:
    for target, each in zip(_ranges(shares, flats, replica), values, strict=True):
        target.copy_(each)
