"""Cuts a block into an attention half and a feed-forward half, if a probe proves that it can be.

The probe runs the block on the meta device with hooks. A block can be cut if

- two of its modules do its work (the others have vectors at most: norms), once each,
- each takes one tensor that depends on the hidden states, and returns one that counts,
- the input of the second depends on the output of the first,
- the hidden states stay as they are where a module adds nothing.

A half is the block's own code. The other half's module returns zeros, so the residual adds nothing.
Everything else stays whole.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.models.huggingface.private import experts_on_shapes
from dynmo.models.huggingface.probe import ModelStructure
from dynmo.models.huggingface.stubs import (
    AddsNothing,
    Arguments,
    PassedOver,
    has_weights,
    hidden_of,
    mapped,
    shallow_copy,
    tensors_of,
)


@dataclass(frozen=True)
class BlockHalves:
    """The children of a block, by half.

    Attributes:
        main: The child of each half that does the work.
        elements: Length of the tuple that each main child returns. None for a tensor.
        others: The other children of each half.
    """

    main: tuple[str, str]
    elements: tuple[int | None, int | None]
    others: tuple[tuple[str, ...], tuple[str, ...]]


def half_of(block: nn.Module, halves: BlockHalves, half: int) -> nn.Module:
    """Returns one half of a block: a copy that keeps the children of the half only."""
    twin, other = shallow_copy(block), 1 - half
    name = halves.main[other]
    twin._modules[name] = AddsNothing(block.get_submodule(name), halves.elements[other])
    for name in halves.others[other]:
        twin._modules[name] = PassedOver(block.get_submodule(name))
    return twin


@dataclass(eq=False)
class _Call:
    """A call of a child during the probe."""

    name: str
    inputs: list[Tensor]
    output: Any


def halves_of(structure: ModelStructure, index: int) -> BlockHalves | str:
    """Returns how a block is cut, or why it stays whole."""
    block = structure.block(index)
    if next(block.parameters(recurse=False), None) is not None:
        return "the block has parameters of its own"
    calls: list[_Call] = []
    hidden = structure.hidden.detach().requires_grad_()

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            # What a child returns is a new leaf for those that come after it.
            given = [x for x in tensors_of((args, kwargs)) if x.requires_grad]
            leaf = mapped(output, _traced)
            calls.append(_Call(name, given, leaf))
            return leaf

        return hook

    removable = [
        child.register_forward_hook(note(name), with_kwargs=True)
        for name, child in block.named_children()
    ]
    args, kwargs = structure.arguments[index]
    try:
        with experts_on_shapes():
            out = block(hidden, *args, **kwargs)
    except Exception as error:
        return f"it does not run on shapes alone ({type(error).__name__})"
    finally:
        for each in removable:
            each.remove()
    halves = _halves(block, calls, hidden_of(out))
    if isinstance(halves, BlockHalves) and not _passes_on(structure, index, halves):
        return "the hidden states change even where a module adds nothing"
    return halves


def _passes_on(structure: ModelStructure, index: int, halves: BlockHalves) -> bool:
    """Runs a block without its modules: what is left must return the hidden states unchanged."""
    taken: list[Tensor] = []
    bare = half_of(half_of(structure.block(index), halves, 0), halves, 1)
    bare.get_submodule(halves.main[1]).register_forward_pre_hook(
        lambda _, args, kwargs: taken.append(tensors_of((args, kwargs))[0]), with_kwargs=True
    )
    args, kwargs = mapped(structure.arguments[index], lambda x: torch.zeros(x.shape, dtype=x.dtype))
    shape = structure.hidden.shape
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            out = hidden_of(bare(hidden, *args, **kwargs))
    except Exception:
        return False
    return torch.equal(out, hidden) and all(torch.equal(each, hidden) for each in taken)


def _traced(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _halves(block: nn.Module, calls: list[_Call], out: Tensor) -> BlockHalves | str:
    names = [call.name for call in calls]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        return f"{twice} runs twice"
    main = [call for call in calls if _works(block.get_submodule(call.name))]
    idle = [
        name for name, child in block.named_children() if name not in names and has_weights(child)
    ]
    if len(main) != 2 or idle:
        return f"{len(main)} modules do its work, not two"
    first, second = main
    if any(len(call.inputs) != 1 for call in main):
        return "a module takes several tensors that depend on the hidden states"
    elements = list[int | None]()
    for call in main:
        many = isinstance(call.output, tuple | list)
        rest = tensors_of(call.output[1:]) if many else []
        if any(_depends(out, x) for x in rest if x.requires_grad):
            return f"{call.name} returns several tensors that count"
        elements.append(len(call.output) if many else None)
    others: tuple[list[str], list[str]] = ([], [])
    produced, is_after = {id(x) for x in tensors_of(first.output)}, False
    for call in calls:
        is_after |= call is first
        if call in main:
            continue
        is_own = not is_after or any(id(x) in produced for x in call.inputs)
        others[0 if is_own else 1].append(call.name)
        if is_own and is_after:
            produced.update(id(x) for x in tensors_of(call.output))
    if not _second_needs_first(calls, first, second):
        return "its two modules take the same hidden states (parallel attention)"
    silent = [name for name, _ in block.named_children() if name not in names]
    return BlockHalves(
        (first.name, second.name),
        (elements[0], elements[1]),
        (tuple(others[0]), (*others[1], *silent)),
    )


def _works(module: nn.Module) -> bool:
    """True for a module with matrices. Norms have vectors."""
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _depends(out: Tensor, on: Tensor) -> bool:
    return (
        torch.autograd.grad(out, on, torch.ones_like(out), retain_graph=True, allow_unused=True)[0]
        is not None
    )


def _second_needs_first(calls: list[_Call], first: _Call, second: _Call) -> bool:
    """Follows what the second took back to what the first returned, over the norms between."""
    wanted = {id(x) for x in tensors_of(first.output)}
    reached = list(second.inputs)
    seen = set[int]()
    while reached:
        tensor = reached.pop()
        if id(tensor) in wanted:
            return True
        for call in calls:
            leaves = [x for x in tensors_of(call.output) if x.requires_grad]
            for leaf in leaves:
                if id(leaf) in seen:
                    continue
                if tensor is leaf or (tensor.grad_fn is not None and _depends(tensor, leaf)):
                    if id(leaf) in wanted:
                        return True
                    seen.add(id(leaf))
                    reached += call.inputs
    return False


@contextmanager
def evaluated(*parts: nn.Module) -> Generator[None]:
    """Sets modules to evaluation. Each gets its mode back."""
    modes = {module: module.training for part in parts for module in part.modules()}
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


@torch.no_grad()
def keeps_numbers(
    first: nn.Module, second: nn.Module, halves: BlockHalves, hidden: Tensor, arguments: Arguments
) -> bool:
    """Whether two halves with values compute what their block computes."""
    args, kwargs = arguments
    whole = shallow_copy(first)
    for name in (halves.main[1], *halves.others[1]):
        whole._modules[name] = second._modules[name]
    with evaluated(whole, first, second):
        wanted = hidden_of(whole(hidden, *args, **kwargs))
        half = hidden_of(first(hidden, *args, **kwargs))
        return torch.equal(wanted, hidden_of(second(half, *args, **kwargs)))
