"""Process meshes, and what their replicas reduce and share."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dynmo.kernels.split import float32_gradients, gradient_dtype
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.process_mesh import FirstReplica, arrange
from dynmo.runtime.layer.accumulation import Tree
from dynmo.runtime.optim.gradient_reduction import (
    Reducer,
    buckets,
    drop_missing,
    gather_parameters,
    reduce_gradients,
    replicated_weights,
    squared_norms,
)
from dynmo.runtime.optim.optimizer import Share, squared_norm
from dynmo.runtime.optim.replicas import cut_state, whole_state
from dynmo.schedule.memory import REDUCED_AT_ONCE
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.runtime.alone import alone
from tests.runtime.jobs import error_of, lose_patience
from tests.runtime.optimizers import optimizer_of, settings, step


def shape(world: Meeting, replicas: list[int]) -> list[list[Any]]:
    """This rank's place in each mesh, its sums over pipeline, peers and all, and what it got."""
    out: list[list[Any]] = []
    mark = torch.tensor([2.0**world.rank])
    for count in replicas:
        here = arrange(world, count)
        sums = [int(each.sum(mark.clone(), "a sum")) for each in (here, here.peers, here.everyone)]
        around, received = (here.rank + 1) % here.size, torch.zeros(1)
        if here.size > 1:
            sent = here.send(mark, around, 1)
            source = (here.rank - 1) % here.size
            here.wait(here.receive(received, source, 1), source, "a message")
            here.wait(sent, around, "room for a message")
        first = FirstReplica(here).sum(mark.clone(), "the first replica")
        who = [here.rank, here.size, here.replica, here.replicas]
        out.append([*who, *sums, int(received), int(first), here.describe_rank(here.rank)])
    return out


def disagree(world: Meeting) -> list[str]:
    here = arrange(world, 2)
    return error_of(lambda: agree(here, b"a" * 8 if here.replica else b"b" * 8, "the plan"))


def reduction_fails(world: Meeting) -> list[Any]:
    """Rank 0's peer never gives its gradients: the wait has an end and a name."""
    here = arrange(world, 2)
    lose_patience(here.peers)
    reducer = Reducer(here.peers)
    line = nn.Linear(2, 2)
    line.weight.grad = torch.ones(2, 2)

    def reduce() -> None:
        if world.rank == 1:
            world.store.wait(["named"])
        elif world.rank == 0:
            shares = replicated_weights(line, frozenset(), 2)
            reducer.submit(
                lambda: partial(drop_missing, reduce_gradients(here.peers, 3, shares, True))
            )
            reducer.finish("the gradients of the step")

    said = error_of(reduce)
    if world.rank == 0:
        world.store.set("named", "1")
    world.close()
    return said


def _module() -> nn.Module:
    """Norm blocks, an odd rest, another dtype, and parameters with no or few gradients."""
    torch.manual_seed(5)
    module = nn.ModuleDict({"big": nn.Linear(300, 201), "norm": nn.LayerNorm(7)})
    module.update({"some": nn.Linear(50, 3), "none": nn.Linear(3, 3)})
    module["still"] = nn.Linear(4, 4).requires_grad_(False)
    module["low"] = nn.Linear(5, 5, bias=False).to(torch.bfloat16)
    float32_gradients(module)
    return module


