"""What decides a model's numbers, as text that two processes can compare.

    versions   Python, torch, dynmo
    code       each file of the user's that the layers come from, and each file that it imports;
               installed packages by their versions
    layers     name, and of each module: class, tensors' shapes, plain attributes, hooks

Values of weights and buffers are not part of it. A layer is made on the rank that holds it, and a
newcomer gets them from there. A file is told by its compiled code: a changed constant counts, a
changed comment does not. A file that is read or imported under a computed name cannot be seen.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from dynmo.errors import RunError
from dynmo.kernels.torch_private import is_compiled
from dynmo.models.model import Model, defined_in, named_tensors
from dynmo.models.tied import form_of

# Attributes that every module has. Its tensors are described apart.
_OWN = frozenset(nn.Module().__dict__) - {"training"} | {"_compiled_call_impl"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Objects of these packages say where or how a process runs, or belong to other layers.
_OPAQUE = (
    "torch.distributed",
    "torch._C",
    "dynmo.runtime",
    "dynmo.models.huggingface.stubs.Unowned",
    "dynmo.models.emulated.Pace",
    "logging",
    "numpy.random.",
    "random.",
    "threading",
    "_thread",
)
# Letters of an attribute that are written. A digest stands for the others.
_LONGEST = 60
# Differences that a message names. It counts the others.
_NAMED = 3

_INDEX = re.compile(r"\d+")
_IS_INDEX = re.compile(r"(^|[._])(index|idx)$")
_PATH = re.compile(r'"/[^"]*"')

# These are compared apart, or with Python's version.
_KNOWN = {"", "dynmo", "torch", *sys.stdlib_module_names} - {"__main__"}
_DYNMO = Path(__file__).parents[1]


class Identity(BaseModel):
    """What decides a model's numbers.

    Attributes:
        versions: Version of each program.
        code: Digest of each file, version of each installed package.
        layers: For each layer, its name and the key of its description.
        descriptions: Values by what they describe. Equal layers share one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    versions: dict[str, str]
    code: dict[str, str]
    layers: tuple[tuple[str, str], ...]
    descriptions: dict[str, dict[str, str]]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer. Layers of a kind differ at most in their indices."""
        known = {key: _kind_of(parts) for key, parts in self.descriptions.items()}
        return tuple(known[key] for _, key in self.layers)

    def with_code(self, objects: Iterable[object]) -> Identity:
        """Returns this identity with the code of `objects`, such as dynamic cases, added."""
        code = {**self.code, **code_of(defined_in(objects))}
        return self.model_copy(update={"code": code})

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yields all that is compared: (what it is, value)."""
        yield from self.versions.items()
        yield from self.code.items()
        for index, (name, key) in enumerate(self.layers):
            yield f"layer {index}", name
            for what, value in self.descriptions[key].items():
                yield f"layer {index} ({name}), {what}", value
        yield "number of layers", str(len(self.layers))

    def differences(self, other: Identity) -> list[str]:
        """Returns what differs, with both values if a person can read them."""
        mine, others = dict(self.parts()), dict(other.parts())
        files = {*self.code, *other.code}
        return [
            key
            if key in files
            else f"{key} ({mine.get(key, 'none')}, not {others.get(key, 'none')})"
            for key in {**mine, **others}
            if mine.get(key) != others.get(key)
        ]


def _kind_of(description: Mapping[str, str]) -> str:
    parts = {_INDEX.sub("#", key): value for key, value in description.items()}
    return _digest(sorted((k, v) for k, v in parts.items() if not _IS_INDEX.search(k)))


def _digest(value: object) -> str:
    content = value if isinstance(value, bytes) else repr(value).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def first_of(differences: Sequence[str]) -> str:
    rest = len(differences) - _NAMED
    return "; ".join(differences[:_NAMED]) + (f"; and {rest} more" if rest > 0 else "")


def identity_from(record: object) -> Identity:
    """Reads what `Identity.model_dump` gave."""
    with contextlib.suppress(ValidationError):
        identity = Identity.model_validate(record)
        if {key for _, key in identity.layers} <= identity.descriptions.keys():
            return identity
    raise RunError("it does not say what model it has; do all ranks run the same dynmo?")


def identity_of(model: Model, layers: Sequence[nn.Module]) -> Identity:
    """Describes a model whose layers were just made, on the meta device or not."""
    descriptions, keys = dict[str, dict[str, str]](), list[tuple[str, str]]()
    for index, (name, layer) in enumerate(zip(model.names, layers, strict=True)):
        description = dict(_layer_parts(layer))
        for (owner, weight), (user, own) in model.tied:
            if user == index:
                description[f"owner of {own}"] = f"{weight} of layer {owner}"
        keys.append((name, _digest(description)))
        descriptions[keys[-1][1]] = description
    modules = [module for layer in layers for module in layer.modules()]
    return Identity(
        versions={
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "torch": torch.__version__,
            "dynmo": _dynmo_version(),
        },
        code=code_of([*model.code, *defined_in([model.loss, *modules])]),
        layers=tuple(keys),
        descriptions=descriptions,
    )


