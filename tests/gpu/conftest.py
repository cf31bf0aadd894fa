"""The device of the GPU tests, and process-wide settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def device(pytestconfig: pytest.Config) -> torch.device:
    """The first CUDA device, or the CPU in a dry run (`--gpu-device cpu`)."""
    on_cuda = pytestconfig.getoption("--gpu-device") == "cuda"
    return torch.device("cuda", 0) if on_cuda else torch.device("cpu")


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The CUDA device, for a test that a dry run cannot imitate."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    return device


@pytest.fixture(autouse=True)
def kernels_as_before() -> Iterator[None]:
    """No test depends on which test came first."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)
