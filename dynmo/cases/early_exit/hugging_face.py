"""A model of transformers whose tokens leave at exit heads.

    embedding | attention, feed-forward | ... | exit | attention, feed-forward | ... | head

An exit is one more head: the model's own norm and output layer, with the weights of the last head.
A token that has exited keeps its last state, in its place among the hidden states. So later blocks
have it as a source of keys and values, and the last head gives it the output of its exit. A
feed-forward half computes the tokens that remain. An attention half, and a block that cannot be
cut, compute all tokens, and those that have exited stay as they are.

The losses are those of `layers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.cases.early_exit.layers import Leaving, start
from dynmo.cases.early_exit.options import EarlyExit
from dynmo.extend import ConfigError, hugging_face

Tensors = tuple[Tensor, ...]


class State(NamedTuple):
    """What layers hand on behind what a model of transformers hands on.

    Attributes:
        places: int64 [remaining], the tokens that remain, by their places in the microbatch.
        labels: int64 [all tokens], the token that each token should predict, or -100.
        loss: [], the weighted loss of the exits so far.
    """

    places: Tensor
    labels: Tensor
    loss: Tensor


def has_state(carried: Tensors) -> bool:
    """Whether there is a `State`. A check of single layers gives none."""
    return bool(carried) and not carried[-1].dim()


def taken_apart(carried: Tensors) -> tuple[Tensors, Tensor | None, State]:
    """Returns what a model hands on, the states before the last block if they are kept, the rest.

    These states are [all tokens, hidden].
    """
    base, state = carried[:-3], State(*carried[-3:])
    if base and base[-1].dim() == 2 and base[-1].is_floating_point():
        return base[:-1], base[-1], state
    return base, None, state


class ExitEmbedding(hugging_face.EmbeddingLayer):
    """Takes ids and labels, int64 [rows, 2, tokens]."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        pair: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensors:
        if pair.dim() == 2:  # a check of single layers
            return super().forward(pair, attention_mask, position_ids)
        ids, labels = pair.unbind(1)
        carried = super().forward(ids, attention_mask, position_ids)
        places = torch.arange(ids.numel(), device=ids.device)
        loss = torch.zeros((), device=ids.device)
        return *carried, *State(places, hugging_face.next_labels(labels).flatten(), loss)


class ExitBlock(hugging_face.BlockLayer):
    """A block, or one half of it, of the tokens that remain.

    Args:
        keeps: Whether it hands on the states before it. The layers of the block behind it do, too.
    """

    def __init__(
        self,
        shared_model: hugging_face.SharedModel,
        spec: hugging_face.LayerSpec,
        block: nn.Module,
        keeps: bool = False,
    ) -> None:
        super().__init__(shared_model, spec.block or 0, block)
        self._keeps = keeps and spec.half == 0
        attends = shared_model.structure.attention[self.index] is not None
        # A half without the attention computes each token alone.
        self._alone = (
            spec.halves is not None and attends and not hasattr(self, "attention_function")
        )

    def forward(self, hidden: Tensor, *carried: Tensor) -> Tensors:
        if not has_state(carried):
            return super().forward(hidden, *carried)
        base, before, state = taken_apart(carried)
        if self._keeps:
            before = hidden.flatten(0, 1)
        kept, places = () if before is None else (before,), state.places
        if len(places) == hidden.shape[:2].numel():
            return *super().forward(hidden, *base), *kept, *state
        flat = hidden.flatten(0, 1)
        if self._alone:
            mask, positions = hugging_face.unpacked(base)
            arguments = self.arguments(hidden, mask, positions)
            if mask is not None and mask.dim() == 2:
                mask = mask.flatten().index_select(0, places)
            if not len(places):
                mask = places.new_zeros(1)
            rows, *rest = self.run(_rows(flat, places), base, arguments, mask)
            rows = rows[0, : len(places)]
        else:
            out, *rest = super().forward(hidden, *base)
            rows = out.flatten(0, 1).index_select(0, places)
        out = flat.index_copy(0, places, rows).view_as(hidden)
        return out, *rest, *kept, *state


