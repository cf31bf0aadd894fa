"""What ranks do together, and how it grows with their number: a pipeline, and many replicas of it.

store      All ranks are threads over one store, which one process serves in a run. Messages and
           bytes are all requests that it answers. Seconds are those of as many requests to torch's
           store, one after the other.
arithmetic The requests to that store by which gloo connects each rank to all others.
threads    All ranks are threads that call what the ranks of a run call, and hand their messages
           over in memory. Messages and bytes are those that the busiest rank sends, of the model's
           sizes. Each message waits for the one before it. Seconds are by arithmetic, for a link of
           20 us and 10 Gbit/s.
one rank   One rank alone does what each rank does for itself, with the figures of so many ranks.
           Bytes are those of the figures.
processes  A step's table, summed over 2 to 8 processes by gloo's ring and over the tree, in turn.

The model has 4 layers for each rank of a pipeline, and a replica has 2 microbatches for each.
Groups of up to 4 ranks use gloo's ring in a run, and the tree here.
`growth` is the exponent of the number of ranks, fitted from the second number on. Seconds are
medians.

python -m benchmarks.many_ranks
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import log
from queue import SimpleQueue
from random import Random
from statistics import linear_regression, median
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import alternate, elapsed, medians, run_ranks
from benchmarks.output import add_number, markdown, parser_of, print_tables, run
from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.cost.readings import Readings as LayerReadings
from dynmo.cost.readings import Times
from dynmo.elastic.manager import own_place
from dynmo.elastic.newcomer import NewcomerState
from dynmo.plan.decide import decide
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.options import Elastic
from dynmo.plan.partition import divisors, uniform
from dynmo.plan.problem import Choice, Problem, Readings, Rules, Work
from dynmo.runtime.comm.agreement import agree, maxima, share_texts
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.process_groups import await_all, claim
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.comm.tree import Tree
from dynmo.runtime.engine.executor import StepOutput
from dynmo.runtime.engine.profiler import Profiler
from dynmo.runtime.engine.rank_speeds import RankSpeeds
from dynmo.runtime.engine.step_reduction import StepReduction
from dynmo.runtime.state.exact_state import weights_digest
from dynmo.runtime.state.migration import holders, transfers

REPLICAS, PROCESSES = (1, 4, 10, 30), (2, 4, 8)
REQUESTS = 1000
LAYERS, MICROBATCHES, MICRO_BATCH = 4, 2, 4  # the first two for each rank of a pipeline
LIMIT = 120.0  # seconds of a wait
STEPS = 10_000
LINK = LinkCost(latency=2e-5, bytes_per_second=1.25e9)

Taken = tuple[float, int, int]
"""Seconds, bytes and messages of a part."""


@dataclass(frozen=True)
class Mesh:
    pipeline: int
    replicas: int

    @property
    def size(self) -> int:
        return self.pipeline * self.replicas

    @property
    def layers(self) -> int:
        return LAYERS * self.pipeline

    @property
    def microbatches(self) -> int:
        return MICROBATCHES * self.pipeline

    def layer_store(self, world: Any) -> Any:
        """Stands for a rank's `LayerStore`, without any layer."""
        model = SimpleNamespace(layers=self.layers, router_loss=None, sums=False, work=None)
        layout = SimpleNamespace(
            ranks=self.pipeline,
            replicas=self.replicas,
            microbatches=self.microbatches,
            partition=uniform(self.layers, self.pipeline),
            stage_ranks=tuple(range(self.pipeline)),
        )
        identity = SimpleNamespace(kinds=("",) * self.layers)
        return SimpleNamespace(
            world=world, model=model, layout=layout, identity=identity, layers={}
        )

    def costs(self) -> tuple[LayerCost, ...]:
        random, million = Random(0), 1_000_000
        sizes = {
            "parameters": 50 * million,
            "weight_bytes": 100 * million,
            "gradient_bytes": 200 * million,
            "optimizer_bytes": 600 * million,
            "activation_bytes": 400 * million,
            "stash_bytes": 200 * million,
            "output_bytes": 16 * million,
        }
        seconds = (random.uniform(5e-3, 15e-3) for _ in range(self.layers))
        return tuple(LayerCost(each, each, each, **sizes) for each in seconds)


