"""Sparse attention: from a step on, some blocks compute only a part of the pairs.

Sources: DynMo 2.2 and F.5.

`hash_attention` computes the pairs in one hash bucket, `drop_attention` those of the queries and
keys that are not dropped. F and B of the attention fall, W does not.

Directions (or dropped vectors) are drawn anew each step from a stream keyed by seed, layer and
step. Every rank tells all layers, also those of other ranks, what they compute at this step. So a
layer that moves knows already, and nothing has to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn

from dynmo import Change, Dynamism, Forecast, Layers
from dynmo.cases.sparse_attention import SparseAttention as SparseAttentionOptions
from dynmo.cases.sparse_attention.dropped import Dropped
from dynmo.cases.sparse_attention.hashed import Hashed
from dynmo.extend import ConfigError, RunFacts, case_seed, layers_that

Blocks = Sequence[int] | None
"""Indices of blocks. None means all."""


class SparseAttentionCase(Dynamism):
    """Makes the attention of some blocks sparse."""

    name = "sparse_attention"

    def __init__(
        self,
        schedule: Sequence[tuple[int, Blocks]],
        kind: Callable[[int], Hashed | Dropped],
        seed: int,
        ratio: tuple[float, float] | None = None,
    ) -> None:
        self._schedule, self._kind, self._seed, self._ratio = tuple(schedule), kind, seed, ratio
        self._halves: list[int] = []
        self._sparse: frozenset[int] = frozenset()

    def check(self, modules: Sequence[nn.Module]) -> None:
        halves = attention_halves(modules)
        named = max((block for _, blocks in self._schedule for block in blocks or ()), default=0)
        if named >= len(halves):
            raise ConfigError(
                f"dynamism.sparse_attention names block {named}, but the model has {len(halves)} "
                f"attention halves, from 0 to {len(halves) - 1}"
            )

    def act(self, step: int, layers: Layers) -> Change | None:
        self._halves = attention_halves(layers.modules)
        before, self._sparse = self._sparse, self._wanted(step)
        for index in self._halves:
            sparse = None
            if index in self._sparse:
                sparse = self._kind(case_seed(self._seed, index, step))
            module: Any = layers.modules[index]  # of any class
            if hasattr(module, "attention_function"):
                module.attention_function = sparse and sparse.of_pairs
            else:
                module.sparse_attention = sparse
        if before == self._sparse:
            return None
        share = f"{len(self._sparse)} of {len(self._halves)}"
        what = f"{share} attention halves are sparse (schedule, step {step})"
        return Change(tuple(sorted(before ^ self._sparse)), what)

    def acts(self, step: int) -> bool:
        # New directions for every step are no change, because only later forwards read them.
        return not self._halves or self._wanted(step) != self._sparse

    def _wanted(self, step: int) -> frozenset[int]:
        """Returns the layers that are sparse at a step."""
        begun = [blocks for at, blocks in self._schedule if at <= step]
        if not begun:
            return frozenset()
        blocks = begun[-1]
        if blocks is None:
            return frozenset(self._halves)
        return frozenset(self._halves[block] for block in blocks)

    def forecast(self, step: int) -> Sequence[Forecast]:
        if self._ratio is None or not self._halves:
            return ()
        forecasts, before = list[Forecast](), self._sparse
        f, b = self._ratio
        for at, _ in self._schedule:
            if at <= step:
                continue
            then = self._wanted(at)
            # A factor is relative to the time that a layer takes now. A layer that becomes sparse
            # and dense again takes the same time as now.
            factors = dict[tuple[float, float], list[int]]()
            for index in (*sorted(then - before), *sorted(before - then)):
                sparse = index in then
                changes = sparse != (index in self._sparse)
                pair = (1.0, 1.0) if not changes else (f, b) if sparse else (1 / f, 1 / b)
                factors.setdefault(pair, []).append(index)
            forecasts += [Forecast(at, tuple(which), *pair) for pair, which in factors.items()]
            before = then
        return forecasts

    def state(self) -> dict[str, Any]:
        return {"sparse": sorted(self._sparse)}

    def load(self, state: dict[str, Any]) -> None:
        self._sparse = frozenset(state["sparse"])


def attention_halves(modules: Sequence[nn.Module]) -> list[int]:
    """Returns the layers that have `sparse_attention` or `attention_function`."""
    return layers_that(
        lambda module: hasattr(module, "sparse_attention") or hasattr(module, "attention_function"),
        modules,
        "sparse_attention, but no layer of the model has attention that can be sparse; give one "
        "of your own an attribute `attention_function` as "
        "dynmo.models.huggingface.layers.BlockLayer has, or `sparse_attention` as "
        "dynmo.cases.sparse_attention.layers.SharedAttentionHalf",
    )


def expected_ratio(hidden: int, sequence: int, share: float) -> tuple[float, float]:
    """Returns F and B of a sparse half, over those of a dense one.

    The half has P = 3 hidden^2 weights and A = 2 sequence hidden.
    """
    linear, attention = 6 * hidden**2, 2 * sequence * hidden
    return (linear + share * attention) / (linear + attention), (
        linear + 2.5 * share * attention
    ) / (linear + 2.5 * attention)


def make(options: SparseAttentionOptions, run: RunFacts) -> Dynamism:
    is_hf = run.model is not None and run.model.kind == "hf"
    if options.kind == "drop":
        kind, share = partial(Dropped, options.drop, options.tile), (1 - options.drop) ** 2
        if run.on_cuda and not is_hf:
            raise ConfigError(
                'dynamism.sparse_attention.kind = "drop" has no CUDA kernel; use "hash", or '
                'parallel.device = "cpu"'
            )
    else:
        kind, share = partial(Hashed, options.buckets, options.tile), 1 / options.buckets
        if run.on_cuda and not is_hf and find_spec("triton") is None:
            raise ConfigError(
                'dynamism.sparse_attention.kind = "hash" needs triton on CUDA; install it, or use '
                'parallel.device = "cpu"'
            )
    model, ratio = run.model, None
    if model is not None and model.kind == "gpt":
        ratio = expected_ratio(model.hidden, model.sequence, share)
    schedule = options.schedule or ((options.start, options.blocks),)
    return SparseAttentionCase(schedule, kind, run.seed, ratio)
