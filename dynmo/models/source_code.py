"""Digests of the code that decides a model's numbers.

    model.py   3f2a..      the file of a layer's class, and each file of the user's that it imports
    einops     0.8.1       an installed package, by its version

A digest is that of the syntax tree without docstrings. A changed constant counts, a changed comment
does not. Imports are followed as they stand in the text, those inside of functions included. A file
that is read or imported under a computed name cannot be seen.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

# These are compared apart, or with Python's version.
_KNOWN = {"dynmo", "torch", *sys.stdlib_module_names} - {"__main__"}
_INSTALLED = {"site-packages", "dist-packages"}
_DYNMO = Path(__file__).parents[1]


class _File(NamedTuple):
    """Digest of a file of code, and the names that it may import."""

    digest: str
    imports: tuple[str, ...]


def code_of(modules: Iterable[str]) -> dict[str, str]:
    """Returns the digests of modules, loaded or not, and of all that they import.

    They are digests of files, by the path below the folder that each is imported from, and
    versions of installed packages, by name.
    """
    code = dict[str, str]()
    seen, waiting = set[str](), sorted(set(modules))
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in seen or top in _KNOWN:
            continue
        seen.add(name)
        path = _path_of(name)
        if path is None:
            continue
        if _INSTALLED & set(path.parts):
            if top not in code:
                code[top] = _version_of(top, path)
            continue
        waiting += _parents(name)
        if path.is_file():
            status = path.stat()
            file = _read(path, name, status.st_mtime_ns, status.st_size)
            code[_label(name, path)] = file.digest
            waiting += file.imports
    return dict(sorted(code.items()))


def _label(name: str, path: Path) -> str:
    parts = () if name == "__main__" else tuple(name.split("."))
    parents = parts if path.stem == "__init__" else parts[:-1]
    return "/".join((*parents, path.name))


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _path_of(name: str) -> Path | None:
    """Returns the file of a module, or a namespace package's folder, without loading it."""
    loaded = sys.modules.get(name)
    file = getattr(loaded, "__file__", None)
    if file is not None:
        return Path(file).resolve()
    if loaded is not None and not hasattr(loaded, "__path__"):
        return None  # made without a file, in a notebook for example
    folders = None if loaded is None else list(loaded.__path__)
    if loaded is None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            spec = PathFinder.find_spec(".".join(parts[:end]), folders)
            if spec is None:
                return None
            if spec.origin is not None and end == len(parts):
                return Path(spec.origin).resolve()
            folders = list(spec.submodule_search_locations or ())
    return Path(folders[0]).resolve() if folders else None


@lru_cache(maxsize=4096)
def _read(path: Path, name: str, modified: int, size: int) -> _File:
    content = path.read_bytes()
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # a compiled module
        return _File(hashlib.sha256(content).hexdigest(), ())
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    imports = tuple(dict.fromkeys(_imports(tree, package)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _remove_docstring(node)
    return _File(hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imports)


def _remove_docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> None:
    match node.body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            node.body = rest


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = "." * node.level + (node.module or "")
            try:
                base = importlib.util.resolve_name(here, package)
            except ImportError:  # beyond the top package
                continue
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _version_of(top: str, path: Path) -> str:
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(top)
    if names:
        return importlib.metadata.version(names[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "unknown"


@lru_cache
def dynmo_version() -> str:
    """Returns a digest of dynmo's files, which says more than its version."""
    digest = hashlib.sha256()
    for path in sorted(_DYNMO.rglob("*.py")):
        digest.update(path.relative_to(_DYNMO).as_posix().encode() + path.read_bytes())
    return f"files {digest.hexdigest()[:12]}"


def function_digest(code: CodeType) -> str:
    """Returns a digest of what a function does, wherever it stands in its file."""
    return hashlib.sha256(repr(_instructions(code)).encode()).hexdigest()[:12]


def _instructions(code: CodeType) -> tuple[Any, ...]:
    constants = tuple(
        _instructions(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts
    )
    return code.co_code, constants, code.co_names, code.co_freevars
