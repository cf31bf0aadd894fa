"""`dynmo train --join` where there is no run to join: what it says, and how soon."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dynmo.config import load
from dynmo.runtime.comm.signed_store import SignedStore
from tests.cli.runs import Run, assert_refused, free_port

TIMEOUT = 1.0

WHERE: dict[str, Any] = {"address": "127.0.0.1", "port": 29500}
GOOD = json.dumps(WHERE)

# Files that name no place. `{}` in a text is a folder that exists.
DAMAGED: dict[str, bytes] = {
    name: content.encode() if isinstance(content, str) else content
    for name, content in {
        "empty": "",
        "spaces": " \n",
        "a half": GOOD[: len(GOOD) // 2],
        "a byte less": GOOD[:-1],
        "a byte more": GOOD + "}",
        "twice": GOOD + GOOD,
        "binary": bytes(range(256)),
        "zeros": bytes(100),
        "no UTF-8": b'{"address": "\xff\xfe", "port": 29500}',
        "half a character": b'{"address": "\xc3',
        "no JSON": "127.0.0.1:29500",
        "null": "null",
        "a number": "29500",
        "a text": '"127.0.0.1:29500"',
        "a list": f"[{GOOD}]",
        "not a number": "NaN",
        "deep": "[" * 100_000,
        "deep table": '{"address":' * 30_000,
        "many digits": '{"address": "127.0.0.1", "port": ' + "9" * 10_000 + "}",
        "long": json.dumps({"folder": "/" + "a" * 100_000}),
        "no key": "{}",
        "another key": '{"host": "127.0.0.1"}',
        "one key more": json.dumps(WHERE | {"more": 1}),
        "both places": json.dumps(WHERE | {"folder": "/tmp"}),
        "no port": '{"address": "127.0.0.1"}',
        "no address": '{"port": 29500}',
        **{
            f"port {port!r}": json.dumps(WHERE | {"port": port})
            for port in (-1, 0, 65536, 2**70, 1e3, 1e400, "29500", None, True, [], {})
        },
        **{
            f"address {address!r}": json.dumps(WHERE | {"address": address})
            for address in (None, "", 5, [], {}, True, "a\0b", "\x1b[31mred\x07", "a\nb", "\ud800")
        },
        **{
            f"folder {folder!r}": json.dumps({"folder": folder})
            for folder in (None, "", 5, ["/tmp"], {}, "tmp", "/t\0mp", "/\x1b]0;title\x07")
        },
        **{
            f"prefix {prefix!r}": json.dumps(WHERE | {"prefix": prefix})
            for prefix in (None, "", 5, [], "\x1b[2J")
        },
    }.items()
}


@pytest.fixture
def place(filled: Path) -> Path:
    """`rendezvous.json` of a run that goes on, as far as its folder shows. It is not there yet."""
    config = load(filled / "run.toml", [f"parallel.timeout={TIMEOUT}"])
    folder = filled / "runs/main"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config.to_toml())
    return folder / "rendezvous.json"


def test_damaged_rendezvous_file_is_refused(tmp_path: Path, place: Path, run: Run) -> None:
    assert len(DAMAGED) >= 33
    for name, content in DAMAGED.items():
        place.write_bytes(content)
        done = run(tmp_path, "run.toml", "--join")
        assert_refused(done, "runs/main/rendezvous.json is damaged")
        assert done.line.isprintable(), name


def test_rendezvous_file_that_cannot_be_read_is_refused(
    tmp_path: Path, place: Path, run: Run
) -> None:
    for target in (tmp_path, place, tmp_path / "nowhere"):
        place.symlink_to(target)
        assert_refused(run(tmp_path, "run.toml", "--join"), "is not being trained now")
        place.unlink()
    place.mkdir()
    assert_refused(run(tmp_path, "run.toml", "--join"), "is not being trained now")


@pytest.mark.parametrize(
    "record",
    [
        {"folder": "/no/such/folder"},
        {"folder": "/" + "a" * 5000},
        {"folder": "/dev/null"},
        {"address": "127.0.0.1", "port": int(free_port())},
        {"address": "256.1.1.1.invalid", "port": 29500},
        {"address": "a" * 300, "port": 29500},
        {"address": "ä" * 100, "port": 29500},
    ],
    ids=lambda record: str(record)[:30],
)
def test_place_where_no_run_meets_is_refused(
    tmp_path: Path, place: Path, run: Run, record: dict[str, Any]
) -> None:
    place.write_text(json.dumps(record))
    assert_refused(run(tmp_path, "run.toml", "--join"), "runs/main/rendezvous.json")


def test_rendezvous_file_of_another_user_is_refused(tmp_path: Path, place: Path, run: Run) -> None:
    place.write_text(GOOD)
    place.chmod(0o666)
    assert_refused(run(tmp_path, "run.toml", "--join"), "can be written by other users")
    if os.geteuid():
        pytest.skip("only root can give a file away")
    place.chmod(0o600)
    os.chown(place, 12345, -1)
    assert_refused(run(tmp_path, "run.toml", "--join"), "belongs to another user (12345)")


# -- limits of the wait ----------------------------------------------------------------------------


def joined_at(tmp_path: Path, place: Path, store: bytes) -> Path:
    """Makes the store of local ranks, and names it in the rendezvous file."""
    folder = tmp_path / "met"
    folder.mkdir()
    (folder / "store").write_bytes(store)
    place.write_text(json.dumps({"folder": str(folder)}))
    return folder / "store"


def test_join_of_a_killed_run_ends_in_time(tmp_path: Path, place: Path, run: Run) -> None:
    """The store of the run is still there, and nobody answers."""
    file = joined_at(tmp_path, place, b"")
    store = SignedStore(dist.FileStore(str(file), 2)).within("gen/0")
    store.set("here/0", "1")
    done = run(tmp_path, "run.toml", "--join")
    assert_refused(done, f"waited {TIMEOUT:g} s for rank 0", status=1)


@pytest.mark.parametrize(
    "store",
    [
        b"",
        bytes(8),
        b"\x08\0\0\0half",
        b"\xff\xff\xff\xff" + bytes(100),
        b"no store at all\n" * 50,
        bytes(range(256)) * 40,
        (b"\x01\0\0\0a" * 2)[:-1],
    ],
    ids=["empty", "no run", "half a key", "large key", "text", "binary", "half a value"],
)
def test_join_at_a_file_that_is_no_store_ends_in_time(
    tmp_path: Path, place: Path, run: Run, store: bytes
) -> None:
    joined_at(tmp_path, place, store)
    assert_refused(run(tmp_path, "run.toml", "--join"), "runs/main/rendezvous.json")
