"""A short run of the fuzz test, and faults that it must detect."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dynmo.cases import CASES
from dynmo.config import load, parse
from dynmo.plan.options import BALANCERS
from dynmo.schedule.catalogue import AUTO, SCHEDULES
from tests import digests
from tests.combinations import mostly_matrix
from tests.equality import RANDOM_MOVES
from tests.fuzz import loops, modules
from tests.fuzz.__main__ import main
from tests.fuzz.draws import STOP, Case, Tables, draw, reference_of
from tests.fuzz.grammar import EXTRAS, LOSSES, PARTS, PRODUCTS, WEIGHTS, WRITES, source_of
from tests.fuzz.grammar import draw as draw_module
from tests.fuzz.layers import LAYERS
from tests.fuzz.models import model_of
from tests.fuzz.outcome import EQUAL, FAILED, REFUSED, CaseResult
from tests.fuzz.recorded import read_cases, write_case
from tests.fuzz.report import passed, replay, summary
from tests.fuzz.runner import Runner
from tests.pool import ROOT, Pool, PoolLost

SEED = 20
SHORT = 18


class Lent(Pool):
    """The session's pool, which a runner must not close."""

    def __init__(self, pool: Pool) -> None:
        self.run = pool.run

    def close(self) -> None:
        pass


@pytest.fixture
def runner(pool: Pool) -> Iterator[Runner]:
    runner = Runner(lambda log: Lent(pool))
    yield runner
    runner.close()


@pytest.mark.parametrize("number", mostly_matrix(range(SHORT), everyday=[4]))
def test_short_fuzz_run_finds_no_difference(runner: Runner, number: int) -> None:
    """The cases of `python -m tests.fuzz --seed 20 --cases 18`."""
    outcome = runner.run(draw(SEED, number))
    assert outcome.kind == EQUAL, (outcome.what, outcome.detail)


def test_short_run_of_loops_finds_no_difference(pool: Pool) -> None:
    """`python -m tests.fuzz.loops --seed 2 --cases 2`."""
    assert [loops.run_case(pool, loops.draw(2, number)) for number in range(2)] == [None] * 2


def test_drawn_loops_cover_every_choice() -> None:
    cases = [loops.draw(1, number) for number in range(300)]
    assert {case["form"] for case in cases} == {"dictionary", "list", "tensors"}
    assert {case["ranks"] for case in cases} == {2, 3, 4}
    assert {case["options"]["schedule"] for case in cases} == {AUTO, *SCHEDULES}
    assert len({case["optimizer"] for case in cases}) == 7
    assert {case["same"]["head_tokens"] for case in cases} == {None, 1, 5, 8, 100}
    for key in ("masked", "tied", "groups", "eval_part", "moves"):
        assert {case[key] for case in cases} == {False, True}


@pytest.mark.parametrize("numbers", mostly_matrix([range(14), range(14, 40)], [range(14)]))
def test_short_run_of_modules_gives_plain_torchs_numbers(pool: Pool, numbers: range) -> None:
    """The cases of `python -m tests.fuzz --modules --seed 2 --cases 40`."""
    outcomes = [modules.run_case(pool, modules.draw_valid(2, number)) for number in numbers]
    assert [(o.case["number"], o.what) for o in outcomes if o.kind == FAILED] == []
    assert sum(o.kind == EQUAL for o in outcomes) > 0.6 * len(numbers)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("x = x * (1 + 1e-4 * (RANK == '1'))", "two ranks and one, or each other differ in loss"),
        ("x = x * (1 + 1e-4 * (RANK != ''))", "one rank and plain torch differ in loss"),
        ("assert RANK == ''", "one rank: AssertionError"),
        ("self.table = nn.Embedding(4, 8, sparse=True)", "unfair refusal: Sequential: "),
    ],
)
def test_planted_faults_of_modules_are_reported(pool: Pool, line: str, what: str) -> None:
    layer = {"init": ["self.w = nn.Parameter(draw(W, W))"], "body": ["x = x @ self.w"]}
    layer |= {"class": [], "returns": "x"}
    section = "init" if line.startswith("self.") else "body"
    read = "import os; RANK = os.environ.get('RANK', '')"
    last = layer | {section: [read, *layer[section], line]}
    case = draw_module(1, 0) | {"made": [], "tied": [], "loss": LOSSES["mean"], "inputs": "tensor"}
    case |= {"layers": [layer, layer, last], "plan": [["step"], ["move", 1], ["step"]]}
    case |= {"options": {"schedule": "zb-h1", "microbatches": 2, "max_grad_norm": 0.0}}
    outcome = modules.run_case(pool, case)
    assert (outcome.kind, what in outcome.what) == (FAILED, True), outcome


