"""Finds what a transformers model runs before, in and after its blocks.

Nothing is known about families. One forward of a copy shows the order. Recorders stand for its
blocks, and modules with weights are replaced by stand-ins that know the shapes of their results.

    embedding  --->  block 0  --->  block 1  --->  ...  --->  norm, output layer
    (before)                  recorders                        (after)

Each recorder must take the tensor that the one before returned. Code between two blocks, or a
tensor that depends on the hidden states and goes by another way, would be lost in a pipeline.
Such a model is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dynmo.errors import ConfigError, first_line
from dynmo.models.huggingface.attention import attention_in
from dynmo.models.huggingface.private import experts_on_shapes, initialise_own
from dynmo.models.huggingface.stubs import (
    Arguments,
    Recorder,
    StandIn,
    has_weights,
    hidden_of,
    mapped,
    marked,
    on_meta,
    spine_of,
    tensors_of,
    units_of,
    with_stubs,
    without_memory,
)

# Size of the forward that shows the structure.
ROWS, TOKENS = 3, 5

_PLAIN = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


class UnfitModelError(ConfigError):
    """A model that cannot be cut into layers."""


@dataclass(frozen=True)
class ModelStructure:
    """The parts of a model.

    Attributes:
        model: The model on the meta device.
        base: Path of the part that takes ids and returns hidden states.
        blocks: Path of the list of blocks.
        before: Paths of the modules that run before the first block.
        after: Paths of the modules that run after the last block.
        elements: Length of the tuple that each block returns. None for a tensor.
        attention: Path of the attention in each block. None if transformers' interface for
            attention functions does not give it.
        arguments: The arguments of each block on the meta device, after its hidden states.
        hidden: The hidden states on the meta device.
    """

    model: PreTrainedModel
    base: str
    blocks: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    elements: tuple[int | None, ...]
    attention: tuple[str | None, ...]
    arguments: tuple[Arguments, ...]
    hidden: Tensor

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.elements)

    def block(self, index: int) -> nn.Module:
        return self.model.get_submodule(self.block_path(index))

    def block_path(self, index: int) -> str:
        return f"{self.blocks}.{index}"

    def recorder(self, index: int, block: nn.Module) -> Recorder:
        return Recorder(block, self.elements[index])


class _Probe(Recorder):
    """A recorder that runs its block on the meta device, to see what it returns."""

    def __init__(self, index: int, block: nn.Module, calls: list[int | str]) -> None:
        super().__init__(block)
        self._index, self._calls = index, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append(self._index)
        hidden, out = self.note(args, kwargs), self._run(args, kwargs)
        self.elements = len(out) if isinstance(out, tuple | list) else None
        first = hidden_of(out)
        if not isinstance(first, Tensor) or first.shape != hidden.shape:
            raise UnfitModelError(
                f"block {self._index} returns no hidden states of the shape that it took"
            )
        if self.elements is None:
            return hidden
        # What else it returns is traced: nobody may use it.
        return hidden, *mapped(tuple(out[1:]), _traced_zeros)

    def leaves(self, arguments: Arguments | None = None) -> Iterator[tuple[str, Any]]:
        """Yields what it takes after the hidden states, by the names that the block gives them."""
        positional, by_name = arguments or self.arguments
        names = list(signature(self.original.forward).parameters)[1:]
        names += [f"argument {index}" for index in range(len(names) + 1, len(positional) + 1)]
        for name, value in (*zip(names, positional, strict=False), *by_name.items()):
            for leaf in _leaves(value):
                yield name, leaf

    @torch.no_grad()
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = mapped((args, kwargs), on_meta)
        try:
            return self.original(*given[0], **given[1])
        except (NotImplementedError, RuntimeError):
            # The block needs values, as experts do that count their tokens.
            given = mapped((args, kwargs), torch.Tensor.detach)
            return without_memory(self.original)(*given[0], **given[1])


def structure_of(model: PreTrainedModel) -> ModelStructure:
    """Finds the parts of a causal language model of transformers.

    Args:
        model: The model on the meta device.

    Raises:
        UnfitModelError: It cannot be cut into layers. The message says what is in the way.
    """
    blocks = find_blocks(model)
    _refuse(_static_problems(model, blocks))
    fill_spine(model, blocks)
    calls: list[int | str] = []

    def unit(path: str, module: nn.Module) -> nn.Module:
        made = StandIn(module, traced=has_weights(module))
        made.register_forward_pre_hook(lambda *_: calls.append(path))
        return made

    whole, probes = with_stubs(model, blocks, unit, lambda at, block: _Probe(at, block, calls))
    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS)
    _run(whole, input_ids=ids)
    seen = [list(probe.leaves()) for probe in probes]
    before, after = _order(model, blocks, calls, len(probes))
    hidden = probes[0].taken
    assert hidden is not None
    leaf = torch.zeros(*ids.shape, embedding_width(model, hidden), requires_grad=True)
    # A model may scale its inputs in place, which a leaf does not allow.
    _run(whole, inputs_embeds=leaf.clone())
    _refuse(_flow_problems(model, probes))
    elements = tuple(each.elements for each in probes)
    arguments = _arguments(model, blocks, elements, leaf)
    others = (probe.leaves(each) for probe, each in zip(probes, arguments, strict=True))
    _refuse(_differences(seen, others))
    shapes, arguments = on_meta(hidden), [mapped(each, on_meta) for each in arguments]
    attention = (
        attention_in(x.original, shapes, *each) for x, each in zip(probes, arguments, strict=True)
    )
    return ModelStructure(
        model=model,
        base=blocks.partition(".")[0],
        blocks=blocks,
        before=before,
        after=after,
        elements=elements,
        attention=tuple(attention),
        arguments=tuple(arguments),
        hidden=shapes,
    )


def find_blocks(model: PreTrainedModel) -> str:
    """Returns the path of the list of blocks.

    It is the only list of the length that the config gives, or the only list, or the only list of
    modules that the class says not to split.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    whole: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    outer = {
        path: module
        for path, module in lists.items()
        if not any(path.startswith(f"{other}.") for other in lists)
    }
    choices = (
        [path for path, module in outer.items() if len(module) == count],
        list(outer),
        [path for path, module in outer.items() if type(module[0]).__name__ in whole],
    )
    found = next((each for each in choices if len(each) == 1), None)
    if found is None:
        some = [*outer][:2] + [f"{len(outer) - 2} more"] * (len(outer) > 2)
        raise UnfitModelError(f"it has not one list of blocks, but {', '.join(some) or 'none'}")
    return found[0]


