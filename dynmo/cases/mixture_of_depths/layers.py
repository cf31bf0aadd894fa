"""Blocks that only some tokens pass (mixture of depths, Raposo et al. 2024).

    x' = x + r f(x)    for the selected tokens, with the router's weight r
    x' = x             for the others

f is the sum of what attention and feed-forward add to the stream. Its attention runs among the
selected tokens only.

Training selects the same number of tokens in each row: those with the largest r (expert choice).
That looks at later tokens. So a predictor learns which tokens are selected. Evaluation selects by
the predictor alone. Training may do so too (threshold routing). Then the number of tokens varies.

The predictor has the two published forms. "bce" adds a binary cross entropy on r, which pulls
selected tokens over 0 and others under it. "mlp" is a small network of its own, with a stopped
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo import ModelOptions
from dynmo.cases.mixture_of_depths.kernels import attend_packed, select
from dynmo.cases.mixture_of_depths.options import MixtureOfDepths
from dynmo.extend import WeightTape, add_loss, gpt

# The width of the predictor "mlp" is the stream's width divided by this.
_PREDICTOR_SHARE = 8


def selected_tokens(capacity: float, sequence: int) -> int:
    return max(1, round(capacity * sequence))


class Router(nn.Module):
    """Selects tokens, and predicts the selection.

    Attributes:
        by_threshold: Whether training selects by the predictor.
        seen: Tokens since the last record: all, selected, and predicted right.
    """

    tape: WeightTape | None = None

    def __init__(self, width: int, std: float, options: MixtureOfDepths) -> None:
        super().__init__()
        self.capacity, self.loss_weight = options.capacity, options.predictor_weight
        self.by_threshold = False
        self.seen: tuple[int, int, int | Tensor] = (0, 0, 0)
        self.weight = nn.Linear(width, 1, bias=False)
        nn.init.normal_(self.weight.weight, std=std)
        self.predictor: nn.Sequential | None = None
        if options.predictor == "mlp":
            inner = max(1, width // _PREDICTOR_SHARE)
            self.predictor = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, 1))

    def forward(
        self, x: Tensor, rows: int, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Selects tokens of x, [rows * sequence, hidden].

        Args:
            real: bool [rows * sequence], the tokens that are no padding. Padding is selected last,
                and never by the predictor. None: all.

        Returns:
            Four tensors: `x`, the selected rows of x [selected, hidden], their weights [selected,
            1], and their places int64 [selected], ascending.
        """
        if not self.training:
            index = _without(self._predicted(x), real).nonzero().squeeze(1)
            x, chosen = select(x, index)
            return x, chosen, self.weight(chosen), index
        if self.predictor is None:
            scores = self.weight(x)
            best = self._best(scores.detach(), rows, real)
            guesses = scores
        else:
            with torch.no_grad():
                best = self._best(self.weight(x), rows, real)
            guesses = self.predictor(x.detach())
        chosen_by_best = torch.zeros(x.shape[0], device=x.device).index_fill_(0, best, 1.0)
        guesses = guesses.squeeze(-1).float()
        loss = functional.binary_cross_entropy_with_logits(guesses, chosen_by_best)
        predicted = _without(guesses.detach() > 0, real)
        index = predicted.nonzero().squeeze(1) if self.by_threshold else best
        # The count stays on the device, because reading it would make CUDA wait.
        right = (predicted == chosen_by_best.bool()).sum()
        self.seen = self.seen[0] + len(x), self.seen[1] + len(index), self.seen[2] + right
        x, chosen = select(add_loss(x, self.loss_weight * loss, self.tape), index)
        return x, chosen, self.weight(chosen), index

    def _best(self, scores: Tensor, rows: int, real: Tensor | None) -> Tensor:
        """Finds the places of the largest scores of each row, int64 [rows * selected]."""
        if real is not None:
            scores = scores.squeeze(-1).masked_fill(~real, -torch.inf)
        scores = scores.view(rows, -1)
        count = selected_tokens(self.capacity, scores.shape[1])
        best = scores.topk(count, dim=1).indices.sort(dim=1).values
        return (best + torch.arange(rows, device=best.device)[:, None] * scores.shape[1]).flatten()

    def _predicted(self, x: Tensor) -> Tensor:
        guesses = self.weight(x) if self.predictor is None else self.predictor(x)
        return guesses.squeeze(-1) > 0


def _without(selected: Tensor, real: Tensor | None) -> Tensor:
    """Leaves padding out of a selection."""
    return selected if real is None else selected & real


class RoutedAttentionHalf(gpt.AttentionHalf):
    """Selects tokens, and attends among them. It hands on four tensors:

    stream     [microbatch, sequence, hidden]
    attended   [selected, hidden]    output of the attention of the selected tokens
    weights    [selected, 1]         their weights
    index      int64 [selected]      their places
    """

    # Evaluation selects by the predictor.
    varying_shapes = True

    def __init__(self, m: ModelOptions, router: Router) -> None:
        super().__init__(m)
        self.router = router

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        batch, sequence, hidden = x.shape
        stream, chosen, weights, index = self.router(x.reshape(-1, hidden), batch)
        q, k, v = (
            self.qkv(self.norm(chosen)).view(-1, 3, self.heads, hidden // self.heads).unbind(1)
        )
        times = index % sequence
        cosine, sine = (table[times, None].to(x.dtype) for table in (self.cosine, self.sine))
        if self.training and not self.router.by_threshold:
            lengths = [len(index) // batch] * batch
        else:
            lengths = torch.bincount(index // sequence, minlength=batch).tolist()
        out = attend_packed(gpt.rotate(q, cosine, sine), gpt.rotate(k, cosine, sine), v, lengths)
        return (
            stream.view(x.shape),
            self.dropout(self.proj(out.reshape(-1, hidden))),
            weights,
            index,
        )


def add_selected(
    added: Callable[[Tensor], Tensor], x: Tensor, attended: Tensor, weights: Tensor, index: Tensor
) -> Tensor:
    """Returns the stream, with the output of a routed block added to the selected tokens."""
    stream, chosen = select(x.flatten(0, 1), index)
    return stream.index_add(0, index, weights * (attended + added(chosen + attended))).view(x.shape)


def gpt_layers(options: MixtureOfDepths, layers: gpt.GptLayers) -> gpt.GptLayers:
    """Returns the layers of a GPT with routed blocks."""
    m = layers.model
    routed = options.routed_blocks(m.blocks)

    def attention(block: int) -> nn.Module:
        if block not in routed:
            return layers.attention(block)
        return RoutedAttentionHalf(m, Router(m.hidden, m.init_std, options))

    def feed_forward(block: int) -> nn.Module:
        half = layers.feed_forward(block)
        if block in routed:
            assert isinstance(half, gpt.AddingHalf)
            half.residual = add_selected
        return half

    return replace(layers, attention=attention, feed_forward=feed_forward)
