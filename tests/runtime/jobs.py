"""What the pool's ranks run for the tests of the runtime. Each function takes the job's world first; arguments and results are JSON."""

from __future__ import annotations

import hashlib
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from dynmo.api import Pipeline, StepResult
from dynmo.balance.partition import Partition, moves, uniform
from dynmo.config import parse
from dynmo.errors import DynmoError, RankDied, RunError, WaitTimeout
from dynmo.kernels.seeds import mix
from dynmo.models.emulated import make_layers
from dynmo.models.model import load_model
from dynmo.runtime import checkpoint
from dynmo.runtime.clock import HostClock
from dynmo.runtime.executor import WAIT, Executor, mean_loss
from dynmo.runtime.lanes import OneLane
from dynmo.runtime.loss_scale import LossScaler
from dynmo.runtime.migrate import Arrival, contents, exchange, fill
from dynmo.runtime.optimizer import LayerOptimizer, OptimizerSettings
from dynmo.runtime.p2p import Transport
from dynmo.runtime.post_validation import NON_FINITE
from dynmo.runtime.profiler import measure_links
from dynmo.runtime.slots import Slots
from dynmo.runtime.split_backward import Layer
from dynmo.runtime.stage import Stage
from dynmo.runtime.world import World
from dynmo.schedule.lower import Channel, Direction, Program, lower
from dynmo.schedule.op import from_text
from tests.schedule.samples import wander

# -- p2p ------------------------------------------------------------------------------------------------------------------

DOWN = Channel(0, Direction.ACTIVATION, 0, 1)


def transport(world: World, messages: int, depth: int, varying: bool = False) -> Transport:
    """One channel, from rank 0 to rank 1."""
    return Transport(world, tuple(Program(rank, (rank,), messages, 0, (), {DOWN: depth}) for rank in range(2)), varying)


def message(shapes: list[Any], j: int) -> tuple[Tensor, ...]:
    """shapes: [dtype, dimensions] of each tensor. Every number tells where it belongs."""
    out: list[Tensor] = []
    for dtype, dimensions in shapes:
        count = torch.Size(dimensions).numel()
        out.append((torch.arange(count) + 10 * j + len(out)).to(getattr(torch, dtype)).reshape(dimensions))
    return tuple(out)


def channel(world: World, steps: list[list[list[Any]]], varying: bool, depth: int, transposed: bool = False) -> int:
    """steps[s][j]: the tensors of message j of step s. Rank 1 compares what arrives; returns how many did."""
    ends = transport(world, len(steps[0]), depth, varying)
    seen = 0
    for shapes in steps:
        ends.open()
        for j, each in enumerate(shapes):
            sent = message(each, j)
            if world.rank == 0:
                ends.put(DOWN, j, tuple(t.mT.contiguous().mT if transposed else t for t in sent))
            else:
                got = ends.take(DOWN, j)
                assert len(got) == len(sent)
                assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, sent, strict=True)), (got, sent)
            seen += 1
        ends.flush()
    ends.close()
    return seen


def asked(world: World, varying: bool) -> list[bool]:
    """Rank 1 asks for messages before and after rank 0 has put them: what it is told from the second on, for the first tells the shapes."""
    ends = transport(world, 4, 4, varying)
    ends.open()
    told: list[bool] = []
    for j in range(4):
        sent = message([["float32", [2, 3]], ["int64", [4]]], j)
        if world.rank == 1 and j:
            told.append(ends.arrived(DOWN, j, 0.01))
        world.barrier("rank 1 to have asked")
        if world.rank == 0:
            ends.put(DOWN, j, sent)
            continue
        if j:
            told.append(ends.arrived(DOWN, j, 10.0))
            told.append(ends.arrived(DOWN, j, 0.0))
        got = ends.take(DOWN, j)
        assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True)), (got, sent)
    ends.flush()
    ends.close()
    return told


