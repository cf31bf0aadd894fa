"""What makes a layer impossible to train, move or rebuild, as its store sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dynmo.errors import CheckpointError, ConfigError, RunError
from dynmo.kernels.packed_weight import unknown_form
from dynmo.models.identity import Identity
from dynmo.models.model import named_tensors
from dynmo.plan.partition import Move
from dynmo.runtime.comm.agreement import first_difference
from dynmo.runtime.comm.headers import DTYPES
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.waits import ranks_text
from dynmo.runtime.layer.census import follow_hooks, hooks_of
from dynmo.runtime.layer.reads import second_place_of
from dynmo.runtime.optim.optimizer import LayerOptimizer
from dynmo.runtime.optim.parameter_groups import ParameterGroups
from dynmo.runtime.state.migration import Arrival


def check_same_model(world: RankGroup, identity: Identity) -> None:
    """Raises ConfigError on every rank if the ranks have built different models."""
    parts = list(identity.parts())
    texts = [f"{what} = {value}" for what, value in parts]
    difference = first_difference(world, texts, "the models of all ranks to be compared")
    if difference is None:
        return
    index, others = difference
    what, mine = parts[index] if index < len(parts) else ("something", "nothing")
    raise ConfigError(
        f"{what} is not the same on rank 0 and {ranks_text(others)} (on rank "
        f"{world.everyone.rank}: {mine}); build the same model from the same code on every rank"
    )


def check_same_groups(world: RankGroup, groups: ParameterGroups) -> None:
    """Raises ConfigError on every rank if the ranks have other groups of parameters."""
    if groups.is_plain:
        return
    difference = first_difference(world, groups.texts(), "the optimizers of all ranks")
    if difference is not None:
        index, others = difference
        raise ConfigError(
            f"group {index} of the optimizer has other options or parameters on rank 0 than on "
            f"{ranks_text(others)}; give all ranks the same optimizer and groups"
        )


def are_double(modules: Sequence[nn.Module], dtype: torch.dtype) -> bool:
    """Returns whether all weights are float64, which excludes another precision."""
    kinds = {p.dtype for module in modules for p in module.parameters() if p.is_floating_point()}
    if kinds == {torch.float64} and dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"the weights are float64, but precision = '{name}'; convert the model first "
            "(model.float()), or leave out precision"
        )
    return kinds == {torch.float64}


def check_layer(index: int, module: nn.Module, replicas: int) -> None:
    """Raises ConfigError if a layer cannot move or would differ between replicas."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise ConfigError(
                f"layer {index}: {name} is of {tensor.dtype}, which can neither move nor be saved; "
                f"known are {', '.join(DTYPES)}"
            )
    renormalised = next(
        (
            name
            for name, x in module.named_modules()
            if isinstance(x, nn.Embedding) and x.max_norm is not None
        ),
        None,
    )
    if replicas > 1 and renormalised is not None:
        raise ConfigError(
            f"layer {index}: the embedding {renormalised or 'itself'} has max_norm, so its forward "
            "writes to its weight, of which every replica would have its own; use "
            "parallel.replicas = 1 without [elastic] reshape, or no max_norm"
        )


def check_views(
    index: int, module: nn.Module, tied: Collection[str], device: torch.device, dtype: torch.dtype
) -> None:
    """Refuses a view of a tensor that is to get another memory, for its type, say."""
    changing = {
        name
        for _, name, x in named_tensors(module)
        if x.layout == torch.strided
        and (not x.is_contiguous() or x.device.type != device.type or dtype != torch.float32)
    }
    reason = second_place_of(module, changing, tied, same=False) if changing else None
    if reason is not None:
        raise ConfigError(f"layer {index} ({type(module).__name__}) {reason}")


def check_moments(
    layer: str, module: nn.Module, optimizer: LayerOptimizer, moments: Mapping[str, Tensor]
) -> None:
    """Asks the optimizer so far which moments have an element for each of the parameter's."""
    parameters = dict(module.named_parameters())
    for key, value in moments.items():
        name, _, moment = key.rpartition("/")
        if name not in parameters or name not in optimizer.shares:
            continue
        shape = parameters[name].shape
        if optimizer.is_cut(name, moment) and value.numel() != shape.numel():
            raise RunError(
                f"{layer}: rebuild got {key} of {list(value.shape)}, but {name} is {list(shape)}; "
                "change the moments as the parameter"
            )


def check_saved_moments(layer: str, optimizer: LayerOptimizer, moments: Iterable[str]) -> None:
    """Refuses optimizer state of a checkpoint that this optimizer has not."""
    unknown = next((name for name in moments if not optimizer.knows(name)), None)
    if unknown is not None:
        raise CheckpointError(
            f"{layer}: the checkpoint has {unknown} of the optimizer, which the config's has not; "
            "resume with the train.optimizer and model.tied that the run was started with"
        )


def check_arrival(
    everyone: RankGroup, move: Move, arrival: Arrival, module: nn.Module, given: object
) -> None:
    """Refuses a layer whose hooks or packed weights this rank does not have.

    A module that the user gave on this rank has the hooks that were registered on all ranks.
    """
    layer = f"layer {move.layer} ({type(module).__name__})"
    if (form := unknown_form(arrival.forms)) is not None:
        raise ConfigError(
            f"{layer} comes with weights that are packed as {form}, which this rank has not "
            "imported; import it on every rank"
        )
    if isinstance(given, nn.Module):
        follow_hooks(module, given)
    here, at_source = hooks_of(module), arrival.hooks
    differing = [each for each in [*at_source, *here] if (each in at_source) != (each in here)]
    if differing:
        has, lacks = everyone.describe_rank(move.source), "this one"
        if differing[0] in here:
            has, lacks = lacks, has
        raise ConfigError(
            f"{layer} has a hook on {has} that {lacks} lacks ({differing[0]}); register hooks on "
            "the layers of all ranks, before or after the pipeline is made"
        )
