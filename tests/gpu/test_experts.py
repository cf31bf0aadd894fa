"""Experts on CUDA: the grouped kernel, and experts sharded over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dynmo.kernels.deferral import install
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.kernels.split import WeightTape
from tests.gpu.test_ranks import CONFIG, Ranks, digest


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("counts", [[96, 0, 160, 8], [264, 0, 0, 0]])
def test_grouped_kernel_equals_a_loop(counts: list[int]) -> None:
    """`grouped_mm` in bfloat16 is compared with float32 on the CPU."""
    torch.manual_seed(0)
    layer = GroupedLinear(4, 64, 48, 0.1)
    reference = GroupedLinear(4, 64, 48, 0.1)
    layer.bfloat16().cuda().flatten_parameters()
    reference.load_state_dict({name: t.float().cpu() for name, t in layer.state_dict().items()})
    install(layer, WeightTape())
    x, g = torch.randn(264, 64).bfloat16(), torch.randn(264, 48).bfloat16()
    ours, theirs = x.cuda().requires_grad_(), x.float().requires_grad_()
    y, expected = layer(ours, counts), reference(theirs, counts)
    torch.testing.assert_close(y.float().cpu(), expected, rtol=2e-2, atol=2e-2)
    y.backward(g.cuda())
    expected.backward(g.float())
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad.float().cpu(), theirs.grad, rtol=2e-2, atol=2e-2)
    for a, b in zip(layer.parameters(), reference.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_shared_experts_train_the_same(device: torch.device, tmp_path: Path, backend: str) -> None:
    """Two replicas with sharded experts, which move, train as two with all experts."""
    if device.type == "cuda" and backend == "auto" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL refuses two ranks on one GPU")
    on = Ranks(device.type, backend, 2)
    experts = {"kind": "moe", "experts": 4, "top_k": 2}
    options = {
        "model": CONFIG["model"] | experts,
        "dynamism": {"cases": ["experts"], "experts": {"place_every": 2, "redundant": 1}},
    }
    digests = {digest(tmp_path, "zb-h1", on, 1, 2, expert=expert, **options) for expert in (1, 2)}
    assert len(digests) == 1
