"""Values in the store that no process of the run has written."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dynmo.runtime.comm import signed_store
from dynmo.runtime.comm.signed_store import Forged, SignedStore


@pytest.fixture
def plain() -> Any:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


@pytest.fixture
def store(plain: dist.Store) -> SignedStore:
    return SignedStore(plain, b"the token")


def test_processes_with_the_token_read_each_other(plain: dist.Store, store: SignedStore) -> None:
    store.within("gen/0").set("member/1", "host")
    assert SignedStore(plain, b"the token").within("gen").get("0/member/1") == b"host"
    assert store.find("nothing") is None
    assert store.holds("gen/0/member/1")
    assert not store.holds("nothing")
    assert store.check(["gen/0/member/1"])


def test_forged_value_is_refused(plain: Any, store: SignedStore) -> None:
    """It may be plain, signed with another token, too long, or copied from another key."""
    store.set("a", "1")
    SignedStore(plain, b"another").set("b", "1")
    plain.set("c", plain.get("a"))
    plain.set("d", "1" * (9 << 20))
    plain.set("e", "")
    for key in "bcde":
        with pytest.raises(Forged, match=rf"wrote {key} \(\d+ bytes\) .* DYNMO_TOKEN"):
            store.get(key)
        assert not store.holds(key)
    assert store.get("a") == b"1"


def test_value_that_is_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch, store: SignedStore
) -> None:
    store.set("a", "1" * 100)
    monkeypatch.setattr(signed_store, "_MOST", 50)
    with pytest.raises(Forged, match="wrote a "):
        store.get("a")


def test_key_is_claimed_once(plain: Any, store: SignedStore) -> None:
    assert store.claim("here/0")
    assert not store.clone().claim("here/0")
    plain.set("here/1", "stranger")
    with pytest.raises(Forged, match="here/1"):
        store.claim("here/1")


def test_process_groups_use_it(store: SignedStore) -> None:
    """C++ calls it, also once the object of Python is gone from here."""
    other: Any = dist.PrefixStore("group", store.within("gen/0"))
    other.set("address", "127.0.0.1")
    assert other.compare_set("first", "", "1") == b"1"
    other.wait(["address"], timedelta(seconds=1))
    assert store.get("gen/0/group/address") == b"127.0.0.1"
