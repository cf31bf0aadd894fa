"""Digests of weights and buffers. Equal ones mean that two runs are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dynmo.kernels.packed_weight import dense_parameters
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.layer.buffers import BufferSet
from dynmo.runtime.optim.optimizer import needs_master
from dynmo.runtime.state.layer_store import LayerStore


def weights_digest(store: LayerStore) -> str:
    """Returns the SHA-256 over that of each layer's parameters. Every rank calls it.

    The layers come in global order, and packed parameters in dense form. For a parameter in lower
    precision the float32 master is hashed, since the parameter is the rounded master. One without a
    master is hashed in float32.

    Raises:
        RunError: The replicas' weights are not equal.
    """

    def parts(index: int, module: nn.Module) -> Iterable[bytes]:
        for _, parameter in dense_parameters(module, store.masters(index)):
            yield _bytes(parameter.float() if needs_master(parameter) else parameter)

    return _digest(store, "the weights", parts)


def buffers_digest(store: LayerStore) -> str:
    """Returns the SHA-256 over that of each layer's persistent buffers.

    Name, dtype, shape and values count. Buffers that give the form of packed weights do not.
    """

    def parts(index: int, module: nn.Module) -> Iterable[bytes]:
        for name, buffer in BufferSet([module]).persistent():
            yield f"{name} {buffer.dtype} {tuple(buffer.shape)} ".encode()
            yield _bytes(buffer)

    return _digest(store, "the buffers", parts)


def _digest(
    store: LayerStore, what: str, parts: Callable[[int, nn.Module], Iterable[bytes]]
) -> str:
    world = store.world
    table = torch.zeros(store.model.layers, 32, dtype=torch.uint8)
    # All replicas use one order, because they make a layer's masters whole together. After a
    # reshape each has received its layers in its own order.
    for index in sorted(store.layers):
        digest = hashlib.sha256()
        with store.whole(index) as module:
            for part in parts(index, module):
                digest.update(part)
        table[index] = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    world.sum(table, f"the digests of {what}")
    digest = hashlib.sha256(table.numpy().tobytes()).hexdigest()
    if world.replicas > 1:
        agree(world, digest, what)
    return digest


def _bytes(tensor: Tensor) -> bytes:
    dense = tensor.detach().cpu()
    dense = dense if dense.layout == torch.strided else dense.to_dense()
    return dense.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy().tobytes()
