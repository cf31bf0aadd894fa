"""How many targets of a microbatch its loss counts.

A loss is a mean over the counted targets of a microbatch. The loss of a step is the mean over those
of the whole step, so each microbatch has the weight of its count. A loss that says that it is a sum
stays one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.data import IGNORED
from dynmo.errors import InputError

Counter = Callable[[Any], "Tensor | float"]
"""Takes the targets of a microbatch. Returns how many of them the loss counts."""

Loss = Callable[[Any, Any], Tensor]


class PieceLoss(NamedTuple):
    """A loss that can be taken of some tokens.

    Attributes:
        align: Takes the targets of a microbatch. Returns them in the places of the outputs that
            they are compared with.
        mean: Takes (output, aligned targets) of some tokens. Returns the mean over those that
            count.
    """

    align: Callable[[Tensor], Tensor]
    mean: Loss


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy.

    Args:
        logits: [..., vocabulary], of any floating-point type. Computed in float32.
        targets: [...] of token ids. A target of -100 does not count.

    Returns:
        A tensor without dimensions.

    Example:
        >>> import torch
        >>> logits, targets = torch.zeros(2, 3, 10), torch.zeros(2, 3, dtype=torch.long)
        >>> round(float(next_token_loss(logits, targets)), 4)
        2.3026
    """
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1)
    )


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy of the next tokens, with labels as transformers has them.

    Args:
        logits: [rows, tokens, vocabulary], of any floating-point type. Computed in float32.
        labels: [rows, tokens] of token ids, in the places of the ids. The label of a token is
            compared with the logits of the token before. -100 does not count.

    Returns:
        A tensor without dimensions.
    """
    labels, logits = next_labels(labels), logits.float()
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def next_labels(labels: Tensor) -> Tensor:
    """Returns the label of the next token in the place of each token."""
    return functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()


def piece_loss_of(loss: object) -> PieceLoss | None:
    """Returns a loss of some tokens. None for a loss that is not known."""
    if loss is next_token_loss:
        return PieceLoss(lambda targets: targets, next_token_loss)
    if loss is causal_lm_loss:
        return PieceLoss(next_labels, next_token_loss)
    return None


def count_labels(labels: Tensor) -> Tensor:
    """Counts the labels that `causal_lm_loss` compares."""
    return (labels[..., 1:] != IGNORED).sum()


def counter_of(loss: object) -> Counter | None:
    """Returns the counter of torch's cross entropy. None for a loss that is not known."""
    loss, given = _parts_of(loss)
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        given = {
            "weight": loss.weight,
            "ignore_index": loss.ignore_index,
            "reduction": loss.reduction,
        }
    elif loss not in (next_token_loss, functional.cross_entropy, functional.nll_loss):
        return None
    if given.get("weight") is not None or given.get("reduction", "mean") != "mean":
        return None
    return partial(count_targets, ignored=given.get("ignore_index", IGNORED))


def is_sum(loss: object) -> bool:
    """Whether a loss has `reduction="sum"`, as torch's losses have it."""
    loss, given = _parts_of(loss)
    return given.get("reduction", getattr(loss, "reduction", None)) == "sum"


def _parts_of(loss: object) -> tuple[object, dict[str, Any]]:
    """Returns the function within partials, and their keywords."""
    given: dict[str, Any] = {}
    while isinstance(loss, partial):
        given = loss.keywords | given
        loss = cast(object, loss.func)
    return loss, given


def count_targets(targets: Tensor, ignored: int = IGNORED) -> Tensor | int:
    """Counts the targets of a cross entropy that are not ignored.

    Args:
        targets: Class indices [...], or probabilities [microbatch, classes, ...]. All of these
            count.
        ignored: The index that does not count.
    """
    if targets.is_floating_point():
        return targets.numel() // max(1, targets.shape[min(1, targets.dim() - 1)])
    return (targets != ignored).sum()


def counts_of(counter: Counter | None, targets: Sequence[Any] | Tensor) -> list[float]:
    """Returns the number of counted targets of each microbatch.

    Raises:
        InputError: The counter returns no number of at least 0.
    """
    if counter is None:
        return [1.0] * len(targets)
    counts = [counter(each) for each in targets]
    if counts and all(isinstance(each, Tensor) and each.dim() == 0 for each in counts):
        counts = torch.stack(cast("list[Tensor]", counts)).tolist()  # one wait for the device
    for each in cast("list[object]", counts):
        if not isinstance(each, Real) or not 0 <= float(each) < math.inf:
            raise InputError(
                f"count returned {each!r}; it must return how many targets of a microbatch the "
                "loss counts, a number of at least 0"
            )
    return [float(each) for each in counts]


def joined(losses: Tensor, counts: Sequence[float], sums: bool = False) -> float:
    """Returns the mean over all counted targets, from the means of microbatches.

    Args:
        losses: float64 [microbatches]. A microbatch without counted targets may have any number.
        counts: Counted targets of each microbatch.
        sums: Whether the losses are sums. Their sum is returned.
    """
    total = sum(counts)
    if not total:
        return math.nan
    if sums:
        return float(losses[torch.tensor(counts) > 0].sum())
    if min(counts) == max(counts):
        return float(losses.clone().mean())
    weights = torch.tensor(counts, dtype=torch.float64) / total
    return float((losses * weights)[weights > 0].sum())
