"""The private functions of torch that dynmo uses. No other file uses one.

To admit a new version of torch, raise `BELOW` once all tests pass with that version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _FunctionBase as FunctionBase
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dynmo.errors import ConfigError

__all__ = [
    "NEEDS_VALUES",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionBase",
    "TorchDispatchMode",
    "tree_leaves",
    "tree_map_only",
    "unset_fake_temporarily",
]

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
)
"""Errors of code that runs on real tensors, but not on tensors without values."""

# The first version that was not tried. pyproject.toml has the same limit.
BELOW = (2, 14)


def check_version(version: str) -> None:
    """Refuse a version of torch that is newer than those that were tried."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) >= BELOW:
        limit = ".".join(map(str, BELOW))
        raise ConfigError(
            f"torch {version} is newer than this dynmo knows; install one below {limit}: pip "
            f"install 'torch<{limit}'"
        )


check_version(torch.__version__)


def scale_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all tensors in place, in one kernel if the device has one."""
    torch._foreach_mul_(list(tensors), factor)


def add_each(sums: Sequence[Tensor], amounts: Sequence[Tensor]) -> None:
    """Add an amount to each sum in place, in one kernel if the device has one."""
    torch._foreach_add_(list(sums), list(amounts))


def reshape_unsafe(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Give another shape to a tensor that has no other user."""
    return torch.ops.aten._unsafe_view.default(x, shape)


def softmax_backward(gradient: Tensor, output: Tensor) -> Tensor:
    """Compute the gradient of the input of a softmax over the last dimension."""
    return torch._softmax_backward_data(gradient, output, -1, output.dtype)


# What functional.grouped_mm calls.
GROUPED_MM: Any = torch._grouped_mm


def run_backward(
    roots: tuple[Any, ...], gradients: tuple[Any, ...], inputs: tuple[Any, ...] = ()
) -> tuple[Tensor | None, ...]:
    """Run the backward. It returns the gradients of the inputs, or adds up those of all leaves.

    Roots and inputs are tensors, or edges of the graph (node, index of the node's output).
    """
    engine = torch.autograd.Variable._execution_engine
    # keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
    return engine.run_backward(roots, gradients, False, False, inputs, True, not inputs)


# These run for each linear or layer, so no function of Python is between.

nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]
"""Returns how many nodes of graphs this thread has made so far."""

in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active

saved_tensors_hooks_in_force: Callable[[], Any] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks,  # pyright: ignore[reportAttributeAccessIssue]
    True,
)
"""Returns the innermost hooks on tensors that autograd saves. None if there are none."""


@contextmanager
def saved_tensors_shown(show: Callable[[Tensor], None]) -> Generator[None]:
    """Show each tensor that autograd saves, except within torch.func.

    Transforms of torch.func (grad, vjp) switch hooks off, and refuse to do so under hooks.
    """

    def pack(tensor: Tensor) -> Tensor:
        show(tensor)
        return tensor

    def switch_off(message: str) -> None:
        refuses = saved_tensors_hooks_in_force()[0] is not pack
        disable(message, refuses)

    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    disable = autograd._saved_tensors_hooks_disable
    autograd._saved_tensors_hooks_disable = switch_off
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        autograd._saved_tensors_hooks_disable = disable


def abort_communicators() -> None:
    """End all process groups at once, whatever they wait for."""
    dist.distributed_c10d._abort_process_group()


def restart_group_names() -> None:
    """Count process groups from 0 again, as all ranks that meet again must."""
    dist.distributed_c10d._world.group_count = 0


def default_store() -> dist.Store:
    """Return the store through which the ranks have met."""
    return dist.distributed_c10d._get_default_store()


def set_group_timeout(group: Any, device: torch.device, timeout: timedelta) -> None:
    """Change how long a process group's backend waits."""
    group._get_backend(device)._set_default_timeout(timeout)


def is_compiled(module: object) -> bool:
    """Return whether a module is what `torch.compile` makes of another."""
    return type(module).__module__.startswith("torch._dynamo")


def configure_compiler(device: torch.device, recompile_limit: int) -> None:
    """Set torch.compile up so that all ranks compile the same arithmetic."""
    # Importing these takes a second. Only runs that compile wait for it.
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = recompile_limit, True  # pyright: ignore[reportAttributeAccessIssue]
    inductor.compile_threads = torch.get_num_threads()  # a rank's own cores, not the machine's
    inductor.fallback_random = (
        True  # dropout draws from torch's own streams, which are keyed by layer and microbatch
    )
    if device.type == "cuda":
        # Otherwise each rank would choose by timing how a sum is split.
        inductor.deterministic = True


def has_triton() -> bool:
    """Return whether Triton is installed and knows the device."""
    from torch.utils._triton import has_triton as found_by_torch

    return found_by_torch()


def has_cpp_compiler() -> bool:
    """Return whether torch finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True
