"""Finds the bytes of layers, and the layers that recompute, from shapes alone.

Nothing is computed or allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import dropwhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import ConfigError, place
from dynmo.kernels.seeds import generators_kept
from dynmo.kernels.split import LOW, gradient_bytes
from dynmo.kernels.torch_private import NEEDS_VALUES, FakeTensorMode
from dynmo.models.emulated import EmulatedLayer
from dynmo.models.model import Model
from dynmo.pipeline.optimizers import settings_of
from dynmo.pipeline.options import PipelineOptions
from dynmo.plan.evaluate import Replica
from dynmo.plan.partition import Partition, RecomputeRule
from dynmo.plan.problem import Problem, Work
from dynmo.plan.recompute import choose_recomputed, recompute_as_workspace
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.engine.peak_memory import Watch
from dynmo.runtime.engine.profiler import weight_bytes
from dynmo.runtime.layer.joint_graph import Tensors
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.token_pieces import Cutter, token_pieces_of
from dynmo.runtime.optim.parameter_groups import ParameterGroups, fused_class
from dynmo.runtime.optim.precision import PRECISIONS, lower
from dynmo.runtime.state.spread_groups import spread_linears, spreading
from dynmo.schedule.bounds import Objective
from dynmo.schedule.memory import rank_limits
from dynmo.schedule.op import Schedule

_logger = logging.getLogger(__name__)


class ActivationsUnknown(ConfigError):
    """Layers of a user's own model train perhaps, but do not run on shapes alone."""


def known_costs(options: PipelineOptions, model: Model) -> tuple[tuple[LayerCost, ...], str | None]:
    """Returns the bytes of every layer, and why activations are unknown if they are."""
    try:
        return shape_costs(options, model), None
    except ActivationsUnknown as error:
        warning = (
            "activations unknown, so memory is that of parameters, gradients and optimizer state "
            f"alone: {error}"
        )
        return static_costs(options, model), warning


def shapes_of(
    options: PipelineOptions,
    model: Model,
    replicas: int | None = None,
    level: int = logging.WARNING,
) -> tuple[LayerCost, ...] | None:
    """Returns the costs from shapes, or None if the layers do not run on shapes alone."""
    try:
        return shape_costs(options, model, replicas)
    except ConfigError as error:
        _logger.log(
            level,
            f"activations unknown, so costs are without what an op needs while it runs: {error}",
        )
        return None


def shape_costs(
    options: PipelineOptions, model: Model, replicas: int | None = None
) -> tuple[LayerCost, ...]:
    """Returns the bytes of every layer. Seconds are 0.

    One microbatch runs on fake tensors, which have shapes without memory. On the meta device
    attention would save the plain product of all positions with all, which no real device does.

    Raises:
        ActivationsUnknown: The user's own model needs more than shapes, such as the value of a
            tensor.
        ConfigError: The user's own model raises an error that has nothing to do with that.
    """
    if model.options is None:
        raise ActivationsUnknown("layers of one's own have no shapes before the first step")
    if options.micro_batch is None:
        raise ActivationsUnknown("the shape of a microbatch is unknown; give micro_batch")
    # A layer's error is reported in one line. Torch would print a traceback first.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    groups = _groups(options, model)
    try:
        with FakeTensorMode():
            costs = _shape_costs(options, model, groups)
    except Exception as error:
        kind = model.options.kind
        if kind != "hf" and not kind.startswith("python:"):
            raise
        said = f"its layers raised {_said(error)}{place(error)}"
        text = f"model.kind = {kind!r}: on shapes alone, {said}"
        text = f"{error}, on shapes alone" if isinstance(error, ConfigError) else text
        if not isinstance(error, NEEDS_VALUES) and _fails(options, model):
            raise ConfigError(text) from error
        raise ActivationsUnknown(text) from error
    return _per_replica(options, costs, replicas)


def static_costs(options: PipelineOptions, model: Model) -> tuple[LayerCost, ...]:
    """Returns the bytes of every layer's parameters, gradients and optimizer state."""
    costs: list[LayerCost] = []
    groups = _groups(options, model)
    for index, module in enumerate(meta_layers(model)):
        lower(module, PRECISIONS[options.precision])
        costs.append(_static_cost(options, model, groups, index, module))
    return _per_replica(options, costs, None)


def _groups(options: PipelineOptions, model: Model) -> ParameterGroups:
    settings = settings_of(options)
    # dynmo's own optimizers keep as many bytes for any group.
    layers = [] if fused_class(settings.make) else meta_layers(model)
    return ParameterGroups(settings, model, layers, torch.device("cpu"))


