"""A dynamic case of the user, that of docs/reference/own-case.md."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dynmo
from dynmo.cases.freezing.case import ScheduledFreezing
from dynmo.config import parse
from dynmo.elastic.launcher.rank_side import describe
from dynmo.errors import ConfigError, RunError
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.case import Change, Dynamism, Signals, checked, named
from dynmo.pipeline.case_options import RunFacts
from dynmo.pipeline.cases import Cases, from_class, make_cases
from dynmo.runtime.engine.batch_check import StepBatch
from tests.cases.kept import cases_of
from tests.cases.own_case import LayerDrop
from tests.equality import RANDOM_MOVES, fields_of, run
from tests.pool import Pool
from tests.runtime import alone

HERE = "tests.pipeline.test_case:"
OWN = "python:tests.cases.own_case:LayerDrop"
CHANGES = {"layer_drop": (0, 5, 10), "freezing": (3, 7)}


def config(ranks: int, **changes: Any) -> dict[str, Any]:
    return {
        "seed": 7,
        "model": {"blocks": 3, "hidden": 16, "heads": 2, "sequence": 8, "dropout": 0.1},
        "train": {"steps": 12, "global_batch": 3, "micro_batch": 1, "lr": 1e-2, "eval_every": 4},
        "parallel": {"pipeline": ranks, "timeout": 20.0},
        "balance": {"balancer": RANDOM_MOVES, "every": 1} if ranks > 1 else {"balancer": "none"},
        "dynamism": {"cases": [OWN, "freezing"], "freezing": {"schedule": [[3, 2], [7, 4]]}},
        "trace": {"steps": 0},
    } | changes


def test_digest_is_equal_on_any_ranks_under_moves(pool: Pool) -> None:
    configs = (config(1), config(2), config(1, dynamism={}))
    alone, spread, without = (run(pool, wanted, "events")[0] for wanted in configs)
    changes = ("change", "step", "case", "layers")
    for kind, *keys in (("step", "loss"), ("eval", "loss"), changes, ("end", "weights_digest")):
        assert fields_of(spread, kind, *keys) == fields_of(alone, kind, *keys)
    assert fields_of(alone, "end", "loss") != fields_of(without, "end", "loss")
    drops, freezes = ([(step, case) for step in at] for case, at in CHANGES.items())
    assert fields_of(alone, "change", "step", "case") == sorted(drops + freezes)


def test_own_cases_come_last() -> None:
    cases = cases_of(parse(config(1)), 8)
    assert [type(case) for case in cases] == [ScheduledFreezing, LayerDrop], "one's own come last"


class Freezing(Dynamism):
    name = "freezing"

    def act(self, step: int, layers: Any) -> None:
        return None


def test_methods_of_a_case_have_defaults() -> None:
    idle = Freezing()
    idle.observe(Signals(0, 1.0, ()))
    idle.load(idle.state())
    assert (idle.forecast(0), idle.state()) == ((), {})


def test_duplicate_case_name_is_refused() -> None:
    named = ["freezing", f"python:{HERE}Freezing"]
    given = config(1, dynamism={"cases": named, "freezing": {"schedule": [[1, 1]]}})
    with pytest.raises(ConfigError, match="two are called 'freezing'"):
        cases_of(parse(given), 8)


class OwnOptions(dynmo.Freezing):
    every: int = 5


class OwnName(dynmo.Freezing):
    name = "own_name"


def test_options_of_a_subclass_make_the_case_of_their_base() -> None:
    (case,) = make_cases([OwnOptions(schedule=((1, 1),))], RunFacts(layers=8))
    assert type(case) is ScheduledFreezing


@pytest.mark.parametrize("module", [__name__, "__main__"])
def test_options_without_a_case_beside_them_are_refused(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnName, "__module__", module)
    says = rf"^cases: OwnName of {module}: cannot import .*: No module named .*; write .*case with "
    with pytest.raises(ConfigError, match=says):
        make_cases([OwnName(schedule=((1, 1),))], RunFacts(layers=8))


def test_object_without_a_flag_is_no_case() -> None:
    case: Any = SimpleNamespace(
        **{name: getattr(Freezing(), name) for name in (*vars(Dynamism), "name") if name[0] != "_"}
    )
    del case.wants_samples
    with pytest.raises(ConfigError, match="has no wants_samples"):
        make_cases([case], RunFacts())


class Nameless:
    def act(self, step: int, layers: Any) -> None:
        return None


def broken() -> None:
    raise RuntimeError("no such thing")


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("no_such_module:X", "cannot import no_such_module"),
        (
            "tests.cases.own_case:Layerdrop",
            "tests.cases.own_case has no function Layerdrop",
        ),
        (HERE + "Nameless", "has no check"),
        (HERE + "broken", "raised RuntimeError: no such thing (test_case.py:"),
        ("dynmo:Dynamism", "raised TypeError"),
    ],
)
def test_class_that_is_not_a_case_is_refused(path: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_class(f"python:{path}")
    assert part in str(error.value)
    assert str(error.value).startswith(f"dynamism.cases 'python:{path}'")


def test_the_result_of_act_is_checked() -> None:
    case = Freezing()
    right = Change((0, 5), "text")
    assert checked(case, None, 6) is None
    assert checked(case, right, 6) is right
    with pytest.raises(RunError, match="case 'freezing': act returned a list"):
        checked(case, [1, 2], 6)
    with pytest.raises(RunError, match="case 'freezing': act changed layer 6"):
        checked(case, Change((6,), "text"), 6)


def test_an_exception_names_the_case() -> None:
    with pytest.raises(KeyError) as error, named(Freezing(), "act", 3):
        raise KeyError("oops")
    assert error.value.__notes__ == ["in act of case 'freezing' at step 3"]
    assert describe(error.value, 0).endswith(", in act of case 'freezing' at step 3")


class OwnPrefix(Freezing):
    """Runs frozen layers by a given function."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def frozen_prefix(self, layers: Sequence[int]) -> Any:
        return self.run


