"""The FLOPs of a model by arithmetic, compared with those that torch counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dynmo.config import parse
from dynmo.models.flops import product_weights
from dynmo.models.model import Model
from dynmo.models.rows import row_cost
from dynmo.models.sequential import Sequential
from dynmo.pipeline.results import peak_of, tokens_of
from dynmo.train.setup import model_of

GPT = {"blocks": 2, "hidden": 32, "heads": 2, "vocab": 64, "sequence": 8}
MOE = GPT | {"kind": "moe", "experts": 4, "top_k": 1, "shared_experts": 1}


def counted(model: Model, ids: Tensor) -> int:
    """The FLOPs of a forward, with all pairs of tokens."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        out: Tensor = ids
        for layer in model.build(range(model.layers)):
            out = layer(out)
    return counter.get_total_flops()


def test_gpt_has_the_flops_that_torch_counts() -> None:
    model, ids = model_of(parse({"model": GPT})), torch.zeros(3, 8, dtype=torch.int64)
    weights = product_weights(model, model.build(()))
    assert weights is not None
    cost = row_cost(model, weights)
    assert counted(model, ids) == 3 * 8 * (cost.linear + 2 * 8 * cost.quadratic)


def test_only_the_experts_of_a_token_count() -> None:
    models = [model_of(parse({"model": MOE | {"top_k": k}})) for k in (1, 2)]
    one, two = (product_weights(model, model.build(())) for model in models)
    assert one is not None
    assert two is not None
    halves = [layer for layer in models[0].build(()) if hasattr(layer, "gate_up")]
    experts = sum(
        p.numel()
        for half in halves
        for part in (half.gate_up, half.down)
        for p in part.parameters()  # pyright: ignore[reportAttributeAccessIssue]
    )
    assert two - one == experts // 4


def test_padding_does_not_count() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    mask = torch.tensor([[1] * 8, [1] * 3 + [0] * 5])
    padded = {"input_ids": ids, "attention_mask": mask}
    assert tokens_of(padded) == 11
    assert tokens_of([padded, padded]) == 22
    packed = torch.tensor([[*range(8), 0, 1, 2, 0, 0]])
    assert tokens_of({"input_ids": ids, "position_ids": packed}) == 11
    assert tokens_of({"input_ids": ids}) == tokens_of(ids) == 16
    assert tokens_of(torch.ones(3, 4, 5)) == 12
    assert tokens_of({"pixels": ids}) == tokens_of(None) == 0


def test_layers_of_ones_own_count_by_their_matrices() -> None:
    model = Sequential([nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)])
    assert product_weights(model, model.build(())) == 4 * 5 + 5 * 2
    convolutions = Sequential([nn.Conv2d(1, 2, 3)])
    assert product_weights(convolutions, convolutions.build(())) is None


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA H100 80GB HBM3", "float32", 67e12),
        ("NVIDIA H100 PCIe", "float16", 756e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "float16", None),
        ("Tesla V100-PCIE-16GB", "float16", 112e12),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA GH200 480GB", "bfloat16", None),
    ],
)
def test_peak_of_a_gpu(name: str, precision: str, peak: float | None) -> None:
    assert peak_of(name, precision) == peak


def test_peak_of_tf32_is_unknown() -> None:
    assert peak_of("NVIDIA H200", "float32", tensor_float=True) is None
    assert peak_of("NVIDIA H200", "bfloat16", tensor_float=True) == 989e12
