"""The names of `import dynmo`, and the examples in its docstrings."""

from __future__ import annotations

import doctest
import importlib
import inspect
from inspect import signature
from pathlib import Path

import pytest
import torch

import dynmo
from dynmo import extend

ROOT = Path(__file__).parents[1]
MAX_MEMBERS, MAX_ARGUMENTS = 25, 17
NAMES = """
    Pipeline Parallel Training Log Checkpoints Loader World StepResult init dry_run RunPlan
    __version__ Model Sequential
    ModelOptions load_model next_token_loss PipelineOptions AdamW SGD LearningRate Balance Elastic
    EarlyExit Experts Freezing MixtureOfDepths Pruning SparseAttention Change Dynamism Forecast
    Layers Signals register_split Csv TensorBoard WandB DynmoError LayerCost Partition
"""
DOCTESTS = "Change Dynamism LayerCost Partition Pipeline Sequential World init next_token_loss"


def test_public_names_are_exactly_these() -> None:
    assert sorted(dynmo.__all__) == sorted(NAMES.split())
    assert all(getattr(dynmo, name) is not None for name in dynmo.__all__)
    assert dir(dynmo) == sorted([*dynmo.__all__, "huggingface"])


def test_names_for_authors_are_few_and_documented() -> None:
    assert len(extend.__all__) <= 26
    assert dir(extend) == sorted(extend.__all__)
    assert all(getattr(extend, name) is not None for name in extend.__all__)
    with pytest.raises(AttributeError, match=r"'jitt'.* jit"):
        extend.jitt  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_optimizers_have_the_defaults_of_torch(name: str) -> None:
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    own = getattr(dynmo, name)().model_dump()
    assert own == {option: theirs[option].default for option in own}


def test_unknown_name_suggests_a_public_name() -> None:
    with pytest.raises(AttributeError, match=r"'Pipelin'.* Pipeline"):
        dynmo.Pipelin  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_package_is_marked_as_typed() -> None:
    assert (ROOT / "dynmo" / "py.typed").is_file()


def test_pipeline_has_few_members_and_arguments() -> None:
    members = [name for name in vars(dynmo.Pipeline) if not name.startswith("_")]
    assert len(members) <= MAX_MEMBERS, sorted(members)  # and `extra`
    given = [
        name for name in signature(dynmo.Pipeline).parameters if name not in ("model", "world")
    ]
    assert len(given) <= MAX_ARGUMENTS, given


@pytest.mark.parametrize("name", DOCTESTS.split())
def test_docstring_examples_run(name: str) -> None:
    value = getattr(dynmo, name)
    module = importlib.import_module(value.__module__)
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(value, name, module=module, globs={**vars(module), "dynmo": dynmo})
    assert example.examples
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert result.failed == 0


@pytest.mark.parametrize("name", [name for name in dynmo.__all__ if not name.startswith("_")])
def test_public_names_have_docstrings(name: str) -> None:
    assert inspect.getdoc(getattr(dynmo, name))
