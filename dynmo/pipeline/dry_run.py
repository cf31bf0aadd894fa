"""Plans a training from shapes alone.

A plan has the placement, the schedule and the memory of each rank. Nothing is computed or
allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Table

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import ConfigError, NoRoomError, PartitionError
from dynmo.models.model import Model
from dynmo.pipeline.assembly import check_own_rules, first_partition
from dynmo.pipeline.case import Dynamism
from dynmo.pipeline.cases import make_cases
from dynmo.pipeline.option_checks import problems
from dynmo.pipeline.options import PipelineOptions
from dynmo.pipeline.shape_costs import known_costs, meta_layers, recompute_for, replica_of
from dynmo.plan.best import NoMeshFitsError, search
from dynmo.plan.evaluate import evaluate
from dynmo.plan.partition import Partition
from dynmo.plan.problem import Allowed, Choice, Problem, Work
from dynmo.plan.recompute import recompute_as_workspace
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import AUTO, SHAPES, full_schedule
from dynmo.schedule.memory import Limit, least_limit, rank_limits, within


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        names: Name of each layer.
        partition: Number of layers on each stage.
        stage_ranks: The rank that holds each stage.
        parameters: Number of parameters of each stage.
        memory: Bytes of each rank at the schedule's peak.
        limit: Bytes that a rank may use, or each. None means unlimited.
        schedule: Name of the schedule.
        microbatches: Number of microbatches of a step.
        precision: The precision that the model computes in.
        recompute: The layers that recompute.
        checkpoint_bytes: Bytes of a checkpoint, at most. Frozen weights may be left out.
        activations_unknown: Why the layers' activations are unknown. `memory` is then without them.
        disk: Bytes in files that each stage is read from. None if no model of transformers is read.
        halves: Blocks of a model of transformers that are cut into halves.
        whole: Why other blocks stay whole: reason by index of the block.
        shapes: With schedule = "auto": bytes of the fullest rank, by schedule.
    """

    names: tuple[str, ...]
    partition: tuple[int, ...]
    stage_ranks: tuple[int, ...]
    parameters: tuple[int, ...]
    memory: tuple[int, ...]
    limit: Limit
    schedule: str
    microbatches: int
    precision: str = "float32"
    recompute: tuple[int, ...] = ()
    checkpoint_bytes: int = 0
    activations_unknown: str | None = None
    disk: tuple[int, ...] | None = None
    halves: tuple[int, ...] = ()
    whole: Mapping[int, str] = field(default_factory=dict[int, str])
    shapes: Mapping[str, int] = field(default_factory=dict[str, int])

    def check_memory(self, options: PipelineOptions) -> None:
        """Raises NoRoomError if a rank needs more than the limit.

        The message names the rank, and what `options` have not set yet.
        """
        is_known = self.activations_unknown is None
        ways = {
            "parallel.zero = 1 with replicas": not options.zero and not is_known,
            "smaller microbatches": options.micro_batch != 1 and is_known,
            "train.recompute = 'auto'": options.recompute == "none" and is_known,
            "a schedule that keeps fewer in flight": is_known,
        }
        advice = ", ".join(["use more ranks", *(way for way, helps in ways.items() if helps)])
        what = (
            f"at the peak of {self.schedule}"
            if is_known
            else ("for parameters, gradients and optimizer state alone")
        )
        limits = rank_limits(self.limit, len(self.memory)) or self.memory
        for rank, (need, limit) in enumerate(zip(self.memory, limits, strict=True)):
            if need > limit:
                raise NoRoomError(
                    f"rank {rank} needs {need} bytes {what}, over pipeline.memory_limit = {limit}; "
                    f"{advice}, or a higher limit"
                )

    def to_json(self) -> dict[str, Any]:
        unused = {"names"} if self.disk is not None else {"names", "disk", "halves", "whole"}
        unused |= set() if self.shapes else {"shapes"}
        return {key: value for key, value in vars(self).items() if key not in unused}

    def block_lines(self) -> Iterator[str]:
        """Yields which blocks are cut into halves, and why others are not."""
        if self.halves:
            yield f"{_blocks(self.halves)} cut into an attention and a feed-forward half"
        for reason in dict.fromkeys(self.whole.values()):
            blocks = [index for index, why in self.whole.items() if why == reason]
            yield f"{_blocks(blocks)} whole: {reason}"

    def shape_lines(self) -> Iterator[str]:
        """Yields what "auto" begins with, and what its other schedules would need."""
        if not self.shapes:
            return
        needs = "".join(
            f", {name} needs {need / 2**20:,.1f} MiB"
            for name, need in self.shapes.items()
            if name != self.schedule
        )
        decided = "measured times decide later (dynmo plan compares them)"
        yield f"auto begins with {self.schedule}{needs}; {decided}"

    def table(self) -> Table:
        recompute = (
            f", {len(self.recompute)} of {len(self.names)} layers recomputed in B"
            if self.recompute
            else ""
        )
        limits = (self.limit,) if isinstance(self.limit, int) else self.limit or ()
        shown = ", ".join(f"{each / 2**20:,.1f}" for each in limits)
        limit = f", limit {shown} MiB" if shown else ""
        known = "" if self.activations_unknown is None else "; parameters only, activations unknown"
        table = Table(
            title=f"{self.schedule}, {len(self.memory)} ranks, {self.microbatches} "
            f"microbatches, {self.precision}{recompute}{limit}{known}",
            title_justify="left",
        )
        for heading in (
            "rank",
            "layers",
            "first",
            "last",
            "parameters",
            "memory at peak" if not known else "memory without activations",
            *(["read from disk"] if self.disk is not None else []),
        ):
            table.add_column(heading, justify="left" if heading in ("first", "last") else "right")
        start = 0
        for stage, (count, rank) in enumerate(zip(self.partition, self.stage_ranks, strict=True)):
            first, last = self.names[start], self.names[start + count - 1]
            start += count
            # The row of a rank's first stage shows the rank's memory.
            memory = (
                f"{self.memory[rank] / 2**20:,.1f} MiB"
                if self.stage_ranks.index(rank) == stage
                else ""
            )
            row = [str(rank), str(count), first, last, f"{self.parameters[stage]:,}", memory]
            if self.disk is not None:
                row.append(f"{self.disk[stage] / 2**20:,.1f} MiB")
            table.add_row(*row)
        return table