def test_drawn_modules_cover_every_choice() -> None:
    cases = [draw_module(1, number) for number in range(600)]
    kinds = {kind for case in cases for kind in case["kinds"]}
    tables = {"weight": WEIGHTS, "product": PRODUCTS, "write": WRITES, "part": PARTS}
    tables |= {"loss": LOSSES, "extra": EXTRAS}
    every = {f"{name}: {kind}" for name, table in tables.items() for kind in table}
    assert every <= kinds
    events = {event[0] for case in cases for event in case["plan"]}
    assert events == {*modules.EVENTS}
    assert {case["options"]["schedule"] for case in cases} == {AUTO, *SCHEDULES}
    assert draw_module(1, 5) == cases[5] != draw_module(2, 5)


def test_failed_module_shrinks_to_what_fails() -> None:
    case = draw_module(1, 3)
    wanted = next(line for layer in case["layers"] for line in layer["body"])
    assert wanted != modules.NEW

    def run(case: Tables) -> modules.Outcome:
        fails = wanted in source_of(case)
        return modules.Outcome(case, FAILED if fails else EQUAL, "planted" if fails else "")

    smallest = modules.shrink(run(case), run).case
    lines = [line for layer in smallest["layers"] for line in layer["body"]]
    assert [line for line in lines if line != modules.NEW] == [wanted]
    assert (smallest["plan"], smallest["options"]["schedule"]) == ([["step"]], "1f1b")
    assert f"        {wanted}\n" in modules.script_of(smallest)


# -- what is drawn -------------------------------------------------------------------------------


def test_seed_and_number_determine_the_case() -> None:
    assert [draw(3, n) for n in range(20)] == [draw(3, n) for n in range(20)]
    assert draw(3, 1) != draw(4, 1)


def test_drawn_cases_are_valid_and_cover_every_choice() -> None:
    """dynmo accepts every drawn configuration, and every choice occurs."""
    cases = [draw(1, number) for number in range(400)]
    configs = [config for case in cases for config in (*case.configs, case.reference)]
    for config in configs:
        parse(config)
    words = {w for c in configs for w in c["model"]["kind"].rpartition(":")[2].split("__")}
    assert set(LAYERS) | {"gpt", "emulated", "mix"} <= words
    assert {c["pipeline"]["schedule"] for c in configs} == {AUTO, *SCHEDULES}
    assert {c["balance"]["balancer"] for c in configs} == {RANDOM_MOVES, *BALANCERS}
    assert {c["train"]["precision"] for c in configs} == {"float32", "bfloat16", "float16"}
    meshes = [c["parallel"] for c in configs]
    ranks = {mesh.get("pipeline", 1) * mesh.get("replicas", 1) for mesh in meshes}
    assert ranks == {1, 2, 3, 4}
    assert {c["train"].get("head_tokens") for c in configs} == {None, 1, 3, 8, 64}
    assert {case for c in configs for case in c["dynamism"].get("cases", ())} > set(CASES)
    late = {tuple(map(c["pipeline"].get, ("post_validation", "rollback"))) for c in configs}
    assert late == {(None, None), (True, None), (True, "in-place")}
    assert sum(case.resumed is not None for case in cases) > 80
    assert sum(case.plain for case in cases) > 20
    spread = [case.config["parallel"].get("expert", 1) for case in cases]
    assert {*spread} == {1, 2, 3, 4}
    assert sum(size > 1 for size in spread) > 80, "one in four"


