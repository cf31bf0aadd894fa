"""B now, W later, for any module tree.

A layer has its own small autograd graph per microbatch. A layer's inputs are detached, so that its
graph ends at its own boundary. B runs that graph and yields the input gradients. The work that the
tape has collected meanwhile is W. Small parameters (norms) and modules that cannot be split take
their weight gradient in B.

With `recompute` (activation checkpointing) F keeps its inputs only. B begins with F again, from the
same seed, so it gets the same bits. Both F's build a graph, since some kernels (torch's LSTM on the
CPU) compute other bits without one. The first graph is dropped at once.

    kept         F ----------- activations -----------> B -- stash --> W
    recomputed   F -- inputs --> (F again: activations) B -- stash --> W

An input that the next layer does not differentiate has no gradient, which is not a gradient of
zeros: torch's optimizers skip a parameter without one. A boolean tensor behind the gradients of a
layer's inputs then says which of them are there. The others are zeros, so that all messages of a
boundary have one shape. The first microbatch of a step decides whether the boolean tensor follows.
Without it, a gradient that is missing later counts as zeros: the parameters behind it have one.

An output that requires no gradient is constant: a mask, say, or a rotary table. The next layer's
input is then constant, too. It has no graph and no gradient, however far it is handed on. The first
microbatch decides for all whose messages its header announces (`Layer._like_first`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dynmo.errors import ConfigError, RunError
from dynmo.kernels.deferral import CaughtProducts, install
from dynmo.kernels.packed_weight import guarded
from dynmo.kernels.seeds import seed_forward
from dynmo.kernels.split import WeightTape, WeightWork, splits, used_leaves
from dynmo.kernels.torch_private import (
    FunctionBase,
    reshape_unsafe,
    run_backward,
    saved_tensors_shown,
)
from dynmo.models.extra_state import extra_state_of, set_extra_state
from dynmo.models.reach import generators_of, modules_of
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.comm.headers import MOST_TENSORS, Spec, is_alias, mark_alias, obstacle, spec_of
from dynmo.runtime.layer.accumulation import AccumulationGroups
from dynmo.runtime.layer.buffers import BufferKey, BufferSet, Copies, has_same_bits, sum_of_bits
from dynmo.runtime.layer.census import Census
from dynmo.runtime.layer.pieces import Cutter, mean_loss, piece_inputs
from dynmo.runtime.layer.plain_state import PlainState
from dynmo.runtime.layer.reads import (
    Others,
    Reads,
    check_leaves,
    kept_aside,
    mark_aliases,
    storage_of,
)
from dynmo.schedule.op import Kind

_logger = logging.getLogger(__name__)

# Prefixes of what `Layer.beside` returns.
_GENERATOR, _LOSS, _EXTRA = "generator ", "loss ", "extra "

Tensors = tuple[Tensor, ...]
Roots = tuple[GradientEdge | None, ...]
"""Begin of a graph for each output that gets a gradient. None for one without a graph."""


class _InPieces(NamedTuple):
    """Runs the last layer and its loss forward and backward, given the gradient of the loss."""

    run: Callable[[Tensor], None]


class _Saved(NamedTuple):
    """State that a microbatch keeps from F to B.

    Attributes:
        inputs: The leaves of the graph that get a gradient. All inputs, if B runs F again.
        measured: All inputs, if their layer measures what this microbatch keeps.
        graph: Begin of the graph, or a function that builds it again, or that runs it in pieces.
        differentiable: Whether each output gets a gradient.
        buffers: Values that F found in the buffers that it wrote to.
    """

    inputs: Tensors
    measured: Tensors | None
    graph: Roots | Callable[[], Tensors] | _InPieces
    differentiable: tuple[bool, ...]
    buffers: Copies


class Layer:
    """One layer of the model on this rank.

    Holds its module, the state of its microbatches in flight, and the times of its ops.

    Args:
        seed: Seed of the run. With step, index and microbatch it seeds the module's random numbers.
        compiles: Whether torch.compile runs the code between its linears.
        first_microbatch: Index in the batch of this replica's first microbatch.
        groups: Adds up its gradients. None: they add up in `.grad`, and nobody is told when they
            are complete.
        others: Finds the tensors of other layers, which neither the layer nor the loss may read.
            None, on shapes alone, refuses nothing that a module does.
        loss: The model's loss, if this is the last layer.

    Attributes:
        warns: Whether to warn if most of its weight gradients cannot wait for W.
        counts_in: A buffer beside the model's state that F writes to and that decides its output.
    """

    warns = False
    counts_in: str | None = None

    def __init__(  # noqa: PLR0913
        self,
        index: int,
        module: nn.Module,
        clock: Clock,
        seed: int,
        compiles: bool = False,
        *,
        first_microbatch: int = 0,
        groups: AccumulationGroups | None = None,
        others: Others | None = None,
        loss: object = None,
    ) -> None:
        self.index, self.module = index, module
        self.name = f"layer {index} ({type(module).__name__})"
        self.census = Census(self.name, module)
        self._others = others
        self._reads = None if others is None else Reads(self.name, module, others)
        self._loss_reads = (
            None if others is None or loss is None else Reads("the loss", loss, others)
        )
        self.clock, self._seed = clock, seed
        self._first_microbatch, self._groups = first_microbatch, groups
        self._saved: dict[int, _Saved] = {}
        self._recompute = False
        # The loss runs in the last layer, so its state is that of the layer.
        losses = [part for _, part in modules_of(loss)][:1]
        self.buffers = BufferSet([module, *losses], generators_of(module, loss))
        self._loss = losses[0] if losses else None
        self._loss_before = {name: b.clone() for name, b in self._loss_buffers.items()}
        # Buffers that F writes to in place, so that autograd counts the write. The layer's first F
        # finds them.
        self._writes_in_place: set[BufferKey] = set()
        # B writes to buffers if it runs parts of the module again (torch.utils.checkpoint).
        self._writes_in_backward = False
        # F writes to its inputs in place, by (keeps a graph, training). The entries may differ. A
        # layer's first F of each kind finds out.
        self._writes_inputs: dict[tuple[bool, bool], bool] = {}
        # Whether the memory of an input may go before B, since the graph has not saved it.
        self._frees_inputs = True
        # Memory of the copies of the last F's inputs. None without copies.
        self._copied: list[int | None] | None = None
        # Whether F writes to weights, and whether it has in this program. A write that repeats what
        # it did (clamp, a mask) changes nothing any more.
        self._writes_weights: bool | None = None
        self._has_written = False
        # Modules in evaluation mode at the last step that trained. None before that.
        self._evaluating: list[str] | None = None
        self._weight_work: dict[int, list[tuple[WeightWork, Tensors]]] = {}
        # Outputs of the first microbatch of the program that runs, and which of them have a
        # gradient. The others are constants that are handed on, like rotary tables. If the batch is
        # ragged, the key is the shapes of the inputs.
        self._outputs_like: dict[Spec, tuple[Spec, tuple[bool, ...]]] = {}
        self._ragged = self._varies = False
        # Which outputs have required a gradient so far. Empty before the first step.
        self._have_trained: list[bool] = []
        # Whether some input had no gradient in the first microbatch of the program that runs.
        self._marks_missing: bool | None = None
        # Marks of this step: kind, start, end, and the parts of W inside a BW.
        self.marks: list[tuple[Kind, Any, Any, list[tuple[Any, Any]]]] = []
        self._inside: list[tuple[Any, Any]] = []
        self.activation_bytes = self.stash_bytes = self.output_bytes = 0
        # Bytes of the largest inputs whose activations and stash were measured. None before that.
        self._measured_size: int | None = None
        self.tape = WeightTape()
        self.tape.run, self.tape.taking = self._timed, False
        install(module, self.tape)
        run: Callable[..., Any] = module
        if compiles:
            from dynmo.kernels.compiling import compiled

            run = compiled(module)
        self._run = guarded(index, module, run)

    def _timed(self, work: WeightWork) -> None:
        start = self.clock.mark()
        work()
        self._inside.append((start, self.clock.mark()))

    @property
    def _measured(self) -> bool:
        return self._measured_size is not None

    def _is_largest(self, inputs: Tensors) -> bool:
        """Returns whether a microbatch is larger than those that were measured."""
        return self._measured_size is None or _bytes(inputs) > self._measured_size

    def switch_recompute(self, recompute: bool) -> None:
        """Recomputes the activations in B from the next F on. For use between steps."""
        self._recompute = recompute

    @property
    def _loss_buffers(self) -> dict[str, Tensor]:
        return {} if self._loss is None else dict(self._loss.named_buffers())

    def beside(self) -> dict[str, Tensor]:
        """Returns state that is no buffer of the layer: of generators, the loss, and extra state.

        A buffer of the loss counts if a forward has written to it.
        """
        states = {
            f"{_GENERATOR}{name}": generator.get_state()
            for name, generator in self.buffers.generators.items()
        }
        states |= {f"{_EXTRA}{name}": t for name, t in extra_state_of(self.module).items()}
        return states | {
            f"{_LOSS}{name}": buffer
            for name, buffer in self._loss_buffers.items()
            if not has_same_bits(buffer, self._loss_before[name])
        }

    def put_beside(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `beside` returned."""
        extra = {key.removeprefix(_EXTRA): t for key, t in state.items() if key.startswith(_EXTRA)}
        set_extra_state(self.module, extra)
        for key, value in state.items():
            if (name := key.removeprefix(_GENERATOR)) in self.buffers.generators:
                self.buffers.generators[name].set_state(value.cpu())
            elif (name := key.removeprefix(_LOSS)) in self._loss_buffers:
                self._loss_buffers[name].copy_(value)

    def begin(self) -> None:
        """Begins a program: its first microbatch sets the shapes of all messages."""
        self._ragged = False
        self._varies = bool(getattr(self.module, "varying_shapes", False))
        self._outputs_like.clear()
        self._marks_missing = None
        self._has_written = False
        if self._groups is not None:
            self._groups.begin()
        for reads in (self._reads, self._loss_reads):
            if reads is not None:
                reads.begin()

    def expect_ragged(self) -> None:
        """Allows inputs of several shapes in this program, since each message has a header."""
        self._ragged = True

    def forget_sizes(self) -> None:
        """Has the bytes of a changed layer measured at its next microbatch that trains."""
        self._measured_size = None
        self.activation_bytes = self.stash_bytes = 0
        self._writes_inputs.clear()
        self._have_trained.clear()

    def look(self, between_steps: bool) -> bool:
        """Returns whether the modes have changed since the last step, and measures anew then.

        Raises:
            ConfigError: `Census.look` finds what would not train.
        """
        before, self._evaluating = self._evaluating, self.census.look(between_steps)
        if changed := before not in (None, self._evaluating):
            self.forget_sizes()
        return changed

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        step: int,
        graph: bool,
        need_input: bool,
        finish: Callable[[Tensor], Tensor] | None,
        pieces: Cutter | None = None,
    ) -> Tensors:
        """Runs F.

        Args:
            graph: Whether to keep what B needs.
            need_input: Whether B must yield input gradients.
            finish: The loss, on the last layer. It takes the module's output.
            pieces: Cuts the microbatch, on the last layer. F is then left to B (`pieces.py`).

        Returns:
            The outputs, contiguous.

        Raises:
            RunError: The layer's output cannot travel, has another shape than that of the first
                microbatch or a gradient that it lacked, or the layer writes to its inputs.
            ConfigError: The output depends on plain attributes that F writes to, or another layer's
                tensor is read, unless `others` is None.
        """
        start = self.clock.mark()
        self.seed_forward(inputs[0].device, step, microbatch)
        if pieces is not None and not graph:
            with torch.no_grad():
                outputs = (self._forward_pieces(inputs, pieces),)
        elif graph:
            given = tuple(_requiring(x, need_input and x.requires_grad) for x in inputs)
            outputs = (
                self._keep_for_pieces(microbatch, given, step, pieces)
                if pieces is not None
                else self._forward_for_backward(microbatch, given, step, finish)
            )
        else:
            with torch.no_grad():
                # A layer may hand its weight on.
                outputs = tuple(_requiring(y, False) for y in self._call(inputs, finish, False))
                outputs = self._like_first(microbatch, inputs, outputs, graph)
            if not self.output_bytes:
                self.output_bytes = _bytes(outputs)
        self.marks.append((Kind.F, start, self.clock.mark(), []))
        return outputs

    def _like_first(
        self, microbatch: int, inputs: Tensors, outputs: Tensors, graph: bool
    ) -> Tensors:
        """Returns the outputs. Those that had a gradient in the first microbatch require one.

        In a ragged batch, the first microbatch with inputs of the same shapes counts. Outputs that
        vary in shape have a header for each microbatch, so they may vary in this, too.

        Raises:
            RunError: Outputs have other shapes than in the first microbatch, or a gradient that
                they had not. One rank refuses them, too, so that any number of ranks trains the
                same models.
        """
        if self._varies:
            return outputs
        spec, found = spec_of(outputs), tuple([y.requires_grad for y in outputs])
        like = spec_of(inputs) if self._ragged else ()
        if like not in self._outputs_like:
            self._outputs_like[like] = spec, self._may_train(outputs) if graph else found
        first_spec, first = self._outputs_like[like]
        what = f"{self.name} returned"
        if spec != first_spec:
            raise RunError(
                f"{what} {_described(spec)} in microbatch {microbatch}, and "
                f"{_described(first_spec)} before in the step; pad the tensors, or give the layer "
                "the attribute varying_shapes = True"
            )
        if found == first:
            return outputs
        if any(now and not before for now, before in zip(found, first, strict=True)):
            raise RunError(
                f"{what} an output that requires a gradient in microbatch {microbatch}, and none "
                "in the first of the step; let it require one in all"
            )
        return tuple(
            y if now == before else _requiring(y)
            for y, now, before in zip(outputs, found, first, strict=True)
        )

    def _may_train(self, outputs: Tensors) -> tuple[bool, ...]:
        """Returns which outputs require a gradient, or have in an earlier step.

        A layer may hand on its input now and then, which is a constant behind frozen layers. If
        nothing of a layer that trains requires a gradient, all floats may in another microbatch.
        """
        found = [y.requires_grad for y in outputs]
        if len(self._have_trained) == len(found):
            found = [now or before for now, before in zip(found, self._have_trained, strict=True)]
        elif not any(found) and any(p.requires_grad for p in self.module.parameters()):
            found = [y.is_floating_point() for y in outputs]
        self._have_trained = found
        return tuple(found)

    def _forward_for_backward(
        self, microbatch: int, inputs: Tensors, step: int, finish: Callable[[Tensor], Tensor] | None
    ) -> Tensors:
        """Runs F and saves the state that B needs."""
        measured = inputs if self._is_largest(inputs) else None
        leaves = inputs
        if not self._recompute:
            frees = self._frees_inputs
            pairs = [_with_leaf(x) for x in inputs] if frees else [(x, x) for x in inputs]
            inputs = tuple(x for x, _ in pairs)
            leaves = tuple(leaf for _, leaf in pairs if leaf.requires_grad)
        # The first B shows whether it writes to buffers. Until then, their values are kept.
        keeps = self._recompute or self._writes_in_backward or not self._measured
        before = self.buffers.copies() if keeps else {}
        # The backward of an earlier microbatch may need the buffers that this F writes to.
        self.buffers.renew(self._writes_in_place)
        versions = {} if self._measured else self.buffers.versions()
        state = PlainState(self.module) if self._others and not self._measured else None
        if self._recompute:
            # A hook that the layer puts on an input is for the run in B alone.
            outputs = self._call(tuple(map(_without_hooks, inputs)), finish, True)
        else:
            outputs = self._call_to_keep(inputs, finish)
        buffers = self.buffers.written(before, waits=False) if keeps else {}
        self._writes_in_place.update(
            key for key, (buffer, version) in versions.items() if buffer._version != version
        )
        if state is not None:
            # A run to compare with puts no hook on the inputs.
            bare = tuple(map(_without_hooks, inputs))
            again = partial(self._rerun_forward, microbatch, bare, step, finish)
            self._check_first(state, buffers, outputs, again)
        # The loss gets a gradient even if it requires none. Its graph is then empty.
        is_last = finish is not None
        given = outputs if is_last else self._like_first(microbatch, inputs, outputs, graph=True)
        differentiable = tuple(is_last or y.requires_grad for y in given)
        # Only the graph is kept. Tensors that it has not saved may go.
        graph = (
            partial(self._rerun_forward, microbatch, inputs, step, finish, buffers)
            if self._recompute
            else _roots(outputs, differentiable)
        )
        self._saved[microbatch] = _Saved(leaves, measured, graph, differentiable, buffers)
        # With recompute the graph goes here. Without it, outputs keep their graph. Their users
        # detach them (the next layer) or only read (a channel, the loss account).
        return tuple(_requiring(y, y.requires_grad) for y in given) if self._recompute else given

    def _check_first(
        self,
        state: PlainState,
        buffers: Copies,
        outputs: Tensors,
        again: Callable[[Copies], Tensors],
    ) -> None:
        """Looks at what the first F has written to.

        Args:
            state: The attributes before it.
            buffers: The buffers that it wrote to, before it.
            again: Runs F again, from given buffers.

        Raises:
            ConfigError: The layer has state that would not follow it.
        """
        written = state.written()
        if written is not None:
            self._check_repeats(written, outputs, partial(again, buffers))
        if self._writes_in_place:
            # `renew` replaces them.
            reason = kept_aside(self.module, {*map(self.buffers.name_of, self._writes_in_place)})
            if reason is not None:
                raise ConfigError(f"{self.name} {reason}")
        if name := self.buffers.first_of(buffers, persistent=False):
            now = self.buffers.copies()
            self.counts_in = None if self._repeats(outputs, partial(again, now)) else name

    def _forward_pieces(self, inputs: Tensors, pieces: Cutter) -> Tensor:
        cut = list(pieces(inputs[0]))
        losses = [
            self._call(piece_inputs(self.module, inputs, piece.tokens), piece.finish, False)[0]
            for piece in cut
        ]
        return mean_loss(losses, [piece.share for piece in cut])

    def _keep_for_pieces(
        self, microbatch: int, inputs: Tensors, step: int, pieces: Cutter
    ) -> Tensors:
        """Keeps what B needs. Returns the loss, which B writes."""
        loss = torch.zeros((), device=inputs[0].device)
        run = partial(self._run_pieces, microbatch, inputs, step, pieces, loss)
        measured = inputs if self._is_largest(inputs) else None
        self._saved[microbatch] = _Saved(inputs, measured, _InPieces(run), (), {})
        if measured is not None:
            kept = _storage_bytes(inputs, inputs)
            self.activation_bytes = max(self.activation_bytes, kept)
            self.output_bytes = max(self.output_bytes, loss.nbytes)
        return (loss,)

    def _run_pieces(
        self,
        microbatch: int,
        inputs: Tensors,
        step: int,
        pieces: Cutter,
        loss: Tensor,
        gradient: Tensor,
    ) -> None:
        """Runs layer and loss of each piece forward and backward."""
        hidden = inputs[0]
        self.seed_forward(hidden.device, step, microbatch)
        losses, shares = list[Tensor](), list[Tensor]()
        if hidden.requires_grad:
            hidden.grad = torch.empty_like(hidden)
        for piece in pieces(hidden):
            given = piece_inputs(self.module, inputs, piece.tokens)
            outputs = self._call(given, piece.finish, True)
            if not losses and not self._measured:
                self._look_at_graph(outputs, ends=True)
            losses.append(outputs[0].detach())
            shares.append(piece.share)
            _run_graph(_roots(outputs, (True,)), (gradient * piece.share,))
            if hidden.grad is not None and given[0].grad is not None:
                hidden.grad[:, piece.tokens] = given[0].grad
        loss.copy_(mean_loss(losses, shares))

    def seed_forward(self, device: torch.device, step: int, microbatch: int) -> None:
        seed_forward(device, self._seed, step, self.index, self._first_microbatch + microbatch)

    def _call(
        self, inputs: Tensors, finish: Callable[[Tensor], Tensor] | None, graph: bool
    ) -> Tensors:
        """Runs the module, with copies of its inputs if it writes to them."""
        mode = (graph, self.module.training)
        copies = self._writes_inputs.get(mode, True)
        given = tuple(x.clone() for x in inputs) if copies else inputs
        self._copied = [storage_of(x) for x in given] if copies else None
        versions = [x._version for x in given]
        # The first run of each mode looks at writes.
        looks = mode not in self._writes_inputs
        notes = graph and self._others is not None and self._writes_weights is not False
        weights = _sums(self.module) if notes else None
        try:
            outputs = self._outputs(given, finish, inputs if looks else None)
        except RuntimeError as error:
            if copies or "a leaf Variable that requires grad" not in str(error):
                raise
            raise self._wrote(" or to a parameter") from error
        if weights is not None:
            self._note_writes(weights)
        if looks:
            written = [_differs(x, copy) for x, copy in zip(inputs, given, strict=True)]
            self._writes_inputs[mode] = any(written)
            for at, x in enumerate(inputs):
                if written[at] and is_alias(x):
                    raise ConfigError(
                        f"{self.name} writes to its input {at} in place, which shares memory with "
                        "another tensor that an earlier layer handed on or keeps, and would change "
                        "that, too; let it compute with a copy"
                    )
        elif not copies and versions != [x._version for x in given]:
            raise self._wrote()
        return outputs

    def _wrote(self, elsewhere: str = "") -> RunError:
        return RunError(
            f"{self.name} writes to its input{elsewhere} in place, which it did not in its first "
            "microbatch, and which is needed as it was; let it compute with a copy"
        )

    def _note_writes(self, before: dict[str, int]) -> None:
        """Raises ConfigError if F writes to a weight again and again, ahead of the B's."""
        after = _sums(self.module)
        written = next((name for name, value in after.items() if before.get(name) != value), None)
        if written is not None and self._has_written:
            raise ConfigError(
                f"{self.name}: its forward writes to its parameter {written!r} each time it runs, "
                "but the forwards of several microbatches run before a backward; keep what changes "
                "in a buffer, or write to the parameter between steps"
            )
        self._has_written = written is not None
        self._writes_weights = bool(self._writes_weights) or self._has_written

    def _outputs(
        self,
        inputs: Tensors,
        finish: Callable[[Tensor], Tensor] | None,
        originals: Tensors | None,
    ) -> Tensors:
        """Runs the module, and marks outputs that are aliases if there are originals.

        Args:
            originals: What the inputs are copies of.
        """
        where = within = f"in F of layer {self.index}"
        try:
            out = self._run(*inputs) if self._reads is None else self._reads.run(self._run, *inputs)
            if finish is not None:
                where = "in the loss"
                out = finish(out) if self._loss_reads is None else self._loss_reads.run(finish, out)
                where = within
            outputs = self._handed_on(out)
            if originals is not None and finish is None and self._others is not None:
                kept = [x for x, given in zip(inputs, originals, strict=True) if is_alias(given)]
                kept += [*self.module.parameters(), *self.module.buffers()]
                mark_aliases(as_tuple(out), outputs, kept)
            return outputs
        except (Exception, SystemExit) as error:
            error.add_note(where)
            raise

    def _handed_on(self, out: object) -> Tensors:
        """Returns the module's outputs contiguous, as a message would arrive."""
        outputs = as_tuple(out)
        what = f"{self.name} returned"
        if len(outputs) > MOST_TENSORS:
            raise ConfigError(
                f"{what} {len(outputs)} tensors; a layer hands on at most {MOST_TENSORS}, so let "
                "it stack them"
            )
        if not outputs:
            raise ConfigError(f"{what} an empty {type(out).__name__}; a layer hands on a tensor")
        for y in outputs:
            if not isinstance(y, Tensor):
                among = "" if y is out else f" among its {len(outputs)} outputs"
                raise ConfigError(
                    f"{what} a {type(y).__name__}{among}; a layer hands on a tensor, or a tuple of "
                    "tensors"
                )
            reason = obstacle(y)
            if reason is not None:
                raise ConfigError(f"{what} {reason}")
        return tuple(y.contiguous() for y in cast(Tensors, outputs))

    def _rerun_forward(
        self,
        microbatch: int,
        inputs: Tensors,
        step: int,
        finish: Callable[[Tensor], Tensor] | None,
        buffers: Copies,
    ) -> Tensors:
        self.seed_forward(inputs[0].device, step, microbatch)
        with self.buffers.replaced(buffers):
            return self._call_to_keep(inputs, finish)

    def _repeats(self, outputs: Tensors, rerun: Callable[[], Tensors]) -> bool:
        """Returns whether F has the same output when it runs again."""
        # Fake tensors have no values, and kernels of a GPU may round otherwise each time.
        before = [y.detach() for y in outputs]
        looks = all(type(y) is Tensor and y.is_cpu for y in before)
        return not looks or all(map(has_same_bits, before, [y.detach() for y in rerun()]))

    def _check_repeats(self, written: str, outputs: Tensors, rerun: Callable[[], Tensors]) -> None:
        """Raises ConfigError if F has another output when it runs again."""
        state = PlainState(self.module)
        if not self._repeats(outputs, rerun):
            raise ConfigError(
                f"{self.name}: its forward writes to its "
                f"attribute {written!r} and has another "
                "output when it runs again. Such state is neither moved, saved nor put back; keep "
                "it in a buffer (register_buffer)"
            )
        state.restore()

    def _call_to_keep(self, inputs: Tensors, finish: Callable[[Tensor], Tensor] | None) -> Tensors:
        """Runs `_call`. Counts the bytes that autograd keeps for the largest microbatch."""
        if not self._is_largest(inputs):
            return self._call(inputs, finish, True)
        own = {storage_of(p) for p in (*self.module.parameters(), *self.module.buffers())}
        kept: list[Tensor] = []

        def show(tensor: Tensor) -> None:
            if storage_of(tensor) not in own:
                kept.append(tensor)

        with saved_tensors_shown(show):
            outputs = self._call(inputs, finish, True)
        self._look_at_graph(outputs, ends=finish is not None)
        saved = {storage_of(tensor) for tensor in kept}
        given = self._copied or map(storage_of, inputs)
        self._frees_inputs = self._writes_inputs[True, self.module.training] or any(
            x.requires_grad and storage not in saved
            for x, storage in zip(inputs, given, strict=True)
        )
        kept_bytes = _storage_bytes(inputs if self._recompute else kept, inputs)
        self.activation_bytes = max(self.activation_bytes, kept_bytes)
        self.output_bytes = max(self.output_bytes, _bytes(outputs))
        return outputs

    def _look_at_graph(self, outputs: Tensors, ends: bool) -> None:
        by_module, by_itself = used_leaves(outputs)
        self.tape.whole = frozenset(by_module & by_itself)
        if self._others is not None:
            who = f"{self.name} or the loss" if ends else self.name
            check_leaves(who, by_module | by_itself, self.module, self._others)

    def backward_input(self, microbatch: int, gradients: Tensors, deferred: bool) -> Tensors:
        """Runs B, and W too unless `deferred`.

        Args:
            gradients: One per output that gets one, as the next layer returned them.
            deferred: Whether W runs later (`backward_weight`).

        Returns:
            One gradient per input that requires one. If the first microbatch had none for some
            input, a boolean tensor follows (see the top of this file).
        """
        start = self.clock.mark()
        inputs, measured, roots, differentiable, buffers = self._saved.pop(microbatch)
        in_pieces = isinstance(roots, _InPieces)
        if callable(roots):
            roots = _roots(roots(), differentiable)
        if measured is not None and not self._is_largest(measured):
            measured = None
        groups, measures = self._groups, measured is not None
        watches = groups is not None and groups.watching
        self.tape.deferred = not in_pieces and (deferred or measures or watches)
        warns = self.warns and deferred and not in_pieces
        self.tape.taken = set() if warns else None
        self._run_backward(roots, gradients, buffers)
        del roots
        work = self.tape.take()
        if groups is not None:
            groups.after_input(microbatch)
        if measured is not None:
            held = (tensor for _, holds in work for tensor in holds)
            self.stash_bytes = max(self.stash_bytes, _storage_bytes(held, measured))
            if not self._recompute and not in_pieces:
                self.activation_bytes = max(self.activation_bytes, self.stash_bytes)
            self._measured_size = _bytes(measured)
        if warns:
            self._warn_of_early_weights()
        if not deferred:  # this work was held back only to be looked at
            for each, _ in work:
                self._timed(each)
            work = []
            if groups is not None:
                groups.after_weight(microbatch)
        if work:
            self._weight_work[microbatch] = work
        gradients_in = self._gradients_of([x for x in inputs if x.requires_grad])
        inside, self._inside = [] if in_pieces else self._inside, []
        self.marks.append((Kind.B if deferred else Kind.BW, start, self.clock.mark(), inside))
        return gradients_in

    def _run_backward(self, graph: Roots | _InPieces, gradients: Tensors, buffers: Copies) -> None:
        self.tape.taking = True
        try:
            with self.buffers.replaced(buffers):
                before = {} if self._measured else self.buffers.copies()
                if isinstance(graph, _InPieces):
                    graph.run(gradients[0])
                else:
                    _run_graph(graph, _present(gradients))
                if not self._measured:
                    self._writes_in_backward = bool(self.buffers.written(before))
        except (Exception, SystemExit) as error:
            error.add_note(f"in B of layer {self.index}")
            raise
        finally:
            self.tape.taking = False

    def _warn_of_early_weights(self) -> None:
        """Warns if B computes the gradients of most weights."""
        # Those of norms and biases take no time.
        trained = [p for p in self.module.parameters() if p.requires_grad and p.dim() > 1]
        later = self.tape.taken or set()
        if not later and all(p.grad is None or not p.grad.any() for p in trained):
            return  # no weight took part, because all tokens have left before
        self.warns = False
        if splits(self.module) and not isinstance(self.module, CaughtProducts):
            return  # its class has opted in, and need not name its parameters
        share = _elements(p for p in trained if p in later) / max(1, _elements(trained))
        if trained and share < 0.5:
            kind = type(getattr(self.module, "block", self.module)).__name__
            _logger.warning(
                f"layer {self.index} ({kind}), and those like it: the gradients of {share:.0%} of "
                "the weights can wait for W, and B computes the others, so zero bubble gains "
                "little; see dynmo.register_split"
            )

    def _gradients_of(self, inputs: Sequence[Tensor]) -> Tensors:
        """Returns the gradients of the inputs, and which of them are there."""
        there = [x.grad is not None for x in inputs]
        if self._marks_missing is None:
            self._marks_missing = not all(there)
        gradients = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)
        return (*gradients, torch.tensor(there)) if self._marks_missing else gradients

    def backward_weight(self, microbatch: int) -> None:
        start = self.clock.mark()
        for work, _ in self._weight_work.pop(microbatch, ()):
            work()
        if self._groups is not None:
            self._groups.after_weight(microbatch)
        self.marks.append((Kind.W, start, self.clock.mark(), []))

    def clear(self) -> None:
        """Drops the state that microbatches in flight left (after a failed step)."""
        self._saved.clear()
        self._weight_work.clear()
        self.tape.take()
        if self._groups is not None:
            self._groups.clear()
        self.marks.clear()


