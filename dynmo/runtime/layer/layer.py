"""One layer of the model on this rank: F, B and W of its microbatches.

A layer's inputs are detached, so that its graph ends at its own boundary, unless it joins the graph
of the layer before it (`joint_graph.py`). B runs a graph and yields the input gradients. The work
that the layers' tapes have collected meanwhile is W. Small parameters (norms) and modules that
cannot be split take their weight gradient in B.

With `recompute` (activation checkpointing) F keeps its inputs only. B begins with F again, from the
same seed, so it gets the same bits. Both F's build a graph, since some kernels (torch's LSTM on the
CPU) compute other bits without one. The first graph is dropped at once.

    kept         F ----------- activations -----------> B -- stash --> W
    recomputed   F -- inputs --> (F again: activations) B -- stash --> W
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.kernels.deferral import install, warn_of_early_gradients
from dynmo.kernels.graph import adds_at_once, reaches
from dynmo.kernels.grouped_linear import gradient_parameters
from dynmo.kernels.seeds import seed_forward
from dynmo.kernels.split import WeightTape, WeightWork
from dynmo.runtime.comm.clock import Clock
from dynmo.runtime.layer.accumulation import AccumulationGroups
from dynmo.runtime.layer.buffers import Beside
from dynmo.runtime.layer.census import Census
from dynmo.runtime.layer.joint_graph import (
    JointGraph,
    Tensors,
    filled,
    requiring,
    roots_of,
    with_leaf,
    without_hooks,
)
from dynmo.runtime.layer.module_call import Finish, Meter, ModuleCall, total_bytes
from dynmo.runtime.layer.reads import Others
from dynmo.runtime.layer.token_pieces import Cutter
from dynmo.schedule.op import Kind


class Layer:
    """One layer of the model on this rank.

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
        marks: Marks of this step: kind, start, end, and the part of W inside a BW.
    """

    warns = False
    is_timed = True
    recompute = False

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
        self.clock, self._seed = clock, seed
        self._first_microbatch = first_microbatch
        self._groups = groups or AccumulationGroups((), 1, 1)
        self.tape = WeightTape()
        self.tape.taking = False
        self._call = ModuleCall(index, module, self.tape, self.meter, loss, others)
        self.outputs, self.writes = self._call.outputs, self._call.writes
        self.buffers = self.writes.buffers
        self.beside = Beside(module, self._call.losses, self.buffers.generators)
        # Whether F runs a backward of its own, which must end at the layer's inputs.
        self._runs_backward = False
        # Microbatches in flight: the graphs that begin here, and work.
        self._graphs: dict[int, JointGraph[Layer]] = {}
        self._open: JointGraph[Layer] | None = None
        self._weight_work: dict[int, list[tuple[WeightWork, Tensors]]] = {}
        # Whether some input had no gradient in the first microbatch of the program that runs.
        self._marks_missing: bool | None = None
        self.marks: list[tuple[Kind, Any, Any, list[tuple[Any, Any]]]] = []
        install(module, self.tape)
        self.parameters = gradient_parameters(module)
        self._call.prepare(compiles)

    def begin(self) -> None:
        """Begins a program."""
        self._marks_missing = None
        self.parameters = gradient_parameters(self.module)
        self._call.begin()
        self._groups.begin()

    def forget_sizes(self) -> None:
        """Has the bytes of a changed layer measured at its next microbatch that trains."""
        self.meter.forget()
        self._call.forget()

    def look(self, between_steps: bool) -> bool:
        """Returns whether the modes have changed since the last step, and measures anew then.

        Raises:
            ConfigError: `Census.look` finds what would not train.
        """
        changed = self.census.look(between_steps)
        if changed:
            self.forget_sizes()
        return changed

    # -- F -----------------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        step: int,
        *,
        graph: bool = True,
        need_input: bool = True,
        finish: Finish | None = None,
        pieces: Cutter | None = None,
        behind: JointGraph[Layer] | None = None,
    ) -> Tensors:
        """Runs F.

        Args:
            graph: Whether to keep what B needs.
            need_input: Whether B must yield input gradients.
            finish: The loss, on the last layer. It takes the module's output.
            pieces: Cuts the microbatch, on the last layer. F is then left to B (`token_pieces.py`).
            behind: The graph of the layer before (`take_open`), which this one joins or closes.

        Returns:
            The outputs, contiguous.
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
            given = tuple([requiring(x, need_input and x.requires_grad) for x in inputs])
            if pieces is not None:
                outputs = self._keep_for_pieces(microbatch, given, step, pieces)
            else:
                outputs = self._forward_for_backward(microbatch, given, step, finish)
        if start is not None:
            self.marks.append((Kind.F, start, self.clock.mark(), []))
        return outputs

    def take_open(self) -> JointGraph[Layer] | None:
        """Returns the graph of the last F, if the next layer may join it."""
        joint, self._open = self._open, None
        return joint

    def _forward_alone(
        self, microbatch: int, inputs: Tensors, finish: Finish | None, pieces: Cutter | None
    ) -> Tensors:
        with torch.no_grad():
            if pieces is not None:
                return (self._call.in_pieces(pieces, inputs),)
            # A layer may hand its weight on.
            outputs = tuple([requiring(y, False) for y in self._call(inputs, finish, False)[0]])
            outputs = self.outputs.like_first(microbatch, inputs, outputs, graph=False)
        self.tape.products.clear()  # of a part that runs with gradients
        if not self.meter.output_bytes:
            self.meter.output_bytes = total_bytes(outputs)
        return outputs

    def _is_plain(self) -> bool:
        """Returns whether the layer's graph may be one with those of its neighbours."""
        return not (
            self.is_timed
            or self.recompute
            or self.tape.is_reentrant
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
        self, behind: JointGraph[Layer], microbatch: int, inputs: Tensors, finish: Finish | None
    ) -> Tensors:
        [x] = [x for x in inputs if x.requires_grad]
        node = x.grad_fn
        self.writes.renew()
        outputs, _ = self._call(inputs, finish, True)
        given, differentiable = self.outputs.differentiable(
            microbatch, inputs, outputs, finish is not None
        )
        products = self.tape.take_products()
        if reaches(outputs, node):
            behind.layers.append(self)
            behind.products.append(products)
            behind.outputs, behind.differentiable = outputs, differentiable
            self._open = behind
            return given
        behind.close()
        leaf = with_leaf(x)[1]
        joint = JointGraph[Layer](
            (leaf,), None, (), differentiable, {}, [self], [products], outputs
        )
        self._graphs[microbatch] = self._open = joint
        return given

    def _forward_for_backward(
        self, microbatch: int, inputs: Tensors, step: int, finish: Finish | None
    ) -> Tensors:
        """Runs F and saves the state that B needs."""
        meter, recompute = self.meter, self.recompute
        measured = inputs if meter.is_largest(inputs) else None
        frees = meter.frees_inputs and not recompute
        pairs = [with_leaf(x) if frees else (x, x) for x in inputs]
        inputs = tuple([x for x, _ in pairs])
        leaves = tuple([leaf for _, leaf in pairs if leaf.requires_grad])
        seed = partial(self.seed_forward, inputs[0].device, step, microbatch)
        if measured is not None or self._call.keeps_buffers(recompute):
            outputs, buffers = self._call.with_buffers(inputs, finish, recompute, seed)
        else:
            self.writes.renew()
            outputs, buffers = self._call(inputs, finish, True)[0], {}
        given, differentiable = self.outputs.differentiable(
            microbatch, inputs, outputs, finish is not None
        )
        products = self.tape.take_products()
        if recompute:  # the graph goes here
            graph = partial(self._call.rebuilt, inputs, finish, buffers, seed)
            products, given = [], without_hooks(given)
        else:  # tensors that the graph has not saved may go
            graph = roots_of(outputs, differentiable)
        self._runs_backward |= any(x.grad is not None for x in leaves)
        joint = JointGraph[Layer](
            leaves, measured, graph, differentiable, buffers, [self], [products]
        )
        self._graphs[microbatch] = joint
        # Outputs keep their graph. Their users detach them (the next layer) or only read (a
        # channel, the loss account).
        self._open = joint if measured is None and self._is_plain() else None
        return given

    def seed_forward(self, device: torch.device, step: int, microbatch: int) -> None:
        seed_forward(device, self._seed, step, self.index, self._first_microbatch + microbatch)

    def _keep_for_pieces(
        self, microbatch: int, inputs: Tensors, step: int, pieces: Cutter
    ) -> Tensors:
        """Keeps what B needs. Returns the loss, which B writes."""
        hidden, loss = inputs[0], torch.zeros((), device=inputs[0].device)

        def run(gradient: Tensor) -> None:
            self.seed_forward(hidden.device, step, microbatch)
            loss.copy_(self._call.in_pieces(pieces, inputs, gradient))

        measured = inputs if self.meter.is_largest(inputs) else None
        leaves = tuple([x for x in inputs if x.requires_grad])
        self._graphs[microbatch] = JointGraph[Layer](
            leaves, measured, (), (), {}, [self], [()], pieces=run
        )
        if measured is not None:
            self.meter.note_forward(inputs, inputs, (loss,))
        return (loss,)

    # -- B and W -----------------------------------------------------------------------------------

    def backward_input(self, microbatch: int, gradients: Tensors, deferred: bool) -> Tensors:
        """Runs B, and W too unless `deferred`, of all layers whose graph begins here.

        Args:
            gradients: One per output that gets one, as the next layer returned them.
            deferred: Whether W runs later (`backward_weight`).

        Returns:
            One gradient per input that requires one. If the first microbatch had none for some
            input, a boolean tensor follows (see `joint_graph.py`). If no graph begins here, the
            gradients that were given.
        """
        start = self.clock.mark() if self.is_timed else None
        joint, meter = self._graphs.pop(microbatch, None), self.meter
        if joint is None:
            return gradients
        in_pieces = joint.pieces is not None
        joint.build_again()
        measured = joint.measured
        if measured is not None and not meter.is_largest(measured):
            measured = None
        is_split = not in_pieces and (
            deferred
            or self.is_timed
            or measured is not None
            or any(layer._groups.watching for layer in joint.layers)
            or any(adds_at_once(x.weight, x.x) for several in joint.products for x in several)
        )
        for layer in joint.layers:
            layer.tape.taken = set() if layer.warns and deferred and not in_pieces else None
        found = self._run_backward(joint, gradients, is_split)
        works = [layer.tape.take() for layer in joint.layers]
        if measured is not None:
            held = (tensor for _, holds in works[0] for tensor in holds)
            meter.note_backward(held, measured, not (self.recompute or in_pieces))
        for layer in joint.layers:
            layer._groups.after_input(microbatch)
            if (taken := layer.tape.taken) is not None:
                layer.warns = not warn_of_early_gradients(layer.index, layer.module, taken)
        between = self.clock.mark() if start is not None and is_split and not deferred else None
        for layer, work in zip(reversed(joint.layers), reversed(works), strict=True):
            if work:
                layer._weight_work[microbatch] = work
            if not deferred:
                layer._finish_weights(microbatch)
        if self._marks_missing is None:
            self._marks_missing = any(gradient is None for gradient in found)
        gradients_in = filled(joint.inputs, found, self._marks_missing)
        for layer in joint.layers[1:]:
            if layer._marks_missing is None:
                layer._marks_missing = not joint.has_gradient(gradients)
        if start is not None:
            end = self.clock.mark()
            inside = [] if between is None else [(between, end)]
            self.marks.append((Kind.B if deferred else Kind.BW, start, end, inside))
        return gradients_in

    def _run_backward(
        self, joint: JointGraph[Layer], gradients: Tensors, is_split: bool
    ) -> Sequence[Tensor | None]:
        for layer in joint.layers:
            layer.tape.taking, layer.tape.deferred = True, is_split
        first = not self.meter.has_measured
        try:
            with self.buffers.replaced(joint.buffers):
                before = self.buffers.copies() if first else {}
                found = joint.run(gradients, is_split)
                if first:
                    self.writes.in_backward = bool(self.buffers.written(before))
        except (Exception, SystemExit) as error:
            last = joint.layers[-1].index
            also = f" to {last}" if last != self.index else ""
            error.add_note(f"in B of layer{'s' * bool(also)} {self.index}{also}")
            raise
        finally:
            for layer in joint.layers:
                layer.tape.taking = False
        return found

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
        self._graphs.clear()
        self._open = None
        self._weight_work.clear()
        self.tape.take()
        self.tape.products.clear()
        self._groups.clear()
        self.marks.clear()
