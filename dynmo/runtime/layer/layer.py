"""One layer of the model on this rank: F, B and W of its microbatches.

A layer's inputs are detached, so that its graph ends at its own boundary, unless it joins the graph
of the layer before it (`span.py`). B runs a graph and yields the input gradients. The work that the
layers' tapes have collected meanwhile is W. Small parameters (norms) and modules that cannot be
split take their weight gradient in B.

With `recompute` (activation checkpointing) F keeps its inputs only. B begins with F again, from the
same seed, so it gets the same bits. Both F's build a graph, since some kernels (torch's LSTM on the
CPU) compute other bits without one. The first graph is dropped at once.

    kept         F ----------- activations -----------> B -- stash --> W
    recomputed   F -- inputs --> (F again: activations) B -- stash --> W

An output that requires no gradient is constant: a mask, say, or a rotary table. The next layer's
input is then constant, too. It has no graph and no gradient, however far it is handed on. The first
microbatch decides for all whose messages its header announces (`Layer._like_first`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError, RunError
from dynmo.kernels.deferral import CaughtProducts, install
from dynmo.kernels.grouped_linear import gradient_parameters
from dynmo.kernels.leaves import Leaves, leaves_of, reaches
from dynmo.kernels.packed_weight import guarded
from dynmo.kernels.seeds import seed_forward
from dynmo.kernels.split import (
    Part,
    WeightTape,
    WeightWork,
    adds_at_once,
    splits,
)
from dynmo.kernels.torch_private import nodes_made, reshape_unsafe
from dynmo.models.extra_state import extra_state_of, set_extra_state
from dynmo.models.reach import modules_of
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.comm.headers import (
    MOST_TENSORS,
    Spec,
    is_alias,
    is_plain,
    mark_alias,
    obstacle,
    spec_of,
)
from dynmo.runtime.layer.accumulation import AccumulationGroups
from dynmo.runtime.layer.buffers import has_same_bits
from dynmo.runtime.layer.census import Census
from dynmo.runtime.layer.meter import Meter, total_bytes
from dynmo.runtime.layer.pieces import Cutter, mean_loss, piece_inputs
from dynmo.runtime.layer.reads import Others, Reads, check_leaves, mark_aliases, storage_of
from dynmo.runtime.layer.span import Span, Tensors, roots_of, run_graph
from dynmo.runtime.layer.writes import Writes
from dynmo.schedule.op import Kind

_logger = logging.getLogger(__name__)

# Prefixes of what `Layer.beside` returns.
_GENERATOR, _LOSS, _EXTRA = "generator ", "loss ", "extra "

Finish = Callable[[Tensor], Tensor]


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
        is_timed: Whether its ops are timed. Its graph is then its own.
        recompute: Whether B recomputes the activations. It changes between steps alone.
        is_reentrant: Whether B must be all of autograd's backward, as with torch's old checkpoint.
        marks: Marks of this step: kind, start, end, and the part of W inside a BW.
    """

    warns = False
    is_timed = True
    recompute = False
    is_reentrant = False

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
        self.census, self.meter = Census(self.name, module), Meter(module)
        self._others = others
        self._reads = Reads(self.name, module, others or dict)
        self._loss_reads = Reads("the loss", loss, others or dict)
        self.clock, self._seed = clock, seed
        self._first_microbatch = first_microbatch
        self._groups = groups or AccumulationGroups((), 1, 1)
        # The loss runs in the last layer, so its state is that of the layer.
        self._losses = [part for _, part in modules_of(loss)][:1]
        self.writes = Writes(self.name, module, self._losses, loss, others is not None)
        self.buffers = self.writes.buffers
        self._loss_before = {name: b.clone() for name, b in self._loss_buffers.items()}
        # Modules in evaluation mode at the last step that trained. None before that.
        self._evaluating: list[str] | None = None
        # Numbers of nodes of the graphs that were looked at.
        self._known_graphs = set[int]()
        # Whether F runs a backward of its own, which must end at the layer's inputs.
        self._runs_backward = False
        # Leaves of all of these.
        self._leaves: Leaves | None = None
        # Microbatches in flight: the graphs that begin here, and work.
        self._spans: dict[int, Span[Layer]] = {}
        self._open: Span[Layer] | None = None
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
        self.marks: list[tuple[Kind, Any, Any, list[tuple[Any, Any]]]] = []
        self.tape = WeightTape()
        self.tape.taking = False
        install(module, self.tape)
        self.parameters = gradient_parameters(module)
        run: Callable[..., Any] = module
        if compiles:
            from dynmo.kernels.compiling import compiled

            run = compiled(module)
        self._run = guarded(index, module, run)

    @property
    def _loss_buffers(self) -> dict[str, Tensor]:
        return dict(pair for part in self._losses for pair in part.named_buffers())

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
        self.parameters = gradient_parameters(self.module)
        self.writes.begin()
        self._groups.begin()
        self._reads.begin()
        self._loss_reads.begin()

    def expect_ragged(self) -> None:
        """Allows inputs of several shapes in this program, since each message has a header."""
        self._ragged = True

    def forget_sizes(self) -> None:
        """Has the bytes of a changed layer measured at its next microbatch that trains."""
        self.meter.forget()
        self.writes.forget()
        self._have_trained.clear()
        self._known_graphs.clear()
        self._leaves, self.tape.whole, self.is_reentrant = None, frozenset(), False

    def look(self, between_steps: bool) -> bool:
        """Returns whether the modes have changed since the last step, and measures anew then.

        Raises:
            ConfigError: `Census.look` finds what would not train.
        """
        before, self._evaluating = self._evaluating, self.census.look(between_steps)
        if changed := before not in (None, self._evaluating):
            self.forget_sizes()
        return changed

    # -- F -----------------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        step: int,
        graph: bool,
        need_input: bool,
        finish: Finish | None,
        pieces: Cutter | None = None,
        behind: Span[Layer] | None = None,
    ) -> Tensors:
        """Runs F.

        Args:
            graph: Whether to keep what B needs.
            need_input: Whether B must yield input gradients.
            finish: The loss, on the last layer. It takes the module's output.
            pieces: Cuts the microbatch, on the last layer. F is then left to B (`pieces.py`).
            behind: The graph of the layer before (`take_open`), which this one joins or closes.

        Returns:
            The outputs, contiguous.

        Raises:
            RunError: The layer's output cannot travel, has another shape than that of the first
                microbatch or a gradient that it lacked, or the layer writes to its inputs.
            ConfigError: The output depends on plain attributes that F writes to, or another layer's
                tensor is read, unless `others` is None.
        """
        start = self.clock.mark() if self.is_timed else None
        self.seed_forward(inputs[0].device, step, microbatch)
        if not graph:
            outputs = self._forward_alone(microbatch, inputs, finish, pieces)
        elif behind is not None and self._may_join(microbatch, inputs, pieces):
            outputs = self._forward_joined(behind, microbatch, inputs, finish)
        else:
            if behind is not None:
                behind.close()
            given = tuple([_requiring(x, need_input and x.requires_grad) for x in inputs])
            if pieces is not None:
                outputs = self._keep_for_pieces(microbatch, given, step, pieces)
            else:
                outputs = self._forward_for_backward(microbatch, given, step, finish)
        if start is not None:
            self.marks.append((Kind.F, start, self.clock.mark(), []))
        return outputs

    def take_open(self) -> Span[Layer] | None:
        """Returns the graph of the last F, if the next layer may join it."""
        span, self._open = self._open, None
        return span

    def _forward_alone(
        self, microbatch: int, inputs: Tensors, finish: Finish | None, pieces: Cutter | None
    ) -> Tensors:
        with torch.no_grad():
            if pieces is not None:
                return (self._forward_pieces(inputs, pieces),)
            # A layer may hand its weight on.
            outputs = tuple([_requiring(y, False) for y in self._call(inputs, finish, False)[0]])
            outputs = self._like_first(microbatch, inputs, outputs, graph=False)
        self.tape.products.clear()  # of a part that runs with gradients
        if not self.meter.output_bytes:
            self.meter.output_bytes = total_bytes(outputs)
        return outputs

    def _is_plain(self) -> bool:
        """Returns whether the layer's graph may be one with those of its neighbours."""
        return not (
            self.is_timed
            or self.recompute
            or self.is_reentrant
            or self.writes.in_backward
            or self._runs_backward
        )

    def _may_join(self, microbatch: int, inputs: Tensors, pieces: Cutter | None) -> bool:
        """Returns whether F may begin with the graph of its inputs.

        A gradient that is missing must be seen, so one input alone may have one. Gradients that
        somebody waits for are not to wait for those of other layers.
        """
        return (
            pieces is None
            and self._is_plain()
            and not self.meter.is_largest(inputs)
            and self.writes.to_inputs(graph=True) is not None
            and not self._groups.ends_at(microbatch)
            and [x.grad_fn is not None for x in inputs if x.requires_grad] == [True]
        )

    def _forward_joined(
        self, behind: Span[Layer], microbatch: int, inputs: Tensors, finish: Finish | None
    ) -> Tensors:
        [x] = [x for x in inputs if x.requires_grad]
        node = x.grad_fn
        self.writes.renew()
        outputs, _ = self._call(inputs, finish, True)
        given, differentiable = self._differentiable(microbatch, inputs, outputs, finish)
        products = self.tape.take_products()
        if reaches(outputs, node):
            behind.layers.append(self)
            behind.products.append(products)
            behind.outputs, behind.differentiable = outputs, differentiable
            self._open = behind
            return given
        behind.close()
        leaf = _with_leaf(x)[1]
        span = Span[Layer]((leaf,), None, (), differentiable, {}, [self], [products], outputs)
        self._spans[microbatch] = self._open = span
        return given

    def _differentiable(
        self, microbatch: int, inputs: Tensors, outputs: Tensors, finish: Finish | None
    ) -> tuple[Tensors, tuple[bool, ...]]:
        """Returns the outputs to hand on, and which of them get a gradient."""
        if finish is not None:
            # The loss gets a gradient even if it requires none. Its graph is then empty.
            return outputs, (True,) * len(outputs)
        given = self._like_first(microbatch, inputs, outputs, graph=True)
        return given, tuple([y.requires_grad for y in given])

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
        if self._varies or self._is_like_first(outputs):
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
        if any(now and not before for now, before in zip(found, first, strict=True)):
            raise RunError(
                f"{what} an output that requires a gradient in microbatch {microbatch}, and none "
                "in the first of the step; let it require one in all"
            )
        return tuple(
            y if now == before else _requiring(y)
            for y, now, before in zip(outputs, found, first, strict=True)
        )

    def _is_like_first(self, outputs: Tensors) -> bool:
        """A quick answer for one output."""
        if self._ragged or len(outputs) != 1 or not self._outputs_like:
            return False
        ((dtype, shape), *_), differentiable = self._outputs_like[()]
        [y] = outputs
        return y.dtype is dtype and y.shape == shape and (y.requires_grad,) == differentiable

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
        self, microbatch: int, inputs: Tensors, step: int, finish: Finish | None
    ) -> Tensors:
        """Runs F and saves the state that B needs."""
        meter, recompute = self.meter, self.recompute
        measured, first = inputs if meter.is_largest(inputs) else None, not meter.has_measured
        frees = meter.frees_inputs and not recompute
        pairs = [_with_leaf(x) if frees else (x, x) for x in inputs]
        inputs = tuple([x for x, _ in pairs])
        leaves = tuple([leaf for _, leaf in pairs if leaf.requires_grad])

        def run() -> Tensors:
            if recompute:  # a hook that the layer puts on an input is for the run in B alone
                return self._call(_without_hooks(inputs), finish, True)[0]
            return self._call_to_keep(inputs, finish)

        def again(inputs: Tensors) -> Tensors:
            """Runs F again. A run to compare with puts no hook on the inputs."""
            noted = self.tape.take_products()
            self.seed_forward(inputs[0].device, step, microbatch)
            outputs, _ = self._call(_without_hooks(inputs), finish, True)
            self.tape.products = noted
            return outputs

        # The first B shows whether it writes to buffers. Until then, their values are kept.
        keeps = recompute or self.writes.in_backward or first
        if keeps or measured is not None:
            outputs, buffers = self.writes.keep(run, again, inputs, first, keeps)
        else:
            self.writes.renew()
            outputs, buffers = self._call(inputs, finish, True)[0], {}
        given, differentiable = self._differentiable(microbatch, inputs, outputs, finish)
        products = self.tape.take_products()

        def build_again() -> Tensors:
            self.seed_forward(inputs[0].device, step, microbatch)
            with self.buffers.replaced(buffers):
                return self._call_to_keep(inputs, finish)

        if recompute:  # the graph goes here
            graph, products, given = build_again, [], _without_hooks(given)
        else:  # tensors that the graph has not saved may go
            graph = roots_of(outputs, differentiable)
        self._runs_backward |= any(x.grad is not None for x in leaves)
        span = Span[Layer](leaves, measured, graph, differentiable, buffers, [self], [products])
        self._spans[microbatch] = span
        # Outputs keep their graph. Their users detach them (the next layer) or only read (a
        # channel, the loss account).
        self._open = span if measured is None and self._is_plain() else None
        return given

    def seed_forward(self, device: torch.device, step: int, microbatch: int) -> None:
        seed_forward(device, self._seed, step, self.index, self._first_microbatch + microbatch)

    def _forward_pieces(self, inputs: Tensors, pieces: Cutter) -> Tensor:
        cut = list(pieces(inputs[0]))
        losses = [
            self._call(piece_inputs(self.module, inputs, piece.tokens), piece.finish, False)[0][0]
            for piece in cut
        ]
        return mean_loss(losses, [piece.share for piece in cut])

    def _keep_for_pieces(
        self, microbatch: int, inputs: Tensors, step: int, pieces: Cutter
    ) -> Tensors:
        """Keeps what B needs. Returns the loss, which B writes."""
        hidden, loss = inputs[0], torch.zeros((), device=inputs[0].device)

        def run(gradient: Tensor) -> None:
            """Runs layer and loss of each piece forward and backward."""
            self.seed_forward(hidden.device, step, microbatch)
            losses, shares = list[Tensor](), list[Tensor]()
            if hidden.requires_grad:
                hidden.grad = torch.empty_like(hidden)
            for piece in pieces(hidden):
                given = piece_inputs(self.module, inputs, piece.tokens)
                outputs, _ = self._call(given, piece.finish, True)
                losses.append(outputs[0].detach())
                shares.append(piece.share)
                part = Part(self.tape, self.parameters, self.tape.take_products())
                roots = roots_of(outputs, (True,))
                run_graph(roots, (gradient * piece.share,), (), [part], apart=False)
                if hidden.grad is not None and given[0].grad is not None:
                    hidden.grad[:, piece.tokens] = given[0].grad
            loss.copy_(mean_loss(losses, shares))

        measured = inputs if self.meter.is_largest(inputs) else None
        leaves = tuple([x for x in inputs if x.requires_grad])
        self._spans[microbatch] = Span[Layer](
            leaves, measured, (), (), {}, [self], [()], pieces=run
        )
        if measured is not None:
            self.meter.note_forward(inputs, inputs, (loss,))
        return (loss,)

    def _call(self, inputs: Tensors, finish: Finish | None, graph: bool) -> tuple[Tensors, Tensors]:
        """Runs the module, with copies of its inputs if it writes to them.

        Returns:
            The outputs, and the inputs that the module was given.
        """
        self.tape.hooks = self.meter.hooks
        originals = inputs if self.writes.to_inputs(graph) is None else None
        call = partial(self._outputs, finish=finish, originals=originals)
        before = nodes_made()
        outputs, given = self.writes.run(call, inputs, graph)
        # Another number of nodes is another graph. A layer that uses a weight by itself may use
        # another one next time.
        size = nodes_made() - before
        may_change = self.tape.whole and not self.is_reentrant
        if graph and (size not in self._known_graphs or may_change):
            self._known_graphs.add(size)
            self._look_at_graph(inputs, outputs, ends=finish is not None)
        return outputs, given

    def _outputs(
        self,
        inputs: Tensors,
        finish: Finish | None,
        originals: Tensors | None,
    ) -> Tensors:
        """Runs the module, and marks outputs that are aliases if there are originals.

        Args:
            originals: What the inputs are copies of.
        """
        where = within = f"in F of layer {self.index}"
        try:
            out = self._reads.run(self._run, *inputs)
            if finish is not None:
                where = "in the loss"
                out = self._loss_reads.run(finish, out)
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
        if is_plain(out):
            return (out,)
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
        return tuple(y.contiguous() for y in outputs)

    def _call_to_keep(self, inputs: Tensors, finish: Finish | None) -> Tensors:
        """Runs F. Counts the bytes that autograd keeps for the largest microbatch."""
        meter = self.meter
        if not meter.is_largest(inputs):
            return self._call(inputs, finish, True)[0]
        with meter.kept() as kept:
            outputs, given = self._call(inputs, finish, True)
            saved = {storage_of(tensor) for tensor in kept}
            meter.note_forward(inputs if self.recompute else kept, inputs, outputs)
        meter.frees_inputs = self.writes.to_inputs(graph=True) or any(
            x.requires_grad and storage_of(own) not in saved
            for x, own in zip(inputs, given, strict=True)
        )
        return outputs

    def _look_at_graph(self, inputs: Tensors, outputs: Tensors, ends: bool) -> None:
        leaves = leaves_of(outputs, self.tape.products, inputs)
        self._leaves = leaves if self._leaves is None else leaves.joined(self._leaves)
        self.tape.whole = self._leaves.whole
        known = {*map(id, self.parameters), *map(id, inputs)}
        if leaves.reentrant or any(id(x) not in known for x in leaves.by_itself):
            # Autograd must run all of the graph: it has a backward within, or a leaf made in F.
            self.is_reentrant, self.tape.whole = True, frozenset(self.parameters)
        if self._others is not None:
            who = f"{self.name} or the loss" if ends else self.name
            check_leaves(who, leaves.all, self.module, self._others)

    # -- B and W -----------------------------------------------------------------------------------

    def backward_input(self, microbatch: int, gradients: Tensors, deferred: bool) -> Tensors:
        """Runs B, and W too unless `deferred`, of all layers whose graph begins here.

        Args:
            gradients: One per output that gets one, as the next layer returned them.
            deferred: Whether W runs later (`backward_weight`).

        Returns:
            One gradient per input that requires one. If the first microbatch had none for some
            input, a boolean tensor follows (see `span.py`). If no graph begins here, the gradients
            that were given.
        """
        start = self.clock.mark() if self.is_timed else None
        span, meter = self._spans.pop(microbatch, None), self.meter
        if span is None:
            return gradients
        in_pieces = span.pieces is not None
        span.build_again()
        measured = span.measured
        if measured is not None and not meter.is_largest(measured):
            measured = None
        apart = not in_pieces and (
            deferred
            or self.is_timed
            or measured is not None
            or any(layer._groups.watching for layer in span.layers)
            or any(adds_at_once(x.weight, x.x) for several in span.products for x in several)
        )
        for layer in span.layers:
            layer.tape.taken = set() if layer.warns and deferred and not in_pieces else None
        found = self._run_backward(span, gradients, apart)
        works = [layer.tape.take() for layer in span.layers]
        if measured is not None:
            held = (tensor for _, holds in works[0] for tensor in holds)
            meter.note_backward(held, measured, not (self.recompute or in_pieces))
        for layer in span.layers:
            layer._groups.after_input(microbatch)
            if layer.tape.taken is not None:
                layer._warn_of_early_weights()
        between = self.clock.mark() if start is not None and apart and not deferred else None
        for layer, work in zip(reversed(span.layers), reversed(works), strict=True):
            if work:
                layer._weight_work[microbatch] = work
            if not deferred:
                layer._finish_weights(microbatch)
        gradients_in = self._gradients_of(span.inputs, found)
        for layer in span.layers[1:]:
            if layer._marks_missing is None:
                layer._marks_missing = not span.has_gradient(gradients)
        if start is not None:
            end = self.clock.mark()
            inside = [] if between is None else [(between, end)]
            self.marks.append((Kind.B if deferred else Kind.BW, start, end, inside))
        return gradients_in

    def _run_backward(
        self, span: Span[Layer], gradients: Tensors, apart: bool
    ) -> Sequence[Tensor | None]:
        for layer in span.layers:
            layer.tape.taking, layer.tape.deferred = True, apart
        first = not self.meter.has_measured
        try:
            with self.buffers.replaced(span.buffers):
                before = self.buffers.copies() if first else {}
                found = span.run(gradients, apart)
                if first:
                    self.writes.in_backward = bool(self.buffers.written(before))
        except (Exception, SystemExit) as error:
            last = span.layers[-1].index
            also = f" to {last}" if last != self.index else ""
            error.add_note(f"in B of layer{'s' * bool(also)} {self.index}{also}")
            raise
        finally:
            for layer in span.layers:
                layer.tape.taking = False
        return found

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

    def _gradients_of(self, inputs: Sequence[Tensor], found: Sequence[Tensor | None]) -> Tensors:
        """Returns the gradients of the inputs, and which of them are there."""
        there = [gradient is not None for gradient in found]
        if self._marks_missing is None:
            self._marks_missing = not all(there)
        gradients = tuple(
            [
                torch.zeros_like(x) if gradient is None else gradient
                for x, gradient in zip(inputs, found, strict=True)
            ]
        )
        return (*gradients, torch.tensor(there)) if self._marks_missing else gradients

    def backward_weight(self, microbatch: int) -> None:
        start = self.clock.mark() if self.is_timed else None
        self._finish_weights(microbatch)
        if start is not None:
            self.marks.append((Kind.W, start, self.clock.mark(), []))

    def _finish_weights(self, microbatch: int) -> None:
        for work, _ in self._weight_work.pop(microbatch, ()):
            work()
        self._groups.after_weight(microbatch)

    def clear(self) -> None:
        """Drops the state that microbatches in flight left (after a failed step)."""
        self._spans.clear()
        self._open = None
        self._weight_work.clear()
        self.tape.take()
        self.tape.products.clear()
        self._groups.clear()
        self.marks.clear()


def as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def _without_hooks(inputs: Tensors) -> Tensors:
    return tuple([_requiring(x, x.requires_grad) for x in inputs])


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


def _described(spec: Spec) -> str:
    return " and ".join(
        f"{list(shape)} of {str(dtype).removeprefix('torch.')}" for dtype, shape in spec[:4]
    )


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
