"""Saves a run's layers and state, and resumes from them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynmo.config import Config, mesh_shapes
from dynmo.dynamism import Dynamism
from dynmo.errors import CheckpointError
from dynmo.events import CheckpointEvent, now
from dynmo.models.model import Model
from dynmo.pipeline.engine import Engine
from dynmo.pipeline.saving import find_checkpoint, restore_engine, save_engine
from dynmo.runtime.comm.world import World

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint to go on from.

    Attributes:
        path: Folder of the checkpoint.
        step: Number of steps that are done.
        state: The run's own part of the checkpoint, as `RunCheckpoints.save` wrote it.
    """

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def partition(self) -> tuple[int, ...]:
        return tuple(self.state["partition"])

    @property
    def loss(self) -> float:
        return self.state["loss"]

    @property
    def moves(self) -> int:
        return self.state["moves"]

    @property
    def reference(self) -> float | None:
        """Seconds that a step took at first."""
        return self.state.get("reference")

    def shape(self, config: Config) -> tuple[int, int]:
        """Returns the mesh to resume in: ranks of a pipeline, and number of replicas.

        A run that chooses its mesh keeps the saved mesh, if this config allows it. A mesh of fewer
        or more ranks comes with the first step.
        """
        saved = tuple(self.state.get("shape", ()))
        known = config.elastic.reshape and saved in mesh_shapes(config)
        shape = (saved[0], saved[1]) if known else config.shape_at(self.step)
        started = config.parallel.pipeline, config.parallel.data
        return shape if shape[0] * shape[1] == started[0] * started[1] else started


class RunCheckpoints:
    """Writes and reads the checkpoints of a run.

    Args:
        config: Config of the run.
        world: All ranks. They share the folder.
        folder: Folder of the checkpoints. None means that none are written.
    """

    def __init__(self, config: Config, world: World, folder: Path | None) -> None:
        self._config, self._world, self._folder = config, world, folder

    def is_due(self, step: int, interrupted: bool) -> bool:
        """Returns True if a checkpoint is due.

        Args:
            step: Number of steps that are done.
            interrupted: Whether the run stops now on request.
        """
        every = self._config.checkpoint.every
        return bool(every) and (
            step % every == 0 or step == self._config.train.steps or interrupted
        )

    def save(
        self,
        step: int,
        pipeline: Engine,
        cases: Sequence[Dynamism],
        loss: float,
        moves: int,
        reference: float | None,
    ) -> CheckpointEvent | None:
        """Writes a checkpoint. All ranks call it together, after the last result.

        Args:
            step: Number of steps that are done.
            pipeline: Holds the layers.
            cases: The dynamic cases, whose states are saved too.
            loss: Loss of the last step.
            moves: Number of times that layers have moved.
            reference: Seconds that a step took at first.

        Returns:
            The event of the checkpoint. None if there is no folder.
        """
        if self._folder is None:
            return None
        extra = {
            "shape": list(pipeline.shape),
            "reference": reference,
            **self._fixed(pipeline.model),
        }
        saved = save_engine(
            pipeline,
            self._folder,
            step,
            self._config.checkpoint.keep,
            cases,
            loss=loss,
            moves=moves,
            extra=extra,
        )
        return CheckpointEvent(step - 1, now(), str(saved.path), saved.bytes, saved.seconds)

    def find(self, model: Model) -> SavedRun:
        """Finds the newest complete checkpoint. All ranks call it together.

        Raises:
            CheckpointError: There is none, or it is of another model.
        """
        assert self._folder is not None, "only a run with a folder resumes"
        path, manifest = find_checkpoint(self._folder, self._world)
        if tuple(manifest.layers) != model.names:
            raise CheckpointError(
                f"{path} is of another model ({len(manifest.layers)} layers, the config's has "
                f"{model.layers}, or layers of other names); resume with the config of that run"
            )
        for key, value in self._fixed(model).items():
            then = manifest.state.get(key, value)
            if then != value:
                raise CheckpointError(
                    f"{path} is of a run with {key} = {then!r}, the config has {value!r}; resume "
                    "with that, or start anew"
                )
        saved = SavedRun(path, manifest.step, manifest.state)
        steps = self._config.train.steps
        if saved.step >= steps and self._world.rank == 0:
            done = f"{path} has {saved.step} steps, and train.steps = {steps}"
            _logger.warning(f"{done}: nothing is left to train; its loss is {saved.loss:.6f}")
        return saved

    def _fixed(self, model: Model) -> dict[str, Any]:
        """Returns the settings that the optimizer state depends on.

        A run keeps them to its end.
        """
        return {"train.optimizer": self._config.train.optimizer, "model.tied": bool(model.tied)}

    def restore(self, saved: SavedRun, pipeline: Engine, cases: Sequence[Dynamism]) -> None:
        """Restores the layers of this rank, the cases and the loss scale.

        All ranks call it together.

        Args:
            saved: The checkpoint.
            pipeline: Holds the layers, on any placement.
            cases: The dynamic cases.
        """
        restore_engine(pipeline, saved.path, saved.state, cases)
