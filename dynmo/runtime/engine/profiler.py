"""Measured costs of every layer: seconds of F, B and W, condensed once a step.

Layers are timed one by one in the first steps after a change. Their graphs are then apart. In all
other steps only stages are timed, and the layers' times are scaled so that they sum to the stage's:

    step       0 1 2 3 4 | 5 6 7 8 ...        k | k+1 ... k+5 | ...
    timed      layers    | stages             ^ | layers      | stages
                                     a stage takes another time than is known

Readings are robust to noise. The clock leaves out time that other processes took (`clock.py`).
Medians leave out single readings (`cost/readings.py`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, fields, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from dynmo.cost.layer_cost import LayerCost, LinkCost, most_pending_gradients
from dynmo.cost.readings import WINDOW, Readings, Times, scale_to
from dynmo.kernels.grouped_linear import gradient_parameters
from dynmo.kernels.split import gradient_bytes
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.comm.headers import TAG_LINKS
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.worker import Worker
from dynmo.runtime.engine.executor import SEND, WAIT, Interval
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.optim.optimizer import LayerOptimizer
from dynmo.schedule.op import Kind


def weight_bytes(module: nn.Module) -> int:
    """Returns the bytes of parameters and buffers, such as those of a packed weight."""
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


OpMark = tuple[Kind, Any, Any, list[tuple[Any, Any]]]
"""Mark of a layer's op: kind, start, end, and the parts of W inside a BW (`Layer.marks`)."""


APART = WINDOW
"""Steps in which layers are timed after a change."""
DRIFT, JUMP = 0.03, 0.15
"""A stage takes another time if three steps differ so far from what is known, or one step does."""
_STEPS = 3


class _StageTimes:
    """What a stage has taken since its layers were last timed."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._newest: deque[float] = deque(maxlen=_STEPS)

    def differs(self, total: float, noise: float) -> bool:
        """Adds a step's total. Returns whether the stage takes another time than is known.

        Args:
            noise: The share by which the total may be off.
        """
        self._newest.append(total)
        if len(self._first) < _STEPS:
            self._first.append(total)
        known = median(self._first)
        drift = median(self._newest) - known if len(self._newest) == _STEPS else 0.0
        is_far = abs(drift) > max(DRIFT, noise) * known
        return is_far or abs(total - known) > max(JUMP, noise) * known


def _noise(ops: Iterable[Sequence[float]]) -> float:
    """Returns three standard errors of the sum of the ops' medians, as a share of it."""
    total = errors = 0.0
    for seconds in ops:
        middle = median(seconds)
        total += middle
        spread = median(abs(each - middle) for each in seconds)
        # A normal distribution has its quartiles at 0.67 deviations, and a median the 1.25-fold
        # error of a mean.
        errors += 1.25 * spread / 0.67 / math.sqrt(len(seconds))
    return 3 * errors / total if total else 0.0


