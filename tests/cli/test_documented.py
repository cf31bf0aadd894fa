"""The commands of README.md, the tutorial and docs/reference/commands.md run.

They run in a folder of their own, outside of the repository, with the files of the page. What
trains also runs under torchrun. Nothing in the environment says how many threads there are. Runs
have fewer steps than in the text.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.tools.documents import code
from tests.cli.runs import Run
from tests.processes import end_all, start
from tests.test_docs_code import ROOT, TUTORIAL, block

pytestmark = pytest.mark.docs

README, REFERENCE = ROOT / "README.md", ROOT / "docs" / "reference" / "commands.md"
PAGES = (README, TUTORIAL, REFERENCE)

# Commands that do not run here, and why.
LEFT_OUT = {
    "make demo": "sets up .venv",
    "pip install -c constraints.txt .": "sets up an environment",
    "pip install -c constraints.txt '.[hf]'": "sets up an environment",
    "make test": "is this suite",
    "make results QUICK=1": "takes minutes; tests/test_remake.py has the program behind it",
    "make gpu": "needs a GPU; tests/benchmarks/test_gpu.py has its dry run",
    ". .venv/bin/activate": "is for a shell",
    "dynmo train tune.toml": "needs a model and talks; tests/train/test_samples.py has both",
    "dynmo checkpoint export runs/my-run tuned": "needs a model; test_checkpoint.py exports one",
    "dynmo checkpoint export runs/tune tuned": "the same",
    "dynmo report runs/tune --html": "needs a run; runs/my-run is shown so",
    "dynmo report --html": "the same",
    "dynmo dashboard runs": "serves until Ctrl-C; tests/browser/test_report.py opens it",
    "dynmo checkpoint verify runs/my-run": "needs a run; test_checkpoint.py verifies one",
    "python -m tests.fuzz --cases 48": "takes minutes; tests/fuzz/test_fuzz.py has 18 cases",
}
LOOPS = ("python loop.py", "torchrun --standalone --nproc-per-node=2 loop.py")

SMALL = "--set model.sequence=16 --set train.steps=4 --set checkpoint.every=2"
FREEZES = f"{SMALL} --set dynamism.freezing.schedule=[[2,5]]"
# Each command of a page with a placeholder filled in or with fewer steps, in order.
RUNS = {
    README: {},
    TUTORIAL: {
        "dynmo train first.toml": [f"dynmo train first.toml {FREEZES}"],
        "dynmo report runs/first": ["dynmo report runs/first"],
        "dynmo train run.toml": [f"dynmo train run.toml {SMALL}"],
    },
    REFERENCE: {
        "dynmo doctor": ["dynmo doctor", "dynmo doctor run.toml --ranks 2 --json"],
        "dynmo data run.toml --out data.bin": [f"dynmo data run.toml {SMALL} --out data.bin"],
        "dynmo profile run.toml": [
            f"dynmo profile run.toml {SMALL} --steps 2 --out costs.json --json",
        ],
        "dynmo plan --costs costs.json --ranks 4": [
            "dynmo plan --costs costs.json",
            "dynmo plan --costs costs.json --ranks 2 --microbatches 4",
        ],
        "dynmo train run.toml --set train.steps=200": [
            f"dynmo train run.toml {SMALL} --dry-run",
            f"dynmo train run.toml {SMALL}",
            f"dynmo train run.toml {SMALL} --set train.steps=6 --resume --json",
            f"dynmo train run.toml {SMALL} --overwrite",
        ],
        "dynmo train runs/my-run/config.toml --set name=again": [
            "dynmo train runs/my-run/config.toml --set name=again"
        ],
        "dynmo plan --costs runs/NAME": ["dynmo plan --costs runs/my-run"],
        "dynmo report runs/my-run runs/again": [
            "dynmo report runs/my-run runs/again",
            "dynmo report runs/my-run --html --json",
        ],
        "dynmo simulate workload.toml": ["dynmo simulate workload.toml --json"],
        "python -m dynmo.train.compile_ahead": ["python -m dynmo.train.compile_ahead"],
    },
}
# Their help is shown.
COMMANDS = (
    "train",
    "doctor",
    "data",
    "report",
    "schedule",
    "profile",
    "plan",
    "simulate",
    "dashboard",
    "checkpoint export",
)
# These start no ranks, and run in this process.
QUICK = ("dynmo schedule --schedule zb-h1 --ranks 4 --microbatches 8",)


def commands(page: Path) -> Iterator[str]:
    """The commands of a page: in blocks without a language, and between backticks in its text."""
    text, inside = page.read_text().splitlines(), set[int]()
    for lines, language in code(text):
        inside |= set(lines)
        yield from (text[i].split(" # ")[0].strip() for i in lines if not language)
    for i, line in enumerate(text):
        if i not in inside:
            yield from re.findall(r"`([^`]+)`", line)


def test_every_command_of_the_pages_is_known() -> None:
    """Each one is run here or left out by name. A benchmark runs from the repository's root."""
    program = re.compile(r"(dynmo|python|torchrun|make|pip|srun|\.) (?!-m benchmarks\.)")
    for page in PAGES:
        documented = {text for text in commands(page) if program.match(text)}
        known = {*LEFT_OUT, *LOOPS, *QUICK, *RUNS[page], *(f"dynmo {name}" for name in COMMANDS)}
        assert documented <= known, page.name
        assert set(RUNS[page]) <= documented, page.name
    everywhere = {text for page in PAGES for text in commands(page)}
    assert {*LEFT_OUT, *LOOPS, *QUICK} <= everywhere


