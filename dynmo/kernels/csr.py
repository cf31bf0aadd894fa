"""Products with a sparse matrix in CSR form, over whole vectors of tokens.

    SpMM    y      = A x                             each kept weight times the tokens of its
                                                     column, added to those of its row
    SDDMM   out[k] += g[row of k] . x[column of k]   one dot product over the tokens for each kept
                                                     weight, nothing for the others

Tokens are packed in panels of at most 64, each [features, tokens] and contiguous. The values that a
row of a panel gathers fit a second-level cache. A row of a plain x^T would share its few cache sets
with every other row.

On CPU the loops are our own (csr_loops.py): each sum has one order, given by the number of tokens.
On CUDA they are torch's. Values and tokens of bfloat16 or float16 are multiplied and summed in
float32. SpMM's result is rounded, SDDMM's stays float32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from dynmo.kernels import csr_loops
from dynmo.kernels.split import LOW
from dynmo.kernels.torch_private import reshape_unsafe


@dataclass(frozen=True, eq=False)
class Csr:
    """Positions of the kept weights.

    Attributes:
        crow: Row r holds the columns col[crow[r]:crow[r + 1]], ascending. int32 [rows + 1].
        col: Column of each kept weight, int32 [kept].
        width: Number of columns of the matrix.
    """

    crow: Tensor
    col: Tensor
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.crow) - 1, self.width

    def rows(self) -> Tensor:
        rows = torch.arange(len(self.crow) - 1, device=self.crow.device)
        return rows.repeat_interleave(self.crow.diff().long(), output_size=len(self.col))

    def is_valid(self) -> bool:
        """Return whether rows and columns can be those of a matrix. True on the meta device."""
        crow, col = self.crow, self.col
        if crow.is_meta:
            return True
        ascending = int(crow[0]) == 0 and bool((crow.diff() >= 0).all())
        return (
            ascending
            and int(crow[-1]) == len(col)
            and bool(((col >= 0) & (col < self.width)).all())
        )

    def positions(self) -> Tensor:
        """Return row * width + column of each kept weight, ascending."""
        return self.rows() * self.width + self.col

    @staticmethod
    def at(positions: Tensor, shape: tuple[int, int]) -> Csr:
        rows, width = shape
        counts = torch.bincount(positions // width, minlength=rows)
        crow = torch.zeros(rows + 1, dtype=torch.int32, device=positions.device)
        crow[1:] = counts.cumsum(0)
        return Csr(crow, (positions % width).to(torch.int32), width)

    def transposed(self) -> tuple[Csr, Tensor]:
        """Return the transposed CSR, and the place in this one of each weight there."""
        rows, width = self.shape
        turned, order = (self.col.long() * rows + self.rows()).sort()
        return Csr.at(turned, (width, rows)), order.to(torch.int32)


def pack(x: Tensor) -> Tensor:
    """Pack [..., features] in panels [panels, features, tokens of one].

    Zeros fill up the last panel. On CUDA the result is one [features, tokens].
    """
    x = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        return x.t().contiguous()
    tokens = _panel(len(x))
    packed = torch.empty(-(-len(x) // tokens), x.shape[1], tokens, dtype=x.dtype)
    # Panel by panel: torch copies a plain transpose four times as fast as it copies the same in one
    # permutation of three dimensions.
    for panel, part in zip(packed, x.split(tokens), strict=False):
        if len(part) < tokens:
            panel[:, len(part) :] = 0
        panel[:, : len(part)].copy_(part.t())
    return packed


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Invert `pack`. The result is contiguous and no view."""
    if packed.is_cuda:
        return reshape_unsafe(packed.t().contiguous(), shape)
    x = torch.empty(math.prod(shape[:-1]), shape[-1], dtype=packed.dtype)
    for panel, part in zip(packed, x.split(packed.shape[2]), strict=False):
        part.copy_(panel[:, : len(part)].t())
    return reshape_unsafe(x, shape)


def _panel(tokens: int) -> int:
    """Choose the tokens of a panel: few panels, of equal length, in whole vectors."""
    count = max(1, -(-tokens // csr_loops.TOKENS))
    return max(1, -(-tokens // count // csr_loops.VECTOR)) * csr_loops.VECTOR


def spmm(csr: Csr, values: Tensor, packed: Tensor) -> Tensor:
    """Multiply A x. Values are [kept]. x and the product are packed."""
    if packed.dtype in LOW:
        return spmm(csr, values.float(), packed.float()).to(packed.dtype)
    if packed.is_cuda:
        return cast(Tensor, torch.mm(_sparse(csr, values), packed))
    out = torch.empty(packed.shape[0], csr.shape[0], packed.shape[2], dtype=packed.dtype)
    csr_loops.spmm(*(t.detach().numpy() for t in (csr.crow, csr.col, values, packed, out)))
    return out


def sddmm_(csr: Csr, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Add left[row of k] . right[column of k], over all tokens, to out[k].

    `out` is float32 if the packed `left` and `right` are of lower precision.
    """
    if left.dtype in LOW:
        sddmm_(csr, left.float(), right.float(), out)
        return
    if left.is_cuda:
        with torch.no_grad():
            out.copy_(torch.sparse.sampled_addmm(_sparse(csr, out), left, right.t()).values())
        return
    csr_loops.sddmm(*(t.detach().numpy() for t in (csr.crow, csr.col, left, right, out)))


def sum_tokens(packed: Tensor) -> Tensor:
    """Sum over the tokens. Lower precisions are summed in float32."""
    dtype = torch.float32 if packed.dtype in LOW else packed.dtype
    return packed.sum(1, dtype=dtype) if packed.is_cuda else packed.sum((0, 2), dtype=dtype)


def _sparse(csr: Csr, values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            csr.crow, csr.col, values.detach(), csr.shape, check_invariants=False
        )
