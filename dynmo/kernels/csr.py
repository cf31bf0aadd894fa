"""Products with a sparse matrix in CSR form, over whole vectors of tokens:

    SpMM    y      = A x                             each kept weight times the tokens of its column, added to those of its row
    SDDMM   out[k] += g[row of k] . x[column of k]   one dot product over the tokens for each kept weight, nothing for the others

Tokens are packed in panels of at most 128, each [features, tokens] and contiguous: 1024 features of a panel fit a second-level cache, where
a row of a plain x^T would share its few cache sets with every other row (measured at 2048 tokens: two to three times slower).

On CPU the loops are compiled here: each sum has one order, given by the number of tokens; torch's own CSR products take several times as
long (2.13, one thread). On CUDA they are torch's. Values and tokens of bfloat16 or float16 are multiplied and summed in float32;
SpMM's result is rounded, SDDMM's stays so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from dynmo.kernels.jit import jit
from dynmo.kernels.split import LOW

_PANEL = 128  # tokens, at most
_VECTOR = 16  # tokens that a panel is a multiple of

Array = NDArray[Any]


# "contract" lets a product and a sum be one instruction: the same in the vector body and in its remainder, so the bits do not depend on
# where in a panel a token stands.
@jit("contract")
def _spmm(crow: Array, col: Array, values: Array, panels: Array, out: Array) -> None:
    """out = A x in each panel, row by row, eight kept weights at a time so that `out` is read and written once for eight products."""
    tokens = panels.shape[2]
    for panel in range(panels.shape[0]):
        x = panels[panel]
        for row in range(crow.shape[0] - 1):
            y = out[panel, row]
            k, end = crow[row], crow[row + 1]
            for j in range(tokens):
                y[j] = 0
            while k + 8 <= end:
                a, b, c, d = x[col[k]], x[col[k + 1]], x[col[k + 2]], x[col[k + 3]]
                e, f, g, h = x[col[k + 4]], x[col[k + 5]], x[col[k + 6]], x[col[k + 7]]
                va, vb, vc, vd = values[k], values[k + 1], values[k + 2], values[k + 3]
                ve, vf, vg, vh = values[k + 4], values[k + 5], values[k + 6], values[k + 7]
                for j in range(tokens):
                    s = y[j] + va * a[j] + vb * b[j] + vc * c[j] + vd * d[j]
                    y[j] = s + ve * e[j] + vf * f[j] + vg * g[j] + vh * h[j]
                k += 8
            while k < end:
                a, va = x[col[k]], values[k]
                for j in range(tokens):
                    y[j] += va * a[j]
                k += 1


# "reassoc" lets a dot product run in vector lanes: an order of its own, fixed by the number of tokens.
@jit("contract", "reassoc", "nsz")
def _sddmm(crow: Array, col: Array, left: Array, right: Array, out: Array) -> None:
    """out[k] += left[row of k] . right[column of k], panel by panel, four kept weights at a time so that `left` is read once for four."""
    tokens = left.shape[2]
    zero = left.dtype.type(0)
    for panel in range(left.shape[0]):
        x = right[panel]
        for row in range(crow.shape[0] - 1):
            g = left[panel, row]
            k, end = crow[row], crow[row + 1]
            while k + 4 <= end:
                a, b, c, d = x[col[k]], x[col[k + 1]], x[col[k + 2]], x[col[k + 3]]
                sa, sb, sc, sd = zero, zero, zero, zero
                for j in range(tokens):
                    q = g[j]
                    sa += q * a[j]
                    sb += q * b[j]
                    sc += q * c[j]
                    sd += q * d[j]
                out[k] += sa
                out[k + 1] += sb
                out[k + 2] += sc
                out[k + 3] += sd
                k += 4
            while k < end:
                a, sa = x[col[k]], zero
                for j in range(tokens):
                    sa += g[j] * a[j]
                out[k] += sa
                k += 1


@dataclass(frozen=True, eq=False)
class Csr:
    """Where the kept weights are: row r holds the columns col[crow[r]:crow[r + 1]], ascending. int32, on the device of the weights."""

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
    """[..., features] -> panels [panels, features, tokens of one], the last filled up with zeros; on CUDA one [features, tokens]."""
    x = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        return x.t().contiguous()
    tokens = _panel(len(x))
    packed = torch.empty(-(-len(x) // tokens), x.shape[1], tokens, dtype=x.dtype)
    # Panel by panel: torch copies a plain transpose four times as fast as the same as one permutation of three dimensions.
    for panel, part in zip(packed, x.split(tokens), strict=False):
        if len(part) < tokens:
            panel[:, len(part) :] = 0
        panel[:, : len(part)].copy_(part.t())
    return packed


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack`, to [..., features] of this shape, contiguous."""
    if packed.is_cuda:
        return packed.t().contiguous().view(shape)
    x = torch.empty(math.prod(shape[:-1]), shape[-1], dtype=packed.dtype)
    for panel, part in zip(packed, x.split(packed.shape[2]), strict=False):
        part.copy_(panel[:, : len(part)].t())
    return x.view(shape)


def _panel(tokens: int) -> int:
    """Tokens of a panel: as few panels as can be, of equal length, in whole vectors."""
    count = max(1, -(-tokens // _PANEL))
    return max(1, -(-tokens // count // _VECTOR)) * _VECTOR


def spmm(csr: Csr, values: Tensor, packed: Tensor) -> Tensor:
    """A x. values: [kept]; x and the result are packed."""
    if packed.dtype in LOW:
        return spmm(csr, values.float(), packed.float()).to(packed.dtype)
    if packed.is_cuda:
        return cast(Tensor, torch.mm(_sparse(csr, values), packed))
    out = torch.empty(packed.shape[0], csr.shape[0], packed.shape[2], dtype=packed.dtype)
    _spmm(csr.crow.numpy(), csr.col.numpy(), values.detach().numpy(), packed.detach().numpy(), out.numpy())
    return out


def sddmm_(csr: Csr, left: Tensor, right: Tensor, out: Tensor) -> None:
    """out[k] += left[row of k] . right[column of k], over all tokens. left, right: packed; out: [kept], float32 where these are lower."""
    if left.dtype in LOW:
        sddmm_(csr, left.float(), right.float(), out)
        return
    if left.is_cuda:
        with torch.no_grad():
            out.copy_(torch.sparse.sampled_addmm(_sparse(csr, out), left, right.t()).values())
        return
    _sddmm(csr.crow.numpy(), csr.col.numpy(), left.detach().numpy(), right.detach().numpy(), out.detach().numpy())


def sum_tokens(packed: Tensor) -> Tensor:
    """Over the tokens; of lower precision in float32."""
    dtype = torch.float32 if packed.dtype in LOW else packed.dtype
    return packed.sum(1, dtype=dtype) if packed.is_cuda else packed.sum((0, 2), dtype=dtype)


def _sparse(csr: Csr, values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(csr.crow, csr.col, values.detach(), csr.shape, check_invariants=False)
