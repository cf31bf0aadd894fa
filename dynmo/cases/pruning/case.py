"""Gradual pruning: weights of least magnitude leave for good, a few at a time.

Sources: Zhu & Gupta 2017, and DynMo 2.2 and C.1.

    sparsity  S_t = S_f + (S_i - S_f) (1 - (t - t0) / (t1 - t0))^3

The linears of every layer are pruned, except those of the first and the last layer (embedding,
head). A frozen layer is left alone.

The global criterion keeps the k largest weights of all layers, on any rank. Magnitudes order like
their bit patterns. So three histograms, summed over the ranks, find the smallest weight that is
kept, digit by digit. The result is exact. Of equal magnitudes, the weight in the lower layer stays.
Within a layer, the weight at the lower position stays.

    bit pattern of |w|   0 eeeeeeee mmm | mmmmmmmmmm | mmmmmmmmmm
                              11 bits   |  10 bits   |  10 bits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from dynmo import Change, Dynamism, Forecast, Layers
from dynmo.cases.pruning.crossover import known_crossover
from dynmo.cases.pruning.options import Pruning
from dynmo.cases.pruning.sparse_linear import (
    SparseLinear,
    dense_size,
    linears,
    prune,
    survivors,
    weight_name,
)
from dynmo.extend import ConfigError, RunFacts

_DENSE_BELOW_ON_CPU = 0.75
# Rows of a matrix product that are timed if nobody knows the size of a microbatch.
_USUAL_TOKENS = 1024


@dataclass(frozen=True)
class Cubic:
    """The steps that prune, and their sparsity."""

    initial: float
    final: float
    start: int
    end: int
    every: int

    @property
    def steps(self) -> tuple[int, ...]:
        return (*range(self.start, self.end, self.every), self.end)

    def sparsity(self, step: int) -> float:
        """Returns the target after pruning at `step`."""
        if step < self.start:
            return 0.0
        left = 1 - (step - self.start) / (self.end - self.start) if step < self.end else 0.0
        return self.final + (self.initial - self.final) * left**3


# -- which weights stay ----------------------------------------------------------------------------


Sum: TypeAlias = Callable[[Tensor, str], Tensor]
"""Adds a tensor up over the ranks, in place."""


@dataclass(frozen=True)
class Candidates:
    """The candidates of one layer: flat tensors in order, made one at a time.

    Those of a linear under a mask are a copy. If weights have float32 masters, the masters are
    compared, because too many rounded weights would be equal.
    """

    module: nn.Module
    masters: Mapping[str, Tensor]

    def __iter__(self) -> Iterator[Tensor]:
        return (
            survivors(x, self.masters.get(f"{weight_name(name)}/master"))
            for name, x in linears(self.module)
        )


def masters(layer: int, layers: Layers) -> dict[str, Tensor]:
    """Returns the float32 masters among a layer's moments."""
    if all(x.weight.dtype.itemsize >= 4 for _, x in linears(layers.modules[layer])):
        return {}
    return {key: moment for key, moment in layers.moments(layer).items() if key.endswith("/master")}


