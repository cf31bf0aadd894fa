"""What decides a model's numbers, as text that two processes can compare.

    versions   Python, torch, dynmo
    code       each file of the user's that the layers come from
    layers     name, and of each module: class, tensors' shapes, plain attributes, hooks

Values of weights and buffers are not part of it. A layer is made on the rank that holds it, and a
newcomer gets them from there.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import inspect
import platform
import re
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from dynmo.errors import RunError
from dynmo.kernels.torch_private import is_compiled
from dynmo.models.model import Model, defined_in, named_tensors
from dynmo.models.source_code import code_of, dynmo_version, function_digest

# Attributes that every module has. Its tensors are described apart.
_OWN = frozenset(nn.Module().__dict__) - {"training"} | {"_compiled_call_impl"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Objects of these packages say where or how a process runs, or belong to other layers.
_OPAQUE = (
    "torch.distributed",
    "torch._C",
    "dynmo.runtime",
    "dynmo.models.huggingface.skeleton.Unowned",
    "dynmo.models.emulated.Pace",
    "logging",
    "threading",
    "_thread",
)
# Limits of what is written of an attribute: depth, objects, letters.
_DEEPEST, _MOST, _LONGEST = 8, 100_000, 60
# Differences that a message names. It counts the others.
_NAMED = 3

# Indices in the names of a layer's modules, and attributes that are an index.
_INDEX = re.compile(r"\d+")
_IS_INDEX = re.compile(r"(^|[._])(index|idx)$")


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
        keys = [key for key in {**mine, **others} if mine.get(key) != others.get(key)]
        files = {*self.code, *other.code}
        return [
            key
            if key in files
            else f"{key} ({mine.get(key, 'none')}, not {others.get(key, 'none')})"
            for key in keys
        ]


def _kind_of(description: Mapping[str, str]) -> str:
    parts = {_INDEX.sub("#", key): value for key, value in description.items()}
    kept = {key: value for key, value in parts.items() if not _IS_INDEX.search(key)}
    return hashlib.sha256(repr(sorted(kept.items())).encode()).hexdigest()[:16]


def first_of(differences: Sequence[str]) -> str:
    rest = len(differences) - _NAMED
    return "; ".join(differences[:_NAMED]) + (f"; and {rest} more" if rest > 0 else "")


def identity_from(record: object) -> Identity:
    """Reads what `Identity.model_dump` gave."""
    try:
        identity = Identity.model_validate(record)
        if {key for _, key in identity.layers} <= identity.descriptions.keys():
            return identity
    except ValidationError:
        pass
    raise RunError("it does not say what model it has; do all ranks run the same dynmo?")


def identity_of(model: Model, layers: Sequence[nn.Module]) -> Identity:
    """Describes a model whose layers were just made, on the meta device or not."""
    descriptions, keys = dict[str, dict[str, str]](), list[tuple[str, str]]()
    for index, (name, layer) in enumerate(zip(model.names, layers, strict=True)):
        description = dict(_layer_parts(layer))
        for (owner, weight), (user, own) in model.tied:
            if user == index:
                description[f"owner of {own}"] = f"{weight} of layer {owner}"
        key = hashlib.sha256(repr(description).encode()).hexdigest()[:16]
        descriptions[key] = description
        keys.append((name, key))
    modules = [module for layer in layers for module in layer.modules()]
    return Identity(
        versions={
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "torch": torch.__version__,
            "dynmo": dynmo_version(),
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
        yield f"{what} {name}", f"{_form(tensor)}{trains}"
    for prefix, module in layer.named_modules():
        path = f"{prefix}." if prefix else ""
        yield f"class of {prefix or 'the layer'}", _class_name(type(module))
        if is_compiled(module):
            continue  # torch.compile says how a process runs, and the module itself follows
        for name, value in sorted(vars(module).items()):
            if name in _HOOKS and value:
                # The keys count the hooks of the process.
                yield f"{path}{name}", _short(_Writer(own).text(list(value.values())))
            elif name not in _OWN:
                yield f"{path}{name}", _short(_Writer(own).text(value))


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _class_name(kind: type) -> str:
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 20]}.. [{hashlib.sha256(text.encode()).hexdigest()[:12]}]"


class _Writer:
    """Writes objects as text that is the same in every process with equal objects."""

    def __init__(self, own: set[int]) -> None:
        self._own = own
        # Ids of the objects around the one that is written, and number of objects so far.
        self._around, self._count = list[int](), 0

    def text(self, value: Any) -> str:
        self._count += 1
        if id(value) in self._around or len(self._around) > _DEEPEST or self._count > _MOST:
            return ".."
        if isinstance(value, str):
            return "a path" if value.startswith("/") else repr(value)
        if isinstance(value, PurePath | torch.device):
            return _class_name(type(value))
        if isinstance(value, enum.Enum):
            return f"{_class_name(type(value))}.{value.name}"
        if isinstance(value, nn.Parameter) or id(value) in self._own:
            return _form(value)
        if isinstance(value, Tensor | np.ndarray):
            return _array_text(value)
        if isinstance(value, type):
            return _class_name(value)
        self._around.append(id(value))
        try:
            return self._compound(value)
        finally:
            self._around.pop()

    def _compound(self, value: Any) -> str:
        kind = _class_name(type(value))
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, set | frozenset):
            return f"{kind} {sorted(map(self.text, cast(set[Any], value)))}"
        if isinstance(value, list | tuple | deque):
            items = ", ".join(map(self.text, cast(Sequence[Any], value)))
            return f"{'' if kind in ('list', 'tuple') else kind}[{items}]"
        if isinstance(value, partial):
            return f"partial{self.text((value.func, value.args, value.keywords))}"
        if isinstance(value, types.MethodType):
            return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if inspect.isroutine(value) or isinstance(value, types.ModuleType):
            return str(getattr(value, "__qualname__", None) or value.__name__)
        if kind.startswith(_OPAQUE):
            return kind
        fields = {name: each for name, each in _fields(value) if name not in _OWN}
        if fields:
            return f"{kind}{self._mapping(fields)}"
        text = repr(value)
        return kind if " at 0x" in text else text

    def _mapping(self, value: Mapping[Any, Any]) -> str:
        return f"{{{', '.join(f'{self.text(k)}: {self.text(v)}' for k, v in value.items())}}}"

    def _function(self, value: types.FunctionType) -> str:
        given = [value.__defaults__, value.__kwdefaults__]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is not filled yet
                given.append(cell.cell_contents)
        texts = ", ".join(self.text(each) for each in given if each is not None)
        return f"{value.__qualname__} {function_digest(value.__code__)} ({texts})"


def _array_text(value: Tensor | np.ndarray[Any, Any]) -> str:
    if isinstance(value, np.ndarray):
        content = np.ascontiguousarray(value).tobytes() if value.dtype != object else b""
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()[:12]}"
    # A tensor that was computed from parameters has values only where they are.
    if value.is_meta or not value.is_leaf or value.layout != torch.strided:
        return _form(value)
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    content = plain.view(torch.uint8).numpy().tobytes()
    return f"{_form(value)} {hashlib.sha256(content).hexdigest()[:12]}"


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        fields = kind.__dict__.get("__slots__", ())
        for name in (fields,) if isinstance(fields, str) else fields:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
