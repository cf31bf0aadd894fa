"""The weights and persistent buffers of a layer, in the form in which they leave dynmo.

Weights of low precision become float32: their master, if there is one. Packed weights are dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dynmo.kernels.packed_weight import dense_parameters, gives_form, unpacked
from dynmo.kernels.split import LOW


def entries(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yields key, owner and tensor of what `module.state_dict()` has, in its order.

    Buffers that give the form of packed weights are left out.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield prefix + name, owner, parameter
        for name, buffer in owner._buffers.items():
            is_saved = name not in owner._non_persistent_buffers_set
            if buffer is not None and is_saved and not gives_form(owner, name):
                yield prefix + name, owner, buffer


def exact_state(module: nn.Module, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state of a layer by key.

    Args:
        masters: Float32 values of parameters, by name, in the shape of the parameter.
    """
    named = dict(module.named_parameters())
    floats = {name: master for name, master in masters.items() if named[name].is_floating_point()}
    dense = {
        id(named[name]): tensor.float() if tensor.dtype in LOW else tensor
        for name, tensor in dense_parameters(module, floats)
    }
    return {key: dense.get(id(tensor), tensor.detach()) for key, _, tensor in entries(module)}


def shapes_of_state(module: nn.Module) -> dict[str, Tensor]:
    """Returns what `exact_state` would, without values, on the meta device.

    The layer may be on the meta device.
    """
    parameters = {id(parameter) for parameter in module.parameters()}
    made = dict[str, Tensor]()
    for key, owner, tensor in entries(module):
        is_low = id(tensor) in parameters and tensor.dtype in LOW
        dtype = torch.float32 if is_low else tensor.dtype
        shape = unpacked(owner, key.rpartition(".")[2], tensor.detach()).shape
        made[key] = torch.empty(shape, dtype=dtype, device="meta")
    return made
