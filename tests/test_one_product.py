"""The configuration file and `dynmo.Pipeline` have the same options, and the trainer is a user."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import dynmo
from docs.tools.reference import keys, sections
from dynmo.cases import CASES
from dynmo.config import Config
from dynmo.config.sections import TrainSection
from dynmo.huggingface import from_pretrained
from dynmo.models.loss import causal_lm_loss
from dynmo.models.options import LoraOptions

ROOT = Path(__file__).parents[1]

# Keys that the command has alone, and why.
OF_THE_COMMAND = {
    "name": "the run's name",
    "data.source": "data: a loop may have any source",
    "train.global_batch": "data: a loop passes whole batches, and says into how many microbatches",
    "train.eval_every": "data: a loop calls evaluate when it likes",
    "train.eval_batches": "data",
    "train.patience": "data: a loop ends when it likes",
    "parallel.pipeline": "launching: a world has its ranks",
    "launch.restarts": "launching",
    "checkpoint.every": "log: a loop calls save when it likes",
    "checkpoint.keep_best": "log: a loop gives save(best=)",
    "metrics.to": "log: a loop gives dynmo.Csv, TensorBoard or WandB to listen",
    "trace.steps": "log: no trace is recorded unless asked for",
}
_PIPELINE = inspect.signature(dynmo.Pipeline).parameters
_RECORDS = {
    key: field
    for record in (dynmo.Parallel, dynmo.Training, dynmo.Log)
    for key, field in record.model_fields.items()
}
_INIT = inspect.signature(dynmo.init).parameters
_LOADER = inspect.signature(dynmo.Loader).parameters
# Records that Python users make, by section of the file.
RECORDS: dict[str, type[BaseModel]] = {
    "model": dynmo.ModelOptions,
    "model.lora": LoraOptions,
    "balance": dynmo.Balance,
    "elastic": dynmo.Elastic,
    **{f"dynamism.{name}": options for name, options in CASES.items()},
}


def in_python(section: str, key: str) -> list[Any]:
    """The defaults of all options in Python that are this key of the file."""
    if section in RECORDS:
        return [RECORDS[section].model_fields[key].default]
    if (section, key) == ("dynamism", "cases"):
        return [_PIPELINE["cases"].default]
    if (section, key) == ("train", "optimizer"):
        assert isinstance(_PIPELINE["optimizer"].default, dynmo.AdamW)
        return ["adamw"]
    if (section, key) == ("checkpoint", "keep"):
        return [inspect.signature(dynmo.Pipeline.save).parameters["keep"].default]
    if (section, key) == ("train", "epochs"):
        return [_LOADER["epochs"].default]
    if (section, key) == ("train", "loss"):
        default = inspect.signature(from_pretrained).parameters["loss"].default
        return [None if default is causal_lm_loss else default]
    if (section, key) == ("train", "weight_decay"):
        given = [Config(train=TrainSection(optimizer=name)) for name in ("adamw", "sgd")]
        assert [each.optimizer for each in given] == [dynmo.AdamW(), dynmo.SGD()]
        return [None]  # each optimizer has its own
    if section == "train":
        records = (dynmo.AdamW, dynmo.SGD, dynmo.LearningRate)
        of_records = [x.model_fields[key].default for x in records if key in x.model_fields]
        if of_records:
            return of_records
    # A size and a number of steps have no default for a loop that has not said them.
    unknown = {"steps", "micro_batch"} if section == "train" else set[str]()
    return [
        Config().train.model_dump()[key] if key in unknown else parameters[key].default
        for parameters in (_PIPELINE, _RECORDS, _INIT, *([_LOADER] if section == "data" else []))
        if key in parameters
    ]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("" if name == "top" else name, key)
        for name, section in sections()
        for key in keys(section)
        if (key if name == "top" else f"{name}.{key}") not in OF_THE_COMMAND
    ],
)
def test_each_key_is_an_option_in_python(section: str, key: str) -> None:
    value = getattr(dict(sections())[section or "top"](), key)
    defaults = in_python(section, key)
    assert defaults
    assert all(default == value for default in defaults)


def test_the_commands_own_keys_exist() -> None:
    known = {
        key if name == "top" else f"{name}.{key}"
        for name, section in sections()
        for key in keys(section)
    }
    assert known >= OF_THE_COMMAND.keys()


# -- the trainer -----------------------------------------------------------------------------------


def _trees() -> list[tuple[str, ast.Module]]:
    return [
        (path.name, ast.parse(path.read_text()))
        for path in sorted((ROOT / "dynmo" / "train").glob("*.py"))
    ]


def test_the_trainer_reaches_the_pipeline_by_public_names_alone() -> None:
    # A name in a file becomes a class of the user's own.
    registry = "dynmo.pipeline.cases"
    hidden = ("dynmo.pipeline", "dynmo.runtime.engine", "dynmo.runtime.layer")
    hidden += ("dynmo.runtime.optim", "dynmo.runtime.state")
    for name, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                assert module == registry or not module.startswith(hidden), f"{name}:{node.lineno}"
                if node.module == "dynmo":
                    assert {alias.name for alias in node.names} <= {*dynmo.__all__}, name
            if isinstance(node, ast.Import):
                assert not any(x.name.startswith("dynmo") for x in node.names), name


def test_the_trainer_uses_no_private_attribute_of_others() -> None:
    for name, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                # `os._exit` is documented.
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "os")
                assert own or node.attr.startswith("__"), f"{name}:{node.lineno}: {node.attr}"


_PLAIN = """
import sys
import torch
import dynmo

with dynmo.init(device="cpu") as world:
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    model = dynmo.Sequential(layers, torch.nn.functional.mse_loss)
    pipeline = dynmo.Pipeline(model, world, microbatches=2, schedule="1f1b")
    pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
print(*sorted(name for name in sys.modules if name.split(".")[0] == "dynmo"))
import dynmo.train.trainer
print("transformers" in sys.modules)
"""


def test_a_plain_pipeline_loads_few_modules() -> None:
    """No TOML reader, no resource manager, and about half of the modules.

    Even a trainer loads no transformers, whose import takes each rank seconds.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN], capture_output=True, text=True, check=True, cwd=ROOT
    )
    plain, transformers = done.stdout.splitlines()
    loaded = plain.split()
    all_modules = [path for path in (ROOT / "dynmo").rglob("*.py") if path.stat().st_size]
    rooms = ("dynmo.config", "dynmo.cli", "dynmo.train", "dynmo.report", "dynmo.elastic.managers")
    assert not [name for name in loaded if name.startswith(rooms)]
    assert "dynmo.elastic.launcher.supervisor" not in loaded
    assert len(loaded) <= 0.55 * len(all_modules)
    assert transformers == "False"
