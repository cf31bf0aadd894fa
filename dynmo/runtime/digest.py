"""The digest of a model's weights, wherever its layers are: what says that two runs have the same numbers."""

from __future__ import annotations

import hashlib

import torch

from dynmo.kernels.sparse_linear import dense_parameters
from dynmo.runtime.holding import Holding


def weights_digest(holding: Holding) -> str:
    """SHA-256 over the SHA-256 of each layer's parameters, pruned ones in dense form, in global layer order: equal exactly when all
    weights are. Of a parameter that computes in lower precision its float32 master is hashed: the parameter is that, rounded. Called on
    every rank. Raises RunError if the replicas' weights are not equal."""
    world = holding.world
    table = torch.zeros(holding.model.layers, 32, dtype=torch.uint8)
    # In one order on all replicas, which make a layer's masters whole together: after a reshape each has got its layers in its own order.
    for index, layer in sorted(holding.layers.items()):
        digest = hashlib.sha256()
        for _, parameter in dense_parameters(layer.module, holding.masters(index)):
            digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        table[index] = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    world.sum(table, "the digests of the weights")
    digest = hashlib.sha256(table.numpy().tobytes())
    if world.replicas > 1:
        world.agree(digest.digest(), "the weights")
    return digest.hexdigest()
