"""The layout's floors: a file imports from its own floor or a lower one, never up, and there are no cycles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

FLOORS: dict[str, int] = {
    # 1: pure Python, no torch. The configuration is pure data, so every floor may read it.
    "dynmo.errors": 1,
    "dynmo.events": 1,
    "dynmo.schedule": 1,
    "dynmo.costs": 1,
    "dynmo.memory": 1,
    "dynmo.simulator": 1,
    "dynmo.config": 1,
    "dynmo.profile_file": 1,
    "dynmo.files": 1,
    # 2: pure.
    "dynmo.balance": 2,
    # 3: torch, no torch.distributed.
    "dynmo.models": 3,
    "dynmo.kernels": 3,
    "dynmo.dynamism": 3,
    "dynmo.data": 3,
    # 4: the runtime.
    "dynmo.runtime": 4,
    # 5: deciding, acting, reporting.
    "dynmo": 5,
    "dynmo.trainer": 5,
    "dynmo.run_checkpoints": 5,
    "dynmo.setup": 5,
    "dynmo.feed": 5,
    "dynmo.plan": 5,
    "dynmo.rebalance": 5,
    "dynmo.scheduling": 5,
    "dynmo.api": 5,
    "dynmo.assembly": 5,
    "dynmo.profiling": 5,
    "dynmo.report": 5,
    # 6: the command line.
    "dynmo.cli": 6,
    "dynmo.__main__": 6,
}

PURE = 2


class Import(NamedTuple):
    """`source` imports `target`. `lazy`: inside a function or for the type checker only, so it cannot close a cycle."""

    source: str
    target: str
    line: int
    lazy: bool


def module(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module(path): path for path in sorted((ROOT / "dynmo").rglob("*.py"))}


def imports(name: str, text: str, package: bool, known: set[str]) -> Iterator[Import]:
    """Every import in a module's text; `from a import b` is an import of `a.b` where that is a module."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                here = parts[: len(parts) - node.level + package]
                base = ".".join([*here, base] if base else here)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(name, inner if inner in known or inner == "torch.distributed" else base, node.lineno, lazy)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, True)
            for child in node.orelse:
                yield from visit(child, lazy)
        else:
            inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside)

    yield from visit(ast.parse(text), False)


def all_imports() -> list[Import]:
    return [
        x for name, path in FILES.items() for x in imports(name, path.read_text(encoding="utf-8"), path.name == "__init__.py", set(FILES))
    ]


def floor(name: str) -> int | None:
    """Of the module or the package that it is in; dynmo/ itself does not stand for the files in it."""
    parts = name.split(".")
    owners = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((FLOORS[owner] for owner in owners if owner in FLOORS and (owner != "dynmo" or name == "dynmo")), None)


def going_up(found: list[Import]) -> list[str]:
    wrong: list[str] = []
    for source, target, line, _ in found:
        if target.split(".")[0] == "dynmo":
            own, other = floor(source), floor(target)
            if own is not None and other is not None and other > own:
                wrong.append(f"{source}:{line} (floor {own}) imports {target} (floor {other})")
    return wrong


def cycle(found: list[Import]) -> list[str] | None:
    """A circle of imports that run when a module is imported, or None. Importing a module runs the packages around it first."""
    edges: dict[str, set[str]] = {}
    for source, target, _, lazy in found:
        if lazy or target.split(".")[0] != "dynmo":
            continue
        parts = target.split(".")
        for around in (".".join(parts[:n]) for n in range(1, len(parts))):
            if not (source + ".").startswith(around + "."):
                edges.setdefault(source, set()).add(around)
        edges.setdefault(source, set()).add(target)
    state: dict[str, bool] = {}  # True: on the path, False: done

    def walk(name: str, path: list[str]) -> list[str] | None:
        if state.get(name):
            return [*path[path.index(name) :], name]
        if name in state:
            return None
        state[name] = True
        for target in sorted(edges.get(name, ())):
            if circle := walk(target, [*path, name]):
                return circle
        state[name] = False
        return None

    return next((circle for name in sorted(edges) if (circle := walk(name, []))), None)


