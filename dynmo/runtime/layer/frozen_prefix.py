"""F of the frozen leading layers of a stage, which a dynamic case may skip."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dynmo.kernels.seeds import generator_of
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.span import Tensors
from dynmo.schedule.op import Kind


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
            inputs = layer.forward(self.microbatch, inputs, self._step, False, False, None)
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