def as_tuple(out: object) -> tuple[Any, ...]:
    return tuple(cast("Sequence[object]", out)) if isinstance(out, tuple | list) else (out,)


def _without_hooks(x: Tensor) -> Tensor:
    same = x.detach().requires_grad_(x.requires_grad)
    if is_alias(x):
        mark_alias(same)
    return same


def _with_leaf(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tensor behind a leaf that gets its gradient, and the leaf.

    The leaf has the shape and one element of memory. An accumulating node holds its leaf: with the
    tensor as the leaf, its memory would live until B, whether the graph has saved it or not.
    """
    if not x.requires_grad:
        return x, x
    leaf = x.new_empty(()).expand(x.shape).requires_grad_()
    behind = reshape_unsafe(leaf, x.shape)  # no view of the leaf: it may be written to
    behind.data = x.detach()
    if is_alias(x):
        mark_alias(behind)
    return behind, leaf


def _requiring(y: Tensor, requires: bool = True) -> Tensor:
    """Returns an output without its graph."""
    detached = y.detach().requires_grad_(requires)
    if is_alias(y):
        mark_alias(detached)
    return detached


def _roots(outputs: Tensors, differentiable: Sequence[bool]) -> Roots:
    return tuple(
        _edge(y) if y.requires_grad else None
        for y, counts in zip(outputs, differentiable, strict=True)
        if counts
    )


def _edge(output: Tensor) -> GradientEdge:
    """get_gradient_edge without its checks, which are slow behind ops that use caches."""
    node = output.grad_fn
    if node is None:
        return get_gradient_edge(output)  # an input, handed on
    # A node written in Python does not live by the object at hand. A C++ node behind it keeps it
    # alive.
    token = output.view_as(output).grad_fn if isinstance(node, FunctionBase) else None
    return GradientEdge(node, output.output_nr, token)


def _present(gradients: Tensors) -> tuple[Tensor | None, ...]:
    """Returns the gradients, with None for those that the tensor behind them denies."""
    if not gradients or gradients[-1].dtype is not torch.bool:
        return gradients
    *values, there = gradients
    if type(there) is not Tensor:  # a fake tensor has no values
        return tuple(values)
    return tuple(
        gradient if is_there else None
        for gradient, is_there in zip(values, there.tolist(), strict=True)
    )


def _run_graph(roots: Roots, gradients: Sequence[Tensor | None]) -> None:
    """torch.autograd.backward without its checks, as slow as a small graph."""
    pairs = [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if root is not None and gradient is not None
    ]
    if pairs:
        # keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
        run_backward(tuple(root for root, _ in pairs), tuple(g for _, g in pairs))


def _described(spec: Spec) -> str:
    return " and ".join(
        f"{list(shape)} of {str(dtype).removeprefix('torch.')}" for dtype, shape in spec[:4]
    )


def _differs(original: Tensor, copy: Tensor) -> bool:
    """Returns whether a fresh copy was written to. `.data` does not raise its version."""
    return copy._version > 0 or (
        type(copy) is Tensor and not has_same_bits(original.detach(), copy)
    )


def _sums(module: nn.Module) -> dict[str, int]:
    """Returns a sum of the bits of each parameter that only its own optimizer may change."""
    return {
        f"{prefix}.{name}".lstrip("."): sum_of_bits(p)
        for prefix, part in module.named_modules()
        for name, p in part._parameters.items()
        # Embeddings renormalise the rows that they read, each once.
        if p is not None and type(p) is nn.Parameter and getattr(part, "max_norm", None) is None
    }


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _storage_bytes(tensors: Iterable[Tensor], inputs: Tensors) -> int:
    """Returns the bytes of the memory blocks behind the tensors.

    An input counts as itself: it may be a view of a whole batch, which is there anyway.
    """
    sizes = {storage_of(t): t.untyped_storage().nbytes() for t in tensors}
    sizes |= {storage_of(x): x.nbytes for x in inputs if storage_of(x) in sizes}
    return sum(sizes.values())