def asked_of_the_gone(world: World) -> list[Any]:
    """Rank 0 puts one message and leaves; rank 1 asks for the next."""
    ends = transport(world, 2, 2)
    ends.open()
    if world.rank == 0:
        ends.put(DOWN, 0, (torch.zeros(3),))
        ends.flush()
        return []
    ends.take(DOWN, 0)
    start = time.monotonic()
    try:
        while not ends.arrived(DOWN, 1, 0.001) and time.monotonic() - start < 5:
            pass
        ends.take(DOWN, 1)
    except RankDied as error:
        return [str(error), time.monotonic() - start]
    return []


def shapes_change(world: World) -> Any:
    ends = transport(world, 3 if world.rank == 0 else 2, 4)
    ends.open()
    for j in range(2):
        if world.rank == 0:
            ends.put(DOWN, j, (torch.zeros(2, 3),))
        else:
            ends.take(DOWN, j)
    ends.flush()
    if world.rank == 1:
        ends.close()
        return 2
    try:
        ends.put(DOWN, 2, (torch.zeros(3, 2),))
    except RunError as error:
        ends.close()
        return str(error)
    return "no error"


def backpressure(world: World, depth: int, messages: int) -> list[list[int]]:
    """Rank 1 takes late, and counts how many messages rank 0 could put before each take; in two steps, for the first has no shapes."""
    ends = transport(world, messages, depth)
    counts: list[list[int]] = []
    for step in range(2):
        ends.open()
        counts.append([])
        for j in range(messages):
            if world.rank == 0:
                ends.put(DOWN, j, (torch.zeros(1000),))
                world.store.set(f"put/{step}/{j}", "1")
            else:
                time.sleep(0.2 if j == 0 else 0.01)
                counts[-1].append(sum(world.store.check([f"put/{step}/{k}"]) for k in range(messages)))
                ends.take(DOWN, j)
        ends.flush()
        world.barrier("the step to end")
    ends.close()
    return counts


def letting_go(world: World, messages: int) -> list[bool]:
    """Which messages rank 0 still keeps, long after rank 1 took the first half of them and before the step ends."""
    ends = transport(world, messages, messages)
    ends.open()
    refs: list[StorageWeakRef] = []
    for j in range(messages):
        if world.rank == 0:
            tensor = torch.zeros(1000)
            refs.append(StorageWeakRef(tensor.untyped_storage()))
            ends.put(DOWN, j, (tensor,))
            del tensor
        elif j < messages // 2:
            ends.take(DOWN, j)
    world.barrier("half of them to be taken")
    time.sleep(0.1)
    kept = [not ref.expired() for ref in refs]
    world.barrier("that to be seen")
    for j in range(messages // 2, messages):
        if world.rank == 1:
            ends.take(DOWN, j)
    ends.flush()
    ends.close()
    return kept


def peer_gone(world: World, depth: int) -> list[Any]:
    """Rank 1 takes one message of several and goes."""
    ends = transport(world, 30, depth)
    ends.open()
    start = time.monotonic()
    try:
        if world.rank == 1:
            ends.take(DOWN, 0)
            ends.close()
            del ends  # and with it the receives that are open
            world.close()
            return []
        for j in range(30):
            ends.put(DOWN, j, (torch.zeros(1000),))
        ends.flush()
    except RunError as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return ["nothing", "", 0.0]


# -- executor -------------------------------------------------------------------------------------------------------------


def _small_layer(index: int, count: int) -> nn.Module:
    torch.manual_seed(mix(9, index))
    if index == 0:
        return nn.Embedding(11, 6)
    if index == count - 1:
        return nn.Linear(6, 11)
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6))


class Late(Transport):
    """Says of messages at random that they are late, so that pieces of W run wherever they may."""

    random = Random(0)

    def arrived(self, channel: Channel, microbatch: int, patience: float) -> bool:
        return self.random.random() < 0.5 and super().arrived(channel, microbatch, 0.0)


