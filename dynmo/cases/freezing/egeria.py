"""Egeria freezes a module that has stopped learning, from the front.

Sources: Wang et al. 2022, and DynMo F.4.

    reference     weights of a layer some steps ago, in int8 on the CPU. It moves and is saved
                  with the layer (`layers.kept`)
    plasticity    how differently layer and reference relate the tokens of one microbatch: the
                  similarity-preserving loss || G / |rows of G|  -  R / |rows of R| ||^2 / b^2
                  with G = A A^T of the layer's output, and R of the reference's
    slope         of the plasticity, smoothed over a window, by a line through the window
    stale         |slope| under a share of its first value. The front module freezes when it has
                  been stale for a whole window

This differs from Egeria in two points. First, a layer and its reference get the same live input,
while Egeria runs the whole reference model. Only the front module may freeze, and its input comes
from a frozen prefix, which is the same in both. Second, b counts tokens, evenly picked, and not
sequences, of which a microbatch of a language model has few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from dynmo import Change, Layers, Signals
from dynmo.cases.freezing.options import Freezing
from dynmo.cases.freezing.prefix import (
    PrefixCase,
    freeze_prefix,
    front,
    last_to_learn,
    learns,
    units,
)
from dynmo.extend import seed_forward

_TOKENS = 64  # rows whose similarities are compared
_KEPT = "egeria/"


@final
class Egeria(PrefixCase):
    """Freezes the front module when its plasticity no longer changes."""

    def __init__(self, options: Freezing, most: int, seed: int) -> None:
        self._options, self._most, self._seed = options, most, seed
        self._layers: Layers | None = None
        self._hooks: list[RemovableHandle] = []
        self._seen: dict[int, tuple[tuple[Any, ...], Tensor]] = {}
        # All values below are the same on every rank. The keys are the first layers of modules.
        # Readings are those since the reference.
        self._readings: dict[int, list[float]] = {}
        self._first_slopes: dict[int, list[float]] = {}
        self._stale: dict[int, int] = {}
        self._referenced: set[int] = set()  # layers
        # The learning rate of the last step, and that at which the first module froze (0: none).
        self._rate = self._frozen_at = 0.0

    # -- deciding ----------------------------------------------------------------------------------

    def check(self, modules: Sequence[nn.Module]) -> None:
        self._most = min(self._most, last_to_learn(modules))

    def attach(self, layers: Layers) -> None:
        self._layers = layers

    def act(self, step: int, layers: Layers) -> Change | None:
        """Freezes stale modules, or thaws all. Watches a step that is read."""
        self._layers = layers
        thaws = 0 < self._rate <= self._options.thaw * self._frozen_at
        change = self._thawed(layers) if thaws and layers.frozen else self._freeze(layers)
        if self._reads(step) and self._referenced:
            self._watch(layers)
        return change

    def acts(self, step: int) -> bool:
        """True if the case watches a step, has just read one or may thaw."""
        return (
            self._reads(step)
            or self._reads(step - 1)
            or self._refers(step - 1)
            or self._frozen_at > 0
        )

    def _freeze(self, layers: Layers) -> Change | None:
        """Freezes the front module if it is stale, and stale modules right behind it."""
        stop = front(layers)
        for module in units(layers.names, self._options.unit):
            if module.start >= stop and learns(layers.modules, module):
                if (
                    module.stop > self._most
                    or self._stale.get(module.start, 0) < self._options.window
                ):
                    break
                stop = module.stop
        change = freeze_prefix(layers, stop, f"Egeria, {self._options.window} stale slopes")
        if change is not None:
            self._frozen_at = self._frozen_at or self._rate
            self._forget(change.layers, layers)
        return change

    def _thawed(self, layers: Layers) -> Change:
        frozen = tuple(sorted(layers.frozen))
        layers.unfreeze(frozen)
        at, self._frozen_at = self._frozen_at, 0.0
        self._refer(layers)
        self._stale.clear()
        return Change(
            frozen,
            (
                f"layers {frozen[0]} to {frozen[-1]} train again (Egeria, learning rate "
                f"{self._rate:.3g} after {at:.3g})"
            ),
        )

    def _forget(self, gone: Sequence[int], layers: Layers) -> None:
        self._referenced -= set(gone)
        for layer in gone:
            self._readings.pop(layer, None)
            self._stale.pop(layer, None)
            if layer in layers.own:
                drop(layers.kept(layer))

    # -- measuring ---------------------------------------------------------------------------------

    def _is_due(self, step: int, every: int) -> bool:
        since = step - self._options.start
        return since >= 0 and since % every == 0

    def _reads(self, step: int) -> bool:
        return self._is_due(step, self._options.every)

    def _refers(self, step: int) -> bool:
        return self._is_due(step, self._options.refresh)

    def _watch(self, layers: Layers) -> None:
        """Keeps input and output of the next step's first microbatch."""
        self._seen.clear()
        for layer in layers.own:
            if layer in self._referenced:
                self._hooks.append(
                    layers.modules[layer].register_forward_hook(partial(self._see, layer))
                )

    def _see(self, layer: int, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if layer not in self._seen:  # microbatches come in order
            held = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
            self._seen[layer] = held, relations(output)

    def observe(self, signals: Signals) -> None:
        self._rate = signals.rate
        layers, step = self._layers, signals.step
        assert layers is not None, "a case acts before it observes"
        if self._reads(step) and self._referenced:
            self._read(step, layers)
        if self._refers(step):
            self._refer(layers)

    def _read(self, step: int, layers: Layers) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        table = torch.zeros(layers.count, dtype=torch.float64)
        for layer, (inputs, live) in self._seen.items():
            # NaN means that the layer has changed shape since. There is nothing to compare until
            # the next reference.
            table[layer] = plasticity(
                layers.modules[layer], layers.kept(layer), inputs, live, (self._seed, step, layer)
            )
        self._seen.clear()
        values: list[float] = layers.collective.sum(table, "the plasticity of every layer").tolist()
        for module in units(layers.names, self._options.unit):
            if all(layer in self._referenced for layer in module):
                self._take(module.start, math.fsum(values[layer] for layer in module) / len(module))

    def _take(self, module: int, value: float) -> None:
        if not math.isfinite(value):
            return
        readings = self._readings.setdefault(module, [])
        readings.append(value)
        window = self._options.window
        del readings[: -2 * window]
        if len(readings) < window:
            return
        means = [
            math.fsum(part) / len(part)
            for part in (readings[max(0, i - window + 1) : i + 1] for i in range(len(readings)))
        ]
        steepness = abs(slope(means[-window:]))
        first = self._first_slopes.setdefault(module, [])
        if len(first) < window:
            first.append(steepness)
        self._stale[module] = (
            self._stale.get(module, 0) + 1
            if steepness < self._options.tolerance * max(first)
            else 0
        )

    def _refer(self, layers: Layers) -> None:
        """Takes new references of all layers that train. Their curves start anew."""
        self._readings.clear()
        self._referenced = set(range(self._most)) - layers.frozen
        for layer in layers.own:
            drop(layers.kept(layer))
            if layer in self._referenced:
                layers.kept(layer).update(quantised(layers.modules[layer]))

    # -- state -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "unit": self._options.unit,
            "readings": [[k, v] for k, v in self._readings.items()],
            "first_slopes": [[k, v] for k, v in self._first_slopes.items()],
            "stale": [[k, v] for k, v in self._stale.items()],
            "referenced": sorted(self._referenced),
            "rate": self._rate,
            "frozen_at": self._frozen_at,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._rate = float(state.get("rate", 0.0))
        self._frozen_at = float(state.get("frozen_at", 0.0))
        if "readings" not in state or state.get("unit", self._options.unit) != self._options.unit:
            return  # the state is of another policy or other modules, so begin anew
        self._readings = {int(k): list(v) for k, v in state["readings"]}
        self._first_slopes = {int(k): list(v) for k, v in state["first_slopes"]}
        self._stale = {int(k): int(v) for k, v in state["stale"]}
        self._referenced = set(state["referenced"])


def slope(values: Sequence[float]) -> float:
    """Returns the slope of the least-squares line, per value. 0 for a single value."""
    middle = (len(values) - 1) / 2
    spread = math.fsum((i - middle) ** 2 for i in range(len(values)))
    return math.fsum((i - middle) * y for i, y in enumerate(values)) / spread if spread else 0.0


def relations(output: Any) -> Tensor:
    """Relates up to 64 tokens of an output: A A^T with rows of length 1, float64.

    If the output has several tensors, the first floating-point one counts.
    """
    tensors = (output,) if isinstance(output, Tensor) else output
    a = next(x for x in tensors if isinstance(x, Tensor) and x.is_floating_point()).detach()
    rows = a.reshape(-1, a.shape[-1]) if a.dim() > 1 else a.reshape(-1, 1)
    count = rows.shape[0]
    picked = torch.arange(min(count, _TOKENS), device=rows.device) * count // min(count, _TOKENS)
    rows = rows[picked].double()
    return nn.functional.normalize(rows @ rows.t(), dim=1)


def plasticity(
    module: nn.Module,
    reference: dict[str, Tensor],
    inputs: tuple[Any, ...],
    live: Tensor,
    key: tuple[int, int, int],
) -> float:
    """Compares a layer and its reference on the same input.

    Args:
        module: The layer.
        reference: The result of `quantised` for the layer some steps ago.
        inputs: Inputs of the layer.
        live: `relations` of the layer's output.
        key: (seed, step, layer), which keys the random numbers.
    """
    weights = dequantised(reference)
    if {name: p.shape for name, p in module.named_parameters()} != {
        name: w.shape for name, w in weights.items()
    }:
        return math.nan
    device = live.device
    # Buffers and inputs are copied, since a module may write to them.
    tensors = {name: w.to(device) for name, w in weights.items()} | {
        name: b.clone() for name, b in module.named_buffers()
    }
    seed_forward(device, *key, microbatch=0)
    with torch.no_grad():
        copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs)
        # torch's own tying is off. It puts the parameters of a submodule that is used twice back in
        # the wrong order, and loses one. A layer has each parameter under one name anyway.
        output = functional_call(module, tensors, copies, tie_weights=False)
    difference = live - relations(output)
    return float(difference.square().sum()) / live.shape[0] ** 2


