"""The weights and persistent buffers of a layer, in the form in which they leave dynmo.

Weights of low precision become float32: their master, if there is one. Packed weights are dense.
Digests are taken of this form. Equal ones mean that two runs are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from dynmo.kernels.packed_weight import dense_parameters, gives_form, unpacked
from dynmo.kernels.split import LOW
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.comm.headers import as_bytes
from dynmo.runtime.layer.buffers import BufferSet
from dynmo.runtime.optim.optimizer import needs_master
from dynmo.runtime.state.layer_store import LayerStore


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


def masters_of(store: LayerStore, index: int) -> dict[str, Tensor]:
    """Returns the whole float32 masters of an own layer, by parameter.

    All replicas call it, in the same order. A replica whose share is empty holds none.
    """
    if not any(map(needs_master, store.modules[index].parameters())):
        return {}
    moments, end = store.moments(index), "/master"
    return {key.removesuffix(end): t for key, t in moments.items() if key.endswith(end)}


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


def weights_digest(store: LayerStore) -> str:
    """Returns the SHA-256 over that of each layer's parameters. Every rank calls it.

    The layers come in global order, and packed parameters in dense form. For a parameter in lower
    precision the float32 master is hashed, since the parameter is the rounded master. One without a
    master is hashed in float32.

    Raises:
        RunError: The replicas' weights are not equal.
    """

    def parts(index: int, module: nn.Module) -> Iterable[bytes]:
        for _, parameter in dense_parameters(module, masters_of(store, index)):
            yield _bytes(parameter.float() if needs_master(parameter) else parameter)

    return _digest(store, "the weights", parts)


def check_replicas(store: LayerStore) -> None:
    """Checks that the replicas have the same weights, by sums of bits. Every rank calls it.

    Sums take a tenth of the time of a digest, and training waits for them.

    Raises:
        RunError: The replicas' weights are not equal.
    """
    if store.world.replicas == 1:
        return
    sums = torch.zeros(store.model.layers, dtype=torch.int64)
    for index in sorted(store.layers):
        with store.whole(index) as module:
            for parameter in module.parameters():
                sums[index] += _sum_of_bits(parameter)
    store.world.sum(sums, "the sums of the weights")
    agree(store.world, sums.tolist(), "the weights")


def _sum_of_bits(tensor: Tensor) -> Tensor:
    dense = tensor.detach()
    flat = as_bytes((dense if dense.layout == torch.strided else dense.to_dense()).contiguous())
    whole = flat.numel() // 8 * 8
    words = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    return (words.view(torch.int64).sum() + flat[whole:].sum()).cpu()


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
