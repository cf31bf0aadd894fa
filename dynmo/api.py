"""What `import dynmo` gives for one's own training loop: `Pipeline`, one model over the ranks of a world.

world = World.join(store, rank, size)
pipeline = Pipeline(world, model, Partition((9, 9)), schedule="zb-h1", microbatches=8)
for step in range(steps):
    result = pipeline.step(step, inputs, targets, lr=3e-4, max_norm=1.0)
    costs = pipeline.costs()                  # measured, the same on every rank
    pipeline.move(exact(...))                 # layers change ranks; nothing else changes
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from dynmo.balance.balancers import BalanceRequest
from dynmo.balance.partition import Cost, Move, Partition, moves, uniform
from dynmo.balance.placed import Make, frozen_stages
from dynmo.config import slots_fit
from dynmo.costs import Costs, LayerCost, LinkCost, elide, stage_costs
from dynmo.errors import CheckpointError, ConfigError, PartitionError, RunError
from dynmo.kernels.sparse_linear import conform, dense_parameters
from dynmo.memory import live_limits
from dynmo.models.model import Model
from dynmo.runtime.clock import clock_for
from dynmo.runtime.executor import SEND, WAIT, Executor, Outcome, mean_loss
from dynmo.runtime.loss_scale import LossScaler
from dynmo.runtime.mesh import FirstReplica, arrange
from dynmo.runtime.migrate import Arrival, Migration, exchange, fill
from dynmo.runtime.optimizer import WHOLE, LayerOptimizer, OptimizerSettings, Share, clip_factor, squared_norm
from dynmo.runtime.p2p import Transport
from dynmo.runtime.post_validation import CLIPPED, NON_FINITE, Caution, Passage, Rollback, Switch
from dynmo.runtime.precision import lower as lower_precision
from dynmo.runtime.profiler import Profiler, measure_links
from dynmo.runtime.reduce import Reducer, Shared, gather_parameters, reduce_gradients, shares_of, squared_norms
from dynmo.runtime.reshape import holders, transfers
from dynmo.runtime.slots import Slots
from dynmo.runtime.split_backward import Layer
from dynmo.runtime.stage import Stage
from dynmo.runtime.tied import TiedWeights
from dynmo.runtime.world import World
from dynmo.runtime.zero import cut_state, whole_state
from dynmo.schedule.bound import Objective
from dynmo.schedule.catalogue import check_microbatches, entry, make, placement_of
from dynmo.schedule.lower import Program, lower, lower_forward
from dynmo.schedule.op import Schedule
from dynmo.simulator import Timeline, resident, simulate

Recompute = Collection[int] | Callable[[Partition, Schedule], Collection[int]]

# Names what a case keeps with a layer, among the layer's optimizer state.
_KEPT = "case:"


@dataclass(frozen=True)
class StepResult:
    """One step, the same on every rank. busy, spans, flags: of each global rank, in seconds; squared_norms: per layer, before clipping, 0
    where the step was skipped: gradients overflowed, nothing was updated, and the loss scale falls.

    rollback: with post-validation, where the step was taken back first. switch: where that makes the pipeline change its mode.
    """

    step: int
    loss: float
    norm: float
    squared_norms: tuple[float, ...]
    busy: tuple[float, ...]
    spans: tuple[float, ...]
    flags: tuple[bool, ...]
    outcome: Outcome
    loss_scale: float = 1.0
    rollback: Rollback | None = None
    switch: Switch | None = None
    skipped: bool = False

    @property
    def idle_ratio(self) -> float:
        """1 - mean over ranks of busy time / span."""
        span = max(self.spans)
        return 1 - sum(self.busy) / len(self.busy) / span if span else 0.0


@dataclass(frozen=True)
class _Pending:
    """A step whose verdict is still out. stepped: whether this rank has made it."""

    step: int
    outcome: Outcome
    lr: float
    max_norm: float
    stepped: bool


class Pipeline:
    """A model's layers spread over a world of ranks, and what may be done with them.

    Every method is called on every rank, with the same arguments. `partition` counts the layers of each stage; which rank holds which stage
    is the schedule's: one each, or several (`chunks`). memory_limit: bytes per rank, for schedules that are made within one.
    compiles: torch.compile runs the layers (`kernels/compiling.py`). dtype: what the model computes in (`runtime/precision.py`); scaler: of
    the loss. recompute: the layers whose activations are computed again in B rather than kept, or a pure function that says which, of a
    placement and the schedule with every stage training.

    The world may be one pipeline of several in a mesh (`mesh.arrange`): `microbatches` are those of one. slots: in how many parts the
    gradients of all their microbatches are added up (default: one per replica). zero: 1 shards the optimizer's state over the replicas.

    post_validation: steps without a barrier at their end (`advance`). A step that must be taken back is, rollback "exact": from copies,
    to the bit; "in-place": by arithmetic, without copies, nearly. clip_scope: by which norm a layer is clipped, that of all or its own.
    """

    def __init__(
        self,
        world: World,
        model: Model,
        partition: Partition,
        *,
        schedule: str,
        microbatches: int,
        chunks: int | None = None,
        memory_limit: int | None = None,
        seed: int = 0,
        optimizer: OptimizerSettings | None = None,
        compiles: bool = False,
        slots: int | None = None,
        zero: int = 0,
        post_validation: bool = False,
        rollback: Literal["exact", "in-place"] = "exact",
        clip_scope: Literal["global", "local"] = "global",
        dtype: torch.dtype = torch.float32,
        scaler: LossScaler | None = None,
        recompute: Recompute = (),
    ) -> None:
        self.world, self.model, self.partition = world, model, partition
        check_microbatches(schedule, world.size, microbatches)
        self._slots, self._zero = slots or world.replicas, bool(zero)
        self._check_slots(world.replicas, microbatches)
        self._schedule_name, self._microbatches, self._seed = schedule, microbatches, seed
        self._chunks, self._memory_limit = chunks, memory_limit
        self.placement = placement_of(schedule, world.size, chunks)
        self._check(partition, self.placement)
        self._settings, self._compiles = optimizer or OptimizerSettings(), compiles
        self.scaler, self._recompute = scaler or LossScaler(), recompute
        self.recomputed = self._recomputed(partition, world.size, microbatches)
        self.clock = clock_for(world.device)
        self.profiler = Profiler(self.clock)
        self._caution = Caution() if post_validation else None
        self._passage = Passage(world, self.placement, self._table_length)
        self._copies, self._clip_scope = rollback == "exact", clip_scope
        self._pending: _Pending | None = None
        self._done: list[StepResult] = []  # results that nobody has been given yet
        self._failure: RunError | None = None
        self._begun = 0.0  # when the program started that now runs
        own = [index for stage in self.own_stages for index in partition.range_of(stage)]
        self._modules = model.build(frozenset(own))
        # Which parameters of a frozen layer trained before, so that it can thaw.
        self._thawed: dict[int, list[str]] = {}
        # Of each own layer, what dynamic cases keep with it.
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._layers: dict[int, Layer] = {}
        self._optimizers: dict[int, LayerOptimizer] = {}
        # Of each own layer, who sums and updates which part; and who does the summing, where there are replicas.
        self._shares: dict[int, list[Shared]] = {}
        self._reducer = Reducer(world.peers) if world.replicas > 1 else None
        for index in own:
            module = self._modules[index].to(world.device)
            self._adopt(index, module, {}, masters=lower_precision(module, dtype))
        self._tied = TiedWeights(world, model.tied, self.rank_of, self._modules)
        self._tied.join()
        self._tied.publish({})
        # Between the ranks of a pair, the lower first, that hold neighbouring stages.
        self.links: dict[tuple[int, int], LinkCost] = measure_links(world, self._pairs())
        # What the next schedule is made from; None until something is measured.
        self._known: tuple[LayerCost, ...] | None = None
        self._executor: Executor | None = None
        self._evaluators: dict[int, Executor] = {}

    @staticmethod
    def placement_for(schedule: str, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
        """Per stage of this schedule, the rank that holds it: how many counts a partition needs."""
        return placement_of(schedule, ranks, chunks)

    # -- what is where ----------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        return self.model.layers

    @property
    def own_stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, rank in enumerate(self.placement) if rank == self.world.rank)

    def rank_of(self, layer: int) -> int:
        """The rank that holds the layer."""
        return self.placement[self.partition.owner(layer)]

    def _pairs(self) -> list[tuple[int, int]]:
        return sorted({(min(pair), max(pair)) for pair in pairwise(self.placement) if pair[0] != pair[1]})

    @property
    def frozen(self) -> frozenset[int]:
        return frozenset(self._thawed)

    @property
    def first_trainable(self) -> int:
        """Global index of the first layer with something to train."""
        for index, module in enumerate(self._modules):
            if any(p.requires_grad for p in module.parameters()):
                return index
        raise RunError("no layer has anything to train; leave at least the last one unfrozen")

    def _check(self, partition: Partition, placement: Sequence[int]) -> None:
        layers, stages = self.model.layers, len(placement)
        if (partition.layers, partition.ranks) != (layers, stages):
            unit = "ranks" if stages == max(placement) + 1 else "stages"
            raise PartitionError(
                f"a placement of {partition.layers} layers on {partition.ranks} {unit}, for {layers} layers on {stages} {unit}"
            )

    def _check_slots(self, replicas: int, microbatches: int) -> None:
        problem = slots_fit(self._slots, replicas, replicas * microbatches)
        if problem:
            raise ConfigError(f"reduction slots: {self._slots} {problem}; use another number of slots, replicas or microbatches")

    def _recomputed(self, partition: Partition, ranks: int, microbatches: int) -> frozenset[int]:
        """The layers whose activations are computed again in B, for this placement."""
        if not callable(self._recompute):
            return frozenset(self._recompute)
        return frozenset(self._recompute(partition, full_schedule(self._schedule_name, ranks, microbatches, self._chunks)))

    def _adopt(
        self,
        index: int,
        module: nn.Module,
        optimizer_state: dict[str, Tensor],
        whole: bool = False,
        masters: Mapping[str, Tensor] | None = None,
    ) -> None:
        """whole: the optimizer's state is the whole layer's, of which this replica may keep a share only. masters: float32 weights of a
        layer that is new, by parameter."""
        shared = frozenset(name for _, (layer, name) in self.model.tied if layer == index)
        self._modules[index] = module
        self._layers[index] = Layer(index, module, self.clock, self._seed, self._compiles)
        self._layers[index].recompute = index in self.recomputed
        world = self.world
        share = Share(world.replica, world.replicas) if self._zero else WHOLE
        optimizer = self._optimizers[index] = LayerOptimizer(module, self._settings, shared, share, masters)
        state = {name: t for name, t in optimizer_state.items() if not name.startswith(_KEPT)}
        optimizer.load(cut_state(optimizer, state) if whole else state)
        self._shares[index] = shares_of(module, shared, world.replicas) if self._reducer is not None else []
        self._layers[index].first_microbatch = world.replica * self._microbatches
        if self._slots > 1:
            done = None if self._reducer is None else partial(self._reduce_layer, index)
            self._layers[index].slots = Slots(list(module.parameters()), self._microbatches, self._slots // world.replicas, done)
        self._kept[index] = {name.removeprefix(_KEPT): t.cpu() for name, t in optimizer_state.items() if name.startswith(_KEPT)}

    # -- training -----------------------------------------------------------------------------------------------------------

    def _relower(self) -> None:
        """Programs and channels are made anew at the next step."""
        for executor in (self._executor, *self._evaluators.values()):
            if executor is not None:
                executor.close()
        self._executor = None
        self._evaluators.clear()

    def _lower(self) -> Executor:
        schedule = self.schedule_for(self.partition, self._known)
        if entry(self._schedule_name).from_costs:
            self.world.agree(hashlib.sha256(str(schedule).encode()).digest(), "the schedule")
        programs = lower(schedule, post_validation=self._caution is not None)
        self._executor = self._execute(programs, self.first_trainable, self._microbatches)
        return self._executor

    def _execute(self, programs: tuple[Program, ...], first: int, microbatches: int) -> Executor:
        world, last = self.world, len(self.placement) - 1
        stages: dict[int, Stage] = {}
        for stage in self.own_stages:
            own = [self._layers[i] for i in self.partition.range_of(stage)]
            share = 1 / (microbatches * world.replicas)
            stages[stage] = Stage(own, first, self.model.loss if stage == last else None, share)
        return Executor(programs[world.rank], stages, last, Transport(world, programs), self.clock)

    def step(
        self, step: int, inputs: Tensor | None, targets: Tensor | None, *, lr: float, max_norm: float = 0.0, flag: bool = False
    ) -> StepResult:
        """Forward, backward, clip, update. inputs: [microbatches, ...] with the first stage, targets: [microbatches, ...] with the last:
        this replica's, which are as many as all others' and follow those of the replica before it in the batch.

        `flag` is handed to every rank in `StepResult.flags` (a wish to stop, say). Raises RunError if loss or gradient is not finite; under
        a dynamic loss scale such a gradient skips the step.
        """
        results = self.advance(step, inputs, targets, lr=lr, max_norm=max_norm, flag=flag) + self.drain()
        return results[-1]

    def advance(
        self, step: int, inputs: Tensor | None, targets: Tensor | None, *, lr: float, max_norm: float = 0.0, flag: bool = False
    ) -> tuple[StepResult, ...]:
        """As `step`, but without a barrier at its end where the pipeline validates afterwards: the next begins before this one is final.

        Returns the results that have become final and were not returned before, in order: with a barrier this step's, without one that
        of the step before. RunError, too, is then raised a step late; nothing was updated. `drain` waits for the last one, and so does
        every method that looks at the model or changes it.
        """
        if not self.post_validates:
            self._settle()
            self._done.append(self.update(step, self.forward_backward(step, inputs, targets), lr=lr, max_norm=max_norm, flag=flag))
            return self._take_done()
        executor = self._executor or self._lower()
        self._train()
        if self._pending is None:
            self._passage.expect()
        self._begun = time.perf_counter()
        executor.scale_loss(self.scaler.scale)
        outcome = executor.run(step, inputs, targets, stands=self._verdict_in_program if self._pending else None)
        self._await_gradients()
        if self._failure is not None:
            self.discard()
            self._raise()
        self._end(step, outcome, lr, max_norm, flag)
        return self._take_done()

    def drain(self) -> tuple[StepResult, ...]:
        """Waits until the last step is final, where `advance` has not. Returns the results that were not returned before."""
        self._settle()
        return self._take_done()

    def forward_backward(self, step: int, inputs: Tensor | None, targets: Tensor | None) -> Outcome:
        """The first half of `step`: runs the program; gradients are left on the parameters."""
        self._settle()
        executor = self._executor or self._lower()
        executor.scale_loss(self.scaler.scale)
        self._train()
        outcome = executor.run(step, inputs, targets)
        self._await_gradients()
        return outcome

    def _await_gradients(self) -> None:
        if self._reducer is not None:
            self._reducer.finish("the gradients of the step")
        self.clock.settle()

    def _train(self) -> None:
        for layer in self._layers.values():
            layer.module.train()

    def _reduce_layer(self, index: int) -> None:
        """A layer's last W has run: its gradients go to the other replicas while this rank goes on."""
        assert self._reducer is not None
        tied = any(index in (owner, user) for (owner, _), (user, _) in self.model.tied)  # their sum is made before it is cut
        work = partial(reduce_gradients, self.world.peers, index, self._shares[index], everywhere=tied or not self._zero)
        self._reducer.submit(work)

    def update(self, step: int, outcome: Outcome, *, lr: float, max_norm: float = 0.0, flag: bool = False) -> StepResult:
        """The second half of `step`: what the ranks must agree on, clipping, the optimizer."""
        self._tied.merge()
        self._unscale()
        table = self._once(self._own_table(outcome, flag))
        result = self._read(step, self.world.everyone.sum(table, "the step to end on every rank"), outcome)
        failed = self._failed(result.loss, result.squared_norms, max_norm)
        error = self._error(result) if failed == NON_FINITE else None
        if error is not None:
            self.discard()
            raise error
        self.scaler.observe(failed != NON_FINITE)
        if failed == NON_FINITE:
            result = replace(result, squared_norms=(0.0,) * self.count, skipped=True)
        else:
            self._apply(result.squared_norms, lr, max_norm)
        self._drop_gradients()
        self._tied.publish(self._thawed)
        self.profiler.observe(self._layers.values())
        return replace(result, switch=self._caution.observe(failed is not None)) if self._caution else result

    def _error(self, result: StepResult) -> RunError | None:
        """Of a step whose loss or norm is not finite: what ends the run; None where the step is skipped, for gradients overflowed under a
        loss scale that may fall. The one place where that is decided, alike on every rank."""
        scaler, finite = self.scaler, math.isfinite(result.loss)
        if finite and scaler.skips:
            return None
        scaled = f" (loss scale {scaler.scale:g})" if scaler.scale != 1 or scaler.dynamic else ""
        what = "Lower train.lr or check the data"
        if finite and scaled and not scaler.dynamic:
            what = 'Lower train.loss_scale, or take "dynamic"'
        return RunError(f"step {result.step}: loss {result.loss}, gradient norm {result.norm}{scaled}; nothing was updated. {what}")

    def _unscale(self) -> None:
        """Divides the loss scale out of the gradients: a power of two, so no bits change."""
        if self.scaler.scale != 1:
            gradients = [p.grad for layer in self._layers.values() for p in layer.module.parameters() if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, 1 / self.scaler.scale)

    def discard(self) -> None:
        """Instead of `update`: drops the gradients and keeps the measurements."""
        for layer in self._layers.values():
            layer.module.zero_grad()
        self.profiler.observe(self._layers.values())

    def _apply(self, squared_norms: Sequence[float], lr: float, max_norm: float) -> None:
        """Steps the layers, clipped. squared_norms: of all layers, or of its own where each is clipped by its own."""
        norm = math.sqrt(math.fsum(squared_norms))
        for index, optimizer in sorted(self._optimizers.items()):  # peers in one order, wherever their layers came from
            if index not in self.frozen:
                optimizer.step(lr, clip_factor(math.sqrt(squared_norms[index]) if self._clip_scope == "local" else norm, max_norm))
                self._send_parameters(index)
        self._await_parameters()

    def _send_parameters(self, index: int) -> None:
        """With ZeRO-1 every replica has its share of a layer's parameters: it gets the others' while this rank goes on."""
        if self._reducer is not None and self._zero:
            self._reducer.submit(partial(gather_parameters, self.world.peers, index, self._shares[index]))

    def _await_parameters(self) -> None:
        if self._reducer is not None:
            self._reducer.finish("the parameters of the step")

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.drop_gradients()

    # -- what the ranks know of a step at its end -----------------------------------------------------------------------------

    # Squared norms of the layers, on all replicas | losses of all replicas' microbatches | busy, span and flag of every global rank.
    # But for the norms each entry is filled by one rank, and of those by one in a pipeline: so no sum is rounded.

    @property
    def _table_length(self) -> int:
        return self.count + self._microbatches * self.world.replicas + 3 * self.world.everyone.size

    def _parts(self, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Norms, losses, and [3, ranks]: views."""
        losses = self.count + self._microbatches * self.world.replicas
        return table[: self.count], table[self.count : losses], table[losses:].view(3, self.world.everyone.size)

    def _own_table(self, outcome: Outcome, flag: bool) -> Tensor:
        """This rank's entries; its gradients must be complete."""
        world, everyone, seconds = self.world, self.world.everyone, self.clock.seconds
        slices, own = outcome.slices, self._microbatches
        table = torch.zeros(self._table_length, dtype=torch.float64)
        norms, losses, rest = self._parts(table)
        if self._zero and self._reducer is not None:
            found = squared_norms(world.peers, dict(sorted(self._shares.items())))
        else:
            found = {index: squared_norm(p.grad for p in layer.module.parameters()) for index, layer in self._layers.items()}
        for index, value in found.items():
            norms[index] = value
        if outcome.losses:
            losses[world.replica * own :][:own] = torch.stack([x.detach() for x in outcome.losses])
        rest[0, everyone.rank] = sum(seconds(s.start, s.end) for s in slices if s.kind not in (WAIT, SEND))
        rest[1, everyone.rank] = seconds(slices[0].start, slices[-1].end)
        rest[2, everyone.rank] = float(flag)
        return table

    def _once(self, table: Tensor) -> Tensor:
        """All replicas have the same norms, for their gradients are summed: one of them gives them to a sum over all."""
        if self.world.replica:
            self._parts(table)[0].zero_()
        return table

    def _complete(self, table: Tensor) -> Tensor:
        """The table has the entries of all of a pipeline's ranks, here: now those of the other replicas', before it goes back."""
        if self._reducer is None:
            return table
        return self.world.peers.sum(self._once(table.clone()), "the other replicas' steps to end")

    def _read(self, step: int, table: Tensor, outcome: Outcome) -> StepResult:
        norms, losses, rest = self._parts(table)
        squares = tuple(norms.tolist())
        busy, spans, flags = rest.tolist()
        norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
        loss = float(losses.clone().mean())
        flags = tuple(x != 0 for x in flags)
        return StepResult(step, loss, norm, squares, tuple(busy), tuple(spans), flags, outcome, self.scaler.scale)

    def _failed(self, loss: float, squared_norms: Sequence[float], max_norm: float) -> str | None:
        """What keeps a step from being made as its gradients are; of a prefix, where the entries of later ranks are still 0, so far."""
        if not all(map(math.isfinite, (loss, *squared_norms))):
            return NON_FINITE
        clips = self._clip_scope == "global" and clip_factor(math.sqrt(math.fsum(squared_norms)), max_norm) != 1.0
        return CLIPPED if clips else None

    # -- post-validation --------------------------------------------------------------------------------------------------------

    @property
    def post_validates(self) -> bool:
        """Whether the next step has no barrier at its end. A weight tied over two ranks gets its gradient from both: there, one stays."""
        return self._caution is not None and self._caution.on and not self._tied.apart

    @property
    def objective(self) -> Objective:
        """What makes a step of this pipeline short."""
        return Objective.MAKESPAN if self._caution is None or self._tied.apart else Objective.SPAN

    def _end(self, step: int, outcome: Outcome, lr: float, max_norm: float, flag: bool) -> None:
        """Of a step without a barrier: makes it if the ranks so far have nothing against it, and tells the next."""
        self._tied.merge()
        self._unscale()
        prefix = self._passage.prefix(self._own_table(outcome, flag))
        known = self._read(step, prefix, outcome)
        # By the norms alone: they are the same on all replicas, which must do alike. A loss that is not finite is for the verdict to find.
        stepped = self._failed(0.0, known.squared_norms, max_norm) is None
        if stepped:
            if self._copies:
                for optimizer in self._optimizers.values():
                    optimizer.keep()
            # That the norm of all will not clip is taken for granted; a layer's own norm is known.
            self._apply(known.squared_norms, lr, max_norm if self._clip_scope == "local" else 0.0)
        self._passage.pass_on(self._complete(prefix) if self._passage.completes else prefix)
        self._pending = _Pending(step, outcome, lr, max_norm, stepped)
        self.profiler.observe(self._layers.values())

    def _verdict_in_program(self) -> bool:
        stands = self._stands()
        if self._failure is None:
            self._passage.expect()
        assert self._executor is not None
        self._executor.scale_loss(self.scaler.scale)  # no B has started
        return stands

    def _settle(self) -> None:
        """Waits until the last step is final."""
        if self._pending is not None:
            self._begun = time.perf_counter()
            self._stands()
            if self._failure is not None:
                self._raise()

    def _assert_final(self) -> None:
        """For what is called on one rank alone, which cannot wait for the others."""
        if self._pending is not None:
            raise RunError(
                f"step {self._pending.step} may still be taken back; call drain() on all ranks first (a case: see Dynamism.acts)"
            )

    def _stands(self) -> bool:
        """Takes the verdict on the pending step and does what it says. False: the step was not made as it was thought to be."""
        pending, self._pending = self._pending, None
        assert pending is not None
        result = self._read(pending.step, self._passage.verdict(), pending.outcome)
        failed = self._failed(result.loss, result.squared_norms, pending.max_norm)
        assert self._caution is not None
        switch = self._caution.observe(failed is not None)
        if failed is not None:
            if pending.stepped:
                self._take_back(pending.lr)
            if failed == CLIPPED:
                self._apply(result.squared_norms, pending.lr, pending.max_norm)
            if failed == NON_FINITE:
                self._failure = self._error(result)
                result = replace(result, squared_norms=(0.0,) * self.count, skipped=True)
            result = replace(result, rollback=Rollback(failed, time.perf_counter() - self._begun))
        if self._failure is None:
            self.scaler.observe(failed != NON_FINITE)
        for optimizer in self._optimizers.values():
            optimizer.forget()
        self._drop_gradients()
        if self._failure is None:
            self._done.append(replace(result, switch=switch))
        return failed is None

    def _take_back(self, lr: float) -> None:
        for index, optimizer in sorted(self._optimizers.items()):  # as in `_apply`
            if index not in self.frozen:
                optimizer.restore() if self._copies else optimizer.invert(lr)
                self._send_parameters(index)
        self._await_parameters()

    def _raise(self) -> NoReturn:
        failure, self._failure = self._failure, None
        assert failure is not None
        raise failure

    def _take_done(self) -> tuple[StepResult, ...]:
        done, self._done = tuple(self._done), []
        return done

    def evaluate(self, inputs: Tensor | None, targets: Tensor | None, microbatches: int) -> float:
        """The mean loss over so many microbatches, without training. inputs, targets as in `step`."""
        self._settle()
        if microbatches not in self._evaluators:
            programs = lower_forward(self.placement, self.world.size, microbatches)
            self._evaluators[microbatches] = self._execute(programs, self.count, microbatches)
        for layer in self._layers.values():
            layer.module.eval()
        outcome = self._evaluators[microbatches].run(0, inputs, targets, training=False)
        for layer in self._layers.values():
            layer.marks.clear()
        table = torch.tensor([mean_loss(outcome.losses)], dtype=torch.float64)
        return float(self.collective.sum(table, "the evaluation to end"))

    # -- what changes ---------------------------------------------------------------------------------------------------------

    def freeze(self, layers: Collection[int]) -> None:
        """These layers train no more. Their optimizer state stays; a leading run of frozen layers is elided from the backward."""
        self._settle()
        before, after = self.first_trainable, self.first_trainable_after(layers)
        if after is None:
            raise PartitionError(f"freezing layers {sorted(layers)} would leave nothing to train")
        for index in sorted(layers):
            if index not in self._thawed:
                names = [name for name, p in self._modules[index].named_parameters() if p.requires_grad]
                self._thawed[index] = names
                for name in names:
                    parameter = self._modules[index].get_parameter(name)
                    parameter.requires_grad_(False)
                    parameter.grad = None
        self._freeze_tied()
        self.changed({*layers, *range(before, after + 1)})

    def unfreeze(self, layers: Collection[int]) -> None:
        """Frozen layers train again, from the optimizer state that they had."""
        self._settle()
        before = self.first_trainable
        self._known = None  # what a layer costs that trains again, nobody has measured
        for index in sorted(layers):
            for name in self._thawed.pop(index, ()):
                self._modules[index].get_parameter(name).requires_grad_(True)
        self._freeze_tied()
        # As in `freeze`: the layers between the old and the new end of the frozen prefix begin or cease to run B.
        self.changed({*layers, *range(self.first_trainable, before + 1)})

    def first_trainable_after(self, layers: Collection[int]) -> int | None:
        gone = set(layers) | self.frozen
        return next((i for i, m in enumerate(self._modules) if i not in gone and any(p.requires_grad for p in m.parameters())), None)

    def _freeze_tied(self) -> None:
        """A tied weight is one weight: frozen with its owner, in every use."""
        for (owner, _), (user, name) in self.model.tied:
            self._modules[user].get_parameter(name).requires_grad_(owner not in self._thawed)

    def changed(self, layers: Iterable[int]) -> None:
        """Their costs are no longer what was measured. Takes effect before the next step, by lowering again."""
        self._settle()
        layers = list(layers)
        self.profiler.forget(layers)
        if self._known is not None:
            self._known = elide(self._known, self.first_trainable, self.frozen)
        for index in layers:
            if index in self._layers:
                self._layers[index].forget_sizes()
        self._relower()

    def move(self, partition: Partition) -> Migration:
        """Puts the layers where `partition` says, with weights, gradients, optimizer state and flags. All or nothing."""
        self._settle()
        self._check(partition, self.placement)
        recomputed = self._recomputed(partition, self.world.size, self._microbatches)
        world = self.world
        plan = moves_between_ranks(self.partition, partition, self.placement)
        world.agree(hashlib.sha256(repr((self.partition.counts, partition.counts)).encode()).digest(), "the new placement")

        def leaving(index: int) -> tuple[nn.Module, dict[str, Tensor]]:
            return self._modules[index], self.layer_state(index)

        def adopt(arrivals: list[Arrival]) -> None:
            for move in plan:
                if move.source == world.rank:
                    self._drop(move.layer)
            for arrival in arrivals:
                state = fill(self._modules[arrival.layer], arrival.tensors, arrival.flags)
                self._adopt(arrival.layer, self._modules[arrival.layer], state)

        migration = exchange(world, plan, leaving, adopt)
        self.partition = partition
        self._tied.join()
        self.profiler.forget(move.layer for move in plan)
        self._relower()
        switched = self.recomputed ^ recomputed
        self.recomputed = recomputed
        for index, layer in self._layers.items():
            layer.recompute = index in recomputed
        if switched:
            self._known = None  # what a layer costs that computes again, nobody has measured
            self.changed(switched)
        return migration

    def _drop(self, index: int) -> None:
        """This rank holds the layer no more."""
        module = self._modules[index]
        for parameter in module.parameters():
            parameter.grad = None
        self._modules[index] = module.to("meta")
        del self._layers[index], self._optimizers[index], self._kept[index], self._shares[index]

    def reshape(self, *, pipeline: int, data: int, partition: Partition | None = None) -> Migration:
        """Makes the same ranks a mesh of `data` replicas of a pipeline of `pipeline` ranks; between steps. The batch stays the same, so
        each replica has other microbatches from the next step on. partition: of the new stages (default: equally many layers each).

        All or nothing. Raises InputError, on every rank, where the ranks, the microbatches, the slots or the schedule do not fit.
        """
        self._settle()
        old, everyone = self.world, self.world.everyone
        microbatches, rest = divmod(self._microbatches * old.replicas, data)
        if pipeline * data != everyone.size or rest:
            have = f"{everyone.size} ranks and {self._microbatches * old.replicas} microbatches"
            need = "pipeline x data must be the number of ranks, and data divide the microbatches"
            raise ConfigError(f"{have} cannot be {data} replicas of {pipeline} ranks; {need}")
        check_microbatches(self._schedule_name, pipeline, microbatches)
        self._check_slots(data, microbatches)
        placement = placement_of(self._schedule_name, pipeline, self._chunks)
        partition = partition or uniform(self.count, len(placement))
        self._check(partition, placement)
        recomputed = self._recomputed(partition, pipeline, microbatches)
        everyone.agree(hashlib.sha256(repr((pipeline, data, partition.counts)).encode()).digest(), "the new mesh")
        after = holders(partition, placement, data)
        plan = transfers(holders(self.partition, self.placement, old.replicas), after)
        whole = {i: self.layer_state(i, whole=True) for i in sorted(self._layers)}

        def leaving(index: int) -> tuple[nn.Module, dict[str, Tensor]]:
            return self._modules[index], whole[index]

        def adopt(arrivals: list[Arrival]) -> None:
            self._relower()
            if self._reducer is not None:
                self._reducer.close()
            for index in [i for i in self._layers if everyone.rank not in after[i]]:
                self._drop(index)
            self.world, self.placement, self.partition, self._microbatches = arrange(everyone, data), placement, partition, microbatches
            self._reducer = Reducer(self.world.peers) if data > 1 else None
            self.recomputed = recomputed
            arrived = {a.layer: fill(self._modules[a.layer], a.tensors, a.flags) for a in arrivals}
            for index in sorted({*self._layers, *arrived}):
                state = arrived[index] if index in arrived else whole[index]
                self._adopt(index, self._modules[index], state, whole=True)
            self._tied = TiedWeights(self.world, self.model.tied, self.rank_of, self._modules)
            self._tied.join()
            self._passage.close()
            self._passage = Passage(self.world, placement, self._table_length)

        migration = exchange(everyone, plan, leaving, adopt)
        self.profiler.forget(move.layer for move in plan)
        self.links = measure_links(self.world, self._pairs())
        return migration

    # -- what a dynamic case sees (`dynmo.dynamism.Layers`) ----------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        return self.model.names

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self._modules

    @property
    def own(self) -> list[int]:
        return sorted(self._layers)

    @property
    def collective(self) -> FirstReplica:
        return FirstReplica(self.world)

    def kept(self, layer: int) -> dict[str, Tensor]:
        return self._kept[layer]

    def moments(self, layer: int) -> dict[str, Tensor]:
        self._assert_final()
        return whole_state(self.world.peers, self._optimizers[layer])

    def rebuild(self, layer: int, moments: Mapping[str, Tensor]) -> None:
        self._assert_final()
        kept = self._kept[layer]
        self._adopt(layer, self._modules[layer], dict(moments), whole=True)
        self._kept[layer] = kept
        self._tied.join()
        self._relower()

    def layer_state(self, index: int, whole: bool = False) -> dict[str, Tensor]:
        """What of one of this rank's layers moves and is saved beside its module: optimizer state, and what cases keep with it.

        whole: with ZeRO-1, the state of all replicas' shares; all replicas ask for it, in the same order.
        """
        self._assert_final()
        kept = {f"{_KEPT}{name}": t.to(self.world.device) for name, t in self._kept[index].items()}
        optimizer = self._optimizers[index]
        return (whole_state(self.world.peers, optimizer) if whole else optimizer.state()) | kept

    def saved_layers(self) -> Iterator[tuple[int, tuple[nn.Module, dict[str, Tensor]]]]:
        """This rank's layers as a checkpoint has them, one whole layer at a time; the first replica's ranks write for all."""
        for index in sorted(self._layers):
            state = self.layer_state(index, whole=True)
            if self.world.replica == 0:
                yield index, (self._modules[index], state)

    # -- what is known ----------------------------------------------------------------------------------------------------------

    def costs(self) -> tuple[LayerCost, ...]:
        """Measured costs of all layers: seconds per microbatch, bytes."""
        pairs = [(layer, self._optimizers[index]) for index, layer in self._layers.items()]
        return self.profiler.gather(self.world, pairs, self.count, copies=self._caution is not None and self._copies)

    def predict(self, layers: tuple[LayerCost, ...], partition: Partition) -> Timeline:
        """What the simulator says of one step under these costs and this placement, with the schedule made for them."""
        return simulate(self.schedule_for(partition, layers), self.stage_costs(layers, partition))

    def schedule_for(self, partition: Partition, layers: tuple[LayerCost, ...] | None = None) -> Schedule:
        """The schedule that would run on this placement, with what is frozen now, made for these costs where it is made for any."""
        costs = caps = None
        if layers is not None and entry(self._schedule_name).from_costs:
            costs = self.stage_costs(layers, partition)
            caps = self._caps(layers, partition)
        return make(
            self._schedule_name,
            self.world.size,
            self._microbatches,
            costs=costs,
            chunks=self._chunks,
            caps=caps,
            first_trainable=partition.owner(self.first_trainable),
            objective=self.objective,
        )

    def full_schedule(self) -> Schedule:
        """The schedule with every stage training: an upper bound of what any frozen prefix keeps in memory."""
        return full_schedule(self._schedule_name, self.world.size, self._microbatches, self._chunks)

    def request(self, layers: tuple[LayerCost, ...], *, cost: Cost = "time", seed: int = 0, step: int = 0) -> BalanceRequest:
        """What a balancer is asked: where these layers should live, under this pipeline's schedule, links and memory limit."""
        limit, stages = self._memory_limit, len(self.placement)
        # Each stage is given its rank's whole limit: a balancer that knows of the placement adds up what a rank's stages hold.
        limits = None if limit is None else (limit,) * stages
        return BalanceRequest(
            layers,
            self.partition,
            cost,
            resident(self.full_schedule()),
            limits,
            seed,
            step,
            self.model.names,
            self._make_for(layers),
            self._boundary_links(),
            self.objective,
            self.first_trainable,
            placement=self.placement,
        )

    def _make_for(self, layers: tuple[LayerCost, ...]) -> Make:
        """The schedule that would run at some stages' costs. What a rank holds anyway is taken as everyone's mean: only the plan that is
        chosen is made within its ranks' true limits."""
        held = sum(layer.static_bytes for layer in layers) // self.world.size
        limit = None if self._memory_limit is None else float(max(0, self._memory_limit - held))

        def scheduled(costs: Costs) -> Schedule:
            kept = [0.0] * self.world.size
            for stage, rank in zip(costs.stages, self.placement, strict=True):
                kept[rank] += stage.held
            cap = 2.0 * self.world.size * max(kept) if limit is None else limit
            return make(
                self._schedule_name,
                self.world.size,
                self._microbatches,
                costs=costs,
                chunks=self._chunks,
                caps=(cap,) * self.world.size,
                first_trainable=frozen_stages(costs),
                objective=self.objective,
            )

        return scheduled

    def _caps(self, layers: tuple[LayerCost, ...], partition: Partition) -> tuple[float, ...]:
        return live_limits(layers, partition.counts, self.placement, self._memory_limit)

    def replan(self, layers: tuple[LayerCost, ...], least: float = 0.0) -> float:
        """Makes the schedule anew from these costs (the same on every rank), where that saves more than the share `least` of a step.

        Returns the share that the simulator says it saves; 0 where the schedule stays, as those do that are not made from costs.
        """
        self._settle()
        if not entry(self._schedule_name).from_costs:
            return 0.0
        costs = self.stage_costs(layers, self.partition)
        before = simulate(self.schedule_for(self.partition, self._known), costs).length(self.objective)
        after = simulate(self.schedule_for(self.partition, layers), costs).length(self.objective)
        gain = 1 - after / before if before else 0.0
        if self._known is not None and gain <= least:
            return 0.0
        self._known = layers
        self._relower()
        return max(0.0, gain)

    def largest(self, value: float) -> float:
        """The largest of the ranks' values, on every rank."""
        return float(self.world.everyone.largest(torch.tensor([value], dtype=torch.float64), "a measurement of every rank"))

    def stage_costs(self, layers: tuple[LayerCost, ...], partition: Partition) -> Costs:
        """The stages' costs, and the links' times for the messages that cross there."""
        ends = partition.bounds[1:-1]
        seconds = tuple(link.seconds(layers[end - 1].output_bytes) for link, end in zip(self._boundary_links(), ends, strict=True))
        return Costs(stage_costs(layers, partition.counts), seconds)

    def _boundary_links(self) -> tuple[LinkCost, ...]:
        """The link behind each stage but the last; between two stages of one rank it costs nothing."""
        here = LinkCost(0.0, math.inf)
        return tuple(self.links.get((min(pair), max(pair)), here) for pair in pairwise(self.placement))

    def digest(self) -> str:
        """SHA-256 over the SHA-256 of each layer's parameters, pruned ones in dense form, in global layer order: equal exactly when all
        weights are. Of a parameter that computes in lower precision its float32 master is hashed: the parameter is that, rounded. Raises
        RunError if the replicas' weights are not equal."""
        self._settle()
        table = torch.zeros(self.count, 32, dtype=torch.uint8)
        for index, layer in self._layers.items():
            digest = hashlib.sha256()
            for _, parameter in dense_parameters(layer.module, self._masters(index)):
                digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
            table[index] = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        self.world.sum(table, "the digests of the weights")
        digest = hashlib.sha256(table.numpy().tobytes())
        if self.world.replicas > 1:
            self.world.agree(digest.digest(), "the weights")
        return digest.hexdigest()

    def _masters(self, index: int) -> dict[str, Tensor]:
        """The whole float32 masters of one of this rank's layers, by parameter."""
        if not self._optimizers[index].masters:
            return {}
        state = self._optimizers[index].state() if self._optimizers[index].whole else self.layer_state(index, whole=True)
        return {key.removesuffix("/master"): value for key, value in state.items() if key.endswith("/master")}

    @property
    def reduction_seconds(self) -> tuple[float, float]:
        """Of all steps so far: what this rank's collectives over the replicas took, and what of it its own work did not hide."""
        return (0.0, 0.0) if self._reducer is None else (self._reducer.worked, self._reducer.waited)

    @property
    def own_layers(self) -> dict[int, tuple[nn.Module, LayerOptimizer]]:
        """This rank's layers by global index, for checkpoints."""
        return {i: (layer.module, self._optimizers[i]) for i, layer in self._layers.items()}

    def restore(self, index: int, tensors: dict[tuple[str, str], Tensor], flags: dict[str, bool]) -> None:
        """Replaces one of this rank's layers by what a checkpoint holds of it. Raises CheckpointError if it is of another shape."""
        self._assert_final()
        try:
            pruned = conform(self._modules[index], {name: t for (section, name), t in tensors.items() if section == "buffer"})
        except ValueError as error:
            raise CheckpointError(f"layer {index} ({self.model.names[index]}): {error}; resume with the run's own config") from None
        shapes = {name: tuple(p.shape) for name, p in self._modules[index].named_parameters() if name not in pruned}
        saved = {name: tuple(t.shape) for (section, name), t in tensors.items() if section == "parameter" and name not in pruned}
        for name in sorted({*shapes, *saved}):
            if shapes.get(name) != saved.get(name):
                raise CheckpointError(
                    f"layer {index} ({self.model.names[index]}): {name} is {saved.get(name)} in the checkpoint, {shapes.get(name)} in the "
                    "config's model; resume with the config that the run was started with"
                )
        for name, parameter in self._modules[index].named_parameters():
            then = tensors["parameter", name].dtype
            if then != parameter.dtype:
                was, now = (str(x).removeprefix("torch.") for x in (then, parameter.dtype))
                raise CheckpointError(
                    f"layer {index} ({self.model.names[index]}): {name} is {was} in the checkpoint, {now} in the config's model; resume "
                    "with the train.precision that the run was started with"
                )
        self._adopt(index, self._modules[index], fill(self._modules[index], tensors, flags), whole=True)
        self._tied.join()
        self._relower()


def full_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule of equal stages that all train."""
    # One that is made within any limit must at least find the memory of 1F1B.
    return make(name, ranks, microbatches, chunks=chunks, caps=(float(ranks),) * ranks if name == "zb-auto" else None)


def moves_between_ranks(old: Partition, new: Partition, placement: Sequence[int]) -> tuple[Move, ...]:
    """The layers whose rank changes, in layer order, with ranks in the place of stages."""
    across = (Move(layer, placement[source], placement[target]) for layer, source, target in moves(old, new))
    return tuple(move for move in across if move.source != move.target)
