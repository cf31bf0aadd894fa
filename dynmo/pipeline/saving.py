"""Saves and restores an engine: its layers, and the state that no layer has."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from dynmo.errors import CheckpointError, DynmoError, RunError, place
from dynmo.models.identity import Identity, first_of, identity_from
from dynmo.models.model import Model
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.case import Dynamism
from dynmo.runtime.comm.agreement import agree, raised_on_all
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.layer.census import evaluating_parts, set_modes
from dynmo.runtime.state import checkpoint
from dynmo.runtime.state.background import CAN_WRITE, spare_memory
from dynmo.runtime.state.checkpoint import MANIFEST
from dynmo.runtime.state.exact_state import check_replicas
from dynmo.runtime.state.layer_tensors import contents, fit, from_base
from dynmo.runtime.state.save import Save

_logger = logging.getLogger(__name__)

_Count = Annotated[int, Field(ge=0, le=1 << 60)]


class SavedState(BaseModel):
    """The pipeline's own part of a checkpoint."""

    # Further keys are the settings that the optimizer state depends on (`kept_settings`).
    model_config = ConfigDict(strict=True, extra="allow")
    partition: list[_Count]
    frozen: list[_Count]
    loss: float | None
    moves: _Count
    cases: dict[str, dict[str, Any]]
    loss_scale: dict[str, float] | None = None
    not_finite: dict[str, _Count] | None = None
    shape: Annotated[list[_Count], Field(min_length=2, max_length=2)] | None = None
    schedule: str | None = None
    reference: float | None = None
    lr: float | None = None
    groups: list[dict[str, float | list[float]]] | None = None
    extra: dict[str, Any] = {}
    identity: Any = None


