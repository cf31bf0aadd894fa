"""The bytes that a layer keeps for the largest of its microbatches."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from dynmo.kernels.torch_private import saved_tensors_hooks_in_force, saved_tensors_shown
from dynmo.runtime.layer.reads import storage_of


class Meter:
    """Counts at the first microbatch, and at each larger one.

    Attributes:
        activation_bytes: From F to B.
        stash_bytes: From B to W.
        output_bytes: What the layer hands on.
        hooks: Those on saved tensors that count, while it counts.
        frees_inputs: Whether the memory of an input may go before B, since the graph has not saved
            it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.hooks: object = None
        self.frees_inputs = True
        self.output_bytes = 0
        self.forget()

    def forget(self) -> None:
        """Has a changed layer measured at its next microbatch that trains."""
        self.activation_bytes = self.stash_bytes = 0
        # Bytes of the largest inputs that were measured, F and B.
        self._size: int | None = None

    @property
    def has_measured(self) -> bool:
        return self._size is not None

    def is_largest(self, inputs: Sequence[Tensor]) -> bool:
        return self._size is None or total_bytes(inputs) > self._size

    @contextmanager
    def kept(self) -> Generator[list[Tensor]]:
        """Collects the tensors that autograd keeps in the context, but for the layer's own.

        The list is emptied in the end: the graph holds it.
        """
        own = {storage_of(t) for t in (*self._module.parameters(), *self._module.buffers())}
        kept = list[Tensor]()

        def show(tensor: Tensor) -> None:
            if storage_of(tensor) not in own:
                kept.append(tensor)

        try:
            with saved_tensors_shown(show):
                self.hooks = saved_tensors_hooks_in_force()
                yield kept
        finally:
            self.hooks = None
            kept.clear()

    def note_forward(
        self, kept: Iterable[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        self.activation_bytes = max(self.activation_bytes, _storage_bytes(kept, inputs))
        self.output_bytes = max(self.output_bytes, total_bytes(outputs))

    def note_backward(
        self, stash: Iterable[Tensor], inputs: Sequence[Tensor], keeps_activations: bool
    ) -> None:
        """Ends the measurement of a microbatch with these inputs."""
        self.stash_bytes = max(self.stash_bytes, _storage_bytes(stash, inputs))
        if keeps_activations:
            self.activation_bytes = max(self.activation_bytes, self.stash_bytes)
        self._size = total_bytes(inputs)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _storage_bytes(tensors: Iterable[Tensor], inputs: Iterable[Tensor]) -> int:
    """Returns the bytes of the memory blocks behind the tensors.

    An input counts as itself: it may be a view of a whole batch, which is there anyway.
    """
    sizes = {storage_of(t): t.untyped_storage().nbytes() for t in tensors}
    sizes |= {storage_of(x): x.nbytes for x in inputs if storage_of(x) in sizes}
    return sum(sizes.values())