def test_every_file_has_a_floor() -> None:
    assert [name for name in FILES if floor(name) is None] == [], "give the new file a floor in FLOORS above, and in the layout"


def test_nothing_imports_upwards() -> None:
    assert going_up(all_imports()) == []


def test_no_cycles() -> None:
    assert cycle(all_imports()) is None


def test_pure_floors_know_no_torch() -> None:
    wrong = [f"{x.source}:{x.line}" for x in all_imports() if (floor(x.source) or 9) <= PURE and x.target.split(".")[0] == "torch"]
    assert wrong == []


def test_models_know_no_ranks() -> None:
    wrong = [f"{x.source}:{x.line}" for x in all_imports() if floor(x.source) == 3 and x.target.startswith("torch.distributed")]
    assert wrong == []


@pytest.mark.parametrize("names", [[n for n in FILES if (floor(n) or 9) <= PURE], ["dynmo.cli"]], ids=["pure floors", "command line"])
def test_imported_without_torch(names: list[str]) -> None:
    code = f"import sys, importlib\nfor n in {names!r}: importlib.import_module(n)\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# The test's own eyes


def see(name: str, text: str, package: bool = False) -> list[tuple[str, bool]]:
    known = {"dynmo.runtime", "dynmo.runtime.stage", "dynmo.errors", "dynmo.schedule.op"}
    return [(x.target, x.lazy) for x in imports(name, text, package, known)]


def test_imports_are_seen_wherever_they_stand() -> None:
    assert see("dynmo.costs", "import torch.nn as nn, json") == [("torch.nn", False), ("json", False)]
    assert see("dynmo.costs", "from dynmo.runtime import stage, Stage") == [("dynmo.runtime.stage", False), ("dynmo.runtime", False)]
    assert see("dynmo.costs", "def f():\n  if 1:\n    import torch") == [("torch", True)]
    assert see("dynmo.costs", "class A:\n  import torch") == [("torch", False)]
    assert see("dynmo.costs", "if TYPE_CHECKING:\n  import torch\nelse:\n  import json") == [("torch", True), ("json", False)]
    assert see("dynmo.costs", "from .errors import X") == [("dynmo.errors", False)]
    assert see("dynmo.schedule.auto", "from .op import X\nfrom ..errors import Y") == [
        ("dynmo.schedule.op", False),
        ("dynmo.errors", False),
    ]
    assert see("dynmo.schedule", "from .op import X", package=True) == [("dynmo.schedule.op", False)]
    assert see("dynmo.models.gpt", "from torch import distributed") == [("torch.distributed", False)]


def test_an_import_upwards_is_seen() -> None:
    assert going_up([Import("dynmo.balance.partition", "dynmo.runtime.stage", 3, True)]) == [
        "dynmo.balance.partition:3 (floor 2) imports dynmo.runtime.stage (floor 4)"
    ]
    assert going_up([Import("dynmo.runtime.stage", "dynmo.balance.partition", 3, False), Import("dynmo.costs", "json", 1, False)]) == []
    assert going_up([Import("dynmo.costs", "dynmo", 1, False)]) != []


def test_a_cycle_is_seen() -> None:
    there, back = Import("dynmo.simulator", "dynmo.schedule.op", 1, False), Import("dynmo.schedule.op", "dynmo.simulator", 1, False)
    assert cycle([there, back]) == ["dynmo.schedule.op", "dynmo.simulator", "dynmo.schedule.op"]
    assert cycle([there, back._replace(lazy=True)]) is None
    # Through the package that is run on the way to its module.
    assert cycle([there, Import("dynmo.schedule", "dynmo.simulator", 1, False)]) is not None
    assert cycle([there, Import("dynmo.schedule.grid", "dynmo.simulator", 1, False)]) is None