def _per_replica(
    options: PipelineOptions, costs: Sequence[LayerCost], replicas: int | None
) -> tuple[LayerCost, ...]:
    replicas = replicas or options.replicas
    return tuple(
        c.with_accumulation(options.accumulation_groups // replicas).shared(
            replicas if options.zero else 1
        )
        for c in costs
    )


def meta_layers(model: Model) -> list[nn.Module]:
    """Returns all layers on the meta device, which takes no memory.

    A model that needs values to be built is built first, and then moved there.
    """
    try:
        with torch.device("meta"):
            return model.build(frozenset())
    except ConfigError:
        return model.build(frozenset())


def _fails(options: PipelineOptions, model: Model) -> bool:
    """Returns True if one microbatch fails on real tensors, too. One layer is in memory at a time.

    Fake tensors have limits of their own.
    """
    try:
        with generators_kept(torch.device("cpu")), torch.no_grad():
            out: Any = _ids(options, model)
            for index in range(model.layers):
                layer = model.build((index,))[index]
                out = layer(*out) if isinstance(out, tuple) else layer(out)
            model.loss(out, _ids(options, model))
    except Exception:
        return True
    return False


def _ids(options: PipelineOptions, model: Model) -> Tensor:
    assert options.micro_batch is not None
    assert model.options is not None
    return torch.zeros((options.micro_batch, model.options.sequence), dtype=torch.int64)


def _said(error: Exception) -> str:
    lines = [*str(error).strip().splitlines()[:1], *getattr(error, "__notes__", ())]
    return f"{type(error).__name__}: {', '.join(lines)}" if lines else type(error).__name__


def _shape_costs(
    options: PipelineOptions, model: Model, groups: ParameterGroups
) -> list[LayerCost]:
    targets = _ids(options, model)
    cutter = token_pieces_of(options.head_tokens, model)
    pieces = None if cutter is None else partial(cutter.cut, targets=targets)
    ids = model.first_inputs(_ids(options, model), targets)
    layers: list[Layer] = []
    for index, module in enumerate(model.build(range(model.layers))):
        if isinstance(module, EmulatedLayer):
            module.f = module.b = module.w = 0.0
        lower(module, PRECISIONS[options.precision])
        layers.append(Layer(index, module, HostClock(), options.seed))
    # The first microbatch makes the gradients and measures the bytes that stay. The second shows
    # the workspace of an op that adds to them.
    makes, adds = (
        _shape_microbatch(layers, i, ids, lambda out: model.loss(out, targets), pieces)
        for i in range(2)
    )
    always_makes = options.all_microbatches == options.accumulation_groups
    costs: list[LayerCost] = []
    for layer, made, added in zip(layers, makes, adds, strict=True):
        cost = _static_cost(options, model, groups, layer.index, layer.module)
        weight = max(0, made.weight - cost.gradient_bytes) if always_makes else added.weight
        costs.append(
            replace(
                cost,
                activation_bytes=layer.meter.activation_bytes,
                stash_bytes=layer.meter.stash_bytes,
                output_bytes=layer.meter.output_bytes,
                workspace_bytes=max(added),
                forward_workspace_bytes=added.forward,
                weight_workspace_bytes=weight,
            )
        )
    return costs