@pytest.mark.parametrize("text", [*(f"dynmo {name} --help" for name in COMMANDS), *QUICK])
def test_command_without_ranks_runs(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dynmo: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    done = dynmo(*shlex.split(text)[1:])
    assert (done.status, done.err) == (0, "")
    assert done.out


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside of the repository, with an environment as of a new shell."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "120")
    assert not tmp_path.is_relative_to(ROOT)
    return tmp_path


def run(line: str, folder: Path) -> str:
    """Runs a command, which must end well, and returns what it prints on stdout."""
    program, *arguments = shlex.split(line)
    module = {"dynmo": ["-m", "dynmo"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
    process = start(
        [sys.executable, *module[program], *arguments], folder, {"PYTHONWARNINGS": "default"}
    )
    try:
        out, err = process.communicate(timeout=250)
    finally:
        end_all([process])
    assert process.returncode == 0, f"{line}\n{err}"
    return out


@pytest.mark.matrix
@pytest.mark.parametrize(
    "page", [pytest.param(README, marks=pytest.mark.matrix), TUTORIAL], ids=lambda page: page.name
)
def test_loop_prints_the_same_alone_and_under_torchrun(page: Path, outside: Path) -> None:
    """torchrun sets one thread a rank. Python alone takes all cores, if nobody says otherwise."""
    (outside / "my_model.py").write_text(block(TUTORIAL, "python", "# my_model.py"))
    text = block(page, "python", "# loop.py" if page == TUTORIAL else "import torch")
    (outside / "loop.py").write_text(text.replace("range(30)", "range(10)"))
    alone_line, two_line = LOOPS
    alone = run(alone_line, outside)
    # Ranks of torchrun write without a buffer: on one pipe their lines would mix.
    run(two_line.replace("torchrun", "torchrun --redirects=3 --log-dir=logs"), outside)
    two = [path.read_text() for path in (outside / "logs").rglob("stdout.log")]
    assert len(two) == 2
    told, expected = (re.sub(r"layers \(.*?\)", "", text) for text in ("".join(two), alone))
    assert set(told.splitlines()) == set(expected.splitlines())
    assert re.search(r"[0-9a-f]{16}\n$", alone)


@pytest.mark.matrix
@pytest.mark.timeout(1500)  # each process imports torch
@pytest.mark.parametrize("page", [TUTORIAL, REFERENCE], ids=lambda page: page.name)
def test_commands_of_a_page_run_alone_and_under_torchrun(page: Path, outside: Path) -> None:
    """The commands run in order. Those that train end with the same weights in both ways."""
    files = {
        "run.toml": block(TUTORIAL, "toml", "# run.toml"),
        "first.toml": block(TUTORIAL, "toml", "# first.toml"),
        "my_model.py": block(TUTORIAL, "python", "# my_model.py"),
    }
    digests: list[dict[str, str]] = []
    for launcher in ("", "torchrun --standalone --nproc-per-node=2 -m "):
        folder = outside / ("torchrun" if launcher else "alone")
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        for name in ("workload.toml", "workload-freezing.json"):
            shutil.copy(ROOT / "examples" / name, folder)
        for line in (line for lines in RUNS[page].values() for line in lines):
            starts_ranks = re.match("dynmo (train|profile) (?!.*--dry-run)", line)
            if starts_ranks or not launcher:
                out = run(launcher + line, folder)
                assert "--json" not in line or json.loads(out)
        logs = folder.glob("runs/*/events.jsonl")
        digests.append({log.parent.name: _digest(log) for log in logs})
    assert digests[0] == digests[1]
    assert digests[0]


def _digest(log: Path) -> str:
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["event"] == "end"
    return last["weights_digest"]