def failing(*_: Any) -> None:
    raise KeyError("oops")


@pytest.mark.parametrize("outputs", [None, (), (None,), [torch.ones(1)]])
def test_the_outputs_of_a_frozen_prefix_are_checked(outputs: Any) -> None:
    engine = alone.gpt(blocks=1, hidden=8, heads=1, sequence=8)
    cases = Cases([OwnPrefix(lambda *_: outputs)], engine)
    cases.take_over(engine)
    Actions(engine).freeze([0])
    what = rf"case 'freezing': .* returned a {type(outputs).__name__}; return .* a tuple of tensors"
    with pytest.raises(RunError, match=what):
        engine.evaluate(StepBatch(*alone.tokens(0)), alone.MICROBATCHES)


def test_an_exception_of_a_frozen_prefix_names_the_case() -> None:
    engine = alone.gpt(blocks=1, hidden=8, heads=1, sequence=8)
    case = OwnPrefix(failing)
    cases = Cases([case], engine)
    cases.take_over(engine)
    Actions(engine).freeze([0])
    with pytest.raises(Exception, match="oops") as error:
        engine.evaluate(StepBatch(*alone.tokens(0)), alone.MICROBATCHES)
    assert "in the frozen prefix of case 'freezing'" in describe(error.value, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case, "changed", failing)
        with pytest.raises(KeyError) as error:
            Actions(engine).unfreeze([0])
    assert error.value.__notes__ == ["in changed of case 'freezing'"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case, "frozen_prefix", failing)
        with pytest.raises(KeyError) as error:
            cases._frozen_prefix([0])
    assert error.value.__notes__ == ["in frozen_prefix of case 'freezing'"]


class OnRank0(Dynamism):
    name = "some"

    def __init__(self, world: dynmo.World) -> None:
        self.rank = world.rank

    def act(self, step: int, layers: dynmo.Layers) -> None:
        pass

    def frozen_prefix(self, layers: Sequence[int]) -> Any:
        return None if self.rank else lambda prefix, samples: prefix.run(prefix.inputs)


def skip_on_one_rank(world: dynmo.World, evaluates: bool) -> str:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    model = dynmo.Sequential(layers, loss=torch.nn.functional.mse_loss)
    cases = [Freezing(), OnRank0(world)]
    pipeline = dynmo.Pipeline(model, world, microbatches=2, cases=cases)
    run = pipeline.evaluate if evaluates else pipeline.step
    with pytest.raises(RunError) as error:
        run(torch.ones(2, 2), torch.ones(2, 2))
    return str(error.value)


def test_a_frozen_prefix_on_some_ranks_is_refused(pool: Pool) -> None:
    for evaluates in (False, True):
        told = pool.run(HERE + "skip_on_one_rank", 2, evaluates=evaluates)
        for text in told:
            assert "case 'some': frozen_prefix returned a function on rank 0 and None on r" in text


class Doubles(Freezing):
    """Doubles the weights of layer 0 before step 4, and returns no `Change`."""

    name = "doubles"

    def act(self, step: int, layers: dynmo.Layers) -> None:
        if step == 4 and 0 in layers.own:
            layers.modules[0].weight.data.mul_(2)  # pyright: ignore
            layers.rebuild(0, layers.moments(0))


def rebuild_frozen(world: dynmo.World, cache_bytes: int) -> list[float]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, 2) for _ in range(4)]
    model = dynmo.Sequential(layers, loss=torch.nn.functional.mse_loss)
    cases = [dynmo.Freezing(schedule=[(1, 3)], cache_bytes=cache_bytes), Doubles()]
    pipeline = dynmo.Pipeline(model, world, microbatches=2, cases=cases, balance="none")
    x = torch.eye(2)
    return [pipeline.step(x, x, samples=[0, 1]).loss for _ in range(6)]


def test_a_frozen_layer_that_is_rebuilt_without_a_change_runs_anew(pool: Pool) -> None:
    job = HERE + "rebuild_frozen"
    (right,) = pool.run(job, 1, cache_bytes=0)
    for ranks in (1, 2):
        assert pool.run(job, ranks, cache_bytes=1 << 20) == [right] * ranks


@pytest.mark.parametrize("word", ["python:", "python:a", "python:a:b:c", "python:a.b:1"])
def test_a_malformed_path_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:Class"):
        parse({"dynamism": {"cases": [word]}})
