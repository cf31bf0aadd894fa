"""What ships beside the package: workflows, the Dockerfile, `make release`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
RELEASE = ROOT / ".ci" / "release"


@pytest.mark.parametrize(
    "command",
    [
        ["zizmor", "--offline", "--persona", "pedantic", ".github/workflows"],
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW],
        ["hadolint", "Dockerfile"],
    ],
    ids=lambda command: command[0],
)
def test_linter_finds_nothing(command: list[str]) -> None:
    done = subprocess.run([BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_workflow_tests_each_python_and_each_torch() -> None:
    rows = yaml.safe_load(WORKFLOW.read_text())["jobs"]["test"]["strategy"]["matrix"]["include"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    head = "Programming Language :: Python :: "
    pythons = {name.removeprefix(head) for name in project["classifiers"] if head + "3." in name}
    assert {row["python"] for row in rows} == pythons
    assert "torch>=2.10,<2.14" in project["dependencies"]
    assert {row["torch"] for row in rows} == {f"2.{minor}" for minor in range(10, 14)}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of version 0.2.0, committed and tagged."""
    for name in (".ci/release", "dynmo/__init__.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(RELEASE, tmp_path / ".ci")
    (tmp_path / "dynmo/__init__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n\n## 0.2.0\n\n- new\n\n## 0.1.0\n")
    _git(tmp_path, "init", "--quiet")
    _commit(tmp_path, "v0.2.0")
    return tmp_path


def _git(folder: Path, *arguments: str) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    subprocess.run(["git", *name, *arguments], cwd=folder, check=True)


def _commit(folder: Path, tag: str = "") -> None:
    _git(folder, "add", "--all")
    _git(folder, "commit", "--quiet", "--message", "one")
    if tag:
        _git(folder, "tag", tag)


def _release(folder: Path) -> tuple[int, str, str]:
    """Status, output and error of `make release`, whose Python only shows what it is to run."""
    command = [folder / ".ci/release", "echo"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_release_builds_and_checks_what_is_tagged(project: Path) -> None:
    status, out, err = _release(project)
    assert (status, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()[:2]] == [
        ["-m", "uv", "build"],
        ["-m", "twine", "check"],
    ]
    assert "upload" not in "".join(out.splitlines()[:2])


@pytest.mark.parametrize("wrong", ["file", "no tag", "tag", "changes"])
def test_release_refuses(project: Path, wrong: str) -> None:
    words = {
        "file": "not committed",
        "no tag": "has no tag",
        "tag": "the tag is v0.3.0",
        "changes": "CHANGELOG.md",
    }
    (project / "dynmo" / "new.py").write_text("")
    if wrong == "changes":
        (project / "CHANGELOG.md").write_text(
            "## Unreleased\n\n- new\n\n## 0.2.0\n\n## 0.1.0\n\n- old\n"
        )
        _git(project, "tag", "--delete", "v0.2.0")
    if wrong != "file":
        _commit(project, {"no tag": "", "tag": "v0.3.0", "changes": "v0.2.0"}[wrong])
    status, out, err = _release(project)
    assert (status, out) == (2, "")
    assert words[wrong] in err
    assert err.count("\n") == 1