def execute(
    world: World, schedule: Any, layers: int, microbatches: int, frozen: int = 0, late: int | None = None, slots: int = 1
) -> dict[str, Any]:
    """Two steps of a schedule of any placement, with equally many layers a stage.

    schedule: text, or [placement, seed] for one at random. frozen: how many leading stages. late: pieces of W run ahead, for messages are
    late, by this seed. Returns losses, a hash of each gradient, the order in which layers ended, and how many pieces ran ahead.
    """
    made = from_text(schedule) if isinstance(schedule, str) else wander(schedule[0], microbatches, frozen, Random(schedule[1]))
    programs = lower(made)
    each = layers // made.stages
    first = made.first_trainable * each
    modules: dict[int, nn.Module] = {}
    stages: dict[int, Stage] = {}
    for s in made.stages_of(world.rank):
        own = range(s * each, (s + 1) * each)
        modules |= {i: _small_layer(i, layers).requires_grad_(i >= first) for i in own}
        loss = functional.cross_entropy if s == made.stages - 1 else None
        stages[s] = Stage([Layer(i, modules[i], HostClock(), 4) for i in own], first, loss, 1 / microbatches)
    ended: list[int] = []
    for layer in (layer for stage in stages.values() for layer in stage.layers):
        layer.slots = Slots(list(layer.module.parameters()), microbatches, slots, partial(ended.append, layer.index))
    Late.random = Random(late)
    ends = (Transport if late is None else Late)(world, programs)
    executor = Executor(programs[world.rank], stages, made.stages - 1, ends, HostClock(), OneLane(), ahead=late is not None)
    random = torch.Generator().manual_seed(1)
    losses: list[float] = []
    ahead = 0
    for step in range(2):
        inputs = torch.randint(11, (microbatches, 4), generator=random)
        outcome = executor.run(step, inputs, inputs.flip(0))
        losses.append(mean_loss(outcome.losses))
        ahead += sum((a.kind, b.kind) == (WAIT, "W") for a, b in pairwise(outcome.slices))
    executor.close()
    left = sum(len(layer._saved) + len(layer._weight_work) for stage in stages.values() for layer in stage.layers)
    return {
        "losses": losses if made.placement[-1] == world.rank else None,
        "gradients": {f"{i}.{n}": None if p.grad is None else _hash(p.grad) for i, m in modules.items() for n, p in m.named_parameters()},
        "left": left,
        "ended": ended,
        "ahead": ahead,
    }


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


# -- moving layers ----------------------------------------------------------------------------------------------------------


def fingerprint(module: nn.Module, optimizer: LayerOptimizer, gradients: bool = True) -> dict[str, Any]:
    """Everything a layer consists of: dtype, shape and bits of each tensor, and what trains."""
    out: dict[str, Any] = {}
    for (section, name), t in contents(module, optimizer.state()).items():
        if gradients or section != "gradient":
            out[f"{section} {name}"] = [str(t.dtype), list(t.shape), _hash(t)]
    return out | {f"trains {name}": p.requires_grad for name, p in module.named_parameters()}


class Held:
    """The layers of one rank, as little as moving them needs."""

    def __init__(self, world: World, kind: dict[str, Any], partition: Partition) -> None:
        self.world, self.partition = world, partition
        self.model = load_model(parse({"model": kind}))
        own = partition.range_of(world.rank)
        self.modules = self.model.build(frozenset(own))
        for index in range(0, self.model.layers, 3):
            self.modules[index].requires_grad_(False)
        self.optimizers = {i: LayerOptimizer(self.modules[i], OptimizerSettings()) for i in own}

    def train(self, step: int) -> None:
        """Gradients from nowhere, one update, and gradients left behind."""
        for index, optimizer in self.optimizers.items():
            for last in (False, True):
                random = torch.Generator().manual_seed(mix(step, index, last))
                for p in self.modules[index].parameters():
                    p.grad = torch.randn(p.shape, generator=random) if p.requires_grad else None
                if not last:
                    optimizer.step(0.1, 1.0)
                    optimizer.drop_gradients()

    def fingerprints(self) -> dict[int, Any]:
        return {i: fingerprint(self.modules[i], o) for i, o in self.optimizers.items()}

    def leaving(self, index: int) -> tuple[nn.Module, dict[str, Tensor]]:
        return self.modules[index], self.optimizers[index].state()

    def move(self, target: Partition, leaving: Any = None) -> int:
        plan = moves(self.partition, target)

        def adopt(arrivals: list[Arrival]) -> None:
            for move in plan:
                if move.source == self.world.rank:
                    self.modules[move.layer].zero_grad()
                    self.modules[move.layer] = self.modules[move.layer].to("meta")
                    del self.optimizers[move.layer]
            for arrival in arrivals:
                state = fill(self.modules[arrival.layer], arrival.tensors, arrival.flags)
                self.optimizers[arrival.layer] = LayerOptimizer(self.modules[arrival.layer], OptimizerSettings())
                self.optimizers[arrival.layer].load(state)

        migration = exchange(self.world, plan, leaving or self.leaving, adopt)
        self.partition = target
        return migration.moved_bytes


