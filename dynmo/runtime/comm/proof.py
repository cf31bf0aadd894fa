"""Proof of each pair of ranks, over a new connection, that both know the run's token.

gloo takes whoever says a small number for a rank. So nothing goes over a connection before this:

    rank 0    nonce a                            ->    rank 1
    rank 0                            nonce b    <-    rank 1
    rank 0    hash(token, "0 to 1", a, b)        ->    rank 1
    rank 0    hash(token, "1 to 0", b, a)        <-    rank 1

The hash covers the group's name and generation, too, so that none can be used twice.
"""

from __future__ import annotations

import hmac
import secrets
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dynmo.errors import RunError
from dynmo.runtime.comm.error_text import reason
from dynmo.runtime.comm.signed_store import SignedStore

# Bytes of a nonce, and of a hash.
_SIZE = 32
_NONCES, _HASHES = 0, 1  # tags of the messages
# Most seconds for the proofs of a group, and most times that a group is made.
PATIENCE, TRIES = 10.0, 10


class Unproven(RunError):
    """The other end of a connection is no rank of this run, or is gone."""


def prove(group: Any, rank: int, size: int, store: SignedStore, timeout: float) -> None:
    """Exchanges proofs with every other rank of a new group of gloo.

    Args:
        rank: This rank's number in the group.
        size: Number of the group's ranks.
        store: The part of the store whose prefix names the group and its generation.
        timeout: Limit of every wait, in seconds.

    Raises:
        Unproven: A connection does not lead to the rank. The group must not be used.
    """
    peers = [peer for peer in range(size) if peer != rank]
    end = time.monotonic() + min(timeout, PATIENCE)

    def swap(own: dict[int, bytes], tag: int) -> dict[int, bytes]:
        heard = {peer: torch.empty(_SIZE, dtype=torch.uint8) for peer in peers}
        said = {peer: torch.frombuffer(bytearray(own[peer]), dtype=torch.uint8) for peer in peers}
        works, at = list[tuple[int, Any]](), rank
        try:
            for at in peers:
                works.append((at, group.recv([heard[at]], at, tag)))
            for at in peers:
                works.append((at, group.send([said[at]], at, tag)))
            for peer, work in works:
                at = peer
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError as error:
            why = reason(error)
            raise Unproven(
                f"rank {rank} got no proof from what should be rank {at} ({why})"
            ) from None
        return {peer: _bytes_of(heard[peer]) for peer in peers}

    nonce = secrets.token_bytes(_SIZE)
    nonces = swap(dict.fromkeys(peers, nonce), _NONCES)

    def hash_of(source: int, target: int, nonces: bytes) -> bytes:
        return store.keyed_hash(f"{source} to {target} of {size}", b"proof", nonces)

    hashes = swap({peer: hash_of(rank, peer, nonce + nonces[peer]) for peer in peers}, _HASHES)
    for peer in peers:
        if not hmac.compare_digest(hashes[peer], hash_of(peer, rank, nonces[peer] + nonce)):
            raise Unproven(
                f"what answered rank {rank} for rank {peer} does not know the run's token"
            )


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