def _gradients(module: nn.Module, replica: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(100 + replica)
    left_out = ("none", "still") if replica == 1 else ("none", "still", "some")
    drawn = {
        name: torch.randn(p.shape, generator=random).to(gradient_dtype(p))
        for name, p in module.named_parameters()
    }
    return {name: g for name, g in drawn.items() if not name.startswith(left_out)}


def _give(module: nn.Module, replica: int) -> None:
    for name, gradient in _gradients(module, replica).items():
        module.get_parameter(name).grad = gradient


def reduce(world: Meeting, everywhere: bool, bucket: int) -> dict[str, Any]:
    """Compares sums, norm and gathered parameters with the tree of all replicas' gradients."""
    here = arrange(world, world.size)
    module, count = _module(), here.replicas
    shared = frozenset({"some.weight"})
    shares = replicated_weights(module, shared, count)
    _give(module, here.replica)
    expected: dict[str, Tensor] = {}
    for name in dict(module.named_parameters()):
        tree = Tree()
        for replica in range(count):
            tree.put(replica, _gradients(module, replica).get(name))
        whole = tree.total(count)
        if whole is not None:
            expected[name] = whole
    reducer = Reducer(here.peers)
    reducer.submit(
        lambda: partial(drop_missing, reduce_gradients(here.peers, 0, shares, everywhere, bucket))
    )
    reducer.finish("the gradients")
    names = {id(p): name for name, p in module.named_parameters()}
    bad: list[str] = []
    for s in shares:
        name, grad = names[id(s.parameter)], s.parameter.grad
        if (grad is None) != (name not in expected):
            bad.append(name)
        elif grad is not None:
            part = slice(None) if everywhere else slice(*s.ranges[here.replica])
            if not torch.equal(grad.view(-1)[part], expected[name].view(-1)[part]):
                bad.append(name)
    norm = squared_norms(here.peers, {0: shares})[0]
    mine = [here.replica + p.detach().clone() for p in module.parameters()]
    with torch.no_grad():
        for p in module.parameters():
            p.add_(here.replica)
    gather_parameters(here.peers, 0, shares, bucket)
    for s, own in zip(
        sorted(shares, key=lambda s: list(names).index(id(s.parameter))), mine, strict=True
    ):
        for replica, (low, high) in enumerate(s.ranges):
            gathered = s.owned and s.parameter.requires_grad
            moved = own.view(-1)[low:high] - here.replica + (replica if gathered else here.replica)
            if not torch.allclose(
                s.parameter.detach().view(-1)[low:high].float(), moved.float(), atol=0.02
            ):
                bad.append(f"gathered {names[id(s.parameter)]}")
    reducer.close()
    ordered = [expected[name] for name in names.values() if name in expected]
    return {
        "bad": bad,
        "norm": norm,
        "expected": squared_norm(ordered),
        "cut": any(low > 0 for s in shares for low, _ in s.ranges),
    }


def states(world: Meeting, name: str) -> list[str]:
    """A state that is cut into shares and made whole again is the same."""
    here = arrange(world, world.size)
    alone, cut = _module(), _module()
    whole = optimizer_of(alone, settings(name).make)
    share = optimizer_of(cut, settings(name).make, share=Share(here.replica, here.replicas))
    for _ in range(2):
        for module, optimizer in ((alone, whole), (cut, share)):
            _give(module, 1)
            step(optimizer, 1e-2)
            optimizer.drop_gradients()
    got, own = whole_state(here.peers, share), share.state()
    bad: list[str] = []
    for ours, theirs in ((got, whole.state()), (cut_state(share, got), own)):
        bad += sorted(ours.keys() ^ theirs.keys())
        bad += [
            key
            for key in ours.keys() & theirs.keys()
            if not torch.equal(ours[key], theirs[key]) or ours[key].shape != theirs[key].shape
        ]
    if here.replicas > 1 and not share.state_bytes < whole.state_bytes:
        bad.append("the share is not smaller")
    return bad


JOBS = "tests.runtime.comm.test_process_mesh:"


def test_views_of_the_same_ranks(pool: Pool) -> None:
    """Rank r contributes 2^r, so that a sum shows which ranks took part."""
    ranks = pool.run(JOBS + "shape", 4, replicas=[2, 4, 1, 2])
    two, four, one = ([r[i] for r in ranks] for i in range(3))
    assert [r[3] for r in ranks] == two, "the same shape again"
    # rank, size, replica, replicas; sums over pipeline, peers, all; from the rank before; the first
    # replica's sum; name
    assert two == [
        [0, 2, 0, 2, 0b0101, 0b0011, 15, 0b0100, 0b0101, "rank 0 (replica 0)"],
        [0, 2, 1, 2, 0b1010, 0b0011, 15, 0b1000, 0b0101, "rank 1 (replica 1)"],
        [1, 2, 0, 2, 0b0101, 0b1100, 15, 0b0001, 0b0101, "rank 2 (replica 0)"],
        [1, 2, 1, 2, 0b1010, 0b1100, 15, 0b0010, 0b0101, "rank 3 (replica 1)"],
    ]
    assert four == [[0, 1, r, 4, 2**r, 15, 15, 0, 1, f"rank {r} (replica {r})"] for r in range(4)]
    assert one == [
        [r, 4, 0, 1, 15, 2**r, 15, 2 ** ((r - 1) % 4), 15, f"rank {r}"] for r in range(4)
    ]


def test_uneven_number_of_replicas_is_refused() -> None:
    with pytest.raises(AssertionError, match="are all ranks"):
        arrange(alone(), 2)
    assert arrange(alone(), 1).replicas == 1


def test_disagreement_names_global_ranks_and_replicas(pool: Pool) -> None:
    """Log files are named by global rank."""
    said = pool.run(JOBS + "disagree", 4)
    ranks = "rank 0 (replica 0) and ranks 1 (replica 1), 3 (replica 1) disagree on the plan"
    assert said == [["RunError", f"{ranks}; do all run the same dynmo, config and data?"]] * 4


def test_missing_reduction_of_a_peer_is_named(pool: Pool) -> None:
    """The limit of the collective, which names the rank, comes first."""
    kind, text = pool.run(JOBS + "reduction_fails", 4)[0]
    waited = "rank 0 (replica 0) waited 0.5 s for rank 1 (replica 1): the gradients of layer 3"
    assert kind == "WaitTimeout"
    assert text.startswith(f"{waited}; ")
    assert text.endswith("where it only takes longer, raise parallel.timeout")


@pytest.mark.parametrize(
    ("replicas", "everywhere", "bucket"),
    mostly_matrix(
        product((2, 3, 4), (True, False), (REDUCED_AT_ONCE, 20_000)),
        everyday=[(2, True, REDUCED_AT_ONCE), (3, True, 20_000), (4, False, 20_000)],
    ),
)
def test_gradients_of_replicas_are_summed_in_shares(
    pool: Pool, replicas: int, everywhere: bool, bucket: int
) -> None:
    for result in pool.run(JOBS + "reduce", replicas, everywhere=everywhere, bucket=bucket):
        assert result["bad"] == []
        assert result["cut"], "no parameter was cut"
        assert result["norm"] == result["expected"]


@pytest.mark.parametrize(("replicas", "name"), [(2, "sgd"), (3, "adamw")])
def test_optimizer_state_shares_form_the_whole_state(pool: Pool, replicas: int, name: str) -> None:
    assert pool.run(JOBS + "states", replicas, name=name) == [[]] * replicas


class _Sizes(nn.Module):
    def __init__(self, sizes: list[int], low: list[int]) -> None:
        super().__init__()
        for i, size in enumerate(sizes):
            dtype = torch.bfloat16 if i in low else torch.float32
            self.register_parameter(f"p{i}", nn.Parameter(torch.empty(size, dtype=dtype)))


@given(
    st.lists(st.sampled_from([0, 1, 7, 16_384, 16_385, 50_000]), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(1, 5),
    st.sampled_from([10_000, 30_000, 100_000, 1 << 25]),
)
def test_buckets_hold_every_share_once(
    sizes: list[int], low: list[int], replicas: int, size: int
) -> None:
    module = _Sizes(sizes, low)
    shares = replicated_weights(module, frozenset({"p1"}), replicas)
    parts: dict[int, list[list[tuple[int, int]]]] = {
        id(p): [[] for _ in range(replicas)] for p in module.parameters()
    }
    for bucket in buckets(shares, size):
        (dtype,) = {s.parameter.dtype for s in bucket}
        assert sum(high - low for s in bucket for low, high in s.ranges) * dtype.itemsize <= size
        for s in bucket:
            for replica, (start, stop) in enumerate(s.ranges):
                parts[id(s.parameter)][replica].append((start, stop))
    for s in shares:
        for (start, stop), share in zip(s.ranges, parts[id(s.parameter)], strict=True):
            assert share, "a bucket says whether there is a gradient, though it were empty"
            filled = [part for part in share if part[0] < part[1]]
            edges = [edge for part in filled for edge in part]
            assert edges == sorted(edges)
            assert edges[1:-1:2] == edges[2::2], "one after another"
            assert (edges[:1], edges[-1:]) == (([start], [stop]) if start < stop else ([], []))


def test_frozen_parameters_are_in_no_bucket() -> None:
    module = _Sizes([5, 6], [])
    module.get_parameter("p0").requires_grad_(False)
    ((only,),) = buckets(replicated_weights(module, frozenset(), 2), 1 << 20)
    assert only.parameter is module.get_parameter("p1")