def _blocks(indices: Sequence[int]) -> str:
    """Writes indices of blocks with their ranges, such as "blocks 0-3, 7"."""
    starts = [i for i in indices if i - 1 not in indices]
    ends = [i for i in indices if i + 1 not in indices]
    ranges = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"{'block' if len(indices) == 1 else 'blocks'} {', '.join(ranges)}"


def dry_run(
    model: Model,
    options: PipelineOptions,
    own_cases: Sequence[Dynamism] = (),
    on_cuda: bool = False,
) -> RunPlan:
    """Plans a training from shapes alone: placement, schedule, and memory of each rank.

    Args:
        model: The model to train.
        options: Options of the pipeline. `pipeline` is the number of ranks of a pipeline.
        own_cases: The user's own dynamic cases.
        on_cuda: Whether the ranks will compute on CUDA.

    Raises:
        NoRoomError: A rank's memory at the schedule's peak is over the limit.
        ConfigError: An option is wrong. `dynmo.Pipeline` would raise the same error.
    """
    for problem in problems(options, model.layers, model.options):
        raise ConfigError(problem)
    facts = options.facts(model.layers, model.options, on_cuda)
    check_own_rules(options)
    cases = make_cases([*options.cases, *own_cases], facts)
    modules = meta_layers(model) if cases else []
    for case in cases:
        case.check(modules)
    costs, unknown = known_costs(options, model)
    check_later_ranks(options, model, costs)
    plan = first_plan(options, model, costs, unknown)
    if model.options is None or model.options.kind != "hf":
        return plan
    return _with_files(plan, model)


def _with_files(plan: RunPlan, model: Model) -> RunPlan:
    """Adds what is known of a model of transformers."""
    from dynmo.models.huggingface.model import HuggingFaceModel, disk_bytes

    assert isinstance(model, HuggingFaceModel)
    sizes, partition = disk_bytes(model), Partition(plan.partition)
    return replace(
        plan,
        disk=tuple(sum(sizes[i] for i in partition.range_of(s)) for s in range(partition.stages)),
        halves=tuple(i for i in range(model.structure.count) if i not in model.whole),
        whole=model.whole,
    )