# -- ranks as threads ------------------------------------------------------------------------------


class CountedStore:
    """Counts requests and their bytes: keys and values, there and back."""

    def __init__(self) -> None:
        self._store, self._lock = dist.HashStore(), Lock()
        self.requests = self.bytes = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            answer = getattr(self._store, name)(*given)
            with self._lock:
                self.requests += 1
                self.bytes += sum(map(size_of, (*given, answer)))
            return answer

        return call


def size_of(value: object) -> int:
    if isinstance(value, list):
        return sum(map(size_of, cast("list[object]", value)))
    return len(value) if isinstance(value, str | bytes) else 8 * isinstance(value, int)


class Mail:
    """Hands messages over between ranks in memory."""

    def __init__(self) -> None:
        self._boxes = defaultdict[tuple[int, int, int], SimpleQueue[Tensor]](SimpleQueue)
        self._lock = Lock()

    def box(self, source: int, to: int, tag: int) -> SimpleQueue[Tensor]:
        with self._lock:
            return self._boxes[source, to, tag]


class Mailbox:
    """A process group as one rank has it. Counts what the rank sends."""

    def __init__(self, mail: Mail, rank: int) -> None:
        self._mail, self._rank = mail, rank
        self.sent = self.bytes = 0

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Message:
        self.sent += 1
        self.bytes += tensors[0].nbytes
        self._mail.box(self._rank, to, tag).put(tensors[0].clone())
        return Message(lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Message:
        box = self._mail.box(source, self._rank, tag)
        return Message(lambda: tensors[0].copy_(box.get(timeout=LIMIT)))


class Message:
    def __init__(self, finish: Callable[[], object]) -> None:
        self._finish = finish

    def wait(self, _: timedelta) -> None:
        self._finish()


class Crowd:
    """All ranks of a mesh, as threads."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self._pool, mail = mesh, ThreadPoolExecutor(mesh.size), Mail()
        self._mailboxes = [Mailbox(mail, rank) for rank in range(mesh.size)]
        replicas, size, store = mesh.replicas, mesh.size, SignedStore(dist.HashStore())
        groups = [range(replica, size, replicas) for replica in range(replicas)]
        groups += [range(first, first + replicas) for first in range(0, size, replicas)]
        self._pipelines: list[RankGroup] = []
        for rank, mailbox in enumerate(self._mailboxes):
            group: Any = mailbox
            world = Meeting(rank, size, torch.device("cpu"), LIMIT, 0, store, group)
            world.process_groups |= {(0, *members): None for members in groups}
            self._pipelines.append(arrange(world, replicas))

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def on_all(self, act: Callable[[int], object]) -> None:
        list(self._pool.map(act, range(self.mesh.size)))

    def meet(self, store: SignedStore) -> None:
        """Meets as `Meeting.join` does."""

        def join(rank: int) -> None:
            claim(store, rank, LIMIT)
            for what in ("here", "joined"):
                await_all(store, what, self.mesh.size, LIMIT)

        self.on_all(join)

    def collective(self, act: Callable[[RankGroup], object]) -> Taken:
        """Counts what the busiest rank sends in a call with the worlds of the pipelines."""
        before = [(box.sent, box.bytes) for box in self._mailboxes]
        self.on_all(lambda rank: act(self._pipelines[rank]))
        pairs = list(zip(self._mailboxes, before, strict=True))
        sent = max(box.sent - known for box, (known, _) in pairs)
        size = max(box.bytes - known for box, (_, known) in pairs)
        return sent * LINK.latency + size / LINK.bytes_per_second, size, sent


# -- parts -----------------------------------------------------------------------------------------


def request_seconds(rounds: int) -> float:
    """Returns the seconds of a request to torch's store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def ask() -> None:
        for _ in range(REQUESTS):
            store.add("count", 1)

    return median(elapsed(ask) for _ in range(rounds)) / REQUESTS


def at_the_store(mesh: Mesh, request: float) -> dict[str, Taken]:
    counted: Any = CountedStore()
    with Crowd(mesh) as crowd:
        crowd.meet(SignedStore(counted))
    return {"meet": (counted.requests * request, counted.bytes, counted.requests)}


def by_arithmetic(mesh: Mesh, request: float) -> dict[str, Taken]:
    """Counts gloo's requests: a rank leaves its address, and reads those of all ranks."""

    def connect(*groups: tuple[int, int]) -> Taken:
        pairs = [(count, size) for count, size in groups if size > 1]
        sizes = sum(count * size * (1 + size) * address_bytes(size) for count, size in pairs)
        requests = sum(count * size * (1 + 2 * size) for count, size in pairs)
        return requests * request, sizes, requests

    pipelines = (mesh.replicas if mesh.replicas > 1 else 0, mesh.pipeline)
    return {
        "connect all ranks": connect((1, mesh.size)),
        "connect pipelines and peers": connect(pipelines, (mesh.pipeline, mesh.replicas)),
    }


class FirstValue(dist.Store):
    """Takes one value, and then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.value: str | bytes = b""

    def set(self, key: str, value: str) -> None:
        self.value = value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        raise RuntimeError

    def get(self, key: str) -> bytes:
        raise RuntimeError


def address_bytes(size: int) -> int:
    """Returns the bytes of a rank's address, in which each pair of ranks has a number."""
    store = FirstValue()
    with mock.patch.dict("os.environ", GLOO_SOCKET_IFNAME="lo"), suppress(RuntimeError):
        dist.ProcessGroupGloo(store, 0, size, timedelta(seconds=1))
    return len(store.value)


def of_threads(mesh: Mesh) -> dict[str, Taken]:
    answer, costs, count = decision_answer(mesh), mesh.costs(), mesh.layers

    def end_step(world: RankGroup) -> None:
        table = StepReduction(mesh.layer_store(world), HostClock())
        table.shared(torch.zeros(table.length, dtype=torch.float64), "the step to end")

    def gather_costs(world: RankGroup) -> None:
        profiler = Profiler(HostClock())
        maxima(world, (0.0,) * 4)
        profiler.gather_halves(world, (), profiler.gather(world, (), count))

    def gather_readings(world: RankGroup) -> None:
        profiler: Any = SimpleNamespace(readings=lambda _: None)
        RankSpeeds(mesh.layer_store(world), profiler).measure(costs, 0.0, 0)

    acts: dict[str, Callable[[RankGroup], object]] = {
        "end a step": end_step,
        "agree on a decision": lambda world: agree(world, answer, "the decision"),
        "gather costs": gather_costs,
        "gather readings for speeds": gather_readings,
        "compare digests": lambda world: weights_digest(mesh.layer_store(world)),
        "say where ranks run": lambda world: share_texts(
            world, json.dumps(vars(own_place(world.everyone.rank))), "where all ranks run"
        ),
    }
    with Crowd(mesh) as crowd, mock.patch("dynmo.runtime.comm.rank_group.FEW", 1):
        return {part: crowd.collective(act) for part, act in acts.items()}


def of_one_rank(mesh: Mesh, rounds: int) -> dict[str, Taken]:
    now = plan_of(mesh)
    layers = now.problem.layers
    readings = Readings(halves=(layers, layers), reference=now.seconds)
    rules = {
        "decide on a placement": Rules(),
        "decide on a mesh": Rules(
            "mesh", replicas=tuple(divisors(mesh.replicas * mesh.microbatches))
        ),
        "decide on a number of ranks": Rules(
            "ranks",
            elastic=Elastic(repack=True),
            replicas=now.mesh.fewer_replicas(mesh.replicas),
            available_ranks=mesh.size,
            most_ranks=mesh.size,
        ),
    }
    replicas = (mesh.replicas, 2 * mesh.replicas)
    old, new = (holders(now.partition, range(mesh.pipeline), each) for each in replicas)
    table, read = table_of(mesh)
    readings_table, measure = speeds_of(mesh)
    texts = messages_to_newcomers(mesh, now)
    acts: dict[str, tuple[Callable[[], object], int]] = {
        "read a step's table": (read, table.nbytes),
        "estimate speeds": (measure, readings_table.nbytes),
        **{
            part: (lambda asked=asked: decide(now.problem, now, asked, readings), 0)
            for part, asked in rules.items()
        },
        "let as many newcomers in": (
            lambda: messages_to_newcomers(mesh, now),
            sum(map(len, texts)),
        ),
        "list the layers that they get": (lambda: transfers(old, new), 0),
    }
    return {
        part: (median(elapsed(act) for _ in range(rounds)), size, 0)
        for part, (act, size) in acts.items()
    }


def plan_of(mesh: Mesh) -> Plan:
    layers, pairs = mesh.costs(), [(rank, rank + 1) for rank in range(mesh.pipeline - 1)]
    profile = Profile(
        layers, (), links=tuple((pair, LINK) for pair in pairs), microbatch=MICRO_BATCH
    )
    work = Work(step=STEPS // 2, end=STEPS)
    problem = Problem(profile, work, bandwidth=LINK.bytes_per_second)
    shape = problem.mesh(mesh.pipeline, mesh.microbatches, "zb-h1", mesh.replicas)
    return evaluate(problem, Choice(shape, uniform(mesh.layers, mesh.pipeline)))


def decision_answer(mesh: Mesh) -> dict[str, Any]:
    now = plan_of(mesh)
    return decide(now.problem, now, Rules(), Readings()).answer


def table_of(mesh: Mesh) -> tuple[Tensor, Callable[[], object]]:
    """Returns the table of a step, and what reads it."""
    reduction = StepReduction(mesh.layer_store(None), HostClock())
    table = torch.ones(mesh.replicas, reduction.length, dtype=torch.float64)

    def read() -> None:
        reduction.read(0, table, StepOutput(), 1.0)
        assert reduction.wrong_batch(0, table) is None

    return table, read


def speeds_of(mesh: Mesh) -> tuple[Tensor, Callable[[], object]]:
    """Returns the readings of all replicas, and what estimates speeds from them."""
    draw = torch.Generator().manual_seed(0)
    shape = mesh.replicas, mesh.layers, 10
    noise = 1 + 0.02 * torch.rand(shape, generator=draw, dtype=torch.float64)
    noise[:, :, 0] = 0.0
    readings = LayerReadings()
    readings.add_alike(Times(1e-2, 1e-2, 1e-2), several=True)
    peers = SimpleNamespace(gather=lambda *_: noise.clone())
    world = SimpleNamespace(largest=lambda own, _: own, peers=peers)
    store = mesh.layer_store(world)
    profiler: Any = SimpleNamespace(readings=lambda _: readings)
    costs = mesh.costs()
    return noise, lambda: RankSpeeds(store, profiler).measure(costs, 0.0, 0)


def messages_to_newcomers(mesh: Mesh, now: Plan) -> list[str]:
    """Returns what rank 0 tells as many newcomers as there are ranks."""
    shape, counts = (mesh.pipeline, mesh.replicas), now.partition.counts
    message = NewcomerState(
        rank=mesh.size,
        generation=1,
        step=0,
        shape=(mesh.pipeline, 2 * mesh.replicas),
        layers=counts,
        shape_before=shape,
        layers_before=counts,
        state={},
        costs=now.problem.layers,
        reference=None,
        microbatches=2 * mesh.replicas * mesh.microbatches,
    )
    return [
        message.model_copy(update={"rank": mesh.size + place}).to_text()
        for place in range(mesh.size)
    ]


# -- figures ---------------------------------------------------------------------------------------


def race(world: RankGroup, rounds: int) -> dict[str, float]:
    """Returns the seconds of gloo's ring and of the tree."""
    store = Mesh(world.size, 1).layer_store(world)
    length = StepReduction(store, HostClock()).length
    own, group = torch.zeros(length, dtype=torch.float64), world.group
    assert group is not None
    tree = Tree(group, range(world.size), world.rank, 1 << 30, timedelta(seconds=LIMIT))
    sides: dict[str, Callable[[], object]] = {
        "ring": lambda: dist.all_reduce(own),
        "tree": lambda: tree.sum(own),
    }
    timed = {name: lambda side=side: elapsed(side) for name, side in sides.items()}
    return medians(alternate(timed, rounds, warmup=3))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    meshes = [Mesh(options.pipeline, replicas) for replicas in options.replicas]
    sizes = [mesh.size for mesh in meshes]
    request = request_seconds(options.rounds)
    kinds: dict[str, Callable[[Mesh], dict[str, Taken]]] = {
        "store": lambda mesh: at_the_store(mesh, request),
        "arithmetic": lambda mesh: by_arithmetic(mesh, request),
        "threads": of_threads,
        "one rank": lambda mesh: of_one_rank(mesh, options.rounds),
    }
    rows: list[dict[str, Any]] = []
    for kind, taken_by in kinds.items():
        of_each = [taken_by(mesh) for mesh in meshes]
        for part in of_each[0]:
            seconds, bytes_, messages = zip(*(each[part] for each in of_each), strict=True)
            figures = {"seconds": seconds, "bytes": bytes_, "messages": messages}
            grows = {key: growth(sizes, each) for key, each in figures.items()}
            rows.append({"part": part, "kind": kind, **figures, "growth": grows})
    processes = [count for count in PROCESSES if count <= options.processes]
    races = [
        run_ranks("benchmarks.many_ranks:race", count, rounds=20 * options.rounds)
        for count in processes
    ]
    seconds_of = {side: [each[side] for each in races] for side in races[0]}
    return {
        "pipeline": options.pipeline,
        "ranks": sizes,
        "rows": rows,
        "race": {"processes": processes} | seconds_of,
    }


def growth(sizes: Sequence[int], figures: Sequence[float]) -> float | None:
    """Returns the exponent of the number of ranks. None if there is nothing to fit."""
    points = list(zip(sizes, figures, strict=True))[len(sizes) > 2 :]
    if len(points) < 2 or not all(figure for _, figure in points):
        return None
    return linear_regression(*zip(*((log(x), log(y)) for x, y in points), strict=True)).slope


def tables(result: dict[str, Any]) -> dict[str, str]:
    head = ["part", "measured on", f"ms, {', '.join(map(str, result['ranks']))} ranks", "growth"]
    head += ["KB", "growth", "messages", "growth"]
    scales = {"seconds": 1e3, "bytes": 1e-3, "messages": 1.0}
    rows = [
        [
            x["part"],
            x["kind"],
            *(
                cell
                for key, scale in scales.items()
                for cell in (of_sizes(x[key], scale), exponent(x["growth"][key]))
            ),
        ]
        for x in result["rows"]
    ]
    race = result["race"]
    raced = [
        [str(count), *(f"{1e3 * race[side][k]:.2f}" for side in ("ring", "tree"))]
        for k, count in enumerate(race["processes"])
    ]
    return {
        "parts": markdown(head, rows, "ll" + "r" * 6),
        "race": markdown(["processes", "gloo's ring, ms", "tree, ms"], raced, "rrr"),
    }


def of_sizes(figures: Sequence[float], scale: float) -> str:
    return ", ".join(f"{figure * scale:.3g}" for figure in figures) if any(figures) else ""


def exponent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    parser = parser_of(__doc__, reads=True)
    add_number(parser, "rounds", 3, "timed calls of each part")
    add_number(parser, "pipeline", 24, "ranks of a pipeline")
    text = "numbers of replicas (default 1 4 10 30)"
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS, help=text)
    add_number(parser, "processes", PROCESSES[-1], "most processes that race")
    run(parser, measure, lambda result: print_tables(tables(result)))