def any_partition(layers: int, ranks: int, random: Random) -> Partition:
    return Partition.from_bounds([0, *sorted(random.sample(range(1, layers), ranks - 1)), layers])


def migrate(world: World, kind: dict[str, Any], seed: int, rounds: int) -> dict[str, Any]:
    """Random placements with an update between them. Bits may not change on the way, nor the updates that follow."""
    random = Random(seed)
    layers = load_model(parse({"model": kind})).layers
    held = Held(world, kind, any_partition(layers, world.size, random))
    moved = 0
    for step in range(rounds):
        held.train(step)
        before = _everyones(world, held.fingerprints(), layers)
        moved += held.move(any_partition(layers, world.size, random))
        assert _everyones(world, held.fingerprints(), layers) == before, "something changed on the way"
        assert sorted(held.optimizers) == list(held.partition.range_of(world.rank))
    return {"layers": held.fingerprints(), "moved": moved}


def _everyones(world: World, own: dict[int, Any], layers: int) -> list[str]:
    """A hash of each layer's fingerprint, from whoever holds it."""
    table = torch.zeros(layers, 32, dtype=torch.uint8)
    for index, value in own.items():
        table[index] = torch.frombuffer(bytearray(hashlib.sha256(repr(sorted(value.items())).encode()).digest()), dtype=torch.uint8)
    return [bytes(row).hex() for row in world.sum(table, "fingerprints").tolist()]


def migrate_fails(world: World, how: str) -> dict[str, Any]:
    """Layers 1 and 2 of (3, 1, 2) are to go from rank 0 to rank 1, and layer 3 on to rank 2, when one rank fails."""
    kind = {"kind": "gpt", "blocks": 2, "hidden": 16, "heads": 2, "sequence": 4}
    held = Held(world, kind, Partition((3, 1, 2)))
    held.train(0)
    before = held.fingerprints()

    def leaving(index: int) -> tuple[nn.Module, dict[str, Tensor]]:
        if index == 2 and how == "source":
            raise RunError("layer 2 will not go")
        module, state = held.leaving(index)
        if index == 2 and how == "dtype":
            module = nn.Linear(2, 2, dtype=torch.complex64)
        if index == 3 and how == "memory":
            state = {"huge": torch.zeros(1).expand(1 << 50)}
        return module, state

    start = time.monotonic()
    try:
        held.move(Partition((1, 2, 3)), leaving)
        error = ""
    except RunError as caught:
        error = str(caught)
    seconds = time.monotonic() - start
    untouched = held.fingerprints() == before and held.partition == Partition((3, 1, 2))
    held.move(Partition((1, 2, 3)))  # and the world is as good as before
    return {"error": error, "seconds": seconds, "untouched": untouched, "after": sorted(held.optimizers)}


# -- checkpoints --------------------------------------------------------------------------------------------------------------

GPT = {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 8}


def pipeline(world: World, counts: list[int], config: dict[str, Any] | None = None) -> Pipeline:
    loaded = parse(config or {"model": GPT})
    return Pipeline(world, load_model(loaded), Partition(tuple(counts)), schedule="zb-h1", microbatches=3, seed=loaded.seed)


def steps(made: Pipeline, first: int, last: int) -> list[float]:
    losses: list[float] = []
    for step in range(first, last):
        tokens = torch.randint(256, (3, 2, 9), generator=torch.Generator().manual_seed(step))
        losses.append(made.step(step, tokens[..., :-1], tokens[..., 1:], lr=0.01).loss)
    return losses


