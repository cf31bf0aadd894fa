"""Each benchmark's command in its smallest form.

Its figures must have the keys of the result file that the documents quote. Functions for ranks run
in the pool, so that no process starts for up to four ranks.
"""

from __future__ import annotations

import json
import math
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.repack import BASELINES
from tests.pool import Pool

FOLDER = Path(harness.__file__).parent
SMALL = {"blocks": 4, "hidden": 16, "heads": 2, "sequence": 32}
RANKS: dict[str, dict[str, Any]] = {
    # An initialisation with large weights makes an untrained model sure of some tokens: they exit.
    "benchmarks.cases_race:race": {"sizes": SMALL | {"init_std": 0.5}},
    "benchmarks.expert_parallel_race:race": {"scale": 0.02},
}
"""Arguments that make a function for ranks small, where its command has no option for that."""

SHORT = (
    "saving --rounds 1 --hidden 64",
    "stand_ins --hidden 64 --blocks 2 --sequence 8 --rounds 2",
    "sweeps --stride 15",
)
LONG = (
    "savings_freezing --rounds 1 --sequence 64",
    "savings_tokens --rounds 1 --cases 1",
    "savings_attention --rounds 1 --cases 1",
    "savings_experts --rounds 1 --cases 1",
    "post_validation --ranks 2 --steps 2 --rounds 1 --scale 10",
    "handed_on --hidden 64 --blocks 2 --sequence 8",
    "exact --seconds 1 --uneven 2",
    "replicas --rounds 1 --hidden 64 --blocks 2",
    "heavy_head --hidden 64 --vocabulary 256 --sequence 64 --rounds 1",
    "exit_thresholds --steps 20 --hidden 64 --sequence 32 --rounds 1",
    "deferred --hidden 64 --tokens 32 --rounds 2",
    "bubbles --stride 24 --workers 4",
    "balanced_routing --draws 1 --tokens 512 --hidden 16",
    "cases --case early_exit --steps 20 --pairs 1",
    "cases --case freezing --steps 20 --pairs 1",
    "cases --case mixture_of_depths --steps 20 --pairs 1",
    "cases --case pruning --steps 20 --pairs 1",
    "copies --rounds 1 --hidden 64 --rows 64",
    "decision_path",
    "step_path",
    "delays --stride 24 --draws 1 --settings 1 --pairs 1 --shortest 0.001",
    "elastic --only plain",
    "executor --rounds 1 --real_rounds 1 --milliseconds 1 --hidden 64",
    "executor_families --rounds 1 --hidden 64",
    "expert_parallel --steps 6",
    "experts --stride 12",
    "host --rounds 1 --largest 8",
    "finetune --case lora-upper --rounds 1 --steps 1 --longest 32 --hidden 64 --blocks 4 --reach 0",
    "freezing --pairs 1 --steps 1 --microbatches 4",
    "joined --only simulated --stride 4 --seconds 1",
    "learning --steps 12 --hidden 64",
    "long_run --steps 10 --turn 5 --hidden 32",
    "many_ranks --pipeline 4 --replicas 1 2 --rounds 1 --processes 2",
    "learning --what experts --steps 12 --hidden 64",
    "overhead --stride 4 --rounds 1",
    "placement --repeat 1 --cases 5",
    "planner --cases 5 --runs 1",
    "quality --steps 40 --seeds 2 --jobs 2 --hidden 64 --only 'freezing, schedule'",
    "ragged --rounds 1 --steps 1 --microbatches 4 --longest 32 --hidden 64",
    "repack --only cases --blocks 24 --stride 12",
    "repack --only emulated --case pruning --steps 2 --unit 0.001",
    "repack --only pipetransformer --blocks 24 --stride 12",
    "repack --only searched --blocks 24",
    "reshape --stride 12 --cases 1",
    "router_loads --steps 140 --hidden 16 --moments 2",
    "savings --rounds 1 --sequence 64 --cases 1",
    "savings_pruning --rounds 1 --sequence 64 --tokens 64",
    "scaling --only simulated --stride 24",
    "steadiness --runs 1 --steps 10 --blocks 1 --busy 0",
    "traces --only growth --cases 1 --stride 24",
    "traces --only moves --steps 2",
    "traces --only simulated --blocks 24 --cases 1",
    "traces --only stepwise --blocks 24",
    "uneven --rounds 1 --milliseconds 1 --microbatches 8",
    "unequal --steps 4 --microseconds 200 --real_steps 4 --hidden 64 --blocks 2",
    "batching --steps 2 --rounds 1 --real_steps 2 --hidden 64",
    "waiting --steps 4 --hidden 64",
    "zero_bubble --stride 12 --cases 4 --draws 2",
)


IN_PARTS = ("elastic", "joined", "repack", "scaling", "traces")
"""Benchmarks whose `--only` leaves out whole parts of the figures."""


