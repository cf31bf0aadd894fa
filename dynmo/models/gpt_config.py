"""The layers of the GPT that options ask for, in the variants that the cases need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from dynmo.models import early_exit
from dynmo.models.experts import ExitExpertsHalf, ExpertRule, ExpertsHalf, RoutedExpertsHalf
from dynmo.models.gpt import (
    AttentionHalf,
    AttentionOptions,
    Embedding,
    FeedForwardHalf,
    Head,
    SharedAttentionHalf,
)
from dynmo.models.loss import next_token_loss
from dynmo.models.mixture_of_depths import RoutedAttentionHalf, RoutedFeedForwardHalf, Router
from dynmo.models.model import Factory, Model, from_factories
from dynmo.models.options import ModelOptions

Named = tuple[str, Callable[[], nn.Module]]


def make(options: ModelOptions, seed: int, cases: Mapping[str, Any]) -> Model:
    exits = "early_exit" in cases
    layers = _with_exits(options, cases) if exits else _plain(options, cases)
    names, factories = [name for name, _ in layers], [factory for _, factory in layers]
    tied = (((0, "tokens.weight"), (len(names) - 1, "logits.weight")),) if options.tied else ()
    loss = early_exit.loss_of_exits if exits else next_token_loss
    model = from_factories(names, factories, seed, loss, tied, takes_targets=exits)
    return replace(model, inputs=("input_ids",))


def _feed_forward(
    m: ModelOptions, block: int, plain: type[FeedForwardHalf], experts: type[ExpertsHalf]
) -> Factory:
    ends = m.init_std, _residual_std(m), m.dropout
    if m.kind != "moe" or (block + 1) % m.moe_every:
        return partial(plain, m.hidden, *ends)
    rule = ExpertRule(m.experts, m.top_k, m.routing, m.router_loss, m.capacity_factor)
    return partial(experts, m.hidden, rule, m.shared_experts, *ends)


def _attention_options(m: ModelOptions) -> AttentionOptions:
    return AttentionOptions(m.hidden, m.heads, m.sequence, m.init_std, _residual_std(m), m.dropout)


def _residual_std(m: ModelOptions) -> float:
    return m.init_std / (2 * m.blocks) ** 0.5


def _plain(m: ModelOptions, cases: Mapping[str, Any]) -> list[Named]:
    """Makes the layers of a GPT without exits, for all other cases."""
    depths, shared = cases.get("mixture_of_depths"), "sparse_attention" in cases
    routed = () if depths is None else depths.routed_blocks(m.blocks)
    options = _attention_options(m)
    attention: Factory = partial(SharedAttentionHalf if shared else AttentionHalf, options)

    def routed_attention() -> nn.Module:
        assert depths is not None
        router = Router(
            m.hidden, depths.capacity, depths.predictor, depths.predictor_weight, m.init_std
        )
        return RoutedAttentionHalf(options, router)

    layers: list[Named] = [
        ("embedding", partial(Embedding, m.vocab, m.hidden, m.init_std, m.dropout))
    ]
    for block in range(m.blocks):
        halves = (
            (RoutedFeedForwardHalf, RoutedExpertsHalf)
            if block in routed
            else (FeedForwardHalf, ExpertsHalf)
        )
        layers.append(
            (f"blocks.{block}.attention", routed_attention if block in routed else attention)
        )
        layers.append((f"blocks.{block}.feed_forward", _feed_forward(m, block, *halves)))
    layers.append(("head", partial(Head, m.hidden, m.vocab, m.init_std)))
    return layers


def _with_exits(m: ModelOptions, cases: Mapping[str, Any]) -> list[Named]:
    options = cases["early_exit"]
    exits, attention_options = options.exits_of(m.blocks), _attention_options(m)
    calm = options.policy == "calm"
    rule = early_exit.ExitRule(
        options.confidence if calm else "top-1", options.threshold_of_policy, decays=calm
    )
    weights = early_exit.exit_weights(exits, m.blocks, by_depth=calm)
    layers: list[Named] = [
        ("embedding", partial(early_exit.ExitEmbedding, m.vocab, m.hidden, m.init_std, m.dropout))
    ]
    for block in range(m.blocks):
        keeps_state = block in exits and rule.confidence == "state"
        attention = partial(early_exit.ExitAttentionHalf, attention_options, keeps_state)
        layers.append((f"blocks.{block}.attention", attention))
        feed_forward = _feed_forward(m, block, early_exit.ExitFeedForwardHalf, ExitExpertsHalf)
        layers.append((f"blocks.{block}.feed_forward", feed_forward))
        if block in exits:
            place = exits.index(block)
            shares = weights[place], sum(weights[place + 1 :]), sum(weights)
            exit_head = partial(
                early_exit.ExitHead, m.hidden, m.vocab, m.init_std, m.sequence, rule, *shares
            )
            layers.append((f"blocks.{block}.exit", exit_head))
    share = weights[-1] / sum(weights)
    layers.append(("head", partial(early_exit.FinalHead, m.hidden, m.vocab, m.init_std, share)))
    return layers
