"""Jobs of the pool's ranks for the tests of meshes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.errors import RunError
from dynmo.runtime.comm.agreement import agree
from dynmo.runtime.comm.process_mesh import FirstReplica, arrange
from dynmo.runtime.comm.world import World
from dynmo.runtime.layer.accumulation import Tree
from dynmo.runtime.optim.gradient_reduction import (
    Reducer,
    drop_missing,
    gather_parameters,
    reduce_gradients,
    shares_of,
    squared_norms,
)
from dynmo.runtime.optim.optimizer import LayerOptimizer, OptimizerSettings, Share, squared_norm
from dynmo.runtime.optim.zero import cut_state, whole_state
from tests.runtime.jobs.world import lose_patience


def shape(world: World, replicas: list[int]) -> list[list[Any]]:
    """Who this rank is in each mesh, the sums over its pipeline, peers and all, and what it got."""
    out: list[list[Any]] = []
    for count in replicas:
        here = arrange(world, count)
        mark = torch.tensor([2.0**world.rank])
        sums = [int(each.sum(mark.clone(), "a sum")) for each in (here, here.peers, here.everyone)]
        around, received = (here.rank + 1) % here.size, torch.zeros(1)
        if here.size > 1:
            sent = here.send(mark, around, 1)
            source = (here.rank - 1) % here.size
            here.wait(here.receive(received, source, 1), source, "a message")
            here.wait(sent, around, "room for a message")
        first = FirstReplica(here).sum(mark.clone(), "the first replica")
        out.append(
            [
                here.rank,
                here.size,
                here.replica,
                here.replicas,
                *sums,
                int(received),
                int(first),
                here.describe_rank(here.rank),
            ]
        )
    return out


def disagree(world: World) -> list[str]:
    here = arrange(world, 2)
    try:
        agree(here, b"a" * 8 if here.replica else b"b" * 8, "the plan")
    except RunError as error:
        return [type(error).__name__, str(error)]
    return []


def reduction_fails(world: World) -> list[Any]:
    """Rank 0's peer never gives its gradients: the wait has an end and a name."""
    here = arrange(world, 2)
    lose_patience(here.peers)
    reducer = Reducer(here.peers)
    line = nn.Linear(2, 2)
    line.weight.grad = torch.ones(2, 2)
    try:
        if world.rank == 1:
            world.store.wait(["named"])
        elif world.rank == 0:
            shares = shares_of(line, frozenset(), 2)
            reducer.submit(
                lambda: partial(drop_missing, reduce_gradients(here.peers, 3, shares, True))
            )
            reducer.finish("the gradients of the step")
    except RunError as error:
        return [type(error).__name__, str(error)]
    finally:
        if world.rank == 0:
            world.store.set("named", "1")
        world.close()
    return []


def _module() -> nn.Module:
    """Norm blocks, an odd rest, another dtype, and parameters with no or few gradients."""
    torch.manual_seed(5)
    module = nn.ModuleDict(
        {
            "big": nn.Linear(300, 201),
            "norm": nn.LayerNorm(7),
            "some": nn.Linear(50, 3),
            "none": nn.Linear(3, 3),
        }
    )
    module["still"] = nn.Linear(4, 4).requires_grad_(False)
    module["low"] = nn.Linear(5, 5, bias=False).to(torch.bfloat16)
    return module


def _gradients(module: nn.Module, replica: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(100 + replica)
    weights = {
        name: torch.randn(p.shape, generator=random).to(p.dtype)
        for name, p in module.named_parameters()
    }
    left_out = [
        name
        for name in weights
        if name.startswith(("none", "still")) or (name.startswith("some") and replica != 1)
    ]
    return {name: g for name, g in weights.items() if name not in left_out}


def reduce(world: World, everywhere: bool, bucket: int) -> dict[str, Any]:
    """Compares sums, norm and gathered parameters with the tree of all replicas' gradients."""
    here = arrange(world, world.size)
    module, count = _module(), here.replicas
    shared = frozenset({"some.weight"})
    shares = shares_of(module, shared, count)
    for name, gradient in _gradients(module, here.replica).items():
        module.get_parameter(name).grad = gradient
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


def states(world: World, name: str) -> list[str]:
    """A state that is cut into shares and made whole again is the same."""
    here = arrange(world, world.size)
    settings = OptimizerSettings(name=name)  # pyright: ignore[reportArgumentType]
    alone, cut = _module(), _module()
    whole = LayerOptimizer(alone, settings)
    share = LayerOptimizer(cut, settings, share=Share(here.replica, here.replicas))
    for _ in range(2):
        for module, optimizer in ((alone, whole), (cut, share)):
            for key, gradient in _gradients(module, 1).items():
                module.get_parameter(key).grad = gradient
            optimizer.step(1e-2)
            optimizer.drop_gradients()
    expected, got, own = whole.state(), whole_state(here.peers, share), share.state()
    bad = sorted(expected.keys() ^ got.keys())
    bad += [
        key
        for key in expected.keys() & got.keys()
        if not torch.equal(expected[key], got[key]) or expected[key].shape != got[key].shape
    ]
    twice = cut_state(share, got)
    bad += sorted(own.keys() ^ twice.keys())
    bad += [key for key in own.keys() & twice.keys() if not torch.equal(own[key], twice[key])]
    if here.replicas > 1 and not share.state_bytes < whole.state_bytes:
        bad.append("the share is not smaller")
    return bad
