"""A stage: contiguous layers on one rank, run as F, B and W of one microbatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynmo.errors import RunError
from dynmo.kernels.seeds import generator_of
from dynmo.kernels.split import LOW
from dynmo.runtime.layer.joint_graph import JointGraph, Tensors
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.outputs import as_tuple
from dynmo.runtime.layer.token_pieces import Cutter, TokenPieces
from dynmo.schedule.op import Kind


class Stage:
    """Contiguous layers of one rank.

    Args:
        first_trainable: Global index of the first layer that trains. A layer below it keeps
            nothing, and B stops there.
        loss: Takes (output, targets) and returns a scalar. Only on the model's last stage.
        loss_weight: Weight of a microbatch's loss in the loss of the step: one over the number of
            microbatches of all replicas.
        frozen: Number of leading layers that are frozen.
        run_frozen: Runs F of these layers. None runs them like the others.
        device: Device of the loss's gradients. A copy to it would hold up each B.
        pieces: Cuts microbatches for the last layer and the loss. None leaves them whole.

    Attributes:
        collected: Takes the model's output of each microbatch, on the last stage. None takes
            nothing.
        observe: Called with the output and the targets of each microbatch, on the last stage.
        look: Called with values of a layer and a microbatch: its "output", the "gradient" of its
            inputs, or the "sum" of its parameters' gradients so far. None but for a search.
        counts: Number of targets that the loss of each microbatch counts. None means that all
            microbatches count alike.
        counts_of_all: Sum of `counts` over all replicas. 1 if the losses are added up.
        router_loss: Takes the model's output. Returns the part of the loss that routers add.
        router_losses: That part in each microbatch, on the last stage.
    """

    collected: dict[int, object] | None = None
    observe: Callable[[Any, Any], None] | None = None
    look: Callable[[str, int, int, Sequence[Tensor | None]], None] | None = None
    router_loss: Callable[[Any], Tensor] | None = None
    counts: Sequence[float] | None = None
    counts_of_all: float = 0.0
    is_double: bool = False

    def __init__(
        self,
        layers: Sequence[Layer],
        first_trainable: int,
        loss: Callable[[Any, Any], Tensor] | None = None,
        loss_weight: float = 1.0,
        frozen: int = 0,
        run_frozen: PrefixRunner | None = None,
        device: torch.device | None = None,
        pieces: TokenPieces | None = None,
    ) -> None:
        self.layers, self._first_trainable, self._loss = list(layers), first_trainable, loss
        self._frozen, self._run_frozen = frozen, run_frozen
        self._loss_weight, self._device, self._pieces = loss_weight, device, pieces
        self.router_losses = dict[int, Tensor]()
        self.scale_loss(1.0)
        self._trained = [layer for layer in self.layers if layer.index >= first_trainable]

    def scale_loss(self, scale: float) -> None:
        """From the next B on, gradients are those of `scale` times the loss."""
        dtype = torch.float64 if self.is_double else torch.float32
        weight = scale * self._loss_weight
        self._loss_gradient = torch.full((), weight, dtype=dtype, device=self._device)
        for layer in self.layers:
            layer.tape.loss_gradient = self._loss_gradient
        # Of each microbatch, if these count differently.
        self._loss_gradients = None
        if self.counts is not None:
            weights = [scale * count / (self.counts_of_all or 1.0) for count in self.counts]
            gradients = torch.tensor(weights, dtype=dtype, device=self._device)
            self._loss_gradients = gradients.unbind()

    def begin(self) -> None:
        for layer in self.layers:
            layer.begin()

    def expect_ragged(self) -> None:
        for layer in self.layers:
            layer.outputs.expect_ragged()

    def forward(
        self, microbatch: int, tensors: Tensors, step: int, targets: object, training: bool
    ) -> Tensors:
        """Runs F of one microbatch. Returns the last layer's outputs, or the loss.

        Args:
            step: Number of the step. It seeds what layers draw.
            targets: Targets of the loss, on the last stage. They may be None if outputs are
                collected. The loss is then NaN.
            training: Whether to keep what B needs.
        """
        assert torch.is_grad_enabled(), "the executor runs with gradients enabled"
        layers = self.layers
        if self._run_frozen is not None and self._frozen and self.look is None:
            frozen, layers = layers[: self._frozen], layers[self._frozen :]
            prefix = FrozenPrefix(frozen, microbatch, tensors, step, training)
            tensors = self._run_frozen(prefix)
        joint: JointGraph[Layer] | None = None
        for layer in layers:
            ends = self._loss is not None and layer is self.layers[-1]
            finish = partial(self._finish, microbatch, targets) if ends else None
            pieces = self._cutter(microbatch, targets) if ends else None
            graph = training and layer.index >= self._first_trainable
            tensors = layer.forward(
                microbatch,
                tensors,
                step,
                graph=graph,
                need_input=layer.index > self._first_trainable,
                finish=finish,
                pieces=pieces,
                behind=joint,
            )
            if self.look is None:
                joint = layer.take_open()
            else:
                self.look("output", layer.index, microbatch, tensors)
        if joint is not None:
            joint.close()
        return tensors

    def _note(self, microbatch: int, output: Any) -> None:
        if self.router_loss is not None:
            self.router_losses[microbatch] = self.router_loss(output).detach()

    def _cutter(self, microbatch: int, targets: object) -> Cutter | None:
        """Returns what cuts a microbatch, unless someone wants its whole output."""
        if self._pieces is None or self.collected is not None or self.observe is not None:
            return None
        return partial(self._pieces.cut, targets=targets, note=partial(self._note, microbatch))

    def _finish(self, microbatch: int, targets: object, output: Tensor) -> Tensor:
        assert self._loss is not None
        if self.collected is not None:
            self.collected[microbatch] = _copy(output)  # a loss may write to the output
            if targets is None:
                return torch.full((), math.nan, device=self._device)
        assert targets is not None, "a last stage needs targets"
        if self.observe is not None:
            self.observe(_copy(output), targets)
        self._note(microbatch, output)
        if self.counts is not None and not self.counts[microbatch]:
            return _zero(output)  # the mean over nothing is no number
        # A loss may write to its targets (to mask some, say). They may be a view of the batch, and
        # a recompute needs them again.
        loss = self._loss(output, _copy(targets))
        if not isinstance(loss, Tensor) or loss.dim():
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"a {type(loss).__name__}"
            )
            raise RunError(f"the loss function returned {what}; it must return a scalar tensor")
        # The last layer may return several outputs.
        several = as_tuple(output)
        # F may run without its graph, to run again in B. An input that is handed on then still says
        # that it requires a gradient.
        if (
            torch.is_grad_enabled()
            and not loss.requires_grad
            and any(isinstance(y, Tensor) and y.requires_grad for y in several)
        ):
            raise RunError(
                "the loss does not depend on the model's output in a way that autograd follows, "
                "so nothing would train"
            )
        return loss.float() if loss.dtype in LOW else loss

    def backward_input(self, microbatch: int, gradients: Tensors | None, deferred: bool) -> Tensors:
        """Runs B, and W too unless `deferred`. Returns gradients of the inputs.

        `gradients` are those of the outputs. None on the last stage, whose output is the loss.
        """
        if gradients is None:
            of_each = self._loss_gradients
            gradients = (self._loss_gradient if of_each is None else of_each[microbatch],)
        for layer in reversed(self._trained):
            gradients = layer.backward_input(microbatch, gradients, deferred)
            if self.look is not None:
                self.look("gradient", layer.index, microbatch, gradients)
                self.look("sum", layer.index, microbatch, _gradients(layer))
        # A message travels from one device.
        return tuple(gradient.to(gradients[0].device) for gradient in gradients)

    def backward_weight(self, microbatch: int) -> None:
        for layer in reversed(self._trained):
            layer.backward_weight(microbatch)
            if self.look is not None:
                self.look("sum", layer.index, microbatch, _gradients(layer))

    def clear(self) -> None:
        for layer in self.layers:
            layer.clear()


def _gradients(layer: Layer) -> list[Tensor | None]:
    return [parameter.grad for parameter in layer.module.parameters()]


def _zero(output: object) -> Tensor:
    """Returns a loss of 0 whose gradients are zeros."""
    floats = [y for y in as_tuple(output) if isinstance(y, Tensor) and y.is_floating_point()]
    return torch.stack([y.reshape(-1)[:0].sum().float() for y in floats]).sum()


def _copy(output: Any) -> Any:
    """Returns copies of tensors without their graph. Lists become tuples."""
    if isinstance(output, tuple | list):
        return tuple(map(_copy, output))
    if isinstance(output, Mapping):
        return {name: _copy(each) for name, each in output.items()}
    return output.detach().clone() if isinstance(output, Tensor) else output


class FrozenPrefix:
    """F of the frozen leading layers of a stage for one microbatch.

    Attributes:
        layers: Their indices in the model. At least one.
        inputs: The inputs of the first layer.
        microbatch: Number of the microbatch in this replica's batch.
        training: False in an evaluation.
        measured: Number of leading layers that have run here. The others must run, since plans
            need the sizes of their outputs.
        skipped: Number of layers that `run` has skipped.
        drew: Name of the first layer that drew random numbers, or could have. None: none did.
        wrote: Name of the first layer that wrote to a buffer, and the buffer's.
    """

    def __init__(
        self, layers: Sequence[Layer], microbatch: int, inputs: Tensors, step: int, training: bool
    ) -> None:
        self._layers, self._step, self._start = layers, step, layers[0].clock.mark()
        self.layers = tuple(layer.index for layer in layers)
        self.microbatch, self.inputs, self.training = microbatch, inputs, training
        known = (place for place, layer in enumerate(layers) if not layer.meter.output_bytes)
        self.measured, self.skipped = next(known, len(layers)), 0
        self.drew: str | None = None
        self.wrote: tuple[str, str] | None = None

    def run(self, inputs: Tensors, skip: int = 0) -> Tensors:
        """Runs F of all layers but the first ones. Call it once.

        Args:
            inputs: The outputs of the last layer that is skipped, or `self.inputs`.
            skip: Number of layers to skip.
        """
        # The profiler sees that these layers take no time, but for the last: until now.
        for place, layer in enumerate(self._layers[:skip], 1):
            if not layer.is_timed:
                continue
            end = layer.clock.mark() if place == skip else self._start
            layer.marks.append((Kind.F, self._start, end, []))
        self.skipped = skip
        for layer in self._layers[skip:]:
            before = layer.buffers.copies()
            device = inputs[0].device
            inputs = layer.forward(self.microbatch, inputs, self._step, graph=False)
            if self.drew is None and self._drew(layer, device):
                self.drew = layer.name
            written = next(iter(layer.buffers.written(before)), None)
            if self.wrote is None and written is not None:
                self.wrote = layer.name, layer.buffers.name_of(written)
        return inputs

    def _drew(self, layer: Layer, device: torch.device) -> bool:
        if layer.buffers.generators:
            return True
        generator = generator_of(device)
        after = generator.get_state()
        layer.seed_forward(device, self._step, self.microbatch)
        return not torch.equal(after, generator.get_state())


PrefixRunner = Callable[[FrozenPrefix], Tensors]
"""Runs F of a frozen prefix, by `FrozenPrefix.run` in the end."""
