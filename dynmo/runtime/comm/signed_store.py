"""A store in which dynmo acts only on what processes of this run have written.

    key      gen/0/member/1
    value    HMAC-SHA256(token, key, text), text

torch's stores serve every process that reaches them. A process that does not know the run's token
can write to the store, but no rank takes what it writes.
"""

from __future__ import annotations

import hmac
import secrets
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dynmo.errors import RunError

# Bytes of a keyed hash, and most bytes of a value. The server of a TCPStore takes no longer ones.
_HASH, _MOST = 32, 8 << 20


class Forged(RunError):
    """No process with the run's token has written a value."""


class SignedStore(dist.Store):
    """A store whose values carry a keyed hash. torch's process groups can use it.

    Args:
        store: The store of torch.
        token: The secret of the run. If it is empty, the hash finds accidents only.
        prefix: The start of all keys.
    """

    def __init__(self, store: dist.Store, token: bytes = b"", prefix: str = "") -> None:
        super().__init__()
        self._store: Any = store  # it takes bytes, which its types deny
        self.token, self._prefix = token, prefix
        # torch's C++ calls the methods, but does not keep the object of Python alive.
        self._children = list[SignedStore]()

    def within(self, prefix: str) -> SignedStore:
        """Returns the part of the store under a prefix."""
        return self._new_child(self._store, f"{self._prefix}{prefix}/")

    def clone(self) -> SignedStore:
        return self._new_child(self._store.clone(), self._prefix)

    def _new_child(self, store: dist.Store, prefix: str) -> SignedStore:
        child = SignedStore(store, self.token, prefix)
        self._children.append(child)
        return child

    @property
    def unsigned(self) -> dist.Store:
        """The same keys without hashes."""
        return dist.PrefixStore(self._prefix.rstrip("/"), self._store)

    def keyed_hash(self, key: str, *parts: bytes) -> bytes:
        """Returns what only a process with the token can compute of a key and parts."""
        return hmac.digest(
            self.token, b"\0".join(((self._prefix + key).encode(), *parts)), "sha256"
        )

    def _signed(self, key: str, value: str | bytes) -> bytes:
        text = value.encode() if isinstance(value, str) else value
        return self.keyed_hash(key, b"value", text) + text

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._prefix + key, self._signed(key, value))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        expected = expected_value and self._signed(key, expected_value)
        desired = self._signed(key, desired_value)
        return self._genuine(key, self._store.compare_set(self._prefix + key, expected, desired))

    def claim(self, key: str) -> bool:
        """Makes a key. Returns False if there is one already."""
        claim = secrets.token_bytes(_HASH)
        return self.compare_set(key, b"", claim) == claim

    def get(self, key: str) -> bytes:
        """Waits for a key, and returns its value.

        Raises:
            Forged: No process with the token has written it.
        """
        return self._genuine(key, self._store.get(self._prefix + key))

    def _genuine(self, key: str, signed: bytes) -> bytes:
        text = signed[_HASH:]
        is_genuine = len(signed) <= _MOST and hmac.compare_digest(signed, self._signed(key, text))
        if not is_genuine:
            raise Forged(
                f"a process without the token of this run wrote {self._prefix}{key} "
                f"({len(signed)} bytes) to the store; if it is a rank, give all ranks one "
                "DYNMO_TOKEN"
            )
        return text

    def find(self, key: str) -> bytes | None:
        """Returns the value of a key, or None if there is none. Raises like `get`."""
        return self.get(key) if self._store.check([self._prefix + key]) else None

    def holds(self, key: str) -> bool:
        """Returns whether a process of this run has written a key."""
        try:
            return self.find(key) is not None
        except Forged:
            return False

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys are there, whoever has written them."""
        return self._store.check([self._prefix + key for key in keys])

    def add(self, key: str, value: int) -> int:
        """Counts. Others can change the count, so it only tells when a wait may end."""
        return self._store.add(self._prefix + key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there, whoever has written them."""
        limit = () if timeout is None else (timeout,)
        self._store.wait([self._prefix + key for key in keys], *limit)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)
