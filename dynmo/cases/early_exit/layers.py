"""A GPT whose tokens leave at exit heads.

Sources: CALM (Schuster et al. 2022) and ADP-C (Liu et al. 2022).

    embedding | attention, feed-forward | ... | exit | attention, feed-forward | ... | head

The last state of a token that exits is its output. It is also its source for keys and values in the
attention of later blocks. Layers hand on the six tensors of a `TokenState`.

A token that has exited keeps the output of its exit. In training the loss is sum(w l) / sum(w) over
exits and head, each the mean over all tokens. CALM weighs by depth, ADP-C equally. In evaluation it
is the loss of the outputs alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo import ModelOptions
from dynmo.cases.early_exit.kernels import attend_kept, merge
from dynmo.cases.early_exit.options import EarlyExit
from dynmo.extend import WeightTape, add_loss, gpt

Tensors = tuple[Tensor, ...]

# CALM's threshold falls over a sequence: 0.9 L + 0.1 L exp(-4 t / N) at token t of N.
_STEEPNESS = 4.0


class TokenState(NamedTuple):
    """The six tensors that layers hand on.

    Attributes:
        x: [tokens, hidden], states of the tokens that remain.
        places: int64 [tokens], their places in the microbatch, ascending.
        exited: [gone, hidden], last states of the tokens that have exited.
        exited_places: int64 [gone], their places in the microbatch.
        targets: int64 [all tokens], the token that each token should predict.
        loss: [], the weighted loss of the exits so far.
    """

    x: Tensor
    places: Tensor
    exited: Tensor
    exited_places: Tensor
    targets: Tensor
    loss: Tensor

    def split(self, leaves: Tensor) -> TokenState:
        stay, gone = (~leaves).nonzero().squeeze(1), leaves.nonzero().squeeze(1)
        if not len(gone):
            return self
        return self._replace(
            x=self.x[stay],
            places=self.places[stay],
            exited=torch.cat((self.exited, self.x[gone])),
            exited_places=torch.cat((self.exited_places, self.places[gone])),
        )


class ExitEmbedding(gpt.Embedding):
    """Ids and targets, int64 [microbatch, 2, sequence] -> a `TokenState`."""

    def forward(self, pair: Tensor) -> Tensors:  # pyright: ignore[reportIncompatibleMethodOverride]
        ids, targets = pair.unbind(1)
        x = super().forward(ids.reshape(-1))
        places = torch.arange(x.shape[0], device=x.device)
        loss = torch.zeros((), device=x.device)
        nothing = x.new_empty(0, x.shape[1])
        return tuple(TokenState(x, places, nothing, places[:0], targets.reshape(-1), loss))


class ExitAttentionHalf(gpt.RotaryAttention):
    """Causal rotary attention of the tokens that remain to all tokens.

    With `keeps_state` it hands on the states before this block too, for an exit that compares them.
    """

    def __init__(self, m: ModelOptions, keeps_state: bool = False) -> None:
        super().__init__(m)
        self.sequence, self.keeps_state = m.sequence, keeps_state
        # Two layers, because tokens that have exited need keys and values, but no queries.
        self.q = nn.Linear(m.hidden, m.hidden, bias=False)
        self.kv = nn.Linear(m.hidden, 2 * m.hidden, bias=False)
        self.proj = nn.Linear(m.hidden, m.hidden, bias=False)
        nn.init.normal_(self.q.weight, std=m.init_std)
        nn.init.normal_(self.kv.weight, std=m.init_std)
        nn.init.normal_(self.proj.weight, std=m.residual_std)

    def forward(self, *tensors: Tensor) -> Tensors:
        state = TokenState(*tensors)
        x = state.x
        nothing_exited = not state.exited.shape[0]
        states = x if nothing_exited else merge(x, state.places, state.exited, state.exited_places)
        shape = -1, self.sequence, self.heads, states.shape[1] // self.heads
        normed = self.norm(states)
        k, v = self.kv(normed).chunk(2, dim=-1)
        k, v = k.reshape(shape), v.reshape(shape)
        cosine, sine = (table[:, None].to(x.dtype) for table in (self.cosine, self.sine))
        k = gpt.rotate(k, cosine, sine)
        if nothing_exited:
            q = gpt.rotate(self.q(normed).reshape(shape), cosine, sine)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            times = state.places % self.sequence
            q = gpt.rotate(
                self.q(self.norm(x)).unflatten(-1, shape[2:]), cosine[times], sine[times]
            )
            out = attend_kept(q, k, v, state.places)
        y = x + self.dropout(self.proj(out.reshape(x.shape)))
        after = tuple(state._replace(x=y))
        return (*after, x) if self.keeps_state else after


class Leaving(nn.Module):
    """Says which tokens leave at an exit.

    Attributes:
        exits: Whether tokens leave. If not, the exit only adds its loss.
        seen: Tokens trained since the last record: all, and those that left.
    """

    tape: WeightTape | None = None

    def decide_by(self, options: EarlyExit, block: int, blocks: int) -> None:
        """Takes what the options say of an exit after a block."""
        self.compares = options.compares
        self.threshold, self.decays = options.threshold_of_policy, options.policy == "calm"
        weights, place = options.loss_weights(blocks), options.exits_of(blocks).index(block)
        # The weights of this exit's loss, of later exits and the head, and of all.
        self.weight, self.later = weights[place], sum(weights[place + 1 :])
        self.total = sum(weights)
        self.exits, self.seen = False, (0, 0)

    @abstractmethod
    def guess(self, x: Tensor) -> Tensor:
        """Returns what a classifier gives for states [tokens, hidden]: [tokens, 1]."""

    @property
    def needs_logits(self) -> bool:
        return self.compares in ("softmax", "top-1")

    def leaves(
        self, x: Tensor, logits: Tensor | None, before: Tensor | None, places: Tensor, sequence: int
    ) -> Tensor:
        """Returns which of the states leave, bool [tokens].

        Args:
            x: States [tokens, hidden].
            logits: Their predictions, if these decide.
            before: The states before the block, if these decide.
            places: Places of the states in the microbatch.
            sequence: Tokens of a row.
        """
        with torch.no_grad():
            confidence = self._confidence(x, logits, before)
            return confidence > self.thresholds(places, sequence)

    def thresholds(self, places: Tensor, sequence: int) -> Tensor:
        """Returns the confidence over which the tokens at some places exit."""
        if not self.decays:
            return torch.full(places.shape, self.threshold, device=places.device)
        time = (places % sequence).float() / sequence
        return (self.threshold * (0.9 + 0.1 * torch.exp(-_STEEPNESS * time))).clamp(0, 1)

    def _confidence(self, x: Tensor, logits: Tensor | None, before: Tensor | None) -> Tensor:
        kind = self.compares
        if kind == "state":
            assert before is not None, "the block before this exit keeps the states"
            return functional.cosine_similarity(x.float(), before.float(), dim=-1)
        if kind == "classifier":
            return self.guess(x).float().sigmoid().squeeze(-1)
        assert logits is not None
        whole = logits.logsumexp(-1)
        if kind == "top-1" or logits.shape[-1] == 1:
            return torch.exp(logits.amax(-1) - whole)
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        return torch.exp(first - whole) - torch.exp(second - whole)

    def teach(self, stream: Tensor, x: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        """Teaches the classifier, and nothing else, whether this exit is right.

        Returns:
            The stream, whose backward pass has the classifier's too.
        """
        if self.compares != "classifier":
            return stream
        right = (logits.detach().argmax(-1) == targets).float()
        guesses = self.guess(x.detach()).float().squeeze(-1)
        loss = functional.binary_cross_entropy_with_logits(
            guesses, right, weight=(targets != -100).float(), reduction="sum"
        )
        return add_loss(stream, loss / max(1, len(targets)), self.tape)


def start(classifier: nn.Linear, std: float) -> None:
    nn.init.normal_(classifier.weight, std=std)
    nn.init.zeros_(classifier.bias)


class ExitHead(Leaving):
    """Predicts, and lets the tokens go whose confidence is over the threshold.

    Args:
        m: Sizes of the model.
        options: Say when a token exits.
        block: The exit stands after this block.
    """

    def __init__(self, m: ModelOptions, options: EarlyExit, block: int) -> None:
        super().__init__()
        self.sequence = m.sequence
        self.norm = nn.RMSNorm(m.hidden, eps=1e-6)
        self.logits = nn.Linear(m.hidden, m.vocab, bias=False)
        nn.init.normal_(self.logits.weight, std=m.init_std)
        self.decide_by(options, block, m.blocks)
        if self.compares == "classifier":
            self.classifier = nn.Linear(m.hidden, 1)
            start(self.classifier, m.init_std)

    def guess(self, x: Tensor) -> Tensor:
        return self.classifier(x)

    def forward(self, *tensors: Tensor) -> Tensors:
        """Takes a `TokenState` and, for confidence "state", the states before the block."""
        state = TokenState(*tensors[:6])
        before = tensors[6] if len(tensors) > 6 else None
        return tuple((self._train if self.training else self._evaluate)(state, before))

    def _train(self, state: TokenState, before: Tensor | None) -> TokenState:
        """Adds the loss of this exit for all tokens that came, and lets tokens go."""
        x, own_targets = state.x, state.targets[state.places]
        logits = self.logits(self.norm(x)).float()
        each = functional.cross_entropy(logits, own_targets, reduction="none")
        own = self.weight * each.sum()
        x = self.teach(x, x, logits, own_targets)
        state = state._replace(x=x)
        if self.exits:
            leaves = self.leaves(x, logits, before, state.places, self.sequence)
            own = own + self.later * torch.where(leaves, each, 0).sum()
            state = state.split(leaves)
            exited = len(leaves) - len(state.places)
            self.seen = self.seen[0] + len(state.targets), self.seen[1] + exited
        return state._replace(loss=state.loss + own / (self.total * len(state.targets)))

    def _evaluate(self, state: TokenState, before: Tensor | None) -> TokenState:
        """Adds the loss of the tokens that exit. Without exits the head alone predicts."""
        if not self.exits:
            return state
        x, places = state.x, state.places
        logits = self.logits(self.norm(x)).float() if self.needs_logits else None
        leaves = self.leaves(x, logits, before, places, self.sequence)
        gone = leaves.nonzero().squeeze(1)
        logits = self.logits(self.norm(x[gone])).float() if logits is None else logits[gone]
        own = functional.cross_entropy(logits, state.targets[places[gone]], reduction="sum")
        loss = state.loss + own / len(state.targets)
        return state.split(leaves)._replace(loss=loss)


class FinalHead(gpt.Head):
    """The head of the tokens that remain. Returns the loss."""

    def __init__(self, m: ModelOptions, share: float) -> None:
        super().__init__(m)
        self.share = share

    def forward(self, *tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, places, _, _, targets, loss = TokenState(*tensors)
        each = functional.cross_entropy(
            super().forward(x).float(), targets[places], reduction="sum"
        )
        return loss + each * ((self.share if self.training else 1.0) / len(targets))


def loss_of_exits(output: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss that the last layer has put together."""
    del targets
    return output


def gpt_layers(options: EarlyExit, layers: gpt.GptLayers) -> gpt.GptLayers:
    """Returns the layers of a GPT whose tokens exit."""
    m = layers.model
    exits, weights = options.exits_of(m.blocks), options.loss_weights(m.blocks)

    def after(block: int) -> dict[str, Callable[[], nn.Module]]:
        own = {"exit": partial(ExitHead, m, options, block)} if block in exits else {}
        return {**layers.after(block), **own}

    return replace(
        layers,
        embedding=partial(ExitEmbedding, m),
        attention=lambda block: ExitAttentionHalf(
            m, keeps_state=block in exits and options.compares == "state"
        ),
        after=after,
        head=partial(FinalHead, m, weights[-1] / sum(weights)),
        loss=loss_of_exits,
        takes_targets=True,
    )
