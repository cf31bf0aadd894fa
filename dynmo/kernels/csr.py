"""Products with a sparse matrix in CSR form, over whole vectors of tokens:

    SpMM    y      = A x                             each kept weight times the tokens of its column, added to those of its row
    SDDMM   out[k] += g[row of k] . x[column of k]   one dot product over the tokens for each kept weight, nothing for the others

Tokens are packed in panels of at most 64, each [features, tokens] and contiguous: what is gathered
for a row of a panel fits a second-level cache, where a row of a plain x^T would share its few cache
sets with every other row.

On CPU the loops are our own (csr_loops.py): each sum has one order, given by the number of tokens.
On CUDA they are torch's. Values and tokens of bfloat16 or float16 are multiplied and summed in
float32; SpMM's result is rounded, SDDMM's stays so.
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
    """Where the kept weights are: row r holds the columns col[crow[r]:crow[r + 1]], ascending.
    int32, on the device of the weights."""

    crow: Tensor
    col: Tensor
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.crow) - 1, self.width

    def rows(self) -> Tensor:
        """The row of each kept weight."""
        counts = self.crow.diff().long()
        return torch.repeat_interleave(torch.arange(len(counts), device=self.crow.device), counts)

    def positions(self) -> Tensor:
        """row * width + column of each kept weight, ascending."""
        return self.rows() * self.width + self.col

    @staticmethod
    def at(positions: Tensor, shape: tuple[int, int]) -> Csr:
        """positions: ascending."""
        rows, width = shape
        counts = torch.bincount(positions // width, minlength=rows)
        crow = torch.zeros(rows + 1, dtype=torch.int32, device=positions.device)
        crow[1:] = counts.cumsum(0)
        return Csr(crow, (positions % width).to(torch.int32), width)

    def transposed(self) -> tuple[Csr, Tensor]:
        """The CSR of the transposed matrix, and which of our kept weights each of its own is."""
        rows, width = self.shape
        turned, order = (self.col.long() * rows + self.rows()).sort()
        return Csr.at(turned, (width, rows)), order.to(torch.int32)


def pack(x: Tensor) -> Tensor:
    """[..., features] -> panels [panels, features, tokens of one], the last filled up with zeros;
    on CUDA one [features, tokens]."""
    x = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        return x.t().contiguous()
    tokens = _panel(len(x))
    packed = torch.empty(-(-len(x) // tokens), x.shape[1], tokens, dtype=x.dtype)
    # Panel by panel: torch copies a plain transpose four times as fast as the same as one
    # permutation of three dimensions.
    for panel, part in zip(packed, x.split(tokens), strict=False):
        if len(part) < tokens:
            panel[:, len(part) :] = 0
        panel[:, : len(part)].copy_(part.t())
    return packed


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack`, to [..., features] of this shape, contiguous, no view."""
    if packed.is_cuda:
        return reshape_unsafe(packed.t().contiguous(), shape)
    x = torch.empty(math.prod(shape[:-1]), shape[-1], dtype=packed.dtype)
    for panel, part in zip(packed, x.split(packed.shape[2]), strict=False):
        part.copy_(panel[:, : len(part)].t())
    return reshape_unsafe(x, shape)


def _panel(tokens: int) -> int:
    """Tokens of a panel: as few panels as can be, of equal length, in whole vectors."""
    count = max(1, -(-tokens // csr_loops.TOKENS))
    return max(1, -(-tokens // count // csr_loops.VECTOR)) * csr_loops.VECTOR


def spmm(csr: Csr, values: Tensor, packed: Tensor) -> Tensor:
    """A x. values: [kept]; x and the result are packed."""
    if packed.dtype in LOW:
        return spmm(csr, values.float(), packed.float()).to(packed.dtype)
    if packed.is_cuda:
        return cast(Tensor, torch.mm(_sparse(csr, values), packed))
    out = torch.empty(packed.shape[0], csr.shape[0], packed.shape[2], dtype=packed.dtype)
    csr_loops.spmm(
        csr.crow.numpy(),
        csr.col.numpy(),
        values.detach().numpy(),
        packed.detach().numpy(),
        out.numpy(),
    )
    return out


def sddmm_(csr: Csr, left: Tensor, right: Tensor, out: Tensor) -> None:
    """out[k] += left[row of k] . right[column of k], over all tokens. left, right: packed; out:
    [kept], float32 where these are lower."""
    if left.dtype in LOW:
        sddmm_(csr, left.float(), right.float(), out)
        return
    if left.is_cuda:
        with torch.no_grad():
            out.copy_(torch.sparse.sampled_addmm(_sparse(csr, out), left, right.t()).values())
        return
    csr_loops.sddmm(
        csr.crow.numpy(),
        csr.col.numpy(),
        left.detach().numpy(),
        right.detach().numpy(),
        out.detach().numpy(),
    )


def sum_tokens(packed: Tensor) -> Tensor:
    """Over the tokens; of lower precision in float32."""
    dtype = torch.float32 if packed.dtype in LOW else packed.dtype
    return packed.sum(1, dtype=dtype) if packed.is_cuda else packed.sum((0, 2), dtype=dtype)


def _sparse(csr: Csr, values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            csr.crow, csr.col, values.detach(), csr.shape, check_invariants=False
        )