def test_every_benchmark_is_listed() -> None:
    commands = {path.stem for path in FOLDER.glob("*.py") if '"__main__"' in path.read_text()}
    assert {command.split()[0] for command in (*SHORT, *LONG)} == commands - {"harness"}


@pytest.mark.parametrize(
    "command", [*SHORT, *(pytest.param(command, marks=pytest.mark.matrix) for command in LONG)]
)
def test_command_prints_the_documented_figures(
    command: str, pool: Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = shlex.split(command)
    run_ranks = harness.run_ranks

    def in_pool(function: str, ranks: int, device: str = "cpu", **arguments: Any) -> Any:
        arguments |= RANKS.get(function, {})
        if ranks > 4:
            return run_ranks(function, ranks, device, **arguments)
        return pool.run(function, ranks, timeout=250, **arguments)[0]

    monkeypatch.setattr(harness, "run_ranks", in_pool)
    monkeypatch.setattr(sys, "argv", [name, "--json", *options])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    figures = json.loads(capsys.readouterr().out)
    check_documented(name, figures, documented_figures(name, "experts" in options))
    assert not list(broken_claims(figures))
    if name in CHECKS:
        CHECKS[name](figures)


def check_documented(name: str, figures: dict[str, Any], documented: dict[str, Any]) -> None:
    if name in IN_PARTS:
        documented = {key: documented[key] for key in figures.keys() & documented.keys()}
    assert documented.keys() - {"machine"}
    figures_there = {key: figures[key] for key in figures.keys() & documented.keys()}
    assert not list(differences(figures_there, documented))


def documented_figures(name: str, of_experts: bool) -> dict[str, Any]:
    """Returns the figures of the benchmark's result file, or of its part in `savings`."""
    if name in ("savings_attention", "savings_freezing", "savings_pruning"):
        savings = json.loads((FOLDER / "results/savings.json").read_text())
        if name == "savings_attention":
            return {"lengths": savings["sparse_attention"]}
        return savings[name.removeprefix("savings_")]
    file = f"{name}_experts" if name == "learning" and of_experts else name
    return json.loads((FOLDER / f"results/{file}.json").read_text())


def differences(figures: Any, documented: Any, path: str = "") -> Iterator[str]:
    """Yields where the keys of figures differ from those of the documents.

    An item of a list must be like some item of the documented list. The keys of `meshes` are data.
    """
    if path.endswith(".meshes"):
        return
    if isinstance(documented, list):
        if not isinstance(figures, list):
            yield f"{path} is {figures}"
            return
        if documented and not figures and path in (".rows", ".published", ".sizes", ".lengths"):
            yield f"{path} is empty"
        for place, item in enumerate(figures):
            each = [list(differences(item, x, f"{path}[{place}]")) for x in documented]
            yield from min(each, key=len, default=[])
    elif isinstance(documented, dict):
        if not isinstance(figures, dict):
            yield f"{path} is {figures}"
            return
        for key in figures.keys() ^ documented.keys():
            yield f"{path}.{key}"
        for key in figures.keys() & documented.keys():
            yield from differences(figures[key], documented[key], f"{path}.{key}")


def broken_claims(figures: Any, path: str = "") -> Iterator[str]:
    """Yields where figures say that weights differ, and where a number is not finite."""
    if isinstance(figures, float) and not math.isfinite(figures):
        yield path
    if isinstance(figures, list):
        figures = dict(enumerate(figures))
    for key, value in figures.items() if isinstance(figures, dict) else ():
        if key in ("same", "same_weights") and value is not True:
            yield f"{path}.{key}"
        yield from broken_claims(value, f"{path}.{key}")


# -- what only a small run shows -------------------------------------------------------------------


def check_case(figures: dict[str, Any]) -> None:
    (row,) = figures["rows"]
    assert all(ratio > 0.5 for ratio in row["ops_over_costs"].values())
    assert all(0 < share < 1 for share in row["program_share"].values())
    assert all(layer[0] > 0 for layers in row["costs"] for layer in layers)
    case, tokens = row["case"], row["tokens"]
    assert row["what"] or case == "mixture_of_depths", "the technique never acted"
    if case == "early_exit":
        assert row["phases"] == [[0, 2], [2, 4], [4, 8], [8, 20]]
        assert tokens[0]["exited"][0] > 0
    if case == "mixture_of_depths":
        assert row["phases"] == [[0, 20]]
        assert tokens[0]["selected"] == [0.125, 0.125]
    if case == "freezing":
        assert [layer[1:] for layer in row["costs"][-1][:5]] == [[0.0, 0.0]] * 5


def check_expert_parallel(figures: dict[str, Any]) -> None:
    rows = figures["rows"]
    assert not rows["static"]["changes"]
    assert not rows["static"]["moves"]
    assert rows["experts placed"]["busiest"] < rows["static"]["busiest"] - 0.2
    assert rows["both"]["changes"] == rows["experts placed"]["changes"]


def check_finetune(figures: dict[str, Any]) -> None:
    (row,) = figures["rows"]
    sides = row["tokens_per_s"]
    assert len(sides) == 14
    assert sides.keys() == row["cuts"].keys() == row["spread"].keys()
    assert all(sum(cut) == 10 for cut in row["cuts"].values())
    assert {kind: name.split()[0] for kind, name in row["best"].items()} == {
        kind: kind for kind in ("balanced", "uniform", "torch", "naive")
    }
    # The lengths of the first sequences differ.
    assert row["tokens"] < row["positions"]["own"] < row["positions"]["padded"]
    assert all(share > 0 for share in row["reached"].values())


def check_placement(figures: dict[str, Any]) -> None:
    assert figures["brute_force"]["equal"] == figures["brute_force"]["cases"]


def check_decision_path(figures: dict[str, Any]) -> None:
    for row in (figures["placement"], figures["ranks"]):
        assert len(row["modules"]) <= 9
        assert row["crossings"] <= 40


def check_step_path(figures: dict[str, Any]) -> None:
    assert figures["calls"] <= 14
    assert figures["path"][0].endswith("Pipeline.step")


def check_host(figures: dict[str, Any]) -> None:
    for row in figures["middle_rank"]:
        assert row["parts"]["zb-h1"]["w"] > 0
        assert row["seconds"]["dynmo zb-h1"] > row["seconds"]["plain torch"]


def check_many_ranks(figures: dict[str, Any]) -> None:
    rows = {row["part"]: row for row in figures["rows"]}
    assert rows["meet"]["messages"] == [5 * 4 + 2, 5 * 8 + 2]
    assert rows["end a step"]["messages"] == [2, 3]
    assert rows["agree on a decision"]["bytes"] == [2 * 16, 3 * 16]


def check_saving(figures: dict[str, Any]) -> None:
    assert figures["bytes"] == 10 * (3 * 64**2 + 1) * 4
    assert figures["seconds"]["behind"] <= figures["seconds"]["written"]


def check_planner(figures: dict[str, Any]) -> None:
    assert figures["uneven"]["failures"] == figures["uneven"]["cap_violations"] == 0


def check_quality(figures: dict[str, Any]) -> None:
    dense, other = figures["dense_by_seed"]
    assert dense == figures["rows"][0]["loss"] != other


def check_repack(figures: dict[str, Any]) -> None:
    for row in figures.get("rows", ()):
        average = row["average"]
        assert all(average["ours"] <= average[name] <= 8 for name in BASELINES)
        assert row["ranks"] == row["exhaustive"]
        assert all(row["complete"])
        assert row["kept"] >= 1
    for row in figures.get("cases", ()):
        assert row["average"] <= 8 >= row["as_static"]
        assert 1 <= row["speedup"] <= row["gain"]["repacked"] + 1e-9
    for row in figures.get("pipetransformer", ()):
        assert row["over_halving"] >= 1
        assert row["replicas"]["halving"] == sorted(row["replicas"]["halving"])


def check_scaling(figures: dict[str, Any]) -> None:
    weak, vertical = figures["weak"], figures["vertical"]
    assert [(x["blocks"], x["pipeline"]) for x in weak] == [(24, 12), (32, 16), (40, 20), (48, 24)]
    assert all(1 <= x["speed_up"] <= x["bound"] + 1e-9 for x in weak)
    assert weak[0]["efficiency"] == {"static": 1.0, "balanced": 1.0, "perfect": 1.0}
    assert len(vertical) + len(figures["vertical_oom"]) == 15
    # Short pipelines have little to gain.
    assert all(0.99 < x["speed_up"] <= x["bound"] + 1e-9 < 1.1 < x["published"] for x in vertical)
    for x in figures["equal_memory"]:
        assert max(x["peak_memory"][:2]) <= 2 * x["ranks"] + 1e-9
        # 1F1B keeps p microbatches, each of twice the size.
        assert x["peak_memory"][2] <= 2 * x["ranks"]
        if x["microbatches"] == 3 * x["ranks"]:
            assert x["over_1f1b"] > x["over_zb_1p"] > 0


CHECKS = {
    "cases": check_case,
    "expert_parallel": check_expert_parallel,
    "finetune": check_finetune,
    "host": check_host,
    "many_ranks": check_many_ranks,
    "placement": check_placement,
    "decision_path": check_decision_path,
    "planner": check_planner,
    "quality": check_quality,
    "repack": check_repack,
    "saving": check_saving,
    "scaling": check_scaling,
    "step_path": check_step_path,
}