class ExitLayer(hugging_face.HuggingFaceLayer, Leaving):
    """Predicts, and lets the tokens go whose confidence is over the threshold."""

    def __init__(
        self,
        options: EarlyExit,
        block: int,
        kinds: hugging_face.LayerKinds,
        head: hugging_face.HeadLayer,
    ) -> None:
        super().__init__(head.shared_model)
        # No other layer has these names.
        self.exit_heads = nn.ModuleDict({str(block): head})
        self._std = kinds.std
        self.decide_by(options, block, kinds.blocks)
        if self.compares == "classifier":
            self.exit_classifiers = nn.ModuleDict({str(block): nn.Linear(kinds.width, 1)})

    @property
    def of_folder(self) -> hugging_face.HeadLayer:
        (head,) = self.exit_heads.values()
        assert isinstance(head, hugging_face.HeadLayer)
        return head

    def start_own(self) -> None:
        if self.compares == "classifier":
            for each in self.exit_classifiers.values():
                start(cast(nn.Linear, each), self._std)

    def guess(self, x: Tensor) -> Tensor:
        (classifier,) = self.exit_classifiers.values()
        return classifier(x)

    def types_in(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        (key,) = self.exit_heads
        types = self.of_folder.types_in(dtype)
        return {f"exit_heads.{key}.{name}": each for name, each in types.items()}

    def forward(self, hidden: Tensor, *carried: Tensor) -> Tensors:
        if not has_state(carried):
            return hidden, *carried
        base, before, state = taken_apart(carried)
        flat, places = hidden.flatten(0, 1), state.places
        x = flat.index_select(0, places)
        before = None if before is None else before.index_select(0, places)
        if not self.training:
            if self.exits:
                logits = self._logits(x) if self.needs_logits else None
                leaves = self.leaves(x, logits, before, places, hidden.shape[1])
                state = state._replace(places=places[~leaves])
            return hidden, *base, *state
        logits, targets = self._logits(x), state.labels.index_select(0, places)
        each = functional.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
        own = self.weight * each.sum()
        hidden = self.teach(hidden, x, logits, targets)
        if self.exits:
            leaves = self.leaves(x, logits, before, places, hidden.shape[1])
            own = own + self.later * torch.where(leaves, each, 0).sum()
            state = state._replace(places=places[~leaves])
            exited = len(places) - len(state.places)
            self.seen = self.seen[0] + len(flat), self.seen[1] + exited
        count = (state.labels != -100).sum().clamp_min(1)
        return hidden, *base, *state._replace(loss=state.loss + own / (self.total * count))

    def _logits(self, x: Tensor) -> Tensor:
        return _logits_of(self.of_folder, x).float()


def _rows(x: Tensor, places: Tensor) -> Tensor:
    """Returns rows of x as a batch of one, [1, rows, hidden], or a row of zeros for none.

    The code of transformers does not take none.
    """
    return (x.index_select(0, places) if len(places) else x.new_zeros(1, x.shape[1]))[None]


def _logits_of(head: hugging_face.HeadLayer, x: Tensor) -> Tensor:
    """Returns the logits of states [tokens, hidden]."""
    some = x if len(x) else x.new_zeros(1, x.shape[1])
    return head.logits(some[None])[0, : len(x)]


class ExitFinalHead(hugging_face.HeadLayer):
    """The head of the tokens that remain. In an evaluation it gives each token its output.

    In training it returns what `ExitLoss` takes.
    """

    def forward(self, hidden: Tensor, *carried: Tensor) -> Any:
        if not has_state(carried):
            return super().forward(hidden, *carried)
        base, _, state = taken_apart(carried)
        if not self.training:
            return super().forward(hidden, *base)
        x = hidden.flatten(0, 1).index_select(0, state.places)
        router, (_, sums) = self.shared_model.router, hugging_face.without_sums(base)
        of_router = () if router is None else (router.loss(*sums),)
        return _logits_of(self, x), *of_router, state.places, state.loss


@dataclass(frozen=True)
class ExitLoss:
    """The loss of what `ExitFinalHead` returns.

    Attributes:
        loss: That of all logits.
        router: The loss of the routers, if there is one.
        share: Weight of the last head, over that of all heads.
    """

    loss: hugging_face.Loss
    router: hugging_face.RouterLoss | None
    share: float

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        of_router = 0.0 if self.router is None else self.router.part(output)
        if not isinstance(output, tuple) or output[-1].dim():
            logits = output if self.router is None else output[0]
            return self.loss(logits, labels) + of_router
        logits, places, exits = output[0], output[-2], output[-1]
        targets = hugging_face.next_labels(labels).flatten()
        count = (targets != -100).sum().clamp_min(1)
        each = functional.cross_entropy(
            logits.float(), targets.index_select(0, places), reduction="sum", ignore_index=-100
        )
        return exits + each * (self.share / count) + of_router


def layers_of(options: EarlyExit, kinds: hugging_face.LayerKinds) -> hugging_face.LayerKinds:
    """Returns what makes the layers of a model of transformers whose tokens exit."""
    exits, weights = options.exits_of(kinds.blocks), options.loss_weights(kinds.blocks)
    wrong = next((each for each in exits if each >= kinds.blocks - 1), None)
    if wrong is not None or not exits or sorted({*exits}) != list(exits):
        raise ConfigError(
            f"dynamism.early_exit.exits = {list(exits)}: give blocks of 0 to {kinds.blocks - 2}, "
            "ascending; behind the last block is the head"
        )

    def block(
        shared_model: hugging_face.SharedModel, spec: hugging_face.LayerSpec, own: nn.Module
    ) -> ExitBlock:
        keeps = options.compares == "state" and spec.block in exits
        return ExitBlock(shared_model, spec, own, keeps)

    heads: Mapping[int, Any] = {each: partial(ExitLayer, options, each, kinds) for each in exits}
    return replace(
        kinds,
        embedding=ExitEmbedding,
        block=block,
        head=ExitFinalHead,
        heads=heads,
        loss=lambda loss, router: ExitLoss(loss, router, weights[-1] / sum(weights)),
        takes_labels=True,
    )
