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
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

from dynmo.errors import WaitTimeout
from dynmo.kernels.split import gradient_dtype, zero_gradient
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.worker import Worker
from dynmo.runtime.layer.accumulation import tree_sum
from dynmo.runtime.optim.optimizer import NORM_BLOCK, Share, block_sums, fold_blocks, share_ranges
from dynmo.schedule.memory import REDUCED_AT_ONCE

_Share = TypeVar("_Share", bound="Shared")


@dataclass(frozen=True)
class Shared:
    """A parameter of a layer that all replicas have.

    Attributes:
        ranges: Range of its elements in each replica's share.
        owned: Whether this layer's optimizer updates it.
    """

    name: str
    parameter: nn.Parameter
    ranges: tuple[tuple[int, int], ...]
    owned: bool

    def length(self, replica: int) -> int:
        low, high = self.ranges[replica]
        return high - low


def shares_of(
    module: nn.Module, shared: frozenset[str], replicas: int, undivided: Collection[str] = ()
) -> list[Shared]:
    """Cuts a layer into shares, as its optimizer does."""
    named = {name: p for name, p in module.named_parameters() if name not in undivided}
    owned = [name for name in named if name not in shared]
    out: list[Shared] = []
    for group in (owned, *([name] for name in named if name in shared)):
        cuts = [
            share_ranges([named[name].numel() for name in group], Share(replica, replicas))
            for replica in range(replicas)
        ]
        out += [
            Shared(name, named[name], tuple(ranges[i] for ranges in cuts), group is owned)
            for i, name in enumerate(group)
        ]
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
            # The worker's own wait has a shorter limit and a better message, so it fails first. A
            # failed worker runs nothing more, so its error is checked.
            limit = self.peers.timeout + 5
            while (
                not done.wait(0.05)
                and self._worker.error is None
                and time.perf_counter() - start < limit
            ):
                pass
            if not done.is_set():
                me = self.peers.describe_rank(self.peers.rank)
                raise self._worker.error or WaitTimeout(
                    f"{me} waited {self.peers.timeout:g} s for its own reduction: {what}", []
                )
        self.waited += time.perf_counter() - start
        settle, self._settle = self._settle, []
        for rest in settle:
            rest()

    def close(self) -> None:
        self._finish()


def reduce_gradients(
    peers: RankGroup,
    layer: int,
    shares: Sequence[Shared],
    everywhere: bool,
    bucket: int = REDUCED_AT_ONCE,
) -> list[tuple[nn.Parameter, Tensor]]:
    """Sums one layer's gradients over the peers, in place."""
    return [
        pair
        for group in buckets(shares, bucket)
        for pair in _reduce(peers, group, everywhere, f"the gradients of layer {layer}")
    ]