def _layer_parts(layer: nn.Module) -> Iterator[tuple[str, str]]:
    own = set[int]()
    for what, name, tensor in named_tensors(layer):
        own.add(id(tensor))
        trains = ", trains" if tensor.requires_grad else ""
        yield f"{what} {name}", f"{form_of(tensor)}{trains}"
    for prefix, module in layer.named_modules():
        yield f"class of {prefix or 'the layer'}", _name_of(type(module))
        if is_compiled(module):
            continue  # torch.compile says how a process runs, and the module itself follows
        for name, value in sorted(vars(module).items()):
            if name in _HOOKS and value:  # its keys count the hooks of the process
                yield f"{prefix}.{name}".lstrip("."), _text(list(value.values()), own)
            elif name not in _OWN:
                yield f"{prefix}.{name}".lstrip("."), _text(value, own)


def _name_of(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or value.__name__
    module = getattr(value, "__module__", None) or "builtins"
    return name if module == "builtins" else f"{module}.{name}"


def _text(value: Any, own: Collection[int] = ()) -> str:
    """Writes an attribute as text that is the same in every process with equal objects.

    Args:
        value: The attribute.
        own: Ids of the layer's parameters and buffers, whose values do not count.
    """
    try:
        text = json.dumps(value, default=partial(_inside, own), skipkeys=True)
    except (TypeError, ValueError, RecursionError):  # it contains itself, say
        text = _name_of(type(value))
    text = _PATH.sub('"a path"', text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]}.. [{_digest(text)[:12]}]"


def _inside(own: Collection[int], value: Any) -> object:
    """Returns what an object is made of that JSON does not know."""
    kind = _name_of(type(value))
    if isinstance(value, Tensor):
        return form_of(value) if id(value) in own else _tensor_text(value)
    if isinstance(value, bytes):
        return repr(value)
    if isinstance(value, set | frozenset):
        return sorted(_text(each, own) for each in cast("set[Any]", value))
    if isinstance(value, PurePath) or kind.startswith(_OPAQUE) or kind == "torch.device":
        return kind
    if isinstance(value, nn.Module):
        return [kind, {name: each for name, each in vars(value).items() if name not in _OWN}]
    if isinstance(value, types.FunctionType):
        kind = f"{value.__qualname__} {_code_digest(value.__code__)}"
        return [kind, value.__defaults__, value.__kwdefaults__, *inspect.getclosurevars(value)[:1]]
    if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
        return _name_of(value)
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # it belongs to its process, as a lock does
        return kind
    parts = (reduced,) if isinstance(reduced, str) else reduced[1:]
    return [kind, *(list(each) if isinstance(each, Iterator) else each for each in parts)]


def _tensor_text(value: Tensor) -> str:
    # A tensor that was computed from parameters has values only where they are.
    is_parameter = isinstance(value, nn.Parameter)
    if is_parameter or value.is_meta or not value.is_leaf or value.layout != torch.strided:
        return form_of(value)
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return f"{form_of(value)} {_digest(plain.view(torch.uint8).numpy().tobytes())}"


def code_of(modules: Iterable[str]) -> dict[str, str]:
    """Returns the digests of modules, loaded or not, and of all that they import.

    They are digests of files, by the path below the folder that each is imported from, and
    versions of installed packages, by name.
    """
    code = dict[str, str]()
    seen, waiting = set[str](), [*modules]
    while waiting:
        name = waiting.pop()
        top, parents = name.partition(".")[0], name.split(".")[:-1]
        path = None if name in seen or top in _KNOWN else _path_of(name)
        seen.add(name)
        if path is None:
            continue
        if {"site-packages", "dist-packages"} & {*path.parts}:
            code[top] = _version_of(top)
            continue
        waiting.append(".".join(parents))
        if path.is_file():
            parents += [name.rpartition(".")[2]] if path.stem == "__init__" else []
            status = path.stat()
            digest, imports = _read(path, ".".join(parents), status.st_mtime_ns, status.st_size)
            code["/".join((*parents, path.name))] = digest
            waiting += imports
    return dict(sorted(code.items()))


def _path_of(name: str) -> Path | None:
    """Returns the file of a module, or a namespace package's folder, without loading it."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is not None:
        return Path(file).resolve()
    below = name.replace(".", "/")
    ends = ("/__init__.py", ".py", "")
    tried = (Path(folder, f"{below}{end}").resolve() for folder in sys.path for end in ends)
    return next((path for path in tried if path.exists()), None)


@lru_cache(maxsize=4096)
def _read(path: Path, package: str, modified: int, size: int) -> tuple[str, tuple[str, ...]]:
    """Returns the digest of a file of code, and the names that it may import."""
    content = path.read_bytes()
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # a compiled module
        return _digest(content), ()
    code = compile(tree, "", "exec", dont_inherit=True, optimize=2)
    return _code_digest(code), tuple(_imports(tree, package))


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # beyond the top package
                name = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(name, package)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


@lru_cache
def _version_of(top: str) -> str:
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(top)
        return importlib.metadata.version(names[0]) if names else "unknown"


@lru_cache
def _dynmo_version() -> str:
    """Returns a digest of dynmo's files, which says more than its version."""
    digest = hashlib.sha256()
    for path in sorted(_DYNMO.rglob("*.py")):
        digest.update(path.relative_to(_DYNMO).as_posix().encode() + path.read_bytes())
    return f"files {digest.hexdigest()[:12]}"


def _code_digest(code: types.CodeType) -> str:
    """Returns a digest of what code does, wherever it stands in its file."""

    def text(constant: Any) -> str:
        return _code_digest(constant) if isinstance(constant, types.CodeType) else _text(constant)

    inner = [text(each) for each in code.co_consts]
    return _digest((code.co_code, inner, code.co_names, code.co_freevars))[:12]
