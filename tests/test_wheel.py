"""The wheel and the sdist of dynmo-train, and the commands of the documents with the wheel alone.

The commands run with an environment that holds nothing else, in a folder without the checkout.
`LEFT_OUT` of tests/cli/test_documented.py says which commands do not run, and why.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from dynmo import __version__
from tests.cli.test_documented import COMMANDS, LOOPS, QUICK, README, REFERENCE, RUNS
from tests.processes import end_all, start
from tests.test_docs_code import ROOT, TUTORIAL, block

pytestmark = [pytest.mark.docs, pytest.mark.timeout(1200)]

UV = [sys.executable, "-m", "uv"]
NAME = f"dynmo_train-{__version__}"


def _uv(*arguments: str | Path) -> None:
    done = subprocess.run([*UV, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def _tracked(*folders: str) -> set[str]:
    """Files of the checkout. Those that git ignores are none."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *folders]
    return set(subprocess.check_output(command, cwd=ROOT, text=True).splitlines())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist, and of the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    _uv("build", "--quiet", "--out-dir", folder)
    return folder


@pytest.fixture(scope="module")
def programs(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds the wheel and what it needs."""
    environment = tmp_path_factory.mktemp("environment")
    _uv("venv", "--quiet", "--clear", "--python", sys.executable, environment)
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    _uv(
        *("pip", "install", "--quiet", "--python", environment / "bin" / "python"),
        *("--constraint", "constraints.txt", built / f"{NAME}-py3-none-any.whl"),
        *(word for link in links for word in ("--find-links", link)),
    )
    return environment / "bin"


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside of the checkout, with an environment as of a new shell."""
    for name in ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert not tmp_path.is_relative_to(ROOT)
    return tmp_path


def run(line: str, programs: Path, folder: Path) -> str:
    """Runs a command of the environment, which must end well, and returns what it prints."""
    program, *arguments = shlex.split(line)
    process = start([str(programs / program), *arguments], folder, {"PYTHONWARNINGS": "default"})
    try:
        out, err = process.communicate(timeout=250)
    finally:
        end_all([process])
    assert process.returncode == 0, f"{line}\n{err}"
    return out


def test_wheel_has_the_package_and_its_licence_alone(built: Path) -> None:
    with ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"{NAME}.dist-info/METADATA").decode()
    package = {name for name in names if name.startswith("dynmo/")}
    assert package == _tracked("dynmo")
    assert "dynmo/py.typed" in package
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    assert {name.split("/")[0] for name in names} == {"dynmo", f"{NAME}.dist-info"}
    assert f"Version: {__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata


def test_sdist_has_what_building_and_testing_need(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as sdist:
        names = {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
    assert names == {*_tracked(), "PKG-INFO"}


def test_twine_finds_nothing(built: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *built.glob("dynmo_train-*")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


@pytest.mark.parametrize("text", [*(f"dynmo {name} --help" for name in COMMANDS), *QUICK])
def test_command_without_ranks_runs(text: str, programs: Path, outside: Path) -> None:
    assert run(text, programs, outside)


def test_module_is_that_of_the_wheel(programs: Path, outside: Path) -> None:
    out = run("python -c 'import dynmo; print(dynmo.__file__)'", programs, outside)
    assert Path(out.strip()).is_relative_to(programs.parent)
    assert run("dynmo --version", programs, outside) == f"dynmo {__version__}\n"


@pytest.mark.parametrize("page", [README, TUTORIAL, REFERENCE], ids=lambda page: page.name)
def test_commands_of_a_page_run(page: Path, programs: Path, outside: Path) -> None:
    """The commands run in order, on files that stand in the documents and in examples/."""
    for language, name in (("toml", "run.toml"), ("toml", "first.toml"), ("python", "my_model.py")):
        (outside / name).write_text(block(TUTORIAL, language, f"# {name}"))
    for name in ("workload.toml", "workload-freezing.json"):
        shutil.copy(ROOT / "examples" / name, outside)
    if page != REFERENCE:
        text = block(page, "python", "# loop.py" if page == TUTORIAL else "import torch")
        (outside / "loop.py").write_text(text.replace("range(30)", "range(10)"))
        for line in LOOPS:
            assert run(line, programs, outside)
    for line in (line for lines in RUNS[page].values() for line in lines):
        run(line, programs, outside)
