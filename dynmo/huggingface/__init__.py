"""Causal language models of transformers: from their folder into a pipeline, and back.

    model = dynmo.huggingface.from_pretrained("Llama-3.1-8B")
    pipeline = dynmo.Pipeline(model, world, microbatches=8)
    ...
    dynmo.huggingface.save_pretrained(pipeline, "tuned")

It needs the extra `hf`. Each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynmo.huggingface.generation import generate as generate
    from dynmo.huggingface.save import save_pretrained as save_pretrained
    from dynmo.models.huggingface.model import from_pretrained as from_pretrained

_HOMES = {
    "from_pretrained": "dynmo.models.huggingface.model",
    "generate": "dynmo.huggingface.generation",
    "save_pretrained": "dynmo.huggingface.save",
}

__all__ = ["from_pretrained", "generate", "save_pretrained"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Loads a public name when it is first used (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(
                f"module 'dynmo.huggingface' has no attribute {name!r}; its names are "
                f"{', '.join(__all__)}"
            )
        importlib.import_module("dynmo.models.huggingface")  # raises without transformers
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