def save_and_go_on(world: World, folder: str, counts: list[int]) -> dict[str, Any]:
    """Four steps with a checkpoint after two; layers 0 and 1 are frozen by then."""
    made = pipeline(world, counts)
    steps(made, 0, 1)
    made.freeze([0, 1])
    steps(made, 1, 2)
    held = [(i, (m, o.state())) for i, (m, o) in made.own_layers.items()]
    saved = checkpoint.save(world, Path(folder), 2, made.model.names, held, {"frozen": sorted(made.frozen)}, keep=2)
    layers = {i: fingerprint(m, o, gradients=False) for i, (m, o) in made.own_layers.items()}
    return {"layers": layers, "losses": steps(made, 2, 4), "digest": made.digest(), "bytes": saved.bytes}


def load_and_go_on(world: World, folder: str, counts: list[int]) -> dict[str, Any]:
    path, manifest, _ = checkpoint.find(Path(folder))
    made = pipeline(world, counts)
    made.freeze(manifest.state["frozen"])
    for index in made.own_layers:
        made.restore(index, *checkpoint.load_layer(path, index, world.device))
    layers = {i: fingerprint(m, o, gradients=False) for i, (m, o) in made.own_layers.items()}
    return {"layers": layers, "losses": steps(made, manifest.step, 4), "digest": made.digest()}


# -- the profiler -------------------------------------------------------------------------------------------------------------


def profile(world: World, f: list[float], b: list[float], w: list[float], counts: list[int]) -> list[list[Any]]:
    """Two steps of emulated layers; the costs gathered."""
    model = make_layers(f, b, w, size=64)
    made = Pipeline(world, model, Partition(tuple(counts)), schedule="zb-h1", microbatches=3)
    ids = torch.zeros(3, 1, dtype=torch.int64)
    for step in range(2):
        made.step(step, ids, ids, lr=0.0)
    return [list(vars(cost).values()) for cost in made.costs()]


def links(world: World) -> list[list[float]]:
    pairs = [(rank, rank + 1) for rank in range(world.size - 1)]
    return [[link.latency, link.bytes_per_second] for link in measure_links(world, pairs).values()]


# -- the world ------------------------------------------------------------------------------------------------------------------


def _again(world: World, size: int, timeout: float) -> World:
    """Another generation of the job's ranks, with little patience."""
    world.barrier("all to be here")
    world.close()
    return World.join(world.store, world.rank, size, timeout=timeout, generation=1)


def one_never_comes(world: World) -> list[str]:
    try:
        _again(world, world.size + 1, 1.0)
    except WaitTimeout as error:
        return [type(error).__name__, str(error)]
    return []


def one_is_late(world: World, what: str) -> list[str]:
    """Rank 1 stays away from what rank 0 waits for."""
    impatient = _again(world, 2, 20 if what == "gone" else 1.5)
    caught: list[str] = []
    try:
        if world.rank == 1 and what == "gone":
            impatient.close()
        elif world.rank == 1:
            time.sleep(2.2)
        elif what == "sum":
            impatient.sum(torch.zeros(1), "the end of the test")
        else:
            impatient.wait(impatient.receive(torch.zeros(1), 1, 0), 1, "the activation of microbatch 3")
    except (WaitTimeout, RankDied) as error:
        caught = [type(error).__name__, str(error)]
    return caught


def agree(world: World, said: list[str | None]) -> str:
    mine = said[world.rank]
    try:
        world.agree(None if mine is None else hashlib.sha256(mine.encode()).digest(), "the plan")
    except DynmoError as error:
        return str(error)
    return ""


# -- the whole ------------------------------------------------------------------------------------------------------------------


def moving(world: World, config: dict[str, Any], placements: list[list[int]]) -> dict[str, Any]:
    """Two steps on each placement."""
    made = pipeline(world, placements[0], config)
    losses: list[float] = []
    digests: list[str] = []
    for turn, counts in enumerate(placements):
        made.move(Partition(tuple(counts)))
        losses += steps(made, 2 * turn, 2 * turn + 2)
        digests.append(made.digest())
    return {"losses": losses, "digests": digests}


