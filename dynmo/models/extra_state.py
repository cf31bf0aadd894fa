"""The extra state of modules (`get_extra_state`), as tensors that can move and be saved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Before the names of modules whose state is JSON.
_JSON = "json "


def extra_state_of(layer: nn.Module) -> dict[str, Tensor]:
    """Returns the extra state of a layer's modules, by their names."""
    found = dict[str, Tensor]()
    for name, part in _with_state(layer):
        value = part.get_extra_state()
        if isinstance(value, Tensor):
            found[name] = value.detach()
        else:
            text = bytearray(json.dumps(value).encode())
            found[_JSON + name] = torch.frombuffer(text, dtype=torch.uint8)
    return found


def set_extra_state(layer: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Takes what `extra_state_of` returned."""
    for name, part in _with_state(layer):
        if name in state:
            part.set_extra_state(state[name])
        elif _JSON + name in state:
            part.set_extra_state(json.loads(state[_JSON + name].cpu().numpy().tobytes()))


def extra_state_problems(index: int, layer: nn.Module) -> Iterator[str]:
    """Yields what cannot become a tensor."""
    for name, part in _with_state(layer):
        value = part.get_extra_state()
        if not isinstance(value, Tensor) and not _is_json(value):
            yield (
                f"get_extra_state of the module {name or 'itself'} of layer {index} returns a "
                f"{type(value).__name__} that is no JSON; only a tensor, or what JSON gives back "
                "alike, can move and be saved"
            )


def _with_state(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, part in layer.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield name, part


def _is_json(value: Any) -> bool:
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False