class Profiler:
    """Times layers and stages.

    Attributes:
        spent: Seconds of observing.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._readings: dict[int, Readings] = {}
        # Steps in which layers are still to be timed, and the stages' times otherwise.
        self._left = APART
        self._stages: dict[int, _StageTimes] = {}
        self._preempted: deque[float] = deque(maxlen=WINDOW)
        self.spent = 0.0

    def forget(self, layers: Iterable[int]) -> None:
        for index in layers:
            self._readings.pop(index, None)
        self._time_layers()

    def _time_layers(self) -> None:
        self._left = APART
        self._stages.clear()
        for readings in self._readings.values():
            readings.condense()

    def begin(self, layers: Iterable[Layer]) -> None:
        """Begins a step. Says whether its layers are timed one by one."""
        layers = list(layers)
        is_timed = self._left > 0 or any(layer.index not in self._readings for layer in layers)
        for layer in layers:
            layer.is_timed = is_timed

    def observe(self, layers: Iterable[Layer]) -> None:
        """Takes the marks of one finished step. The clock must be settled."""
        start = time.perf_counter()
        timed = [layer for layer in layers if layer.marks]
        for layer in timed:
            self._readings.setdefault(layer.index, Readings()).add(*self._read(layer.marks))
            layer.marks.clear()
        self._left -= bool(timed)
        self.spent += time.perf_counter() - start

    def observe_stages(
        self, stages: Mapping[int, Sequence[Layer]], intervals: Iterable[Interval]
    ) -> None:
        """Takes the times of stages in a step in which no layer was timed."""
        if any(layer.is_timed for layers in stages.values() for layer in layers):
            return
        start = time.perf_counter()
        ops = defaultdict[tuple[int, str], list[float]](list)
        for s in intervals:
            seconds = None if s.kind in (WAIT, SEND) else self._clock.seconds(s.start, s.end)
            if seconds is not None:
                ops[s.stage, s.kind].append(seconds)
        for stage, layers in stages.items():
            f, b, w, bw = (median(ops.get((stage, kind), (0.0,))) for kind in Kind)
            readings = [self._readings[layer.index] for layer in layers]
            if w == 0.0:
                known = [each.unscaled for each in readings]
                share = sum(x.w for x in known) / (sum(x.b + x.w for x in known) or 1.0)
                b, w = (1 - share) * (b or bw), share * (b or bw)
            scale_to(readings, Times(f, b, w))
            noise = _noise(each for (at, _), each in ops.items() if at == stage)
            if self._stages.setdefault(stage, _StageTimes()).differs(f + b + w, noise):
                self._time_layers()
                break
        self.spent += time.perf_counter() - start

    def observe_ops(self, intervals: Iterable[Interval]) -> None:
        """Notes the share of one step's op time that other processes took."""
        seconds = elapsed = 0.0
        for s in intervals:
            known = None if s.kind in (WAIT, SEND) else self._clock.seconds(s.start, s.end)
            if known is not None:
                seconds += known
                elapsed += self._clock.elapsed(s.start, s.end)
        self._preempted.append(1 - seconds / elapsed if elapsed else 0.0)

    @property
    def preempted(self) -> float:
        """The median share of op time in which other processes took this rank's core."""
        return median(self._preempted) if self._preempted else 0.0

    def _read(self, marks: Sequence[OpMark]) -> list[list[float]]:
        """Returns a step's readings of F, B and W. A doubtful one counts if it is alone."""

        def read(seconds: Callable[[Any, Any], float | None]) -> list[list[float]]:
            return [[s for s in kind if s is not None] for kind in _by_kind(marks, seconds)]

        readings = read(self._clock.seconds)
        if all(readings):
            return readings
        doubtful = read(self._clock.elapsed)
        return [known or other for known, other in zip(readings, doubtful, strict=True)]

    def readings(self, index: int) -> Readings | None:
        return self._readings.get(index)

    def seconds(self, index: int) -> Times:
        readings = self._readings.get(index)
        return Times() if readings is None else readings.seconds

    def gather(
        self,
        world: RankGroup,
        layers: Iterable[tuple[Layer, LayerOptimizer]],
        count: int,
        copies: bool = False,
        accumulation_groups: int = 1,
    ) -> tuple[LayerCost, ...]:
        """Gathers every layer's cost on the slowest replica, the same on every rank."""
        table = torch.zeros(count, len(fields(LayerCost)), dtype=torch.float64)
        for layer, optimizer in layers:
            gradients = sum(
                gradient_bytes(p) for p in gradient_parameters(layer.module) if p.requires_grad
            )
            pending = most_pending_gradients(accumulation_groups // world.replicas)
            # Shapes alone tell the workspaces, which stay 0 here.
            cost = LayerCost(
                *self.seconds(layer.index),
                parameters=sum(p.numel() for p in layer.module.parameters()),
                weight_bytes=weight_bytes(layer.module),
                gradient_bytes=gradients,
                optimizer_bytes=optimizer.state_bytes,
                activation_bytes=layer.meter.activation_bytes,
                stash_bytes=layer.meter.stash_bytes,
                output_bytes=layer.meter.output_bytes,
                rollback_bytes=copies * optimizer.rollback_bytes,
                pending_gradient_bytes=pending * gradients,
            )
            table[layer.index] = torch.tensor(astuple(cost), dtype=torch.float64)
        world.everyone.largest(table, "everyone's layer costs")
        rows: list[list[float]] = table.tolist()
        return tuple(LayerCost(row[0], row[1], row[2], *map(int, row[3:])) for row in rows)

    def gather_halves(
        self, world: RankGroup, layers: Iterable[int], costs: Sequence[LayerCost]
    ) -> tuple[tuple[LayerCost, ...], ...]:
        """Returns the costs from half of the readings alone, the same on every rank.

        Only times differ: bytes and parameters are counted, and one count is exact.
        """
        unknown = Times(math.inf, math.inf, math.inf)
        table = torch.zeros(len(costs), 3, len(unknown), dtype=torch.float64)
        for index in layers:
            readings = self._readings.get(index, Readings())
            table[index] = torch.tensor(
                [readings.seconds, *(readings.halves or (unknown, unknown))], dtype=torch.float64
            )
        world.everyone.largest(table, "everyone's readings")
        if not table.isfinite().all():
            return ()
        return tuple(
            tuple(
                _in_proportion(cost, *layer[0], *layer[half])
                for cost, layer in zip(costs, table.tolist(), strict=True)
            )
            for half in (1, 2)
        )


def _in_proportion(
    cost: LayerCost, f: float, b: float, w: float, half_f: float, half_b: float, half_w: float
) -> LayerCost:
    return replace(
        cost,
        f=cost.f * half_f / f if f else half_f,
        b=cost.b * half_b / b if b else half_b,
        w=cost.w * half_w / w if w else half_w,
    )


def _by_kind(
    marks: Sequence[OpMark], seconds: Callable[[Any, Any], float | None]
) -> tuple[list[float | None], ...]:
    """Returns readings of F, B and W in order, None where `seconds` knows none."""
    f, b, w = list[float | None](), list[float | None](), list[float | None]()
    for kind, start, end, inside in marks:
        whole, parts = seconds(start, end), [seconds(*pair) for pair in inside]
        if kind is Kind.F:
            f.append(whole)
        elif kind is Kind.W:
            w.append(whole)
        elif kind is Kind.B:
            b.append(whole)
        else:
            weight = _total(*parts)
            w.append(weight)
            b.append(_rest(whole, weight))
    return f, b, w


def _rest(whole: float | None, part: float | None) -> float | None:
    """Returns a whole without a part, or None if one is unknown or the part is longer.

    It seems longer if the thread lost its core. The whole is then CPU time. The part is elapsed
    time, of which a virtual machine took some unseen.
    """
    rest = None if whole is None or part is None else whole - part
    return rest if rest is not None and rest >= 0 else None


def _total(*seconds: float | None) -> float | None:
    known = [x for x in seconds if x is not None]
    return sum(known) if len(known) == len(seconds) else None


Pair = tuple[int, int]


def measure_links(
    world: RankGroup, pairs: Sequence[Pair], sizes: Pair = (1 << 10, 1 << 20), repeats: int = 5
) -> dict[Pair, LinkCost]:
    """Measures the cost of each pair's link, alike on all ranks. All call it.

    Takes the median of several ping-pongs, with pauses, as messages have in training. Back to back
    they would be several times faster than any real message: caches, threads and cores are awake
    then. Pairs that share no rank are measured at once.

    Args:
        pairs: Pairs of ranks, the lower rank first.
        sizes: Bytes of a small and a large message.
        repeats: Number of counted ping-pongs for each size.
    """
    table = torch.zeros(len(pairs), 2, dtype=torch.float64)
    world.open_channels([(TAG_LINKS, low, high) for low, high in pairs])
    for together in _rounds(pairs):
        for low, high in together:
            if world.rank not in (low, high):
                continue
            peer = high if world.rank == low else low
            times = [_ping(world, peer, size, repeats) for size in sizes]
            if world.rank == low:
                per_byte = max(0.0, (times[1] - times[0]) / (sizes[1] - sizes[0]))
                table[pairs.index((low, high))] = torch.tensor(
                    [max(0.0, times[0] - per_byte * sizes[0]), per_byte]
                )
        world.barrier(_LINKS)
    world.everyone.largest(table, "the link times")
    links = (
        LinkCost(latency, 1 / per_byte if per_byte else float("inf"))
        for latency, per_byte in table.tolist()
    )
    return dict(zip(pairs, links, strict=True))


def _rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Divides the pairs into rounds, so that no rank is twice in one."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        free = (known for known in rounds if not any(set(pair) & set(other) for other in known))
        concurrent = next(free, None)
        if concurrent is None:
            rounds.append(concurrent := [])
        concurrent.append(pair)
    return rounds


PAUSE = 0.005  # seconds
_LINKS = "the links to be measured"


def _ping(world: RankGroup, peer: int, size: int, repeats: int) -> float:
    """Returns the seconds one way, sent and received as channels do.

    The first exchange opens the connection and is not counted.
    """
    if world.enqueues:
        return _ping_on_device(world, peer, size, repeats)
    sender = Worker("links", threaded=True)
    buffer = torch.zeros(size, dtype=torch.uint8, device=world.device)
    times: list[float] = []
    for _ in range(repeats + 1):
        incoming = world.receive(torch.empty_like(buffer), peer, TAG_LINKS)
        time.sleep(PAUSE)
        start = time.perf_counter()
        if world.rank > peer:
            world.wait(incoming, peer, _LINKS)
        sender.submit(lambda: world.wait(world.send(buffer, peer, TAG_LINKS), peer, _LINKS))
        if world.rank < peer:
            world.wait(incoming, peer, _LINKS)
        times.append((time.perf_counter() - start) / 2)
    sender.close()
    return median(times[1:])


def _ping_on_device(world: RankGroup, peer: int, size: int, repeats: int) -> float:
    """Returns the seconds one way on a CUDA device.

    A communicator has one stream for both directions. A receive that is posted first would hold up
    the send that it waits for.
    """
    buffer = torch.zeros(size, dtype=torch.uint8, device=world.device)
    both = [world.send, world.receive] if world.rank < peer else [world.receive, world.send]
    times: list[float] = []
    for _ in range(repeats + 1):
        time.sleep(PAUSE)
        start = time.perf_counter()
        for act in both:
            world.wait(act(buffer, peer, TAG_LINKS), peer, _LINKS)
        world.settle()
        times.append((time.perf_counter() - start) / 2)
    return median(times[1:])
