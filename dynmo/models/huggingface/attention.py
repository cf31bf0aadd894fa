"""Gives a block another attention, by transformers' interface for attention functions.

Any class that asks this interface for its function can have it. The function also takes the mask
and the factors that the model makes for the block's own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import AttentionInterface

from dynmo.errors import ConfigError

_NAME = "dynmo"


class AttentionFunction(Protocol):
    """An attention."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Computes the attention of all positions.

        Args:
            q: Queries [rows, heads, tokens, size].
            k: Keys [rows, key heads, tokens, size]. Several heads may share a key head.
            v: Values [rows, key heads, tokens, value size].
            mask: bool [rows, 1 or heads, tokens, tokens], the pairs that may be computed. None:
                those of a key that is not behind its query.
            scaling: Factor of the scores.
            softcap: Bound of the scores. None: there is none.
            sinks: A further score of each head, without a value, [heads]. None: there is none.
            dropout: Probability that a weight is dropped.

        Returns:
            [rows, heads, tokens, value size].
        """
        ...


_Call = Callable[..., tuple[Tensor, None]]
_current: ContextVar[_Call] = ContextVar("attention")


def _attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _current.get()(*args, **kwargs)


AttentionInterface.register(_NAME, _attend)


@contextmanager
def attention_by(function: AttentionFunction, configs: Iterable[Any]) -> Generator[None]:
    """Has modules call another attention.

    Args:
        function: The attention.
        configs: The configs of the modules (`configs_of`).
    """

    def call(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        if others.get("position_bias") is not None:
            raise ConfigError(f"{type(module).__name__} adds a bias to its scores")
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask = attention_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask >= 0  # what is left out has the least number
        out = function(
            query,
            key,
            value,
            mask,
            scaling=factor,
            softcap=others.get("softcap"),
            sinks=others.get("s_aux"),
            dropout=dropout,
        )
        return out.transpose(1, 2).contiguous(), None

    with _calling(call, configs):
        yield


@contextmanager
def _calling(call: _Call, configs: Iterable[Any]) -> Generator[None]:
    before = [(config, config._attn_implementation) for config in configs]
    token = _current.set(call)
    try:
        for config, _ in before:
            config._attn_implementation = _NAME
        yield
    finally:
        _current.reset(token)
        for config, name in before:
            config._attn_implementation = name


def configs_of(block: nn.Module) -> list[PreTrainedConfig]:
    """Returns the configs that name the attention of a block's modules, each once."""
    found = (getattr(module, "config", None) for module in block.modules())
    return list({id(each): each for each in found if isinstance(each, PreTrainedConfig)}.values())


def attention_in(block: nn.Module, hidden: Tensor, args: Any, kwargs: Any) -> str | None:
    """Returns the path of a block's attention. None if it asks the interface for none.

    Args:
        block: A block on the meta device. The other arguments are those of its forward.
    """
    found: list[nn.Module] = []

    def note(module: nn.Module, q: Tensor, _: Tensor, v: Tensor, *__: Any, **___: Any) -> Any:
        found.append(module)
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]), None

    # What comes behind the attention may need values.
    with suppress(Exception), torch.no_grad(), _calling(note, configs_of(block)):
        block(hidden, *args, **kwargs)
    return next((path for path, module in block.named_modules() if module in found), None)
