"""The order of packages: imports come only from packages above in the list.

There are no import cycles.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

import dynmo

ROOT = Path(__file__).parents[1]

# Packages and top modules in the order of the layout. Each imports only from itself and from those
# before it.
ORDER = (
    "dynmo.errors",
    "dynmo.events",
    "dynmo.files",
    "dynmo.jit",
    "dynmo.options",
    "dynmo.cost",
    "dynmo.schedule",
    "dynmo.schedule.automatic",
    "dynmo.kernels",
    "dynmo.data",
    "dynmo.balance",
    "dynmo.planner",
    "dynmo.elastic.member",
    "dynmo.elastic.managers.manager",
    "dynmo.elastic.launcher.launch_folder",
    "dynmo.elastic.managers",
    "dynmo.elastic.launcher",
    "dynmo.models",
    "dynmo.dynamism",
    "dynmo.runtime",
    "dynmo.runtime.comm",
    "dynmo.runtime.layer",
    "dynmo.runtime.optim",
    "dynmo.runtime.state",
    "dynmo.runtime.engine",
    "dynmo.elastic",
    "dynmo.pipeline",
    "dynmo.config",
    "dynmo.train",
    "dynmo.report",
    "dynmo.cli",
    "dynmo.__main__",
    "dynmo",
)
NO_TORCH = {
    "dynmo.errors",
    "dynmo.events",
    "dynmo.files",
    "dynmo.jit",
    "dynmo.options",
    "dynmo.cost",
    "dynmo.schedule",
    "dynmo.schedule.automatic",
    "dynmo.config",
    "dynmo.balance",
    "dynmo.planner",
    "dynmo.elastic.member",
    "dynmo.elastic.managers.manager",
    "dynmo.elastic.launcher.launch_folder",
    "dynmo.elastic.managers",
    "dynmo.elastic.launcher",
}
NO_RANKS = {"dynmo.kernels", "dynmo.data", "dynmo.models", "dynmo.dynamism"}
MAX_TOP_MODULES = 6
# Names the private functions of all of torch.
PRIVATE_TORCH = "dynmo.kernels.torch_private"

# Modules that need an optional dependency. Only functions import them.
OPTIONAL = (("dynmo.kernels.hash_attention", "dynmo.kernels.hash_attention_triton"),)  # triton

# Imports that break the rules. There are none. Nothing may be added.
KNOWN: tuple[tuple[str, str], ...] = ()

# Modules whose functions load what a plain pipeline does not need, such as checkpoints, decisions
# and ranks that come and go.
LATE = {
    "dynmo.pipeline.pipeline",
    "dynmo.pipeline.assembly",
    "dynmo.pipeline.gathering",
    "dynmo.pipeline.rebalance",
    "dynmo.pipeline.start",
    "dynmo.runtime.engine.schedule_keeper",
    "dynmo.runtime.layer.split_backward",
    "dynmo.runtime.state.layer_store",
}


class Import(NamedTuple):
    """`source` imports `target`.

    It does so when it is imported itself, inside a function, or for the type checker only.
    """

    source: str
    target: str
    line: int
    place: Literal["module", "function", "typing"] = "module"


def module(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Where the public names are defined.
HOMES = {name: getattr(dynmo, name).__module__ for name in dynmo.__all__ if name[0] != "_"}
FILES = {module(path): path for path in sorted((ROOT / "dynmo").rglob("*.py"))}


def imports(name: str, text: str, package: bool, known: set[str]) -> Iterator[Import]:
    """Every import in a module's text.

    `from a import b` is an import of `a.b` if that is a module.
    """

    def visit(node: ast.AST, place: Literal["module", "function", "typing"]) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, node.lineno, place) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                here = parts[: len(parts) - node.level + package]
                base = ".".join([*here, base] if base else here)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if base == "dynmo" and alias.name in HOMES:
                    inner = HOMES[alias.name]
                yield Import(
                    name,
                    inner if inner in known or inner == "torch.distributed" else base,
                    node.lineno,
                    place,
                )
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, "typing")
            for child in node.orelse:
                yield from visit(child, place)
        else:
            function = place == "module" and isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            )
            for child in ast.iter_child_nodes(node):
                yield from visit(child, "function" if function else place)

    yield from visit(ast.parse(text), "module")


def all_imports() -> list[Import]:
    """Every import of dynmo's modules."""
    names = set(FILES)
    return [
        x
        for name, path in FILES.items()
        for x in imports(name, path.read_text(encoding="utf-8"), path.name == "__init__.py", names)
    ]


