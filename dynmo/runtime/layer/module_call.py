"""Runs a layer's module, and looks at what that reads, writes, builds and keeps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.kernels.graph import Leaves, leaves_of
from dynmo.kernels.grouped_linear import gradient_parameters
from dynmo.kernels.packed_weight import guarded
from dynmo.kernels.split import WeightTape
from dynmo.kernels.torch_private import (
    nodes_made,
    saved_tensors_hooks_in_force,
    saved_tensors_shown,
)
from dynmo.models.reach import modules_of
from dynmo.runtime.comm.headers import is_alias
from dynmo.runtime.layer.buffers import Copies
from dynmo.runtime.layer.joint_graph import Tensors, roots_of, run_graph, without_hooks
from dynmo.runtime.layer.outputs import Outputs, as_tuple
from dynmo.runtime.layer.reads import Others, Reads, check_leaves, mark_aliases, storage_of
from dynmo.runtime.layer.token_pieces import Cutter, piece_inputs
from dynmo.runtime.layer.writes import Writes

Finish = Callable[[Tensor], Tensor]
"""The loss of a microbatch, given the last module's output."""


class ModuleCall:
    """Runs one layer's module, with the loss if it has one.

    Attributes:
        outputs: What the layer hands on.
        writes: What it writes to.
        losses: The loss, if it is a module. It runs in the last layer, so its state is that of the
            layer.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        tape: WeightTape,
        meter: Meter,
        loss: object,
        others: Others | None,
    ) -> None:
        self._index, self._module, self._tape, self._meter = index, module, tape, meter
        self._name = f"layer {index} ({type(module).__name__})"
        self._others = others
        self._reads = Reads(self._name, module, others or dict)
        self._loss_reads = Reads("the loss", loss, others or dict)
        self.losses = [part for _, part in modules_of(loss)][:1]
        self.writes = Writes(self._name, module, self.losses, loss, others is not None)
        self.outputs = Outputs(self._name, module)
        self._run: Callable[..., Any] = module
        # Numbers of nodes of the graphs that were looked at, and leaves of all of these.
        self._known_graphs = set[int]()
        self._leaves: Leaves | None = None

    def prepare(self, compiles: bool) -> None:
        """Precedes the first call, once the module has its tape."""
        run: Callable[..., Any] = self._module
        if compiles:
            from dynmo.kernels.compiling import compiled

            run = compiled(self._module)
        self._run = guarded(self._index, self._module, run)

    def begin(self) -> None:
        self.outputs.begin()
        self.writes.begin()
        self._reads.begin()
        self._loss_reads.begin()

    def forget(self) -> None:
        """Looks anew at a changed layer."""
        self.outputs.forget()
        self.writes.forget()
        self._known_graphs.clear()
        self._leaves, self._tape.whole, self._tape.is_reentrant = None, frozenset(), False

    def __call__(
        self, inputs: Tensors, finish: Finish | None, graph: bool
    ) -> tuple[Tensors, Tensors]:
        """Runs the module, with copies of its inputs if it writes to them.

        Returns:
            The outputs, and the inputs that the module was given.
        """
        self._tape.hooks = self._meter.hooks
        originals = inputs if self.writes.to_inputs(graph) is None else None
        call = partial(self._run_module, finish=finish, originals=originals)
        before = nodes_made()
        outputs, given = self.writes.run(call, inputs, graph)
        # Another number of nodes is another graph. A layer that uses a weight by itself may use
        # another one next time.
        size = nodes_made() - before
        may_change = self._tape.whole and not self._tape.is_reentrant
        if graph and (size not in self._known_graphs or may_change):
            self._known_graphs.add(size)
            self._look_at_graph(inputs, outputs, ends=finish is not None)
        return outputs, given

    def _run_module(
        self,
        inputs: Tensors,
        finish: Finish | None,
        originals: Tensors | None,
    ) -> Tensors:
        """Runs the module, and marks outputs that are aliases if there are originals.

        Args:
            originals: What the inputs are copies of.
        """
        where = within = f"in F of layer {self._index}"
        try:
            out = self._reads.run(self._run, *inputs)
            if finish is not None:
                where = "in the loss"
                out = self._loss_reads.run(finish, out)
                where = within
            outputs = self.outputs.handed_on(out)
            if originals is not None and finish is None and self._others is not None:
                living = [x for x, given in zip(inputs, originals, strict=True) if is_alias(given)]
                living += [*self._module.parameters(), *self._module.buffers()]
                mark_aliases(as_tuple(out), outputs, living)
            return outputs
        except (Exception, SystemExit) as error:
            error.add_note(where)
            raise

    def measured(self, inputs: Tensors, finish: Finish | None, recompute: bool) -> Tensors:
        """Runs F. Counts the bytes that autograd keeps for the largest microbatch."""
        meter = self._meter
        if not meter.is_largest(inputs):
            return self(inputs, finish, True)[0]
        with meter.saved_tensors() as tensors:
            outputs, given = self(inputs, finish, True)
            saved = {storage_of(tensor) for tensor in tensors}
            meter.note_forward(inputs if recompute else tensors, inputs, outputs)
        meter.frees_inputs = self.writes.to_inputs(graph=True) or any(
            x.requires_grad and storage_of(passed) not in saved
            for x, passed in zip(inputs, given, strict=True)
        )
        return outputs

    def keeps_buffers(self, recompute: bool) -> bool:
        """Whether values of buffers are kept. The first B shows whether it writes to them."""
        return recompute or self.writes.in_backward or not self._meter.has_measured

    def with_buffers(
        self,
        inputs: Tensors,
        finish: Finish | None,
        recompute: bool,
        seed: Callable[[], None],
    ) -> tuple[Tensors, Copies]:
        """Runs an F whose bytes are counted, or with more to keep than autograd does.

        Args:
            seed: Seeds F, if it runs again.

        Returns:
            The outputs, and the values that F found in the buffers that it wrote to.
        """
        writes, first = self.writes, not self._meter.has_measured

        def run() -> Tensors:
            if recompute:  # a hook that the layer puts on an input is for the run in B alone
                return self(without_hooks(inputs), finish, True)[0]
            return self.measured(inputs, finish, recompute)

        def again() -> Tensors:
            """Runs F again. A run to compare with puts no hook on the inputs."""
            noted = self._tape.take_products()
            seed()
            outputs, _ = self(without_hooks(inputs), finish, True)
            self._tape.products = noted
            return outputs

        return writes.keep(run, again, first, self.keeps_buffers(recompute))

    def rebuilt(
        self, inputs: Tensors, finish: Finish | None, buffers: Copies, seed: Callable[[], None]
    ) -> Tensors:
        """Runs F of a recomputed layer again."""
        seed()
        with self.writes.buffers.replaced(buffers):
            return self.measured(inputs, finish, recompute=True)

    def in_pieces(self, pieces: Cutter, inputs: Tensors, gradient: Tensor | None = None) -> Tensor:
        """Runs module and loss on each piece, and B and W if the loss's gradient is given.

        Returns:
            The loss of the microbatch.
        """
        hidden, parts = inputs[0], list[Tensor]()
        if gradient is not None and hidden.requires_grad:
            hidden.grad = torch.empty_like(hidden)
        for piece in pieces(hidden):
            given = piece_inputs(self._module, inputs, piece.tokens)
            (loss,), _ = self(given, piece.finish, gradient is not None)
            if gradient is not None:
                self._tape.products.clear()  # nothing waits
                roots = roots_of((loss,), (True,))
                run_graph(roots, (gradient * piece.share,), (), (), is_split=False)
                if hidden.grad is not None and given[0].grad is not None:
                    hidden.grad[:, piece.tokens] = given[0].grad
            # A piece without counted targets has no mean.
            parts.append(torch.where(piece.share > 0, loss.detach() * piece.share, 0.0))
        return torch.stack(parts).sum()

    def _look_at_graph(self, inputs: Tensors, outputs: Tensors, ends: bool) -> None:
        leaves = leaves_of(outputs, self._tape.products, inputs)
        self._leaves = leaves if self._leaves is None else leaves.joined(self._leaves)
        self._tape.whole = self._leaves.whole
        parameters = gradient_parameters(self._module)
        known = {*map(id, parameters), *map(id, inputs)}
        if leaves.reentrant or any(id(x) not in known for x in leaves.by_itself):
            # Autograd must run all of the graph: it has a backward within, or a leaf made in F.
            self._tape.is_reentrant, self._tape.whole = True, frozenset(parameters)
        if self._others is not None:
            who = f"{self._name} or the loss" if ends else self._name
            check_leaves(who, leaves.all, self._module, self._others)


class Meter:
    """Counts the bytes that a layer keeps, at the first microbatch and at each larger one.

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
    def saved_tensors(self) -> Generator[list[Tensor]]:
        """Collects the tensors that autograd keeps in the context, but for the layer's own.

        The list is emptied in the end: the graph holds it.
        """
        owned = {storage_of(t) for t in (*self._module.parameters(), *self._module.buffers())}
        tensors = list[Tensor]()

        def show(tensor: Tensor) -> None:
            if storage_of(tensor) not in owned:
                tensors.append(tensor)

        try:
            with saved_tensors_shown(show):
                self.hooks = saved_tensors_hooks_in_force()
                yield tensors
        finally:
            self.hooks = None
            tensors.clear()

    def note_forward(
        self, tensors: Iterable[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        self.activation_bytes = max(self.activation_bytes, _storage_bytes(tensors, inputs))
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
