"""dynmo's experts compute the same as transformers' Mixtral, in another order of sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dynmo.cases.experts.layers import ExpertsHalf
from dynmo.models.gpt import feed_forward_size
from dynmo.models.options import ModelOptions

OPTIONS = ModelOptions(kind="moe", hidden=32, init_std=0.3, router_loss=0.0)

close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def mixtral() -> Any:
    """The module of the model. The import takes seconds."""
    from transformers.models.mixtral import modeling_mixtral

    return modeling_mixtral


def block_of(half: ExpertsHalf, modeling: Any, hidden: int) -> Any:
    router = half.router
    sizes = {"hidden_size": hidden, "intermediate_size": feed_forward_size(hidden)}
    experts = {"num_local_experts": router.experts, "num_experts_per_tok": router.top_k}
    config = modeling.MixtralConfig(**sizes, **experts, experts_implementation="eager")
    block = modeling.MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(half.router.weight)
        block.experts.gate_up_proj.copy_(torch.stack([*half.gate_up.parameters()]))
        block.experts.down_proj.copy_(torch.stack([*half.down.parameters()]))
    return block


@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("training", [True, False])
def test_experts_equal_those_of_mixtral(mixtral: Any, top_k: int, training: bool) -> None:
    torch.manual_seed(top_k)
    half = ExpertsHalf(OPTIONS.model_copy(update={"top_k": top_k}))
    half.train(training)
    block = block_of(half, mixtral, 32).train(training)
    x, g = torch.randn(2, 24, 32, requires_grad=True), torch.randn(2, 24, 32)

    def gradients(added: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return added, *torch.autograd.grad(added, (x, *weights), g)

    own = half.router.weight, *half.gate_up.parameters(), *half.down.parameters()
    ours, experts = gradients(half.added(x), *own), block.experts
    weights = (block.gate.weight, experts.gate_up_proj, experts.down_proj)
    theirs = gradients(block(half.norm(x)), *weights)
    close((*ours[:3], torch.stack(ours[3:11]), torch.stack(ours[11:])), theirs)


def test_auxiliary_loss_is_half_of_that_of_mixtral(mixtral: Any) -> None:
    """Each token has two experts. Mixtral counts both fully, and dynmo counts shares."""
    torch.manual_seed(0)
    half = ExpertsHalf(OPTIONS.model_copy(update={"router_loss": 1.0}))
    x = torch.randn(40, 32)
    half.router(x)[0].sum().backward()
    scores = half.router.weight.detach().clone().requires_grad_()
    theirs = mixtral.load_balancing_loss_func((x @ scores.T,), 8, 2)
    theirs.backward()
    assert half.router.weight.grad is not None
    assert scores.grad is not None
    close(2 * half.router.weight.grad, scores.grad)