@dataclass(frozen=True)
class Threshold:
    """The weights that stay.

    Attributes:
        bits: Magnitudes whose bit pattern is over this stay.
        ties: For each layer, how many of the magnitudes equal to it stay, the first ones.
    """

    bits: int
    ties: tuple[int, ...]

    def keep(self, layer: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Returns one bool per candidate of a layer, True for those that stay."""
        left, out = self.ties[layer], list[Tensor]()
        for tensor in tensors:
            keys = _keys(tensor)
            stays = keys > self.bits
            equal = (keys == self.bits).nonzero()[:left, 0]
            stays[equal] = True
            left -= len(equal)
            out.append(stays)
        return out


def _keys(tensor: Tensor) -> Tensor:
    """Returns integers that order as magnitudes do.

    NaN is over all, because the loss must find a broken weight. Weights in float64 are compared by
    their rounded magnitudes.
    """
    return tensor.detach().float().abs().view(torch.int32)


_DIGITS = ((20, 11), (10, 10), (0, 10))  # shift and width in bits, the highest first


def find_threshold(
    parts: Mapping[int, Iterable[Tensor]], keep: int, layers: int, total: Sum
) -> Threshold:
    """Finds the threshold that keeps exactly `keep` of the candidates of all ranks.

    If there are no more than that, all stay. Works on one tensor at a time.

    Args:
        parts: The candidates on this rank, by layer. They are listed several times.
    """
    bits, left = 0, keep
    for shift, width in _DIGITS:
        counts = torch.zeros(1 << width, dtype=torch.int64)
        for tensors in parts.values():
            for keys in map(_keys, tensors):
                near = keys[(keys >> (shift + width)) == bits]
                digits = (near >> shift) & ((1 << width) - 1)
                counts += torch.bincount(digits, minlength=1 << width).cpu()
        from_top = total(counts, "the magnitudes of all weights").flip(0).cumsum(0)
        if shift + width == 31 and int(from_top[-1]) <= keep:
            return Threshold(-1, (0,) * layers)
        if keep <= 0:
            return Threshold(2**31 - 1, (0,) * layers)
        place = int((from_top < left).sum())
        left -= int(from_top[place - 1]) if place else 0
        bits = (bits << width) | ((1 << width) - 1 - place)
    equal = torch.zeros(layers, dtype=torch.int64)
    for layer, tensors in parts.items():
        equal[layer] = sum(int((_keys(tensor) == bits).sum()) for tensor in tensors)
    total(equal, "the weights at the threshold")
    before = equal.cumsum(0) - equal
    return Threshold(bits, tuple(torch.minimum((left - before).clamp(min=0), equal).tolist()))


# -- the case --------------------------------------------------------------------------------------


@final
class PruningCase(Dynamism):
    """Prunes the linears of all layers but the first and the last."""

    name = "pruning"
    announces = True
    divides_parameters = True

    def __init__(self, options: Pruning, run: RunFacts) -> None:
        steps = options.steps_of(run.steps)
        self._schedule = Cubic(options.initial_sparsity, options.final_sparsity, *steps)
        self._criterion, given = options.criterion, options.dense_below
        self._tokens = _USUAL_TOKENS if run.tokens is None else run.tokens
        # None: by shape, some of which are known before.
        self._dense_below = given if isinstance(given, float) else None
        if given == "auto" and not run.on_cuda:
            self._dense_below = _DENSE_BELOW_ON_CPU
        self._known = given if isinstance(given, dict) else {}
        self._measured = dict(self._known)
        self._sparsity = 0.0
        self._targets: tuple[int, ...] = ()

    def check(self, modules: Sequence[nn.Module]) -> None:
        inner = range(1, len(modules) - 1)
        self._targets = tuple(i for i in inner if any(True for _ in linears(modules[i])))
        if not self._targets:
            raise ConfigError(
                "dynamism.pruning: no layer but the first and the last has an nn.Linear to prune; "
                "leave the case out"
            )

    def act(self, step: int, layers: Layers) -> Change | None:
        if not self._targets:
            self.check(layers.modules)
        targets = tuple(i for i in self._targets if i not in layers.frozen)
        wanted = self._schedule.sparsity(step)
        if not self.acts(step) or not targets or wanted <= 0:
            return None
        measured = self._measure(targets, layers)
        modules, total = layers.modules, layers.collective.sum
        parts = {i: Candidates(modules[i], masters(i, layers)) for i in layers.own if i in targets}
        sizes = {i: sum(dense_size(linear) for _, linear in linears(modules[i])) for i in targets}
        keep = round((1 - wanted) * sum(sizes.values()))
        everyone = (
            find_threshold(parts, keep, layers.count, total)
            if self._criterion == "global"
            else None
        )
        # Columns per layer: weights before, weights after, linears, linears in sparse form.
        table = torch.zeros(layers.count, 4, dtype=torch.int64)
        for index, tensors in parts.items():
            if everyone is None:  # the threshold of a single layer knows it as layer 0
                keep = round((1 - wanted) * sizes[index])
                keeps = find_threshold({0: tensors}, keep, 1, lambda counts, _: counts).keep(
                    0, tensors
                )
            else:
                keeps = everyone.keep(index, tensors)
            if not all(bool(kept.all()) for kept in keeps):
                self._prune(index, layers, keeps)
            now = [linear for _, linear in linears(modules[index])]
            sparse = sum(isinstance(x, SparseLinear) for x in now)
            counts = sum(map(len, keeps)), sum(len(survivors(x)) for x in now), len(now), sparse
            table[index] = torch.tensor(counts)
        total(table, "all layers to be pruned")
        before, after, count, sparse = table.sum(0).tolist()
        self._sparsity = wanted
        if before == after:
            return None
        shares = [1 - int(table[i, 1]) / sizes[i] for i in targets]
        what = (
            f"pruned to sparsity {1 - after / sum(sizes.values()):.4f} ({self._criterion} "
            f"magnitude; layers {min(shares):.3f} to {max(shares):.3f}): {after} of "
            f"{sum(sizes.values())} weights; {sparse} of {count} linears run sparse{measured}"
        )
        options = {} if self._measured == self._known else {"dense_below": dict(self._measured)}
        return Change(targets, what, options)

    def acts(self, step: int) -> bool:
        return step in self._schedule.steps

    def _prune(self, index: int, layers: Layers, keeps: Sequence[Tensor]) -> None:
        moments = dict(layers.moments(index))
        for (name, linear), keep in zip(list(linears(layers.modules[index])), keeps, strict=True):
            sparse = 1 - int(keep.sum()) / dense_size(linear) >= self._threshold(linear)
            prefix = f"{weight_name(name)}/"
            own = {key: moment for key, moment in moments.items() if key.startswith(prefix)}
            moments |= prune(linear, keep, sparse, own)
        layers.rebuild(index, moments)

    def _threshold(self, linear: nn.Linear) -> float:
        return self._measured[_shape(linear)] if self._dense_below is None else self._dense_below

    def _measure(self, targets: Sequence[int], layers: Layers) -> str:
        """Measures shapes that are not known yet. Returns a text about them for the log."""
        if self._dense_below is not None:
            return ""
        first: dict[str, tuple[int, nn.Linear]] = {}
        for index in targets:
            for _, linear in linears(layers.modules[index]):
                first.setdefault(_shape(linear), (index, linear))
        new = sorted(first.keys() - self._measured.keys())
        if new:
            table = torch.zeros(len(new), dtype=torch.float64)
            for place, (index, linear) in enumerate(first[shape] for shape in new):
                if index in layers.own:
                    table[place] = known_crossover(linear, self._tokens)
            layers.collective.sum(table, "the sparse kernels to be measured")
            self._measured |= dict(zip(new, table.tolist(), strict=True))
        return "; sparse pays from " + ", ".join(
            f"{x:.3f} at {shape}" for shape, x in self._measured.items()
        )

    def forecast(self, step: int) -> Sequence[Forecast]:
        """Forecasts as if all layers lose alike, and linears take all of a layer's time."""
        out, now = list[Forecast](), self._sparsity
        for at in self._schedule.steps:
            then = self._schedule.sparsity(at)
            if at > step and then > now:
                factor = self._time(then) / self._time(now)
                out.append(Forecast(at, self._targets, factor, factor, factor))
        return out

    def _time(self, sparsity: float) -> float:
        known = self._measured.values() if self._dense_below is None else [self._dense_below]
        return 1.0 if sparsity < min(known, default=1.0) else 1 - sparsity

    def state(self) -> dict[str, Any]:
        return {"sparsity": self._sparsity, "measured": self._measured}

    def load(self, state: dict[str, Any]) -> None:
        self._sparsity = float(state["sparsity"])
        self._measured = {**state["measured"], **self._known}


def _shape(linear: nn.Linear) -> str:
    return f"{linear.out_features}x{linear.in_features}"


def make(options: Pruning, run: RunFacts) -> Dynamism:
    return PruningCase(options, run)