# -- post-validation --------------------------------------------------------------------------------------------------------------

PV_STEPS = 7


def _spoiled(made: Pipeline, faults: list[list[Any]], now: list[int]) -> None:
    """Has the gradients of some layers spoiled as they are looked at: faults are [step, layer, what], what "inf" or a factor."""
    table = made._step_end.table  # pyright: ignore[reportPrivateUsage]
    own = table.own

    def spoil(*args: Any) -> Tensor:
        for step, layer, what in faults:
            if step == now[0] and layer in made.own_layers:
                gradients = [p.grad for p in made.own_layers[layer][0].parameters() if p.grad is not None]
                if not gradients:  # it is frozen
                    continue
                if what == "inf":
                    gradients[0].view(-1)[0] = float("inf")
                else:
                    torch._foreach_mul_(gradients, what)
        return own(*args)

    table.own = spoil  # pyright: ignore[reportAttributeAccessIssue]


def validated(
    world: World, schedule: str, faults: list[list[Any]], afterwards: bool, changes: bool = False, kind: str = "gpt", **options: Any
) -> dict[str, Any]:
    """Some steps with gradients spoiled on the way; changes: layers freeze, move, and are evaluated in between."""
    ranks, model = world.size, {"model": {"blocks": 3, "hidden": 16, "heads": 2, "sequence": 4, "dropout": 0.1}}
    loaded = parse(model if kind == "gpt" else {"model": {"kind": f"python:{kind}"}})
    whole = load_model(loaded)
    stages = len(Pipeline.placement_for(schedule, ranks))
    limit = options.pop("limit", 20.0)
    made = Pipeline(world, whole, uniform(whole.layers, stages), schedule=schedule, microbatches=12, post_validation=afterwards, **options)
    made.scaler = LossScaler(2.0**16, window=1 << 30)
    now = [0]
    _spoiled(made, faults, now)
    random = Random(stages)
    results: list[StepResult] = []
    seen: list[Any] = []
    for step in range(PV_STEPS):
        if changes and step % 3 == 2:
            if step == 5:
                made.freeze([0, 1])
            made.move(any_partition(whole.layers, stages, random))
            seen.append(made.digest())
        now[0] = step
        tokens = torch.randint(256, (12, 1, 5), generator=torch.Generator().manual_seed(step))
        results += made.advance(step, tokens[..., :-1], tokens[..., 1:], lr=0.01, max_norm=limit)
        if changes and step % 3 == 1:
            seen.append(made.evaluate(tokens[..., :-1], tokens[..., 1:], 12))
    results += made.drain()
    failed = made._step_end.failed  # pyright: ignore[reportPrivateUsage]
    return {
        "steps": [r.step for r in results],
        "losses": [r.loss for r in results],
        "norms": [r.squared_norms for r in results],
        "rollbacks": [[r.step, r.rollback.what] for r in results if r.rollback],
        # What each step was up against, as the pipeline itself sees it afterwards; of a skipped one no norms are told.
        "failed": [NON_FINITE if r.skipped else failed(r.loss, r.squared_norms, limit) for r in results],
        "digest": made.digest(),
        "seen": seen,
    }


def validated_raises(world: World, schedule: str) -> dict[str, Any]:
    """An overflow on the last rank, with nobody to skip it; then the step again, without."""
    whole = load_model(parse({"model": {"blocks": 3, "hidden": 16, "heads": 2, "sequence": 4}}))
    made = Pipeline(world, whole, uniform(8, world.size), schedule=schedule, microbatches=6, post_validation=True)
    now = [0]
    _spoiled(made, [[2, 7, "inf"]], now)
    tokens = torch.randint(256, (6, 1, 5), generator=torch.Generator().manual_seed(0))
    digests: list[str] = []
    error = ""
    for now[0] in (0, 1, 2, 3, 4, 5):
        try:
            if now[0] == 2:
                digests.append(made.digest())
            made.advance(now[0], tokens[..., :-1], tokens[..., 1:], lr=0.01)
        except RunError as caught:
            error = str(caught)
            digests.append(made.digest())
    return {"error": error, "digests": [*digests, made.digest()]}