def drop_missing(missing: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Sets a gradient to None again if no replica had it."""
    for parameter, present in missing:
        if not float(present):
            parameter.grad = None


def _reduce(
    peers: RankGroup, group: Sequence[Shared], everywhere: bool, what: str
) -> list[tuple[nn.Parameter, Tensor]]:
    """Reduces one bucket. Returns gradients missing here, and whether any has them."""
    absent = [s.parameter.grad is None for s in group]
    flats = [flat_gradient(s.parameter) for s in group]
    # Not from a list, which on CUDA the host would wait for.
    flags = flats[0].new_ones(len(group))
    for i, none in enumerate(absent):
        if none:
            flags[i].zero_()
    parts = [torch.cat([*_ranges(group, flats, replica), flags]) for replica in range(peers.size)]
    rows = peers.exchange(parts, [parts[peers.rank].numel()] * peers.size, what)
    del parts
    total = tree_sum(enumerate(rows), peers.size)
    assert total is not None
    sums, present = total.split([total.numel() - len(group), len(group)])
    if everywhere:
        gather_shares(peers, group, flats, sums, what)
    else:
        _write(group, flats, peers.rank, sums)
    return [(s.parameter, present[i].clone()) for i, s in enumerate(group) if absent[i]]


def gather_parameters(
    peers: RankGroup, layer: int, shares: Sequence[Shared], bucket: int = REDUCED_AT_ONCE
) -> None:
    """Gives all replicas every replica's share of one layer's parameters."""
    for group in buckets((s for s in shares if s.owned), bucket):
        flats = [s.parameter.detach().view(-1) for s in group]
        gather_shares(
            peers,
            group,
            flats,
            torch.cat(_ranges(group, flats, peers.rank)),
            f"the parameters of layer {layer}",
        )


def gather_shares(
    peers: RankGroup,
    shares: Sequence[Shared],
    flats: Sequence[Tensor],
    own_share: Tensor,
    what: str,
) -> None:
    """Fills in the flats from the shares of all replicas."""
    sizes = [sum(s.length(replica) for s in shares) for replica in range(peers.size)]
    for replica, values in enumerate(peers.exchange([own_share] * peers.size, sizes, what)):
        _write(shares, flats, replica, values)


def squared_norms(peers: RankGroup, layers: Mapping[int, Sequence[Shared]]) -> dict[int, float]:
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


def _blocks(shared: Shared) -> int:
    return -(-shared.parameter.numel() // NORM_BLOCK)


def buckets(shares: Iterable[_Share], size: int) -> Iterator[list[_Share]]:
    """Groups parameters that train by dtype. A bucket takes a part of every share."""
    groups: dict[torch.dtype, list[_Share]] = {}
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
            bucket: list[_Share] = []
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


def _ranges(shares: Sequence[Shared], flats: Sequence[Tensor], replica: int) -> list[Tensor]:
    return [flat[slice(*s.ranges[replica])] for s, flat in zip(shares, flats, strict=True)]


def _write(shares: Sequence[Shared], flats: Sequence[Tensor], replica: int, values: Tensor) -> None:
    start = 0
    for target in _ranges(shares, flats, replica):
        target.copy_(values[start : start + target.numel()])
        start += target.numel()


# -- weights that are spread over replicas ---------------------------------------------------------
#
#     weight 3 on replica 0                  replica 0   gradients of the rows of replicas 0, 1
#     weight 3 on replica 2 (other group)    replica 2   gradients of the rows of replicas 2, 3
#                                            both        the sum, as a tree over replicas 0, 1, 2, 3
#
# Each replica's rows have a gradient of their own, wherever they were computed. So the sums have
# the same bits for every placement of the weights, and for weights that are not spread.


@dataclass(frozen=True)
class SpreadWeight(Shared):
    """A weight that some of the replicas hold.

    Attributes:
        held: Whether this replica holds it. If not, `parameter` is one like it.
        gradients: Parameters with the gradients of rows computed here, by replica of the rows.
        sources: Replicas whose rows each replica computes, by replica. Empty: the replica does not
            hold the weight.
    """

    held: bool
    gradients: Mapping[int, nn.Parameter]
    sources: tuple[tuple[int, ...], ...]

    @property
    def holders(self) -> int:
        return sum(map(bool, self.sources))


def reduce_spread(
    peers: RankGroup, layer: int, weights: Sequence[SpreadWeight], bucket: int = REDUCED_AT_ONCE
) -> list[tuple[nn.Parameter, Tensor]]:
    """Sums the gradients of a layer's spread weights over the peers, in place, for all holders."""
    for weight in weights:
        if weight.holders == 1 and weight.held and weight.parameter.requires_grad:
            rows = [(source, p.grad) for source, p in sorted(weight.gradients.items())]
            weight.parameter.grad = tree_sum(rows, peers.size)
    missing: list[tuple[nn.Parameter, Tensor]] = []
    several = [weight for weight in weights if weight.holders > 1]
    # A holder sends a row for each replica that it computes.
    most_rows = max((len(sources) for weight in several for sources in weight.sources), default=1)
    for group in buckets(several, bucket // most_rows):
        missing += _reduce_spread(peers, group, f"the gradients of layer {layer}")
    for weight in weights:
        for parameter in weight.gradients.values():
            if parameter is not weight.parameter:
                parameter.grad = None
    return missing


def _reduce_spread(
    peers: RankGroup, weights: Sequence[SpreadWeight], what: str
) -> list[tuple[nn.Parameter, Tensor]]:
    """Reduces a bucket of weights that several replicas hold.

    Returns the parameters without a gradient here, and whether any replica has one. A flag behind
    each row of gradients says whether the row is there.
    """
    me, replicas = peers.rank, range(peers.size)
    like = weights[0].parameter
    empty = torch.empty(0, dtype=gradient_dtype(like), device=like.device)
    held = [weight for weight in weights if weight.held]
    flags = {
        (weight.name, source): empty.new_full((1,), parameter.grad is not None)
        for weight in held
        for source, parameter in weight.gradients.items()
    }
    absent = [w for w in held if all(p.grad is None for p in w.gradients.values())]
    parts = [
        [
            piece
            for weight in held
            for source in (weight.sources[me] if weight.sources[replica] else ())
            for piece in (
                flat_gradient(weight.gradients[source])[slice(*weight.ranges[replica])],
                flags[weight.name, source],
            )
        ]
        for replica in replicas
    ]
    # A row for each replica whose rows the sender computes, and its flag.
    sizes = [sum((w.length(me) + 1) * len(w.sources[i]) for w in held) for i in replicas]
    arrived = peers.exchange([torch.cat([empty, *part]) for part in parts], sizes, what)
    sums = _sums(held, arrived, me)
    parts = [[sums[w.name][:-1] for w in held if w.sources[i]] for i in replicas]
    sizes = [sum(w.length(i) for w in held) for i in replicas]
    arrived = peers.exchange([torch.cat([empty, *part]) for part in parts], sizes, what)
    for replica, received in enumerate(arrived):
        shares = received.split([weight.length(replica) for weight in held])
        for weight, share in zip(held, shares, strict=True):
            flat_gradient(weight.parameter)[slice(*weight.ranges[replica])] = share
    return [(weight.parameter, sums[weight.name][-1].clone()) for weight in absent]


def _sums(weights: Sequence[SpreadWeight], arrived: Sequence[Tensor], me: int) -> dict[str, Tensor]:
    """Returns the sum over this replica's range of each weight, and its flag."""
    rows: dict[str, dict[int, Tensor]] = {weight.name: {} for weight in weights}
    for replica, received in enumerate(arrived):
        start = 0
        for weight in weights:
            for source in weight.sources[replica]:
                end = start + weight.length(me) + 1
                rows[weight.name][source], start = received[start:end], end
    return {
        name: total
        for name, by_source in rows.items()  # every replica's rows are computed somewhere
        if (total := tree_sum(sorted(by_source.items()), len(arrived))) is not None
    }