def _refuse(problems: Iterator[str]) -> None:
    for problem in problems:
        raise UnfitModelError(problem)


def _static_problems(model: PreTrainedModel, blocks: str) -> Iterator[str]:
    """Yields what is wrong before a forward: each tensor must belong to a module that can move."""
    for name, value in vars(model.config).items():
        if name.endswith("layerdrop") and value:
            yield f"{name} = {value} skips blocks at random; set it to 0"
    if "." not in blocks:
        yield f"its blocks ({blocks}) are not part of a base model"
    for path in (*spine_of(blocks), blocks):
        module = model.get_submodule(path)
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    where = f"{path}.{name}".lstrip(".")
                    yield f"the {kind} {where} belongs to no module that could be moved"
    for name in _other_tensors(model):
        yield f"the tensor {name} is neither a parameter nor a buffer"


def _other_tensors(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            is_own = name in ("_parameters", "_buffers")
            if not is_own and any(each.is_meta for each in tensors_of(value)):
                yield f"{path}.{name}".lstrip(".")


def fill_spine(model: PreTrainedModel, blocks: str) -> None:
    """Gives the buffers of the modules that hold the blocks their values. No layer owns them."""
    for path in spine_of(blocks):
        module = model.get_submodule(path)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            module._buffers[name] = marked(buffer)
        if module._buffers:
            initialise_own(model, module, path)


def _run(model: nn.Module, **inputs: Tensor) -> Any:
    try:
        with experts_on_shapes():
            return model(**inputs, use_cache=False)
    except ConfigError:
        raise
    except Exception as error:
        raise UnfitModelError(
            f"its code does not run from {next(iter(inputs))} alone, without weights: it raised "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _order(
    model: nn.Module, blocks: str, calls: Sequence[int | str], count: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the modules that run before the first and after the last block."""
    ran = [call for call in calls if isinstance(call, int)]
    if ran != list(range(count)):
        raise UnfitModelError(f"its blocks do not run once each and in order, but {ran}")
    first, last = calls.index(0), calls.index(count - 1)
    between = [call for call in calls[first:last] if isinstance(call, str)]
    if between:
        raise UnfitModelError(f"{between[0]} runs between two blocks")
    before = list(dict.fromkeys(call for call in calls[:first] if isinstance(call, str)))
    after = list(dict.fromkeys(call for call in calls[last:] if isinstance(call, str)))
    twice = next((path for path in before if path in after), None)
    if twice is not None and has_weights(model.get_submodule(twice)):
        raise UnfitModelError(f"{twice} runs before and after the blocks")
    for path in units_of(model, blocks):
        # What never runs is saved with the output layer.
        if path not in before and has_weights(model.get_submodule(path)):
            after += [] if path in after else [path]
    return tuple(before), tuple(after)


def embedding_width(model: PreTrainedModel, hidden: Tensor) -> int:
    """Returns the last dimension of embedded ids."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return hidden.shape[-1]
    return getattr(embedding, "embedding_dim", hidden.shape[-1])


def _flow_problems(model: nn.Module, probes: Sequence[_Probe]) -> Iterator[str]:
    """Yields what goes beside the hidden states, which go from block to block."""
    for index, probe in enumerate(probes):
        if index and probe.taken is not probes[index - 1].taken:
            yield f"its code changes the hidden states between blocks {index - 1} and {index}"
        for what, value in probe.leaves():
            if isinstance(value, Tensor) and value.requires_grad:
                yield f"block {index} takes {what}, which depends on hidden states or weights"
            if not isinstance(value, _PLAIN):
                kind = type(value).__name__
                yield f"block {index} takes {what}, a {kind}, which blocks may share"
    for name in _other_tensors(model):
        yield f"it keeps {name} from one forward to the next"


def _differences(
    seen: Iterable[Iterable[tuple[str, Any]]], others: Iterable[Iterable[tuple[str, Any]]]
) -> Iterator[str]:
    """Yields the arguments of blocks that differ between two forwards."""
    for index, pair in enumerate(zip(seen, others, strict=True)):
        for (what, value), (_, same) in zip_longest(*pair, fillvalue=("an argument", ())):
            if not _equal(value, same):
                yield f"block {index} takes {what}, which depends on the ids or on another block"


def _arguments(
    model: nn.Module, blocks: str, elements: Sequence[int | None], embedded: Tensor
) -> list[Arguments]:
    """Returns the arguments of the blocks if these return nothing but hidden states."""
    whole, recorders = with_stubs(
        model, blocks, lambda _, unit: StandIn(unit), lambda at, each: Recorder(each, elements[at])
    )
    with torch.no_grad():
        _run(whole, inputs_embeds=embedded.clone())
    return [each.arguments for each in recorders]


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _traced_zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, requires_grad=like.is_floating_point())
