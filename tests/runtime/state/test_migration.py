"""Moving layers between ranks: every bit arrives, or no layer moves."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from dynmo.balance.partition import Move
from dynmo.errors import RunError
from dynmo.runtime.state.migration import contents, fill, pack, unpack
from tests.combinations import mostly_matrix
from tests.pool import Pool

JOBS = "tests.runtime.jobs.migrate:"
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {"kind": "gpt", "blocks": 3, "hidden": 16, "heads": 2, "sequence": 4},
    "own": {"kind": "python:tests.models.user_model:layers"},
}
CPU = torch.device("cpu")
MOVE = Move(2, 0, 1)


@pytest.mark.parametrize(
    ("kind", "ranks", "seed"),
    mostly_matrix(product(KINDS, (2, 4), (0, 1)), everyday=[("gpt", 4, 0), ("own", 4, 0)]),
)
def test_random_moves_change_no_bits(pool: Pool, kind: str, ranks: int, seed: int) -> None:
    """Layers train between moves, as in a run without moves."""
    moved = pool.run(JOBS + "migrate", ranks, kind=KINDS[kind], seed=seed, rounds=4)
    (stayed,) = pool.run(JOBS + "migrate", 1, kind=KINDS[kind], seed=seed, rounds=4)
    assert {
        index: layer for result in moved for index, layer in result["layers"].items()
    } == stayed["layers"]
    assert stayed["moved"] == 0
    assert all(result["moved"] == moved[0]["moved"] > 0 for result in moved), (
        "every rank knows the bytes of all"
    )
    sections = {name.split()[0] for layer in stayed["layers"].values() for name in layer}
    assert sections == {"parameter", "buffer", "gradient", "optimizer", "trains"}
    trains = [value for layer in stayed["layers"].values() for value in layer.items()]
    assert {value for name, value in trains if name.startswith("trains")} == {True, False}


@pytest.mark.parametrize(
    ("how", "rank", "reason"),
    [
        ("source", 0, "layer 2 will not go"),
        (
            "dtype",
            1,
            "layer 2: buffer odd is of float8_e5m2, which cannot travel; known are float32",
        ),
        ("memory", 1, "allocate"),
    ],
)
def test_failed_move_leaves_all_layers_in_place(
    pool: Pool, how: str, rank: int, reason: str
) -> None:
    """All ranks raise at once, no layer has moved, and the next move succeeds."""
    results = pool.run(JOBS + "migrate_fails", 3, how=how)
    for each, result in enumerate(results):
        assert result["error"].startswith(f"layers could not be moved (rank {rank})")
        assert result["error"].endswith("all stay where they were")
        assert (reason in result["error"]) or each != rank
        assert result["untouched"]
    assert [result["after"] for result in results] == [[0], [1, 2], [3, 4, 5]]


def edited(change: Any) -> bytes:
    """A linear's manifest with something changed."""
    text, _ = pack(2, nn.Linear(3, 2), {})
    manifest = json.loads(text)
    change(manifest)
    return json.dumps(manifest).encode()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.update(layer=3), "layer 2 was expected from rank 0, which sends layer 3"),
        (
            lambda m: m["tensors"][0].update(dtype="float128"),
            "layer 2: parameter weight is of float128, which cannot travel",
        ),
        (lambda m: m["tensors"][0].update(dtype="__class__"), "cannot travel"),
        (
            lambda m: m["tensors"][0].update(shape="12"),
            "the manifest of layer 2 from rank 0 cannot be read",
        ),
        (lambda m: m["tensors"][0].update(extra=1), "cannot be read"),
        (lambda m: m["tensors"][0].pop("name"), "cannot be read"),
        (lambda m: m["tensors"][0].update(shape=[1 << 44]), r"from rank 0: it announces \d+"),
        (lambda m: m["tensors"][0].update(shape=[-2, -3]), r"weight has the shape \[-2, -3\]"),
    ],
)
def test_bad_manifests_are_refused(change: Any, match: str) -> None:
    with pytest.raises(RunError, match=match):
        unpack(edited(change), MOVE, CPU)


@pytest.mark.parametrize("length", [-1, 1 << 50])
def test_manifest_length_is_bounded(pool: Pool, length: int) -> None:
    """The receiver does not allocate a size just because a peer announces it."""
    _, told = pool.run(JOBS + "announces", 2, length=length)
    assert told.startswith(f"the manifest of layer 2 from rank 0 has {length} bytes")


def test_truncated_manifest_is_refused() -> None:
    with pytest.raises(RunError, match="cannot be read"):
        unpack(pack(2, nn.Linear(3, 2), {})[0][:-5], MOVE, CPU)


class Counting(nn.Module):
    """Has a buffer from its first forward on."""

    seen: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.ones(2) if self.seen is None else self.seen + 1
        return self.linear(x)


def test_buffer_made_in_a_forward_moves() -> None:
    here, there = Counting(), Counting().to("meta")
    here(here(torch.zeros(1, 2)))
    fill(there, contents(here, {}), dict.fromkeys(("linear.weight", "linear.bias"), True))
    assert there.seen is not None
    assert there.seen.tolist() == [2.0, 2.0]


def test_unpacked_layer_equals_the_packed_layer() -> None:
    """`fill` builds the module from the tensors that the receiver allocated."""
    module = nn.BatchNorm1d(4)
    module.weight.requires_grad_(False)
    module.bias.grad = torch.randn(4)
    state = {"bias/step": torch.tensor(3.0), "bias/exp_avg": torch.randn(4)}
    text, tensors = pack(2, module, state)
    arrival = unpack(text, MOVE, CPU)
    assert [(t.dtype, t.shape) for t in tensors] == [
        (t.dtype, t.shape) for t in arrival.tensors.values()
    ]
    for ours, sent in zip(arrival.tensors.values(), tensors, strict=True):
        ours.copy_(sent)
    other = nn.BatchNorm1d(4).to("meta")
    assert fill(other, arrival.tensors, arrival.flags).keys() == state.keys()
    before, after = contents(module, state), contents(other, state)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not other.weight.requires_grad
    assert other.bias.requires_grad