def check_later_ranks(options: PipelineOptions, model: Model, costs: tuple[LayerCost, ...]) -> None:
    """Checks that the model fits the later numbers of ranks that `elastic` names."""
    elastic, limit = options.elastic, options.memory_limit
    if limit is None or options.recompute != "none":
        return
    # Ranks, replicas that they may form, and the key.
    later: list[tuple[int, tuple[int, ...], str]] = [
        (pipeline * data, (data,), f"elastic.reshape_at: [{step}, {pipeline}, {data}]")
        for step, pipeline, data in elastic.reshape_at
    ]
    if elastic.target_ranks is not None:
        shapes = options.mesh_rule(model.layers).shapes(elastic.target_ranks)
        fewer = tuple(data for _, data in shapes if data <= options.replicas)
        key = f"elastic.target_ranks = {elastic.target_ranks}"
        later.append((elastic.target_ranks, fewer, key))
    zero = options.zero
    if options.expert > 1:
        # Replicas that share experts stay together, and the costs are of so many.
        zero, later = 0, [(ranks, (options.replicas,), key) for ranks, _, key in later]
    elif zero and later:  # each mesh divides the optimizer state by its own replicas
        costs, _ = known_costs(options.model_copy(update={"zero": 0}), model)
    # Any times will do, because only the memory counts.
    layers = tuple(replace(cost, f=1.0, b=1.0, w=1.0) for cost in costs)
    profile = Profile(layers, model.names, microbatch=options.samples)
    work = Work(
        chunks=options.chunks,
        accumulation_groups=options.accumulation_groups,
        zero=zero,
        post_validation=options.post_validation,
    )
    for ranks, replicas, key in later:
        allowed = Allowed(
            ranks,
            options.global_batch,
            (options.samples,),
            SHAPES if options.schedule == AUTO else (options.schedule,),
            replicas,
        )
        try:
            search(Problem(profile, work, least_limit(limit)), allowed, quick=True)
        except NoMeshFitsError as error:
            raise NoRoomError(
                f"{key} cannot hold the model: {error.shortage}; use more ranks, or a higher "
                "memory limit"
            ) from None


def first_plan(
    options: PipelineOptions,
    model: Model,
    costs: tuple[LayerCost, ...],
    activations_unknown: str | None = None,
) -> RunPlan:
    """Plans the run from the first step on.

    No times are known yet. So "auto" begins with the first schedule that fits the memory.
    """

    def plan_of(name: str) -> RunPlan:
        return _plan_of(options, model, costs, activations_unknown, name)

    plan = (
        plan_of(options.schedule)
        if options.schedule != AUTO
        else _first_of(options, model, plan_of)
    )
    plan.check_memory(options)
    return plan


def _first_of(options: PipelineOptions, model: Model, plan_of: Callable[[str], RunPlan]) -> RunPlan:
    """Returns the plan of the first schedule that fits, or of the one that comes closest."""
    plans, failed = list[RunPlan](), list[PartitionError]()
    for name in options.first_shapes(model.layers):
        try:
            plans.append(plan_of(name))
        except PartitionError as error:  # too full even with all layers recomputed
            failed.append(error)
    if not plans:
        raise failed[0]
    needs = {plan.schedule: max(plan.memory) for plan in plans}
    fitting = (plan for plan in plans if within(plan.memory, plan.limit))
    closest = min(plans, key=lambda plan: max(plan.memory))
    return replace(next(fitting, closest), shapes=needs)


def _plan_of(
    options: PipelineOptions,
    model: Model,
    costs: tuple[LayerCost, ...],
    activations_unknown: str | None,
    name: str,
) -> RunPlan:
    partition = first_partition(options, model.layers, schedule=name)
    ranks, replicas = options.pipeline, options.replicas
    full = full_schedule(name, ranks, options.microbatches, options.chunks)
    recompute = recompute_for(options, model, costs if activations_unknown is None else None)
    recomputed = frozenset(
        recompute(partition, full, replicas) if callable(recompute) else recompute
    )
    costs = recompute_as_workspace(costs, recomputed)
    replica = replica_of(options, costs, schedule=name)
    holder = [replica.stage_ranks[partition.owner(layer)] for layer in range(model.layers)]
    if any(holder[owner] != holder[user] for (owner, _), (user, _) in model.tied):
        # A weight that is tied over two ranks keeps the barrier at the end of a step.
        replica = replica_of(options, costs, schedule=name, objective=Objective.MAKESPAN)
    plan = evaluate(replica.problem, Choice(replica.mesh, partition))
    return RunPlan(
        names=model.names,
        partition=partition.counts,
        stage_ranks=plan.stage_ranks,
        parameters=tuple(
            sum(costs[layer].parameters for layer in partition.range_of(stage))
            for stage in range(partition.stages)
        ),
        memory=plan.memory,
        limit=options.memory_limit,
        schedule=plan.schedule.name,
        microbatches=options.microbatches,
        precision=options.precision,
        recompute=tuple(sorted(recomputed)),
        checkpoint_bytes=sum(
            cost.weight_bytes + cost.optimizer_bytes * (replicas if options.zero else 1)
            for cost in costs
        ),
        activations_unknown=activations_unknown,
    )