def test_model_name_lists_its_layers() -> None:
    layers = [type(layer).__name__ for layer in model_of("modules__lstm__fan_2__mix")()]
    assert layers == ["Embedding", "Recurrent", "Fan", "Mix", "Head"]
    for wrong in ("modules__lstn", "factory__lstm", "modules_sum__lstm"):
        with pytest.raises(AttributeError):
            model_of(wrong)


# -- what is noticed -----------------------------------------------------------------------------


class Planted(nn.Module):
    """A linear, and what `do` makes of its output."""

    def __init__(self, do: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self._do = nn.Linear(8, 8), do

    def forward(self, x: Tensor) -> Tensor:
        return self._do(self.linear(x))


def _model(do: Callable[[Tensor], Tensor]) -> list[nn.Module]:
    return [nn.Embedding(256, 8), nn.Linear(8, 8), Planted(do), nn.Linear(8, 256)]


def a_model() -> list[nn.Module]:
    return _model(torch.tanh)


def a_wrong_bit() -> list[nn.Module]:
    """Differs in the last bits on any rank but the first."""
    return _model(lambda y: y * (1 + 1e-7 * (os.environ["RANK"] != "0")))


def a_crash() -> list[nn.Module]:
    def crash(y: Tensor) -> Tensor:
        raise KeyError("planted")

    return _model(crash)


def a_warning() -> list[nn.Module]:
    def warn(y: Tensor) -> Tensor:
        warnings.warn("planted", stacklevel=1)
        return y

    return _model(warn)


def a_refusal() -> list[nn.Module]:
    return [nn.Embedding(256, 8, sparse=True), nn.Linear(8, 256)]


def planted(function: str, **sections: Tables) -> Case:
    """A small case with a model of this file."""
    config: Tables = {
        "seed": 0,
        "model": {"kind": f"python:tests.fuzz.test_fuzz:{function}", "sequence": 4},
        "data": {"source": "file:LICENSE"},
        "train": {"steps": 4, "global_batch": 4, "micro_batch": 1},
        "parallel": {"pipeline": 2, "timeout": 10.0},
        "pipeline": {"schedule": "zb-h1"},
        "balance": {"balancer": "none"},
        "dynamism": {},
    }
    return Case(7, config | {name: config.get(name, {}) | keys for name, keys in sections.items()})


@pytest.mark.parametrize(
    ("function", "kind", "what"),
    [
        ("a_wrong_bit", FAILED, "wrong bits: steps at 0: {'loss'"),
        ("a_crash", FAILED, "KeyError on rank 0"),
        ("a_warning", FAILED, "UserWarning on rank 0"),
        ("a_refusal", REFUSED, "sparse=False"),
    ],
)
def test_planted_faults_are_reported(runner: Runner, function: str, kind: str, what: str) -> None:
    outcome = runner.run(planted(function))
    assert outcome.kind == kind
    assert what in outcome.what
    assert passed([outcome]) is (kind == REFUSED)


def test_many_refused_configurations_fail_the_run(runner: Runner) -> None:
    outcome = runner.run(planted("a_crash", parallel={"pipeline": 3}, train={"micro_batch": 3}))
    assert outcome.kind == REFUSED
    assert not passed([outcome, outcome, *[replace(outcome, kind=EQUAL)] * 18])
    assert passed([outcome, *[replace(outcome, kind=EQUAL)] * 19])
    assert "refused 1 times: config: train.micro_batch" in summary([outcome], 1.0)


def test_hanging_pool_is_replaced(pool: Pool) -> None:
    hanging = mock.create_autospec(Pool, instance=True)
    hanging.run.side_effect = PoolLost("a rank did not answer in time; the pool was ended")
    pools: list[Pool] = [Lent(pool), hanging]
    runner = Runner(lambda log: pools.pop())
    assert runner.run(planted("a_model")).what.startswith("hang or crash")
    hanging.close.assert_called_once()
    assert runner.run(planted("a_model")).kind == EQUAL
    runner.close()


# -- what is printed -----------------------------------------------------------------------------


@pytest.mark.matrix
def test_printed_files_replay_a_case(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files parse to the configurations that ran, and `dynmo train` takes them."""
    cases = [draw(SEED, number) for number in range(60)]
    case = next(case for case in cases if case.resumed)
    monkeypatch.chdir(tmp_path)
    text = replay(CaseResult(case, FAILED), Path("files"))
    name = f"fuzz-{case.number}"
    assert load(f"files/{name}.toml") == parse(case.config)
    assert load(f"files/{name}-resumed.toml") == parse(case.resumed or {})
    expected = parse(reference_of(case.config)).model_dump() | {"name": f"{name}-reference"}
    assert load(f"files/{name}-reference.toml").model_dump() == expected
    assert STOP not in Path(f"files/{name}-reference.toml").read_text()
    commands = [line.split() for line in text.splitlines() if line.startswith("    dynmo train")]
    assert [command[-1] for command in commands] == ["--overwrite", "--resume", "--overwrite"]

    shutil.copy(ROOT / "LICENSE", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", *commands[2], "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert runner.run(case).kind == EQUAL
    digest = repr(json.loads(done.stdout)["weights_digest"])
    assert digest == runner.reference(case).end["weights_digest"]


def test_written_case_has_the_digests_of_its_run(runner: Runner, tmp_path: Path) -> None:
    train, stops = {"eval_every": 2}, {"cases": [f"{STOP}0"]}
    first = planted("a_model", train=train, dynamism=stops, checkpoint={"every": 1})
    second = planted("a_model", train=train, pipeline={"schedule": "1f1b"}).config
    case = replace(first, resumed=second)
    outcome = runner.run(case)
    assert outcome.kind == EQUAL, (outcome.what, outcome.detail)
    file = tmp_path / "runs.jsonl"
    for _ in range(2):
        write_case(outcome, file)
    again = read_cases(file)[1]
    assert again == replace(case, number=2, recorded=outcome.end)
    assert runner.run(again).kind == EQUAL
    for key in ("weights_digest", "course"):
        other = replace(again, recorded=outcome.end | {key: "'0'"})
        assert f"wrong bits: end at {key}" in runner.run(other).what


def test_recorded_runs_are_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, end = tmp_path / "runs.jsonl", {"loss": "1.0", "weights_digest": "'0'"}
    file.write_text("")
    assert digests.compare_runs(file) == 1, "nothing is compared"
    for _ in range(3):
        write_case(CaseResult(planted("a_model"), EQUAL, end=end), file)

    def outcomes(
        cases: list[Case], jobs: int, tell: Callable[[CaseResult], None]
    ) -> list[CaseResult]:
        assert all(case.recorded == end for case in cases)
        kinds = [EQUAL, FAILED if changed else EQUAL, EQUAL]
        results = [
            CaseResult(case, kind, "wrong bits") for case, kind in zip(cases, kinds, strict=True)
        ]
        for result in results:
            tell(result)
        return results

    monkeypatch.setattr("tests.fuzz.runner.run_all", outcomes)
    for changed in (False, True):
        assert digests.compare_runs(file) == changed
        out, err = capsys.readouterr()
        assert (f"{file}:2: wrong bits" in out) == changed
        assert f"3 compared, {int(changed)} changed" in err


def test_command_writes_its_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(cases: list[Case], *_: object) -> list[CaseResult]:
        return [CaseResult(case, FAILED if case.number == 2 else EQUAL) for case in cases]

    monkeypatch.setattr("tests.fuzz.__main__.run_all", outcomes)
    monkeypatch.setattr("tests.fuzz.__main__.prepare", lambda: None)
    file = tmp_path / "fuzz.json"
    assert main(["--cases", "3", "--seed", "5", "--out", str(file)]) == 1
    counts = json.loads(file.read_text())
    assert counts.items() >= {"cases": 3, "seed": 5, "equal": 2, "refused": 0, "failed": 1}.items()
    assert counts["commit"] is None or len(counts["commit"].removesuffix("-dirty")) == 40


def test_command_shows_a_case_and_writes_its_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--only", "5", "--seed", "2", "--show", "--folder", str(tmp_path)]) == 0
    assert f"dynmo train {tmp_path}/seed-2/fuzz-5.toml --overwrite" in capsys.readouterr().out
    assert load(tmp_path / "seed-2" / "fuzz-5.toml") == parse(draw(2, 5).config)
