"""Lines about tokens: shares that layers compute, and evaluations with exits."""

from __future__ import annotations

from dynmo.change_events import TokensEvent
from dynmo.events import EvalEvent


def tokens_text(event: TokensEvent) -> str:
    """Returns one line with the share of tokens that each layer let go or computed.

    Example:
        >>> tokens_text(TokensEvent(10, "early_exit", (5, 8), {"exited": [0.4, 0.25]}))
        'early_exit, layers 5, 8: exited 40%, 25%'
    """
    shares = "; ".join(
        f"{what.replace('_', ' ')} {', '.join(f'{share:.0%}' for share in each)}"
        for what, each in event.shares.items()
    )
    return f"{event.case}, layers {', '.join(map(str, event.layers))}: {shares}"


def evaluation_text(event: EvalEvent) -> str:
    """Returns one line with the held-out loss.

    If tokens exit, the line also has the loss without exits, and the speeds.

    Example:
        >>> evaluation_text(EvalEvent(10, 2.5, 200.0, 2.4, 100.0))
        'held-out loss 2.5000 at 200 tokens/s; without exits 2.4000 at 100 tokens/s (x2.00)'
    """
    line = f"held-out loss {event.loss:.4f}"
    if event.dense_loss is None or event.tokens_per_s is None or event.dense_tokens_per_s is None:
        return line
    gain = event.tokens_per_s / event.dense_tokens_per_s
    return (
        f"{line} at {event.tokens_per_s:,.0f} tokens/s; without exits {event.dense_loss:.4f} at "
        f"{event.dense_tokens_per_s:,.0f} tokens/s (x{gain:.2f})"
    )
