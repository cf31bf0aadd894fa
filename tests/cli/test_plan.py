from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynmo.cli import main
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.cost.profile_file import Profile, write

FIELDS = [
    "schedule",
    "balancer",
    "ranks",
    "microbatches",
    "objective",
    "partition",
    "placement",
    "stage_cost",
    "imbalance",
]
FIELDS += [
    "span",
    "makespan",
    "bubble_ratio",
    "idle_ratio",
    "lower_bound",
    "memory",
    "memory_limit",
    "recompute",
    "moves",
    "moved_bytes",
    "seconds",
]
FIELDS += ["words", "alternatives"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process: exit status, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main(["plan", *map(str, arguments)])
        out = capsys.readouterr()
        return status, out.out, out.err

    return call


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An embedding, four blocks of two halves, and a head.

    The head takes as long as two halves.
    """
    names = [
        "embedding",
        *(f"blocks.{i}.{half}" for i in range(4) for half in ("attention", "feed_forward")),
        "head",
    ]
    one = LayerCost(1e-3, 1e-3, 1e-3, 1000, 4 << 20, 4 << 20, 8 << 20, 4 << 20, 2 << 20, 1 << 20)
    layers = (one,) * 9 + (LayerCost(2e-3, 2e-3, 2e-3, *list(vars(one).values())[3:]),)
    path = tmp_path / "costs.json"
    link = LinkCost(1e-5, 1e10)
    write(
        path,
        Profile(
            layers,
            tuple(names),
            links=(((0, 1), link),),
            microbatch=2,
            microbatches=8,
            ranks=2,
            schedule="1f1b",
            partition=(5, 5),
        ),
    )
    return path


def answer(run: Run, *arguments: object) -> dict[str, Any]:
    status, out, err = run(*arguments, "--json")
    assert (status, err) == (0, "")
    assert out.endswith("}\n")
    assert out.count("\n") == 1
    return json.loads(out)


def test_the_contract(run: Run, file: Path) -> None:
    answered = answer(
        run,
        "--costs",
        file,
        "--ranks",
        4,
        "--microbatches",
        8,
        "--balancer",
        "exact",
        "--schedule",
        "zb-h1",
    )
    assert list(answered) == FIELDS
    assert (
        answered["schedule"],
        answered["balancer"],
        answered["ranks"],
        answered["microbatches"],
    ) == ("zb-h1", "exact", 4, 8)
    assert sum(answered["partition"]) == 10
    assert max(answered["stage_cost"]) == pytest.approx(9e-3)
    assert answered["imbalance"] == pytest.approx(
        (9 - min(answered["stage_cost"]) * 1e3) / (33 / 4)
    )
    assert answered["lower_bound"] <= answered["span"] <= answered["makespan"]
    assert answered["bubble_ratio"] == pytest.approx(1 - 8 * 9e-3 / answered["span"])
    assert len(answered["memory"]) == 4
    assert set(answered["alternatives"]) == {"balancers", "schedules", "microbatches", "ranks"}
    best = answered["alternatives"]["schedules"][0]
    assert best["gain"] == pytest.approx(1 - best["span"] / answered["span"])


def test_cost_is_not_costs(run: Run, file: Path) -> None:
    status, out, err = run("--cost", file, "--ranks", 4)
    assert (status, out) == (2, "")
    assert err == (
        f"dynmo: --cost {file}: choose one of time, parameters (a file of costs goes to --costs)\n"
    )
    status, out, err = run("--ranks", 4)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dynmo: --costs is missing")


def test_what_the_file_says_need_not_be_said(run: Run, file: Path) -> None:
    answered = answer(run, "--costs", file, "--no-alternatives")
    assert (
        answered["schedule"],
        answered["ranks"],
        answered["microbatches"],
        answered["alternatives"],
    ) == ("1f1b", 2, 8, {})
    assert answered["partition"] == [5, 5] or answered["moves"], (
        "moves are from where the layers were"
    )
    assert (
        answer(run, "--costs", file.parent, "--no-alternatives")["partition"]
        == answered["partition"]
    ), "a run's folder"


def test_the_least_a_file_can_say(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "hand.json"
    path.write_text('{"f": [1, 1, 2, 1], "b": [1, 1, 2, 1], "w": [1, 1, 2, 1], "comm": 0.1}')
    answered = answer(run, "--costs", path, "--ranks", 2, "--microbatches", 4)
    assert answered["partition"] in ([2, 2], [3, 1])
    assert answered["memory"] == [0, 0]
    assert (
        answer(run, "--costs", path, "--ranks", 2, "--microbatches", 4, "--objective", "makespan")[
            "objective"
        ]
        == "makespan"
    )


def test_the_words_of_other_trainers(run: Run, file: Path) -> None:
    arguments = (
        "--costs",
        file,
        "--ranks",
        2,
        "--microbatches",
        8,
        "--balancer",
        "uniform",
        "--no-alternatives",
    )
    exported = answer(run, *arguments)["words"]
    assert exported["megatron"] == {"pipeline_model_parallel_layout": "Ett|ttL", "rounded": []}
    assert exported["torchtitan"]["module_fqns_per_model_part"][0] == [
        "tok_embeddings",
        "layers.0",
        "layers.1",
    ]
    assert exported["deepspeed"] == {"parts": [0, 5, 10]}
    said = {
        flag: run(*arguments, flag)[1] for flag in ("--megatron", "--torchtitan", "--deepspeed")
    }
    assert "pipeline_model_parallel_layout = Ett|ttL" in said["--megatron"]
    assert '["tok_embeddings", "layers.0", "layers.1"]' in said["--torchtitan"]
    assert "parts = [0, 5, 10]" in said["--deepspeed"]
    assert "parts" not in run(*arguments)[1]


def test_what_cannot_be_said_there(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(
        '{"f": [1, 1, 1], "b": [1, 1, 1], "w": [1, 1, 1], "names": ["blocks.0", "odd", "blocks.1"]}'
    )
    exported = answer(run, "--costs", path, "--ranks", 2, "--microbatches", 4, "--no-alternatives")[
        "words"
    ]
    assert "stands between numbered blocks" in exported["megatron"]["problem"]
    assert exported["deepspeed"]["parts"][-1] == 3


def test_the_text(run: Run, file: Path) -> None:
    status, out, err = run(
        "--costs",
        file,
        "--ranks",
        4,
        "--microbatches",
        8,
        "--schedule",
        "zb-h1",
        "--memory-limit",
        "1GiB",
    )
    assert (status, err) == (0, "")
    bars = [line for line in out.splitlines() if line.startswith("rank ")]
    assert len(bars) == 4
    assert all("F" in bar and "B" in bar and "W" in bar for bar in bars)
    assert any("F" * 20 + "B" * 20 + "W" * 20 in bar for bar in bars), (
        "the longest rank fills the width"
    )
    assert "embedding" in bars[0]
    for word in (
        "step",
        "lower bound",
        "imbalance",
        "of the limit of 1,024.0 MiB",
        "moves",
        "other balancers",
        "other schedules",
    ):
        assert word in out
    assert "other microbatches, same global batch" in out
    assert "rank-seconds" in out


def test_several_stages_a_rank_in_the_picture(run: Run, file: Path) -> None:
    out = run(
        "--costs",
        file,
        "--ranks",
        2,
        "--microbatches",
        8,
        "--schedule",
        "zb-v",
        "--no-alternatives",
    )[1]
    bars = [line for line in out.splitlines() if line.startswith("rank ")]
    assert [bar.split()[:4] for bar in bars] == [
        ["rank", str(r), "stage", str(s)] for r, s in ((0, 0), (0, 3), (1, 1), (1, 2))
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedule", "zb-h3"), "unknown schedule 'zb-h3'; choose one of"),
        (("--balancer", "best"), "unknown balancer 'best'; choose one of"),
        (("--ranks", "0"), "--ranks 0: at least 1 is needed"),
        (("--microbatches", "0"), "--microbatches 0: at least 1 is needed"),
        (("--ranks", "11"), "11 ranks need at least 11 layers; the model has 10"),
        (
            ("--schedule", "interleaved-1f1b", "--microbatches", "5"),
            "5 microbatches are not a multiple of 2 ranks; use 4 or 6",
        ),
        (("--memory-limit", "much"), "--memory-limit much: not a size"),
        (("--memory-limit", "0"), "--memory-limit 0: a rank needs some memory"),
        (("--memory-limit", "100MiB"), "over the limit of 104857600; "),
    ],
)
def test_bad_input_is_one_line(
    run: Run, file: Path, arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run("--costs", file, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_what_the_file_must_say(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "hand.json"
    path.write_text('{"f": [1, NaN], "b": [1, 1], "w": [1, 1]}')
    assert run("--costs", path, "--ranks", 2, "--microbatches", 4)[2] == (
        f"dynmo: costs file {path}: layer 1: f is NaN; a time is a number of at least 0\n"
    )
    path.write_text('{"f": [1, 1], "b": [1, 1], "w": [1, 1]}')
    status, _, err = run("--costs", path, "--microbatches", 4)
    assert (status, err) == (
        2,
        "dynmo: --ranks is missing, and the costs file does not say it either\n",
    )


def test_recomputing_where_memory_is_short(run: Run, file: Path) -> None:
    arguments = (
        "--costs",
        file,
        "--ranks",
        2,
        "--microbatches",
        8,
        "--schedule",
        "1f1b",
        "--no-alternatives",
        "--memory-limit",
        "110MiB",
    )
    assert run(*arguments)[0] == 2
    answered = answer(run, *arguments, "--recompute", "auto")
    assert 0 < len(answered["recompute"]) < 10
    assert max(answered["memory"]) <= 110 << 20
    every = answer(run, *arguments, "--recompute", "all")
    assert every["recompute"] == list(range(10))
    assert answered["span"] < every["span"]
    out = run(*arguments, "--recompute", "auto")[1]
    assert "recomputed" in out
    roomy = answer(
        run, "--costs", file, "--no-alternatives", "--recompute", "auto", "--memory-limit", "10GiB"
    )
    assert roomy["recompute"] == []


@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "v-min"])
def test_a_v_on_one_rank_within_a_limit(run: Run, file: Path, schedule: str) -> None:
    answered = answer(
        run,
        "--costs",
        file,
        "--ranks",
        1,
        "--schedule",
        schedule,
        "--memory-limit",
        "1GiB",
        "--no-alternatives",
    )
    assert len(answered["partition"]) == 2


def test_the_mesh(run: Run, file: Path) -> None:
    arguments = (
        "--costs",
        file,
        "--gpus",
        4,
        "--global-batch",
        32,
        "--schedule",
        "zb-h1",
        "--bandwidth",
        "1GB",
    )
    answered = answer(run, *arguments, "--micro-batch", "1,2", "--zero", 1)
    assert list(answered) == [
        *FIELDS,
        "gpus",
        "global_batch",
        "zero",
        "bandwidth",
        "mesh",
        "candidates",
        "refused",
        "slower",
    ]
    best, candidates = answered["mesh"], answered["candidates"]
    assert candidates[0] == best
    assert {(x["pipeline"], x["replicas"]) for x in candidates} == {(1, 4), (2, 2), (4, 1)}
    assert [x["step_seconds"] for x in candidates] == sorted(x["step_seconds"] for x in candidates)
    assert all(x["replicas"] * x["microbatches"] * x["micro_batch"] == 32 for x in candidates)
    assert best["samples_per_second"] == pytest.approx(32 / best["step_seconds"])
    assert best["step_seconds"] == pytest.approx(answered["span"] + best["exposed"])
    assert (answered["partition"], answered["memory"]) == (best["partition"], best["memory"])
    assert (answered["ranks"], answered["microbatches"], answered["bandwidth"]) == (
        best["pipeline"],
        best["microbatches"],
        1e9,
    )
    measured = answer(run, *arguments[:-2])
    assert measured["bandwidth"] == 1e10, "the slowest link of the file"


def test_the_mesh_as_text(run: Run, file: Path) -> None:
    arguments = (
        "--costs",
        file,
        "--gpus",
        6,
        "--global-batch",
        24,
        "--memory-limit",
        "120MiB",
        "--schedule",
        "1f1b",
    )
    status, out, err = run(*arguments, "--megatron")
    assert (status, err) == (0, "")
    for word in (
        "6 GPUs, a global batch of 24, at most 120.0 MiB a rank",
        "best: ",
        "candidates",
        "against best",
        "sequences a second",
    ):
        assert word in out
    assert "refused, such as " in out
    assert "needs 128974848 bytes, 3145728 over the limit" in out
    assert "pipeline_model_parallel_layout" in out


def test_names_are_no_markup(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    names, size = [f"[bold]{i}[/x]" for i in range(4)], [1 << 20] * 4
    path.write_text(
        json.dumps(
            {
                "f": [1] * 4,
                "b": [1] * 4,
                "w": [1] * 4,
                "names": names,
                "microbatch": 1,
                "activation_bytes": size,
                "output_bytes": [1] * 4,
            }
        )
    )
    arguments = ("--costs", path, "--recompute", "all", "--balancer", "deepspeed-type:[/x]")
    for mesh in (
        ("--ranks", 2, "--microbatches", 4, "--no-alternatives"),
        ("--gpus", 2, "--global-batch", 4),
    ):
        status, out, err = run(*arguments, *mesh)
        assert (status, err) == (0, "")
        assert "deepspeed-type:[/x]" in out
        assert "[bold]0[/x]" in out


def test_reductions_that_take_no_time_are_told(run: Run, tmp_path: Path, file: Path) -> None:
    path = tmp_path / "hand.json"
    path.write_text('{"f": [1, 1], "b": [1, 1], "w": [1, 1], "microbatch": 1}')
    said = "no bandwidth was measured: what replicas sum takes no time here; --bandwidth says"
    assert said in run("--costs", path, "--gpus", 2, "--global-batch", 4)[1]
    assert (
        said not in run("--costs", path, "--gpus", 2, "--global-batch", 4, "--bandwidth", "1GB")[1]
    )
    assert said not in run("--costs", file, "--gpus", 2, "--global-batch", 4)[1]
    assert answer(run, "--costs", path, "--gpus", 2, "--global-batch", 4)["bandwidth"] is None


def test_numbers_beyond_any_machine(run: Run, file: Path, tmp_path: Path) -> None:
    """One line, or an answer."""
    status, out, err = run(
        "--costs",
        file,
        "--gpus",
        2,
        "--global-batch",
        4,
        "--micro-batch",
        2,
        "--bandwidth",
        "1e-320",
        "--json",
    )
    assert (status, err) == (0, "")
    assert {x["replicas"] for x in json.loads(out)["candidates"]} == {1}
    status, out, err = run(
        "--costs", file, "--gpus", 11, "--global-batch", 22, "--bandwidth", "1e-320", "--json"
    )
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "at 1e-320 bytes per second a step takes longer than a number can say" in err
    path = tmp_path / "large.json"
    path.write_text(
        json.dumps({"f": [1] * 8, "b": [1] * 8, "w": [1] * 8, "weight_bytes": [1 << 60] * 8})
    )
    assert answer(run, "--costs", path, "--ranks", 2, "--microbatches", 4, "--no-alternatives")[
        "partition"
    ] == [4, 4]
    status, out, err = run(
        "--costs", path, "--ranks", 2, "--microbatches", 4, "--memory-limit", "1GiB"
    )
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "over the limit of 1073741824" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "4"), "--gpus needs --global-batch"),
        (("--zero", "1"), "--zero goes with --gpus"),
        (
            ("--gpus", "4", "--global-batch", "8", "--ranks", "2"),
            "--ranks is what --gpus searches for",
        ),
        (("--gpus", "0", "--global-batch", "8"), "0 GPUs; at least 1 is needed"),
        (
            ("--gpus", "4", "--global-batch", "8", "--micro-batch", "one"),
            "--micro-batch one: numbers of sequences",
        ),
        (
            ("--gpus", "4", "--global-batch", "8", "--bandwidth", "fast"),
            "--bandwidth fast: bytes per second",
        ),
        (("--gpus", "4", "--global-batch", "8", "--zero", "2"), "zero = 2; it is 0 or 1"),
        (
            ("--gpus", "4", "--global-batch", "7", "--micro-batch", "2"),
            "a global batch of 7 does not divide",
        ),
        (
            ("--gpus", "4", "--global-batch", "8", "--memory-limit", "20MiB"),
            "meshes fits; the least, ",
        ),
        (("--recompute", "some"), "--recompute some: choose one of none, auto, all"),
    ],
)
def test_a_mesh_that_cannot_be(
    run: Run, file: Path, arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run("--costs", file, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_why_a_choice_is_not_possible_stands_below_its_table(run: Run, file: Path) -> None:
    """Reasons in a column would make every row of it as high as they are long."""
    out = run("--costs", file, "--ranks", 4, "--microbatches", 6)[1]
    assert re.search(r"│ interleaved-1f1b .*│ not possible", out)
    assert re.search(r"(?m)^  interleaved-1f1b: .*microbatches", out)


def test_the_fewest_ranks(run: Run, file: Path) -> None:
    answered = answer(run, "--costs", file, "--ranks", 6, "--fewest-ranks", 0.5)
    rows = answered["ranks"]
    assert [row["ranks"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert (answered["global_batch"], answered["full_seconds"]) == (16, rows[-1]["step_seconds"])
    assert answered["limit_seconds"] == 1.5 * answered["full_seconds"]
    fast = [row["ranks"] for row in rows if row["step_seconds"] <= answered["limit_seconds"]]
    assert answered["fewest_ranks"] == min(fast)
    for row in rows:
        assert (row["pipeline"], row["replicas"], row["schedule"]) == (row["ranks"], 1, "1f1b")
        assert row["micro_batch"] * row["microbatches"] == 16
        assert row["speed"] == pytest.approx(answered["full_seconds"] / row["step_seconds"])
        assert row["samples_per_second_per_rank"] == pytest.approx(
            16 / row["step_seconds"] / row["ranks"]
        )
        assert len(row["memory"]) == row["ranks"]
        assert sum(row["partition"]) == 10
        assert row["best_micro_batch"]["step_seconds"] <= row["step_seconds"]
    best = answer(
        run,
        "--costs",
        file,
        "--ranks",
        6,
        "--schedule",
        "1f1b",
        "--balancer",
        "schedule-aware",
        "--microbatches",
        8,
    )
    assert rows[-1]["step_seconds"] <= best["span"]


def test_the_fewest_ranks_within_memory_and_as_text(run: Run, file: Path) -> None:
    status, out, err = run(
        "--costs", file, "--ranks", 5, "--fewest-ranks", 9, "--memory-limit", "100MiB"
    )
    assert (status, err) == (0, "")
    assert "1 to 5 ranks, a global batch of 16, at most 100.0 MiB a rank" in out
    assert re.search(
        r"^  1: as 1 ranks x 1 replicas.* over the limit of 104857600$", out, re.MULTILINE
    )
    fewest = re.search(r"fewest │ +(\d)", out)
    assert fewest is not None
    assert f"{fewest[1]} of 5 ranks are enough: a step of " in out
    status, out, err = run(
        "--costs", file, "--ranks", 2, "--fewest-ranks", 0, "--memory-limit", "1MiB"
    )
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_the_fewest_ranks_of_a_mesh(run: Run, file: Path) -> None:
    options = ("--costs", file, "--gpus", 4, "--global-batch", 16, "--micro-batch", "2")
    answered = answer(run, *options, "--fewest-ranks", 0)
    assert answered["fewest_ranks"] == 4
    assert all(row["pipeline"] * row["replicas"] == row["ranks"] for row in answered["ranks"])
    assert (
        answered["ranks"][3]["step_seconds"]
        == answer(run, *options)["candidates"][0]["step_seconds"]
    )


def test_the_fewest_ranks_of_a_run(run: Run, file: Path, tmp_path: Path) -> None:
    """The run's config says which replicas its accumulation groups allow."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "costs.json").write_bytes(file.read_bytes())
    own = answer(run, "--costs", folder, "--fewest-ranks", 0.5)
    assert [row["replicas"] for row in own["ranks"]] == [1, 1]
    text = (
        "[train]\nglobal_batch = 16\nmicro_batch = 2\nreduction_slots = 2\n[parallel]\n"
        "pipeline = 2\ndata = 2\n"
    )
    (folder / "config.toml").write_text(text)
    with_config = answer(run, "--costs", folder, "--fewest-ranks", 0.5)
    assert [row["ranks"] for row in with_config["ranks"]] == [1, 2, 3, 4]
    assert {row["replicas"] for row in with_config["ranks"]} <= {1, 2}
    assert with_config["global_batch"] == 16


def test_the_fewest_ranks_of_a_workload(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "workload.toml"
    times = "f = [{0}, {0}, {0}, {0}]\nb = [{0}, {0}, {0}, {0}]\nw = [{0}, {0}, {0}, {0}]\n"
    moments = "".join(
        f"[[layers.moments]]\nstep = {step}\n{times.format(x)}" for step, x in ((0, 1), (20, 0.4))
    )
    path.write_text(f"steps = 40\nranks = 4\nmicrobatches = 8\n[layers]\n{moments}")
    needed = answer(run, "--costs", path, "--fewest-ranks", 0)["ranks_needed"]
    assert [(row["first"], row["last"]) for row in needed["moments"]] == [(0, 19), (20, 39)]
    assert needed["moments"][0]["ranks"] > needed["moments"][1]["ranks"]
    status, out, err = run("--costs", path, "--fewest-ranks", 0)
    assert (status, err) == (0, "")
    assert f"needs {needed['mean']:.1f} of 4 ranks on average" in out


@pytest.mark.parametrize(
    "options",
    [
        ("--fewest-ranks", -1),
        ("--fewest-ranks", "nan"),
        ("--fewest-ranks", "inf"),
        ("--fewest-ranks", 0, "--megatron"),
        ("--fewest-ranks", 0, "--cost", "parameters"),
        ("--fewest-ranks", 0, "--ranks", 40),
        ("--fewest-ranks", 0, "--zero", 1),
        ("--fewest-ranks", 0, "--gpus", 4),
    ],
)
def test_wrong_options_of_the_fewest_ranks(
    run: Run, file: Path, options: tuple[object, ...]
) -> None:
    status, out, err = run("--costs", file, *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
