"""The same code path on a CUDA device, within the tolerance of other kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dynmo.cases.freezing.cache import OutputCache
from dynmo.cases.sparse_attention.hashed import Hashed
from dynmo.errors import WaitTimeout
from dynmo.runtime.comm.clock import clock_for
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.stage import FrozenPrefix
from dynmo.runtime.optim.gradient_reduction import (
    buckets,
    drop_missing,
    reduce_bucket,
    replicated_weights,
)
from tests.gpu.one_rank import trained

CONFIG = {
    "model": {"blocks": 2, "hidden": 64, "heads": 4, "sequence": 32},
    "train": {"steps": 6, "global_batch": 8, "micro_batch": 2, "lr": 1e-3},
    "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[3, 3]]}},
}


@pytest.mark.gpu
def test_cuda_runs_agree_with_the_cpu_and_each_other(device: torch.device) -> None:
    first, again, on_cpu = (
        trained(each, CONFIG)["losses"] for each in (device, device, torch.device("cpu"))
    )
    assert first == pytest.approx(again, rel=1e-5)
    assert first == pytest.approx(on_cpu, rel=1e-3)


@pytest.mark.gpu
def test_nccl_works_with_one_rank(cuda: torch.device, tmp_path: Path) -> None:
    """Collectives, a group without its timeout, a regular end, and an end after a failure."""
    store = SignedStore(dist.FileStore(str(tmp_path / "store"), 1))
    for generation, failed in enumerate((False, True, False)):
        world = Meeting.join(store, 0, 1, device=cuda, generation=generation)
        x = torch.arange(8.0, device=cuda)
        group = dist.new_group([0], backend="nccl")
        assert isinstance(group, dist.ProcessGroup)
        world._lift_limit(group)
        dist.all_reduce(x)
        dist.broadcast(x, 0, group=group)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        assert out.tolist() == list(range(8))
        world.close(failed=failed)
        assert not dist.is_initialized()


@pytest.mark.gpu
def test_cached_output_returns_unchanged(device: torch.device) -> None:
    """The cached output is stored in host memory."""
    layer = Layer(0, torch.nn.Linear(64, 64).to(device), clock_for(device), 0)
    cache, x = OutputCache(1 << 20), (torch.randn(8, 64, device=device),)
    prefixes = [FrozenPrefix([layer], 0, x, step, training=True) for step in range(2)]
    (first,), (kept,) = (cache.run(prefix, "a") for prefix in prefixes)
    assert [prefix.skipped for prefix in prefixes] == [0, 1]
    assert kept.device == first.device
    assert torch.equal(kept, first)


@pytest.fixture
def without_syncs(cuda: torch.device) -> Iterator[None]:
    """Every call that makes the host wait for the device raises."""
    torch.cuda.synchronize()
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.usefixtures("without_syncs")
def test_cached_output_does_not_block_the_host() -> None:
    """The output is copied out and back asynchronously, also from another stream."""
    device = torch.device("cuda:0")
    layer = Layer(0, torch.nn.Linear(2048, 2048).to(device), clock_for(device), 0)
    cache, x = OutputCache(1 << 30), (torch.randn(2048, 2048, device=device),)

    def run(samples: str, step: int) -> torch.Tensor:
        (y,) = cache.run(FrozenPrefix([layer], 0, x, step, training=True), samples)
        return y

    run("a", 0)  # the first of its size looks at shapes
    torch.cuda.set_sync_debug_mode("error")
    first = run("b", 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        kept = run("b", 1)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(kept, first)


@pytest.mark.gpu
@pytest.mark.usefixtures("without_syncs")
def test_hash_directions_do_not_block_the_host() -> None:
    x, v = (torch.randn(2, 256, 4, 32, device="cuda") for _ in range(2))
    hashed = Hashed(8, 32, 1)
    first = hashed(x, v)
    torch.cuda.set_sync_debug_mode("error")
    second = hashed(x, v)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.usefixtures("without_syncs")
def test_reduction_does_not_block_the_host() -> None:
    """Two gradients are missing, and one is not contiguous."""
    module = torch.nn.ModuleList(torch.nn.Linear(64, 32) for _ in range(2)).cuda()
    first, *_ = parameters = list(module.parameters())
    first.grad = torch.randn(64, 32, device="cuda").t()
    parameters[1].grad = torch.randn(32, device="cuda")
    expected = first.grad.clone()
    peers = Meeting(0, 1, torch.device("cuda", 0), 5.0, 0, SignedStore(dist.HashStore()))
    torch.cuda.set_sync_debug_mode("error")
    with torch.no_grad():
        (bucket,) = buckets(replicated_weights(module, frozenset(), 1), 1 << 20)
        missing = reduce_bucket(peers, bucket, everywhere=True, what="gradients")
    torch.cuda.set_sync_debug_mode("default")
    drop_missing(missing)
    assert torch.equal(first.grad, expected)
    assert all(p.grad is not None for p in parameters[:2])


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_stalled_stream_times_out() -> None:
    """A stream may compute before the wait for longer than the timeout."""
    world = Meeting(0, 2, torch.device("cuda", 0), 0.2, 0, SignedStore(dist.HashStore()))
    second = 2 * 10**9  # of a device's cycles, about
    torch.cuda._sleep(second)
    with world.waits.around(world.device, [1], "a message"):
        pass
    world.settle()
    with world.waits.around(world.device, [1], "a message"):
        torch.cuda._sleep(second)
    with pytest.raises(WaitTimeout, match=r"rank 0 .* rank 1: a message"):
        world.settle()
    torch.cuda.synchronize()
    world.settle()
