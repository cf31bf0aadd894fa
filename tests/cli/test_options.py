"""A record of options as a command line: arguments, options, flags, lists and refused values."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from dynmo.cli.options import CommandOptions, command, like
from dynmo.errors import InputError
from dynmo.options import Count, MemoryLimit
from dynmo.plan.options import Balance, Balancer
from dynmo.schedule.bounds import Objective


class Options(CommandOptions):
    folder: Path
    """A folder."""
    sizes: tuple[Count, ...] = ()
    """Sizes,
    in order."""
    memory_limit: MemoryLimit = None
    steps: Count = 8
    set_: list[str] | None = None
    objective: Objective = Objective.SPAN
    cost: Literal["time", "parameters"] = like(Balance, "cost")
    balancer: Balancer = like(Balance, "balancer")
    grid: bool = False
    names: bool = True


def called(*arguments: str) -> Options:
    """The options that a function gets."""
    seen: list[Options] = []

    @command
    def function(options: Options) -> None:
        seen.append(options)

    app = typer.Typer()
    app.command()(function)
    done = CliRunner().invoke(app, ["runs", *arguments])
    if done.exception is not None:
        raise done.exception
    return seen[0]


def test_options_that_are_not_given_have_the_defaults_of_the_record() -> None:
    options = called()
    assert options == Options(folder=Path("runs"))
    assert (options.balancer, options.cost) == (Balance().balancer, Balance().cost)
    assert options.model_fields_set == {"folder"}


def test_text_becomes_the_type_of_the_field() -> None:
    lists = ("--sizes", "1,2", "--set", "a=1", "--set", "b=2", "--memory-limit", "1KiB,2")
    flags = ("--grid", "--no-names", "--json", "--objective", "makespan", "--steps", "3")
    options = called(*lists, *flags)
    assert (options.sizes, options.set_, options.memory_limit) == (
        (1, 2),
        ["a=1", "b=2"],
        (1024, 2),
    )
    assert (options.grid, options.names, options.as_json) == (True, False, True)
    assert (options.objective, options.steps) == (Objective.MAKESPAN, 3)
    assert called("--sizes", "4", "--memory-limit", "1KiB").memory_limit == 1024


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--steps", "0", "must be greater than or equal to 1"),
        ("--steps", "many", "must be a valid integer"),
        ("--sizes", "1,x", "must be a valid integer"),
        ("--memory-limit", "1XB", "not a size"),
        ("--cost", "money", "must be 'time' or 'parameters'"),
        ("--balancer", "best", "must be 'none'"),
    ],
)
def test_a_wrong_value_is_named_with_its_option(option: str, value: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        called(option, value)
    assert str(caught.value).startswith(f"{option} {value}: {problem}")


def test_help_has_the_text_and_the_words_of_a_field() -> None:
    app = typer.Typer()
    app.command()(command(_nothing))
    text = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output.split())
    assert "--sizes VALUE Sizes, in order." in text
    assert "--cost time|parameters" in text
    assert "One of none, uniform, exact, diffusion." in text
    assert "--names --no-names" in text


def _nothing(options: Options) -> None:
    pass
