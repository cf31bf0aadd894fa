"""The functions of transformers that are not public. No other module imports one.

Tested with the versions of `TESTED`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers.masking_utils as masking_utils
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import guard_torch_init_functions
from transformers.integrations import moe
from transformers.pytorch_utils import Conv1D

from dynmo.kernels.deferral import register_split
from dynmo.kernels.products import stands_for_grouped_mm
from dynmo.kernels.split import WeightTape, may_split, note, split_linear
from dynmo.kernels.torch_private import FakeTensor
from dynmo.models.huggingface.stubs import overlaid

TESTED = ("5.23.0",)

stands_for_grouped_mm(torch.ops.transformers.grouped_mm_fallback)


@contextmanager
def experts_on_shapes() -> Generator[None]:
    """Lets experts run on the meta device and on fake tensors.

    torch's grouped product takes only bfloat16 there. transformers has another one.
    """
    before = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = before


def on_shapes(like: Tensor) -> AbstractContextManager[None]:
    """Lets a model run on fake tensors as it runs on values, if `like` is one."""
    return _on_fakes() if isinstance(like, FakeTensor) else nullcontext()


@contextmanager
def _on_fakes() -> Generator[None]:
    # Positions without values may be those of several sequences. A mask for them takes memory.
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        with experts_on_shapes():
            yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def initialise(
    model: PreTrainedModel, module: nn.Module, path: str = "", keep: Iterable[Tensor] = ()
) -> None:
    """Sets the first values of a module's parameters and buffers, as the model would.

    Args:
        model: The model that the module belongs to.
        module: The module. Its children are set first.
        path: Path of the module in the model. A layer has the paths of the model.
        keep: Tensors that get values later, so drawing theirs would be a waste.
    """
    kept = list(keep)
    for tensor in kept:
        cast(Any, tensor)._is_hf_initialized = True
    try:
        with torch.no_grad(), guard_torch_init_functions():
            _initialise(model, module, path)
    finally:
        for tensor in kept:
            del cast(Any, tensor)._is_hf_initialized


def _initialise(model: PreTrainedModel, module: nn.Module, path: str) -> None:
    for name, child in module.named_children():
        _initialise(model, child, f"{path}.{name}".lstrip("."))
    # A model may initialise parts of its blocks itself, and looks for them in its lists.
    is_holder = type(module) is nn.Module
    whole = overlaid(model.get_submodule(path), module) if is_holder else module
    initialise_own(model, whole, path)


@torch.no_grad()
def initialise_own(model: PreTrainedModel, module: nn.Module, path: str) -> None:
    """Sets the first values of a module's own parameters and buffers, but not of its parts.

    A model may hold other models, such as one for images. Each initialises its own modules.
    """
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        holder = model.get_submodule(".".join(parts[:depth]))
        if isinstance(holder, PreTrainedModel):
            # It is untyped: pyright would infer its result from every model of transformers.
            cast(Any, holder)._init_weights(module)
            return


@dataclass(frozen=True, eq=False)
class Conversion:
    """Tensors of files that become one or several tensors of a model.

    Attributes:
        first: Name of the first tensor that they become.
        converter: What makes others of them. None means that one tensor has another name at most.
        sources: Pattern of the converter, and key in the files, of each.
    """

    first: str
    converter: WeightConverter | None
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        return [key for _, key in self.sources]

    def convert(self, model: PreTrainedModel, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of the model by name.

        Args:
            model: The whole model, on the meta device.
            read: Returns the tensor that a key stands for in the files.
        """
        if self.converter is None:
            return {self.first: read(self.sources[0][1])}
        converter = deepcopy(self.converter)
        for pattern, key in self.sources:
            converter.add_tensor(self.first, key, pattern, cast(Any, partial(read, key)))
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def conversions_of(
    model: PreTrainedModel, keys: Iterable[str]
) -> tuple[list[Conversion], dict[str, str]]:
    """Returns how the tensors of files become those of a model, and the keys that it does not use.

    Each such key has the name that the tensor would have in the model.

    The model keeps its conversions, which transformers reverts when it saves the model.

    Args:
        model: The model on the meta device.
        keys: The keys in the files.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    made, unused = dict[str, Conversion](), dict[str, str]()
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if name not in wanted:
            unused[key] = name
            continue
        converter = None if pattern is None else converter_of[pattern]
        made.setdefault(name, Conversion(name, converter)).sources.append((pattern or key, key))
    cast(Any, model)._weight_conversions = [each for each in mapping if each.was_used()]
    return list(made.values()), unused


def without_ignored(
    model: PreTrainedModel, missing: Iterable[str], unexpected: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Drops the missing and unexpected names that transformers ignores for this model."""
    info = SimpleNamespace(missing_keys={*missing}, unexpected_keys={*unexpected})
    model._adjust_missing_and_unexpected_keys(cast(Any, info))
    return info.missing_keys, info.unexpected_keys


def as_in_files(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a part of a model's state under the names and in the shapes of its files."""
    return revert_weight_conversion(model, state)


def make_in(
    kind: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Makes a model of a class on torch's default device. It may change the config."""
    return cast(Any, kind)._from_config(config, dtype=dtype)


def types_after_loading(
    model: PreTrainedModel, dtype: torch.dtype, tied: Mapping[str, str]
) -> dict[str, torch.dtype]:
    """Returns the types of parameters and buffers after `from_pretrained(dtype=dtype)`.

    Args:
        model: The model, made in this type.
        tied: The owner of each weight that is tied.
    """
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    types = {name: tensor.dtype for name, tensor in named}
    plan = model._get_dtype_plan(dtype)
    if plan:
        kept = build_glob_alternation([*plan])[0]
        types |= {name: torch.float32 for name in model.state_dict() if kept.search(name)}
    return types | {user: types[owner] for user, owner in tied.items()}


class _SplitConv1D(Conv1D):
    """A linear layer whose weight is [in, out], with a W that waits.

    `kernels/products.py` knows its product too, but asks at each call of torch in its forward.
    """

    tape: WeightTape | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = cast(nn.Parameter, self.weight), cast(nn.Parameter, self.bias)
        if self.tape is None or not weight.requires_grad or not may_split(self, x.device):
            return super().forward(x)
        rows = x.view(-1, x.shape[-1])
        if self.tape.notes(weight):
            y = note(self.tape, torch.addmm(bias, rows, weight), rows, weight, bias, turned=True)
        else:
            width, outputs = weight.shape
            y = split_linear(rows, weight, bias, self.tape, ((outputs, width), (1, outputs), 0))
        return y.view(*x.shape[:-1], y.shape[-1])


register_split(Conv1D, _SplitConv1D)