def allowed_imports(exceptions: Sequence[tuple[str, str]] = KNOWN) -> list[Import]:
    return [x for x in all_imports() if (x.source, x.target) not in exceptions]


def room(name: str) -> str | None:
    """The innermost entry of ORDER that holds the module. `dynmo` holds only itself."""
    parts = name.split(".")
    owners = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next(
        (owner for owner in owners if owner in ORDER and (owner != "dynmo" or name == "dynmo")),
        None,
    )


def going_up(imported: Sequence[Import]) -> list[str]:
    """Returns one message for each import of a later entry of ORDER."""
    wrong: list[str] = []
    for source, target, line, _ in imported:
        own, other = room(source), room(target)
        if (
            target.split(".")[0] == "dynmo"
            and own
            and other
            and ORDER.index(other) > ORDER.index(own)
        ):
            wrong.append(f"{source}:{line} ({own}) imports {target} ({other})")
    return wrong


def cycle(imported: Sequence[Import]) -> list[str] | None:
    """Returns a circle of imports, or None.

    Imports inside functions and for the type checker count.

    An import of a module also runs the packages that contain it.
    """
    edges: dict[str, set[str]] = {}
    for source, target, _, place in imported:
        if target.split(".")[0] != "dynmo":
            continue
        parts = target.split(".")
        for around in (".".join(parts[:n]) for n in range(1, len(parts))):
            if place == "module" and not (source + ".").startswith(around + "."):
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
            if loop := walk(target, [*path, name]):
                return loop
        state[name] = False
        return None

    return next((loop for name in sorted(edges) if (loop := walk(name, []))), None)


def test_every_file_is_in_a_listed_package() -> None:
    assert [name for name in FILES if room(name) is None] == [], (
        "put the new file into a package of ORDER above"
    )


def test_top_level_modules_are_few() -> None:
    top = [path.stem for path in (ROOT / "dynmo").glob("*.py") if not path.stem.startswith("__")]
    assert len(top) <= MAX_TOP_MODULES, sorted(top)


def test_packages_do_not_import_upwards() -> None:
    assert going_up(allowed_imports()) == []


def test_imports_have_no_cycles() -> None:
    assert cycle(allowed_imports()) is None


def test_functions_import_no_modules_of_dynmo() -> None:
    """Only cli/ and the modules of `LATE` import dynmo modules in functions, to load less.

    A module with an optional dependency may be imported in a function too.
    """
    late = [
        x
        for x in allowed_imports((*KNOWN, *OPTIONAL))
        if x.place == "function" and x.target.split(".")[0] == "dynmo"
    ]
    late = [x for x in late if room(x.source) != "dynmo.cli" and x.source not in LATE]
    assert [f"{x.source}:{x.line}" for x in late] == []


def test_known_exceptions_are_still_needed() -> None:
    """Whoever removes such an import also removes its line from the list."""
    there = {(x.source, x.target) for x in all_imports()}
    assert [pair for pair in (*KNOWN, *OPTIONAL) if pair not in there] == []


def test_pure_packages_do_not_import_torch() -> None:
    wrong = [
        f"{x.source}:{x.line}"
        for x in all_imports()
        if room(x.source) in NO_TORCH and x.target.split(".")[0] == "torch"
    ]
    assert wrong == []


