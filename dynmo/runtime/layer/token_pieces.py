"""The last layer and its loss, some tokens at a time, so that logits of all never exist.

F keeps the layer's input alone. B runs layer and loss of some tokens forward and backward, then of
the next ones. Only B knows the loss. Nothing is computed twice, and no weight gradient can wait:

    whole        F: logits, loss            B: gradients of logits and input     W: of weights
    in pieces    F: -       B: (logits, loss, gradients of logits, input and weights) of each piece
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from dynmo.data import IGNORED
from dynmo.errors import ConfigError
from dynmo.models.loss import PieceLoss, piece_loss_of
from dynmo.models.model import Model


class TokenPiece(NamedTuple):
    """Some tokens of a microbatch.

    Attributes:
        tokens: Their positions in a row.
        share: Their part of the counted targets of the microbatch, without dimensions.
        finish: Takes the layer's output. Returns the mean loss of the counted targets.
    """

    tokens: slice
    share: Tensor
    finish: Callable[[Any], Tensor]


Cutter = Callable[[Tensor], Iterator[TokenPiece]]
"""Takes the input of the last layer."""


@dataclass(frozen=True)
class TokenPieces:
    """Cuts microbatches into pieces.

    Attributes:
        most: Most tokens of a piece, over all rows.
        loss: The loss of some tokens.
    """

    most_tokens: int
    loss: PieceLoss

    def cut(
        self, hidden: Tensor, targets: object, note: Callable[[Any], None] | None = None
    ) -> Iterator[TokenPiece]:
        """Yields the pieces of a microbatch.

        Args:
            hidden: Input of the last layer, [rows, tokens, width].
            targets: [rows, tokens], as the model's loss takes them.
            note: Called with the layer's output of each piece.
        """
        shape = list(targets.shape) if isinstance(targets, Tensor) else None
        if (
            not isinstance(targets, Tensor)
            or hidden.dim() != 3
            or targets.shape != hidden.shape[:2]
        ):
            raise ConfigError(
                f"train.head_tokens: the last layer takes a tensor of shape {list(hidden.shape)}, "
                f"and the targets {'are no tensor' if shape is None else f'have the shape {shape}'}"
                "; only [rows, tokens, width] and [rows, tokens] can be cut; leave out head_tokens"
            )
        aligned = self.loss.align(targets)
        is_counted = aligned != IGNORED
        total = is_counted.sum().clamp(min=1)
        rows, length = hidden.shape[:2]
        step = max(1, self.most_tokens // rows)
        for start in range(0, length, step):
            tokens = slice(start, start + step)
            share = is_counted[:, tokens].sum() / total
            piece_targets = aligned[:, tokens].contiguous()
            yield TokenPiece(tokens, share, partial(self._finish, piece_targets, note))

    def _finish(self, targets: Tensor, note: Callable[[Any], None] | None, output: Any) -> Tensor:
        if note is not None:
            note(output)
        return self.loss.mean(output, targets)


def token_pieces_of(most_tokens: int | None, model: Model) -> TokenPieces | None:
    """Returns what cuts the microbatches of a model. None: they stay whole.

    Raises:
        ConfigError: The loss of some tokens is not known.
    """
    if most_tokens is None:
        return None
    loss = model.piece_loss or piece_loss_of(model.loss)
    if loss is None:
        raise ConfigError(
            "train.head_tokens needs a loss that can be taken of some tokens: "
            "dynmo.next_token_loss, or that of a model of transformers; leave out head_tokens"
        )
    return TokenPieces(most_tokens, loss)


def piece_inputs(
    module: nn.Module, inputs: tuple[Tensor, ...], tokens: slice
) -> tuple[Tensor, ...]:
    """Returns what the module takes for some tokens.

    A piece of the first input is a leaf of its own. The others are those that the module names.

    Raises:
        ConfigError: The module takes several inputs and does not name those of a piece.
    """
    hidden, *others = inputs
    piece = hidden.detach()[:, tokens].contiguous().requires_grad_(hidden.requires_grad)
    if not others:
        return (piece,)
    of_piece = getattr(module, "inputs_of_a_piece", None)
    if of_piece is None:
        raise ConfigError(
            f"train.head_tokens: the last layer ({type(module).__name__}) takes {len(inputs)} "
            "inputs, of which dynmo cannot cut all; leave out head_tokens"
        )
    return (piece, *of_piece(tuple(others)))
