"""B now, W later, for any module tree: one layer with its own small autograd graph per microbatch.

A layer's inputs are detached, so that its graph ends at its own boundary. B runs that graph and
yields the input gradients; what the tape has collected meanwhile is W. Small parameters (norms) and
modules that cannot be split take their weight gradient in B.

With `recompute` (activation checkpointing) F keeps its inputs only, and B begins with F again, from
the same seed: the same bits. Both F's build a graph, since some kernels (torch's LSTM on the CPU)
compute other bits without one. The first graph is dropped at once.

    kept         F ----------- activations -----------> B -- stash --> W
    recomputed   F -- inputs --> (F again: activations) B -- stash --> W
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from dynmo.errors import ConfigError, RunError
from dynmo.kernels.compiling import compiled
from dynmo.kernels.seeds import generator_of, seed_forward
from dynmo.kernels.sparse_linear import guarded
from dynmo.kernels.split import WeightTape, WeightWork, install, used_twice
from dynmo.kernels.torch_private import FunctionBase, run_backward
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.comm.headers import MOST_TENSORS, obstacle
from dynmo.runtime.layer.accumulation import AccumulationGroups
from dynmo.runtime.layer.buffers import BufferKey, BufferSet, Copies, has_same_bits
from dynmo.runtime.layer.plain_state import PlainState
from dynmo.schedule.op import Kind

Tensors = tuple[Tensor, ...]
Roots = tuple[GradientEdge | None, ...]
"""Where a graph begins, for each floating-point output; None for one without."""


class _Saved(NamedTuple):
    """What a microbatch keeps from F to B.

    graph: Where the graph begins, or what builds it again. buffers: The values that F found in the
    buffers that it wrote to.
    """

    inputs: Tensors
    graph: Roots | Callable[[], Tensors]
    buffers: Copies


class Layer:
    """One layer of the model on this rank: its module, what its microbatches in flight keep, and
    how long its ops took.

    Args:
        index: Its index in the model.
        module: Computes it.
        clock: Gives the marks of its ops.
        seed: The run's. With step, index and microbatch it seeds what the module draws.
        compiles: Whether torch.compile runs what lies between its linears.
        checks_state: Whether to refuse a module whose output depends on plain attributes that it
            writes to.
        recompute: Whether its activations are recomputed in B. `switch_recompute` changes it.
        first_microbatch: Index in the batch of this replica's first microbatch.
        groups: Adds up its gradients. None: they add up in `.grad`, and nobody is told when they
            are complete.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        clock: Clock,
        seed: int,
        compiles: bool = False,
        checks_state: bool = False,
        *,
        recompute: bool = False,
        first_microbatch: int = 0,
        groups: AccumulationGroups | None = None,
    ) -> None:
        self.index, self.module = index, module
        self._clock, self._seed = clock, seed
        self._first_microbatch, self._groups = first_microbatch, groups
        self._saved: dict[int, _Saved] = {}
        self._recompute, self._checks_state = recompute, checks_state
        self.buffers = BufferSet([module])
        # Buffers that F writes to in place, so that autograd counts the write. The layer's first F
        # finds them.
        self._writes_in_place: set[BufferKey] = set()
        # Whether B writes to buffers, since it runs parts of the module again
        # (torch.utils.checkpoint).
        self._writes_in_backward = False
        # Whether F writes to its inputs in place, by (keeps a graph, training). It may differ, and
        # a layer's first F of each finds out.
        self._writes_inputs: dict[tuple[bool, bool], bool] = {}
        self._weight_work: dict[int, list[tuple[WeightWork, Tensors]]] = {}
        # Of W's that have begun ahead of time: when their pieces ran.
        self._ahead: dict[int, list[tuple[Any, Any]]] = {}
        # Marks of this step: kind, start, end, and the parts of W inside a BW, or ahead of a W.
        self.marks: list[tuple[Kind, Any, Any, list[tuple[Any, Any]]]] = []
        self._inside: list[tuple[Any, Any]] = []
        self.activation_bytes = self.stash_bytes = self.output_bytes = 0
        self._measured = False
        self.tape = WeightTape()
        self.tape.run, self.tape.taking = self._timed, False
        install(module, self.tape)
        self._run = guarded(index, module, compiled(module) if compiles else module)

    def _timed(self, work: WeightWork) -> None:
        start = self._clock.mark()
        work()
        self._inside.append((start, self._clock.mark()))

    def switch_recompute(self, recompute: bool) -> None:
        """From the next F on, recomputes the activations in B, or keeps them. For use between
        steps, when the layer keeps nothing.

        Args:
            recompute: Whether to recompute them.
        """
        self._recompute = recompute

    def forget_sizes(self) -> None:
        """The layer has changed: measure its bytes again at the next microbatch that trains it (a
        frozen prefix keeps none)."""
        self._measured = False
        self.activation_bytes = self.stash_bytes = 0
        self._writes_inputs.clear()

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        step: int,
        graph: bool,
        need_input: bool,
        finish: Callable[[Tensor], Tensor] | None,
    ) -> Tensors:
        """Runs F. graph: keep what B needs; need_input: B must yield input gradients; finish: the
        loss, on the last layer."""
        start = self._clock.mark()
        seed_forward(
            _device_of(inputs), self._seed, step, self.index, self._first_microbatch + microbatch
        )
        if not graph:
            with torch.no_grad():
                outputs = self._call(inputs, finish, False)
            if not self.output_bytes:
                self.output_bytes = sum(y.nbytes for y in outputs)
        else:
            inputs = tuple(
                x.detach().requires_grad_(need_input and x.is_floating_point()) for x in inputs
            )
            # Until the first B has shown whether it writes to buffers, what F finds there is kept.
            keeps = self._recompute or self._writes_in_backward or not self._measured
            before = self.buffers.copies() if keeps else {}
            # The backward of an earlier microbatch may need what this F writes to.
            self.buffers.renew(self._writes_in_place)
            versions = {} if self._measured else self.buffers.versions()
            state = PlainState(self.module) if self._checks_state and not self._measured else None
            outputs = (
                self._call(inputs, finish, True)
                if self._recompute
                else self._call_to_keep(inputs, finish)
            )
            buffers = self.buffers.maybe_written(before) if keeps else {}
            self._writes_in_place.update(
                key for key, (buffer, version) in versions.items() if buffer._version != version
            )
            rerun = partial(self._rerun_forward, microbatch, inputs, step, finish, buffers)
            written = None if state is None else state.written()
            if written is not None:
                self._check_repeats(written, outputs, rerun)
            # The graph alone is kept: what it has not saved may go.
            self._saved[microbatch] = _Saved(
                inputs, rerun if self._recompute else _roots(outputs), buffers
            )
            # With recompute the graph goes with this detach. Without it, outputs keep their graph:
            # who takes them detaches (the next layer) or only reads (a channel, the loss account).
            outputs = tuple(y.detach() for y in outputs) if self._recompute else outputs
        self.marks.append((Kind.F, start, self._clock.mark(), []))
        return outputs

    def spare(self, start: Any, end: Any) -> None:
        """F need not run, for its output was kept: from `start` to `end` it took to get at that."""
        self.marks.append((Kind.F, start, end, []))

    def drew(self, microbatch: int, device: torch.device, step: int) -> bool:
        """Whether F, which has just run, drew random numbers from torch's generator of the
        device."""
        generator = generator_of(device)
        after = generator.get_state()
        seed_forward(device, self._seed, step, self.index, self._first_microbatch + microbatch)
        return not torch.equal(after, generator.get_state())

    def _call(
        self, inputs: Tensors, finish: Callable[[Tensor], Tensor] | None, graph: bool
    ) -> Tensors:
        """Runs the module, on copies of its inputs where it writes to them, so that they stay as
        they are."""
        mode = (graph, self.module.training)
        copies = self._writes_inputs.get(mode, True)
        given = tuple(x.clone() for x in inputs) if copies else inputs
        versions = [x._version for x in given]
        outputs = self._outputs(given, finish)
        if mode not in self._writes_inputs:
            self._writes_inputs[mode] = any(map(_differs, inputs, given))
        elif not copies and versions != [x._version for x in given]:
            raise RunError(
                f"layer {self.index} ({type(self.module).__name__}) writes to its input in place, which it did not in its first "
                "microbatch, and which is needed as it was; let it compute with a copy"
            )
        return outputs

    def _outputs(self, inputs: Tensors, finish: Callable[[Tensor], Tensor] | None) -> Tensors:
        try:
            out = self._run(*inputs)
            if finish is not None:
                out = finish(out)
            return self._handed_on(out)
        except Exception as error:
            error.add_note(f"in F of layer {self.index}")
            raise

    def _handed_on(self, out: object) -> Tensors:
        """What the module returned, as it goes to the next layer. A message that travels loses its
        strides, so they all do."""
        outputs = cast(
            "tuple[object, ...]", tuple(out) if isinstance(out, tuple | list) else (out,)
        )
        what = f"layer {self.index} ({type(self.module).__name__}) returned"
        if len(outputs) > MOST_TENSORS:
            raise RunError(
                f"{what} {len(outputs)} tensors; a layer hands on at most {MOST_TENSORS}, so let it stack them"
            )
        for y in outputs:
            if not isinstance(y, Tensor):
                among = "" if y is out else f" among its {len(outputs)} outputs"
                raise RunError(
                    f"{what} a {type(y).__name__}{among}; a layer hands on a tensor, or a tuple of tensors"
                )
            reason = obstacle(y)
            if reason is not None:
                raise RunError(f"{what} {reason}")
        return tuple(y.contiguous() for y in cast(Tensors, outputs))

    def _rerun_forward(
        self,
        microbatch: int,
        inputs: Tensors,
        step: int,
        finish: Callable[[Tensor], Tensor] | None,
        buffers: Copies,
    ) -> Tensors:
        """F again, with these values in the buffers that it writes to."""
        seed_forward(
            _device_of(inputs), self._seed, step, self.index, self._first_microbatch + microbatch
        )
        with self.buffers.replaced(buffers):
            return self._call_to_keep(inputs, finish)

    def _check_repeats(self, written: str, outputs: Tensors, rerun: Callable[[], Tensors]) -> None:
        """Raises ConfigError if F has another output when it runs again, since it has written to
        the plain attribute `written`."""
        if not all(type(y) is Tensor and y.is_cpu for y in outputs):
            return  # fake tensors have no values, and kernels of a GPU may round otherwise each time
        state = PlainState(self.module)
        if not all(map(has_same_bits, outputs, rerun())):
            raise ConfigError(
                f"layer {self.index} ({type(self.module).__name__}): its forward writes to its attribute {written!r} and has another "
                "output when it runs again. Such state is neither moved, saved nor put back; keep it in a buffer (register_buffer)"
            )
        state.restore()

    def _call_to_keep(self, inputs: Tensors, finish: Callable[[Tensor], Tensor] | None) -> Tensors:
        return (
            self._call(inputs, finish, True)
            if self._measured
            else self._call_measured(inputs, finish)
        )

    def _call_measured(self, inputs: Tensors, finish: Callable[[Tensor], Tensor] | None) -> Tensors:
        """As `_call`, counting the bytes that autograd keeps. Weights are not activations."""
        own = {_storage(p) for p in (*self.module.parameters(), *self.module.buffers())}
        kept: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in own:
                kept.append(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self._call(inputs, finish, True)
        self.tape.whole = used_twice(outputs)
        self.activation_bytes = _storage_bytes(inputs if self._recompute else kept, inputs)
        self.output_bytes = sum(y.nbytes for y in outputs)
        return outputs

    def backward_input(self, microbatch: int, gradients: Tensors, deferred: bool) -> Tensors:
        """Runs B, and W too unless `deferred`. gradients: one per floating-point output; yields one
        per floating-point input (zeros where an input has no influence)."""
        start = self._clock.mark()
        inputs, roots, buffers = self._saved.pop(microbatch)
        if callable(roots):
            roots = _roots(roots())
        groups = self._groups
        self.tape.deferred = (
            deferred or not self._measured or (groups is not None and groups.watching)
        )
        self.tape.taking = True
        try:
            with self.buffers.replaced(buffers):
                before = {} if self._measured else self.buffers.copies()
                _run_graph(roots, gradients)
                if not self._measured:
                    self._writes_in_backward = bool(self.buffers.written(before))
        except Exception as error:
            error.add_note(f"in B of layer {self.index}")
            raise
        finally:
            self.tape.taking = False
        del roots
        work = self.tape.take()
        if groups is not None:
            groups.after_input(microbatch)
        if not self._measured:
            self.stash_bytes = _storage_bytes(
                (tensor for _, holds in work for tensor in holds), inputs
            )
            if not self._recompute:
                self.activation_bytes = max(self.activation_bytes, self.stash_bytes)
            self._measured = True
        if not deferred:  # what was held back only to be looked at
            for each, _ in work:
                self._timed(each)
            work = []
            if groups is not None:
                groups.after_weight(microbatch)
        if work:
            self._weight_work[microbatch] = work
        gradients_in = tuple(_gradient(x) for x in inputs if x.requires_grad)
        inside, self._inside = self._inside, []
        self.marks.append((Kind.B if deferred else Kind.BW, start, self._clock.mark(), inside))
        return gradients_in

    def backward_weight(self, microbatch: int) -> None:
        """Runs W (the last of its pieces, where `weight_pieces` has run the others)."""
        start = self._clock.mark()
        for work, _ in self._weight_work.pop(microbatch, ()):
            work()
        if self._groups is not None:
            self._groups.after_weight(microbatch)
        self.marks.append((Kind.W, start, self._clock.mark(), self._ahead.pop(microbatch, [])))

    def partial_weights(self, microbatch: int) -> Iterator[None]:
        """Runs W in pieces, one at each step: one deferred weight gradient, which lets go of what
        it held. The same work in the same order as at once, so the same bits, whatever runs between
        two steps."""
        work = self._weight_work.get(microbatch, [])
        # A B between two pieces would take the gradients that are there already for its own.
        while len(work) > 1 and not (self._groups is not None and self._groups.watching):
            start = self._clock.mark()
            work.pop(0)[0]()
            self._ahead.setdefault(microbatch, []).append((start, self._clock.mark()))
            yield
        last = bool(work)
        del work  # or what the last one held would live on here
        self.backward_weight(microbatch)
        if last:
            yield

    def clear(self) -> None:
        """Drops what microbatches in flight left (after a failed step)."""
        self._saved.clear()
        self._weight_work.clear()
        self._ahead.clear()
        self.tape.take()
        if self._groups is not None:
            self._groups.clear()
        self.marks.clear()


def _roots(outputs: Tensors) -> Roots:
    return tuple(_edge(y) if y.requires_grad else None for y in outputs if y.is_floating_point())


def _edge(output: Tensor) -> GradientEdge:
    """get_gradient_edge without its checks, which take long after an op that has used the
    caches."""
    node = output.grad_fn
    if node is None:
        return get_gradient_edge(output)  # an input, handed on
    # A node written in Python does not live by the object that is at hand; one in C++ behind it
    # keeps it.
    token = output.view_as(output).grad_fn if isinstance(node, FunctionBase) else None
    return GradientEdge(node, output.output_nr, token)


def _run_graph(roots: Roots, gradients: Tensors) -> None:
    """torch.autograd.backward for outputs whose gradients are at hand and fit: its checks cost as
    much again as a small graph."""
    if None in roots:
        pairs = [(root, g) for root, g in zip(roots, gradients, strict=True) if root is not None]
        roots, gradients = tuple(root for root, _ in pairs), tuple(g for _, g in pairs)
    if not roots:
        return
    # keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
    run_backward(roots, gradients)


def _gradient(x: Tensor) -> Tensor:
    gradient = x.grad
    return torch.zeros_like(x) if gradient is None else gradient


def _differs(original: Tensor, copy: Tensor) -> bool:
    """Whether a fresh copy has been written to; through `.data`, say, that does not raise its
    version."""
    return copy._version > 0 or (type(copy) is Tensor and not has_same_bits(original, copy))


def _device_of(tensors: Tensors) -> torch.device:
    return tensors[0].device


def _storage(tensor: Tensor) -> int:
    """What tells two memory blocks apart, also on the meta device, where every address is 0."""
    return tensor.untyped_storage()._cdata


def _storage_bytes(tensors: Iterable[Tensor], inputs: Tensors) -> int:
    """Of the memory blocks behind the tensors. An input counts as itself: it may be a view of a
    whole batch, which is there anyway."""
    sizes = {_storage(t): t.untyped_storage().nbytes() for t in tensors}
    sizes |= {_storage(x): x.nbytes for x in inputs if _storage(x) in sizes}
    return sum(sizes.values())
