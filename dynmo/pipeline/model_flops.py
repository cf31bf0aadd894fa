"""The floating-point operations of a step by arithmetic, and how many a device could do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dynmo.data.grouping import RowCost
from dynmo.models.model import Model
from dynmo.models.rows import product_weights, row_cost

# Dense figures of the vendors' data sheets, in TFLOP/s: float32, and 16 bits with sums in float32.
# A name contains all words of its key. Longer keys come first.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("H100 PCIe", 51.0, 756.0),
    ("H100 NVL", 60.0, 835.0),
    ("H100", 67.0, 989.0),
    ("H200 NVL", 60.0, 835.0),
    ("H200", 67.0, 989.0),
    ("B200", 75.0, 2250.0),
    ("A100", 19.5, 312.0),
    ("V100 PCIE", 14.0, 112.0),
    ("V100", 15.7, 125.0),
    ("L40S", 91.6, 362.0),
    ("L4", 30.3, 121.0),
    ("RTX 4090", 82.6, 165.2),
)


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the FLOP/s of a GPU at most. None if they are unknown."""
    if device.type != "cuda":
        return None
    tensor_float = torch.get_float32_matmul_precision() != "highest"
    return peak_of(torch.cuda.get_device_name(device), precision, tensor_float)


def peak_of(name: str, precision: str, tensor_float: bool = False) -> float | None:
    """Returns the FLOP/s at most of a GPU with this name.

    Args:
        name: What the driver says. A part of a GPU (MIG) is unknown, and so are smaller variants.
        precision: "float32", "bfloat16" or "float16".
        tensor_float: Whether products of float32 are rounded to TF32. Their peak is unknown.
    """
    words = set(name.replace("-", " ").split())
    if words & {"MIG", "D", "Laptop"} or (precision == "float32" and tensor_float):
        return None
    for key, single, half in _PEAKS:
        if words.issuperset(key.split()):
            if precision == "bfloat16" and key.startswith("V100"):
                return None  # it has no units for that
            return (single if precision == "float32" else half) * 1e12
    return None


class ModelFlops:
    """Counts the model FLOPs of batches.

    They are those of a dense training step. A token has 6 for each weight that it is multiplied by.
    Causal attention in a row of n tokens has 6 * n**2 for each layer and channel. Frozen, left
    out and skipped work counts like other work, and recomputed work does not (PaLM, appendix B).
    """

    def __init__(self, model: Model) -> None:
        weights = product_weights(model, model.build(()))
        self._cost: RowCost | None = row_cost(model, weights) if weights else None

    def of(self, batch: Any) -> Tensor | float:
        """Returns the FLOPs of a replica's batch, without padding that a mask tells.

        A tensor on a GPU is not waited for. 0 if the tokens are unknown.
        """
        if isinstance(batch, list):
            total: Tensor | float = 0.0
            for each in batch:
                total = total + self.of(each)
            return total
        if isinstance(batch, Mapping):
            mask, positions = batch.get("attention_mask"), batch.get("position_ids")
            if isinstance(mask, Tensor) and mask.dim() == 2:
                lengths = mask.sum(-1).double()
                return self._flops(lengths.sum(), (lengths * lengths).sum())
            if isinstance(positions, Tensor) and positions.dim() == 2:
                return self._of_packed(positions)
            return self.of(batch.get("input_ids"))
        if not isinstance(batch, Tensor) or batch.dim() < 2:
            return 0.0
        shape = batch.shape[:-1] if batch.is_floating_point() else batch.shape
        tokens = shape.numel()
        return self._flops(tokens, tokens * shape[1:].numel())

    def _of_packed(self, positions: Tensor) -> Tensor | float:
        """Returns the FLOPs of rows of several samples. Positions begin anew with each sample.

        Padding has position 0, and samples have two tokens at least.
        """
        samples = (positions == 1).sum().double()
        tokens = (positions > 0).sum() + samples
        # The square of a sample's length is the sum of 2 * position + 1.
        return self._flops(tokens, 2 * positions.sum() + tokens)

    def _flops(self, tokens: Tensor | float, squares: Tensor | float) -> Tensor | float:
        """Returns the FLOPs of tokens in rows, from the sum of the rows' squared lengths."""
        if self._cost is None:
            return 0.0
        # A backward has twice the products of a forward.
        return 3 * (tokens * self._cost.linear + squares * self._cost.quadratic)