def test_models_do_not_import_torch_distributed() -> None:
    wrong = [
        f"{x.source}:{x.line}"
        for x in all_imports()
        if room(x.source) in NO_RANKS
        and x.target.startswith("torch.distributed")
        and x.source != PRIVATE_TORCH
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "names",
    [[n for n in FILES if room(n) in NO_TORCH], ["dynmo.schedule"], ["dynmo.cli"]],
    ids=["pure packages", "schedule", "command line"],
)
def test_modules_load_without_torch(names: list[str]) -> None:
    code = (
        f"import sys, importlib\nfor n in {names!r}: importlib.import_module(n)\n"
        f"sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# The test's own eyes


def see(name: str, text: str, package: bool = False) -> list[tuple[str, str]]:
    known = {"dynmo.runtime", "dynmo.runtime.layer.stage", "dynmo.errors", "dynmo.schedule.op"}
    return [(x.target, x.place) for x in imports(name, text, package, known)]


def test_imports_at_any_position_are_detected() -> None:
    assert see("dynmo.jit", "import torch.nn as nn, json") == [
        ("torch.nn", "module"),
        ("json", "module"),
    ]
    assert see("dynmo.jit", "from dynmo.runtime.layer import stage, Stage") == [
        ("dynmo.runtime.layer.stage", "module"),
        ("dynmo.runtime.layer", "module"),
    ]
    assert see("dynmo.jit", "def f():\n  if 1:\n    import torch") == [("torch", "function")]
    assert see("dynmo.jit", "class A:\n  import torch") == [("torch", "module")]
    assert see("dynmo.jit", "if TYPE_CHECKING:\n  import torch\nelse:\n  import json") == [
        ("torch", "typing"),
        ("json", "module"),
    ]
    assert see("dynmo.jit", "from .errors import X") == [("dynmo.errors", "module")]
    assert see("dynmo.schedule.auto", "from .op import X\nfrom ..errors import Y") == [
        ("dynmo.schedule.op", "module"),
        ("dynmo.errors", "module"),
    ]
    assert see("dynmo.schedule", "from .op import X", package=True) == [
        ("dynmo.schedule.op", "module")
    ]
    assert see("dynmo.models.gpt", "from torch import distributed") == [
        ("torch.distributed", "module")
    ]


def test_upward_import_is_detected() -> None:
    assert going_up(
        [Import("dynmo.balance.partition", "dynmo.runtime.layer.stage", 3, "function")]
    ) == [
        (
            "dynmo.balance.partition:3 (dynmo.balance) imports dynmo.runtime.layer.stage "
            "(dynmo.runtime.layer)"
        )
    ]
    assert (
        going_up([Import("dynmo.schedule.op", "dynmo.schedule.automatic.exact", 1, "typing")]) != []
    )
    assert (
        going_up(
            [
                Import("dynmo.runtime.layer.stage", "dynmo.balance.partition", 3),
                Import("dynmo.jit", "json", 1),
            ]
        )
        == []
    )
    assert going_up([Import("dynmo.jit", "dynmo", 1)]) != []


def test_import_cycle_is_detected() -> None:
    there = Import("dynmo.cost.layer_cost", "dynmo.schedule.op", 1)
    back = Import("dynmo.schedule.op", "dynmo.cost.layer_cost", 1)
    assert cycle([there, back]) == [
        "dynmo.cost.layer_cost",
        "dynmo.schedule.op",
        "dynmo.cost.layer_cost",
    ]
    assert cycle([there, back._replace(place="function")]) is not None
    assert cycle([there, back._replace(place="typing")]) is not None
    # An import of dynmo.schedule.op runs dynmo.schedule first.
    assert cycle([there, Import("dynmo.schedule", "dynmo.cost.layer_cost", 1)]) is not None
    assert cycle([there, Import("dynmo.schedule.grid", "dynmo.cost.layer_cost", 1)]) is None