def quantised(module: nn.Module) -> dict[str, Tensor]:
    """Copies a layer's weights to the CPU: matrices in int8 with a scale per row."""
    out: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        weight = parameter.detach().cpu()
        if weight.dim() < 2 or not weight.numel() or not weight.is_floating_point():
            out[f"{_KEPT}{name}/as_is"] = weight.clone()
            continue
        scale = weight.abs().amax(dim=tuple(range(1, weight.dim())), keepdim=True).float() / 127
        steps = weight.float() / torch.where(scale > 0, scale, 1.0)
        out[f"{_KEPT}{name}/int8"] = steps.round().to(torch.int8)
        out[f"{_KEPT}{name}/scale"] = scale.to(weight.dtype)
    return out


def dequantised(kept: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of a reference by parameter name."""
    out: dict[str, Tensor] = {}
    for key, tensor in kept.items():
        name, _, form = key.removeprefix(_KEPT).rpartition("/")
        if key.startswith(_KEPT) and form != "scale":
            scale = kept.get(f"{_KEPT}{name}/scale")
            out[name] = tensor if scale is None else tensor.to(scale.dtype) * scale
    return out


def drop(kept: dict[str, Tensor]) -> None:
    for key in [key for key in kept if key.startswith(_KEPT)]:
        del kept[key]