def _static_cost(
    options: PipelineOptions,
    model: Model,
    groups: ParameterGroups,
    index: int,
    module: nn.Module,
) -> LayerCost:
    """Returns the bytes that a layer keeps.

    If replicas share groups of weights, these are the bytes with the most groups allowed.
    """
    copies = options.post_validation and (options.rollback == "exact" or not groups.inverts)
    # Each replica's rows have a gradient of their own, so weights that are spread have as many.
    gradients = sum(gradient_bytes(p) for p in module.parameters() if p.requires_grad)
    if options.expert > 1:
        facts = options.facts(None, model.options, on_cuda=False)
        for part in spreading(module):
            part.hold(range(facts.most_groups(part.groups)))
    parameters = list(module.parameters())
    # The layer that owns a tied weight updates it.
    users = {name for _, (layer, name) in model.tied if layer == index}
    updated = {
        name: p for name, p in module.named_parameters() if p.requires_grad and name not in users
    }
    # ZeRO-1 divides by the replicas all bytes that are not spread (`_per_replica`).
    times = options.replicas if options.zero and options.expert > 1 else 1
    spread = {p for linear in spread_linears(module).values() for p in linear.parameters()}
    trained = {
        name: gradient_bytes(p) * (times if p in spread else 1) for name, p in updated.items()
    }
    state = sum(
        groups.group(index, name).state_bytes(p.shape, trained[name] // max(1, p.numel()))
        for name, p in updated.items()
    )
    masters = sum(trained[name] for name, p in updated.items() if p.dtype in LOW)
    return LayerCost(
        0.0,
        0.0,
        0.0,
        parameters=sum(p.numel() for p in parameters),
        weight_bytes=weight_bytes(module),
        gradient_bytes=gradients,
        optimizer_bytes=state + masters,
        rollback_bytes=(sum(trained.values()) + state) * copies,
    )


class _Workspace(NamedTuple):
    """The most bytes that F, B and W need beside the bytes that the layer keeps."""

    forward: int
    backward: int
    weight: int


def _shape_microbatch(
    layers: Sequence[Layer],
    microbatch: int,
    ids: Tensor,
    loss: Callable[[Tensor], Tensor],
    pieces: Cutter | None,
) -> list[_Workspace]:
    watches = [Watch() for _ in layers]
    forward, backward, weight = ([0] * len(layers) for _ in range(3))
    trained = list(dropwhile(_is_frozen, layers))
    first = len(layers) - len(trained)  # a frozen prefix has neither graph nor backward
    tensors: Tensors = (ids,)
    for layer, watch in zip(layers, watches, strict=True):
        graph, given = layer.index >= first, tensors
        with watch:
            ends = layer is layers[-1]
            tensors = layer.forward(
                microbatch,
                given,
                0,
                graph=graph,
                need_input=layer.index > first,
                finish=loss if ends else None,
                pieces=pieces if ends else None,
            )
        # Nobody counts the inputs of a layer that keeps nothing.
        inputs = 0 if graph else sum(x.nbytes for x in given)
        forward[layer.index] = inputs + watch.excess(watch.live if graph else 0)
    gradients: Tensors = (torch.ones(()),)
    watches = watches[first:]
    for layer, watch in zip(reversed(trained), reversed(watches), strict=True):
        before, given = watch.restart(), sum(g.nbytes for g in gradients)
        with watch:
            gradients = layer.backward_input(microbatch, gradients, deferred=True)
        backward[layer.index] = watch.excess(before) + given
    for layer, watch in zip(reversed(trained), reversed(watches), strict=True):
        before = watch.restart()
        with watch:
            layer.backward_weight(microbatch)
        weight[layer.index] = watch.excess(before)
    return list(map(_Workspace, forward, backward, weight))


def _is_frozen(layer: Layer) -> bool:
    return not any(p.requires_grad for p in layer.module.parameters())


def recompute_for(
    options: PipelineOptions, model: Model, known: Sequence[LayerCost] | None = None
) -> RecomputeRule:
    """Returns `train.recompute` as a pipeline takes it.

    "auto" depends on shapes alone. All ranks therefore choose alike, whatever they measure.

    Args:
        options: Options of the pipeline.
        model: The model to train.
        known: The costs from shapes with the replicas of `options`, if the caller has them.
    """
    recompute, limit = options.recompute, options.memory_limit
    if isinstance(recompute, tuple):
        return recompute
    if recompute != "auto" or limit is None:
        return range(model.layers) if recompute == "all" else ()

    @cache
    def costs_for(replicas: int) -> tuple[LayerCost, ...]:
        if known is not None and replicas == options.replicas:
            return recompute_as_workspace(known, ())
        try:
            return recompute_as_workspace(shape_costs(options, model, replicas), ())
        except ActivationsUnknown as error:
            raise ConfigError(
                "train.recompute = 'auto' needs the layers' activations, which are unknown; use "
                f"'all' or a list of layers: {error}"
            ) from error

    def fitting(partition: Partition, schedule: Schedule, replicas: int) -> frozenset[int]:
        costs = costs_for(replicas)
        replica = replica_of(options, costs, replicas=replicas)
        limits = rank_limits(limit, schedule.ranks) or ()
        return choose_recomputed(
            costs,
            partition,
            schedule,
            lambda layers: replica.memory(layers, partition, schedule),
            limits,
        )

    return fitting


def replica_of(
    options: PipelineOptions,
    costs: tuple[LayerCost, ...],
    *,
    replicas: int | None = None,
    schedule: str | None = None,
    objective: Objective | None = None,
) -> Replica:
    """Returns one replica of a run whose layers have the bytes of shapes."""
    validates = options.post_validation
    usual = Objective.SPAN if validates else Objective.MAKESPAN
    names = tuple(map(str, range(len(costs))))
    work = Work(objective or usual, validates, options.chunks, options.accumulation_groups)
    problem = Problem(Profile(costs, names, microbatch=1), work, options.memory_limit)
    name, count = schedule or options.schedule, replicas or options.replicas
    return Replica(problem, problem.mesh(options.pipeline, options.microbatches, name, count))