def state_of(
    engine: Engine, cases: Sequence[Dynamism], *, loss: float, moves: int, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the part of an engine's state that no layer has, as JSON."""
    return {
        "partition": list(engine.store.layout.partition.counts),
        "schedule": engine.store.layout.schedule,
        "frozen": sorted(engine.store.frozen.layers),
        "loss": loss if math.isfinite(loss) else None,
        "moves": moves,
        "loss_scale": engine.optimizer_step.scaler.state(),
        "not_finite": engine.optimizer_step.not_finite.state(),
        "cases": {case.name: case.state() for case in cases},
        **extra,
    }


def begin_save(
    engine: Engine,
    folder: Path,
    step: int,
    keep: int,
    state: Mapping[str, Any],
    best: int | None = None,
    *,
    behind: bool = False,
) -> Save:
    """Saves all layers and the state. All ranks call it together, after the last result.

    Args:
        behind: Whether processes beside the ranks write what this copies to memory.
    """
    store = engine.store
    check_replicas(engine.pending.final)  # the first one's weights are saved for all
    save = Save(
        store.world.everyone,
        folder,
        step,
        engine.model.names,
        {**state, **kept_settings(engine), "shape": list(store.layout.shape)},
        keep,
        best,
        behind=behind and CAN_WRITE and _fits_memory(engine),
    )
    save.take(saved_layers(engine))
    return save


def _fits_memory(engine: Engine) -> bool:
    """Returns whether host memory has room for a copy of this rank's layers."""
    own = engine.store.own.values()
    size = sum(t.nbytes for m, o in own for t in contents(m, o.state()).values())
    free = spare_memory()
    if 2 * size <= free:
        return True
    _logger.warning(
        f"rank {engine.store.world.everyone.rank} waits for its checkpoints: a copy of "
        f"{size / 2**30:.1f} GiB is too much for {free / 2**30:.1f} GiB of free memory"
    )
    return False


def saved_layers(engine: Engine) -> Iterator[tuple[int, tuple[nn.Module, dict[str, Tensor]]]]:
    """Yields this rank's layers as a checkpoint has them, one whole layer at a time.

    The ranks of the first replica write for all.
    """
    store = engine.pending.final
    for index in sorted(store.layers):
        state = store.state(index, whole=True)
        with store.whole(index) as module:
            if store.world.replica == 0:
                yield index, (module, state)


def restore_layer(
    engine: Engine,
    index: int,
    tensors: dict[tuple[str, str], Tensor],
    forms: Mapping[str, str] | None = None,
) -> None:
    """Replaces one of this rank's layers by its tensors in a checkpoint."""
    engine.pending.assert_final()
    store = engine.store
    tensors = store.spread.own_part(index, tensors)
    tensors = fit(index, store.model.names[index], store.modules[index], tensors, forms)
    store.replace(index, tensors)
    engine.programs.relower()


@dataclass(frozen=True)
class SavedPipeline:
    """A checkpoint to go on from.

    Attributes:
        path: Folder of the checkpoint.
        step: Number of steps that are done.
        names: Name of each layer.
        state: The pipeline's own part.
    """

    path: Path
    step: int
    names: tuple[str, ...]
    state: SavedState


def find_checkpoint(folder: Path, world: RankGroup) -> SavedPipeline:
    """Finds the newest checkpoint that is whole, and warns of newer ones that are not.

    All ranks call it together.
    """
    path, manifest, problems = checkpoint.find(folder, world)
    for problem in problems if world.rank == 0 else ():
        _logger.warning(f"{problem}; resuming from {path.name}")
    try:
        state = SavedState.model_validate(manifest.state)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        wrong = "lacks" if first["type"] == "missing" else "has a wrong value of"
        raise CheckpointError(
            f"{path}/{MANIFEST} is damaged: its state {wrong} {first['loc'][0]!r}"
        ) from None
    return SavedPipeline(path, manifest.step, tuple(manifest.layers), state)


def kept_settings(engine: Engine) -> dict[str, Any]:
    """Returns the settings that the optimizer state depends on. A training keeps them."""
    return {"train.optimizer": engine.store.groups.name, "model.tied": bool(engine.model.tied)}


def check_saved(saved: SavedPipeline, model: Model) -> None:
    if saved.names != model.names:
        raise CheckpointError(
            f"{saved.path} is of another model ({len(saved.names)} layers, this one has "
            f"{model.layers}, or layers of other names); resume with that model"
        )


def check_settings(saved: SavedPipeline, engine: Engine) -> None:
    for key, value in kept_settings(engine).items():
        then = (saved.state.model_extra or {}).get(key, value)
        if then != value:
            raise CheckpointError(
                f"{saved.path} is of a run with {key} = {then!r}, this one has {value!r}; resume "
                "with that, or start anew"
            )


def restore_engine(engine: Engine, saved: SavedPipeline, cases: Sequence[Dynamism]) -> None:
    """Restores the layers of this rank and the engine's state from a checkpoint.

    All ranks call it together. A warning names code that has changed since.
    """
    path, state = saved.path, saved.state
    agree(engine.store.world, path.name, "which checkpoint to resume from")
    _restore_frozen(engine, state.frozen)
    engine.store.on_change(range(engine.model.layers))
    what = "the checkpoint's layers to be read"
    with raised_on_all(engine.store.world, CheckpointError, what):
        if engine.store.world.everyone.rank == 0 and state.identity is not None:
            _warn_of_changes(engine.store.identity.with_code(cases), path, state.identity)
        for index in engine.store.layers:
            module = engine.store.modules[index]
            manifest, layer = checkpoint.load_manifest(path, index), engine.model.names[index]
            left_out = from_base(f"layer {index} ({layer})", module, manifest.base)
            tensors = checkpoint.load_layer(path, manifest, engine.store.world.device)
            tensors |= {("parameter", name): tensor for name, tensor in left_out.items()}
            restore_layer(engine, index, tensors, manifest.forms)
            _restore_modes(engine, path, index, manifest.evaluating)
    _restore_cases(engine, state, cases)


def _restore_modes(engine: Engine, path: Path, index: int, then: Collection[str]) -> None:
    """Sets a layer's modules to the modes that they had. A warning names one that had another."""
    module = engine.store.modules[index]
    now = evaluating_parts(module)
    for part in sorted({*then} ^ {*now})[:1]:
        was, other = ("evaluation", "training") if part in then else ("training", "evaluation")
        _logger.warning(
            f"{part or 'the module'} of layer {index} ({engine.model.names[index]}) was in {was} "
            f"mode in {path}, and is in {other} mode in the present model; it gets the saved mode, "
            "so call train() or eval() once the pipeline is made"
        )
    set_modes(module, then)


def _warn_of_changes(identity: Identity, path: Path, then: object) -> None:
    try:
        changes = identity.differences(identity_from(then))
    except RunError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if changes:
        _logger.warning(
            f"{path} was written by other code: {first_of(changes)}; the run goes on with the "
            "present code, so its numbers may differ"
        )


def restore_state(engine: Engine, state: Mapping[str, Any], cases: Sequence[Dynamism]) -> None:
    """Restores the frozen layers, the dynamic cases and the loss scale."""
    saved = SavedState.model_validate(state)
    _restore_frozen(engine, saved.frozen)
    _restore_cases(engine, saved, cases)


def _restore_frozen(engine: Engine, layers: Collection[int]) -> None:
    thawed = engine.store.frozen.layers.difference(layers)
    if thawed:
        Actions(engine).unfreeze(thawed)
    Actions(engine).freeze(layers)


def _restore_cases(engine: Engine, state: SavedState, cases: Sequence[Dynamism]) -> None:
    for case in cases:
        if case.name in state.cases:
            with _usable(f"the state of case {case.name!r}"):
                case.load(state.cases[case.name])
    if state.loss_scale is not None:
        with _usable("the state of the loss scale"):
            engine.optimizer_step.scaler.load(state.loss_scale)
    with _usable("the number of skipped steps"):
        engine.optimizer_step.not_finite.load(state.not_finite or {"count": 0, "in_a_row": 0})


@contextmanager
def _usable(what: str) -> Iterator[None]:
    """Turns an error of code that takes back its state into CheckpointError."""
    try:
        yield
    except DynmoError:
        raise
    except Exception as error:
        where = place(error, own=True)
        raise CheckpointError(f"{what} in the checkpoint cannot be used{where}") from error
