"""`dynmo checkpoint` checks the checkpoints of a run, and makes a folder of transformers of one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dynmo.cli.options import CommandOptions, command
from dynmo.cli.output import print_json, progress
from dynmo.cli.plan_text import show_size
from dynmo.cli.rank_process import import_from_working_folder
from dynmo.cli.run_folder import check_run
from dynmo.errors import CheckpointError, ConfigError, InputError

if TYPE_CHECKING:
    from dynmo.config import Config
    from dynmo.models.huggingface.model import HuggingFaceModel

_logger = logging.getLogger(__name__)

checkpoint = typer.Typer()


class CheckpointOptions(CommandOptions):
    run: Path
    """A run, such as runs/NAME, its folder of checkpoints, or one of them (step-N)."""

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, or one of them."""
        check_run(self.run)
        inside = self.run / "checkpoints"
        return inside if inside.is_dir() else self.run


@checkpoint.command("verify")
@command
def verify(options: CheckpointOptions) -> None:
    """Read every file of the checkpoints, and compare its hash."""
    from dynmo.runtime.state.checkpoint import complete, verify

    rows: list[dict[str, Any]] = []
    for path in complete(options.checkpoints):
        row: dict[str, Any] = {"checkpoint": str(path), "problem": None}
        with progress(f"reading {path.name}"):
            try:
                verify(path)
            except CheckpointError as error:
                row["problem"] = str(error)
        row["bytes"] = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
        rows.append(row)
    if not rows:
        raise InputError(f"{options.run} has no checkpoint")
    if options.as_json:
        print_json({"checkpoints": rows})
    else:
        for row in rows:
            said = row["problem"] or f"whole, {show_size(row['bytes'])}"
            print(said if row["problem"] else f"{row['checkpoint']}: {said}")
    if any(row["problem"] for row in rows):
        raise typer.Exit(2)


class ExportOptions(CheckpointOptions):
    folder: Path
    """The folder to write, for transformers or peft."""
    model: Path | None = None
    """The folder that the model was loaded from (default: model.path of the run)."""
    dtype: str | None = None
    """Type of the weights, such as bfloat16."""
    merge: bool = False
    """Make adapters a part of the weights, as peft does."""
    best: bool = False
    """Take the checkpoint with the lowest held-out loss (checkpoint.keep_best), not the newest."""


@checkpoint.command("export")
@command
def export(options: ExportOptions) -> None:
    """Write the model of a checkpoint as transformers does."""
    from dynmo.huggingface.checkpoint import export_checkpoint, find_checkpoint
    from dynmo.huggingface.export import type_of
    from dynmo.runtime.state.checkpoint import best_of

    dtype = type_of(options.dtype)
    if options.folder.exists() and not options.folder.is_dir():
        raise InputError(f"{options.folder} is a file; give a folder")
    folder = options.checkpoints
    path, manifest, problems = find_checkpoint(best_of(folder) if options.best else folder)
    for problem in problems:
        _logger.warning(f"{problem}; {path.name} is exported")
    model = _model(options, path, manifest.layers)
    _import_forms(path, model.layers)
    with progress(f"exporting {path.name}") as show:
        done = export_checkpoint(
            path,
            model,
            options.folder,
            dtype,
            lambda layer: show(layer, model.layers),
            merge=options.merge,
        )
    if options.as_json:
        answer = {
            "checkpoint": str(path),
            "step": manifest.step,
            "folder": str(options.folder),
            "files": done.files,
            "bytes": done.bytes,
        }
        print_json(answer)
    else:
        size = show_size(done.bytes)
        print(f"{options.folder}: the weights after {manifest.step} steps, {size}")


def _model(options: ExportOptions, path: Path, names: list[str]) -> HuggingFaceModel:
    """Returns the model of a checkpoint, whose layers have these names."""
    from dynmo.models.huggingface.model import make
    from dynmo.models.options import ModelOptions

    found, source, seed = ModelOptions(kind="hf"), options.model, 0
    if source is None:
        config = _config_of(path)
        if config is None:
            raise InputError(
                f"{path} belongs to no run of dynmo train (its config.toml is missing); give the "
                "folder that the model was loaded from, with --model FOLDER"
            )
        if config.model.kind != "hf":
            raise ConfigError(
                f'{path} is of a run with model.kind = "{config.model.kind}"; only a model of '
                'transformers (model.kind = "hf") can be exported'
            )
        found, source, seed = config.model, Path(config.model.path), config.seed
    for cut in ("auto", "blocks"):
        update = {"path": str(source), "cut": cut, "sequence": 1}
        model = make(found.model_copy(update=update), seed)
        if list(model.names) == names:
            return model
    raise ConfigError(
        f"{path} is of another model than {source} (its layers are {names[0]}, {names[1]}, ..., "
        f"{len(names)} in all); give the folder that it was loaded from, with --model FOLDER"
    )


def _import_forms(path: Path, layers: int) -> None:
    """Imports the cases of the run's user if a layer has weights that they have packed."""
    from dynmo.kernels.packed_weight import unknown_form
    from dynmo.runtime.state.checkpoint import load_manifest
    from dynmo.train.setup import own_cases

    missing = (unknown_form(load_manifest(path, index).forms) for index in range(layers))
    if any(missing) and (config := _config_of(path)) is not None:
        import_from_working_folder()
        own_cases(config)


def _config_of(path: Path) -> Config | None:
    """Returns the config of the run that a checkpoint belongs to. None if there is no run."""
    from dynmo.config import load

    file = path.resolve().parents[1] / "config.toml"
    return load(file) if file.is_file() else None
