"""Measures ranks against each other: speed, links and clocks. All ranks call it together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median, median_low

import torch

from dynmo.doctor.finding import Finding, State
from dynmo.elastic.manager import own_node
from dynmo.runtime.comm.agreement import share_texts
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.profiler import measure_links

SLOW = 1.3
"""A rank is slow if its products take so many times as long as the others'. Less is noise."""
_SKEW = 0.5  # seconds
_SECONDS, _ROUNDS = 0.3, 5
_WIDTH, _WIDTH_ON_CUDA = 384, 4096
# A link below these is slow for training: bytes per second, and seconds.
_BANDWIDTH, _LATENCY = 1e8, 5e-3
_BUSY = 0.9


def measure(world: RankGroup) -> list[Finding]:
    """Measures for about a second. Every rank gets the same findings."""
    hosts = share_texts(world, own_node(), "the names of all machines")
    return [*_speeds(world, hosts), *_links(world), *_clocks(world, hosts)]


def _speeds(world: RankGroup, hosts: list[str]) -> Iterator[Finding]:
    """Compares the seconds of one matrix product, while all ranks compute."""
    world.barrier("all ranks to compute")
    row = torch.tensor(_time_products(world.device), dtype=torch.float64)
    table: list[list[float]] = world.gather(row, "the speed of every rank").tolist()
    usual = median_low(seconds for seconds, _ in table)
    figures = {"seconds": [seconds for seconds, _ in table], "busy": [busy for _, busy in table]}
    fine = True
    for rank, (seconds, busy) in enumerate(table):
        if seconds <= SLOW * usual:
            continue
        fine = False
        seen = f"rank {rank} ({hosts[rank]}) takes x{seconds / usual:.1f} as long for a product"
        remedy = "look for a low clock rate, a hot device or a limit of its container"
        if busy < _BUSY:
            seen += f", and had its core for {busy:.0%} of the time"
            remedy = "end the processes that share its core, or use fewer ranks or threads"
        yield Finding("speed of ranks", State.warning, seen, remedy, figures)
    if fine:
        seen = f"a product takes {_between([seconds for seconds, _ in table], 1e3)} ms"
        yield Finding("speed of ranks", State.ok, seen, figures=figures)


def _time_products(device: torch.device) -> tuple[float, float]:
    """Returns the mean seconds of a product, and the share of them that this thread computed."""
    width = _WIDTH_ON_CUDA if device.type == "cuda" else _WIDTH
    left, right = torch.ones(2, width, width, device=device)
    done, start, cpu = -1, 0.0, 0.0
    while done < 1 or time.perf_counter() - start < _SECONDS:
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done += 1
        if not done:  # the first one warms up
            start, cpu = time.perf_counter(), time.thread_time()
    elapsed, cpu = time.perf_counter() - start, time.thread_time() - cpu
    return elapsed / done, min(1.0, cpu / elapsed)


def _links(world: RankGroup) -> Iterator[Finding]:
    """Measures neighbours' links, as a run does."""
    links = measure_links(world, list(pairwise(range(world.size))))
    if not links:
        return
    figures = {
        f"{low}-{high}": {"latency": link.latency, "seconds_of_mebibyte": link.seconds(1 << 20)}
        for (low, high), link in links.items()
    }
    slow = {
        pair: link
        for pair, link in links.items()
        if link.latency > _LATENCY or link.seconds(1 << 20) > (1 << 20) / _BANDWIDTH
    }
    rates = [(1 << 20) / link.seconds(1 << 20) for link in (slow or links).values()]
    latencies = [link.latency for link in (slow or links).values()]
    seen = f"{_between(latencies, 1e6)} us, {_between(rates, 1e-9)} GB/s in messages of 1 MiB"
    if slow:
        pairs = ", ".join(f"ranks {low} and {high}" for low, high in slow)
        remedy = (
            "check the interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and what else loads it "
            "and the cores"
        )
        yield Finding("links", State.warning, f"slow between {pairs}: {seen}", remedy, figures)
    else:
        yield Finding("links", State.ok, f"{len(links)} of neighbours: {seen}", figures=figures)


def _clocks(world: RankGroup, hosts: list[str]) -> Iterator[Finding]:
    """Compares the clocks just after all ranks have met."""
    own = torch.zeros(_ROUNDS, dtype=torch.float64)
    for turn in range(_ROUNDS):
        world.barrier("all ranks to compare clocks")
        own[turn] = time.time()
    table = world.gather(own, "the clock of every rank")
    offsets: list[float] = [median(row.tolist()) for row in table - table[0]]
    figures = {"seconds_after_rank_0": offsets}
    wrong = {hosts[rank]: offset for rank, offset in enumerate(offsets) if abs(offset) > _SKEW}
    for host, offset in wrong.items():
        seen = f"the clock of {host} is {offset:+.1f} s off that of {hosts[0]}"
        remedy = f"synchronise the clocks (NTP): logs and traces of {host} have wrong times"
        yield Finding("clocks", State.warning, seen, remedy, figures)
    if not wrong:
        seen = f"within {max(map(abs, offsets)) * 1e3:.1f} ms"
        yield Finding("clocks", State.ok, seen, figures=figures)


def _between(values: list[float], factor: float) -> str:
    low, high = (f"{value * factor:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
