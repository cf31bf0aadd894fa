"""Products with a sparse matrix in CSR form, over whole vectors of tokens.

    SpMM    y      = A x                             each kept weight times the tokens of its
                                                     column, added to those of its row
    SDDMM   out[k] += g[row of k] . x[column of k]   one dot product over the tokens for each kept
                                                     weight, nothing for the others

Tokens are packed in panels of at most 64, each [features, tokens] and contiguous. The values that a
row of a panel gathers fit a second-level cache. A row of a plain x^T would share its few cache sets
with every other row.

On CPU the loops are our own, compiled by numba: each sum has one order, given by the number of
tokens, on any machine. On CUDA they are torch's. Values and tokens of bfloat16 or float16 are
multiplied and summed in float32. SpMM's result is rounded, SDDMM's stays float32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynmo.extend import jit

Array: TypeAlias = NDArray[Any]

_TOKENS = 64  # most tokens of a panel
_VECTOR = 16  # the tokens of a panel are a multiple of this
_BATCH = 64  # dot products whose partial sums stay in the first-level cache


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

    @staticmethod
    def of(kept: Tensor) -> Csr:
        """Makes the CSR of a matrix of bools."""
        rows, col = kept.nonzero().unbind(1)
        return Csr(_starts(rows, len(kept)), col.to(torch.int32), kept.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.crow) - 1, self.width

    def rows(self) -> Tensor:
        rows = torch.arange(len(self.crow) - 1, device=self.crow.device)
        return rows.repeat_interleave(self.crow.diff().long(), output_size=len(self.col))

    def positions(self) -> Tensor:
        """Returns row * width + column of each kept weight, ascending."""
        return self.rows() * self.width + self.col

    def transposed(self) -> tuple[Csr, Tensor]:
        """Returns the transposed CSR, and the place in this one of each weight there."""
        order = self.col.argsort(stable=True)
        rows = self.rows()[order].to(torch.int32)
        return Csr(_starts(self.col, self.width), rows, self.shape[0]), order.to(torch.int32)

    def is_valid(self) -> bool:
        """Returns whether these can be positions in a matrix. True on the meta device."""
        crow, col = self.crow, self.col
        return crow.is_meta or bool(
            crow[0] == 0
            and crow[-1] == len(col)
            and (crow.diff() >= 0).all()
            and ((col >= 0) & (col < self.width)).all()
        )


def _starts(rows: Tensor, count: int) -> Tensor:
    """Returns where each row starts, and the end, int32 [count + 1]."""
    counts = torch.bincount(rows, minlength=count)
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def pack(x: Tensor) -> Tensor:
    """Packs [..., features] in panels [panels, features, tokens of one].

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
    """Inverts `pack`. The result is contiguous and no view."""
    x = torch.empty(shape, dtype=packed.dtype, device=packed.device)
    rows = x.view(math.prod(shape[:-1]), shape[-1])
    if packed.is_cuda:
        rows.copy_(packed.t())
        return x
    for panel, part in zip(packed, rows.split(packed.shape[2]), strict=False):
        part.copy_(panel[:, : len(part)].t())
    return x


def _panel(tokens: int) -> int:
    """Chooses the tokens of a panel: few panels, of equal length, in whole vectors."""
    count = max(1, -(-tokens // _TOKENS))
    return max(1, -(-tokens // count // _VECTOR)) * _VECTOR


def spmm(csr: Csr, values: Tensor, packed: Tensor) -> Tensor:
    """Multiplies A x. Values are [kept]. x and the product are packed."""
    dtype = wide(packed.dtype)
    values, x = values.to(dtype), packed.to(dtype)
    if x.is_cuda:
        out = cast(Tensor, torch.mm(_sparse(csr, values), x))
    else:
        out = x.new_empty(x.shape[0], csr.shape[0], x.shape[2])
        _spmm(*(t.detach().numpy() for t in (csr.crow, csr.col, values, x, out)))
    return out.to(packed.dtype)


def sddmm_(csr: Csr, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Adds left[row of k] . right[column of k], over all tokens, to out[k].

    `out` is float32 if the packed `left` and `right` are of lower precision.
    """
    left, right = (t.to(wide(t.dtype)) for t in (left, right))
    if left.is_cuda:
        with torch.no_grad():
            out.copy_(torch.sparse.sampled_addmm(_sparse(csr, out), left, right.t()).values())
    else:
        _sddmm(*(t.detach().numpy() for t in (csr.crow, csr.col, left, right, out)))


def sum_tokens(packed: Tensor) -> Tensor:
    """Sums over the tokens. Lower precisions are summed in float32."""
    return packed.sum(1 if packed.is_cuda else (0, 2), dtype=wide(packed.dtype))


def _sparse(csr: Csr, values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            csr.crow, csr.col, values.detach(), csr.shape, check_invariants=False
        )


# A product and a sum may be one instruction ("contract"). This holds for all tokens, so the bits
# do not depend on a token's place in a panel.
@jit("contract")
def _spmm(crow: Array, col: Array, values: Array, panels: Array, out: Array) -> None:
    """Compute out = A x in each panel."""
    for panel in range(panels.shape[0]):
        x = panels[panel]
        for row in range(crow.shape[0] - 1):
            y, k, end = out[panel, row], crow[row], crow[row + 1]
            y[:] = 0
            # Four weights at a time: fewer loads and stores of y. The order stays that of k.
            while k + 4 <= end:
                a, b, c, d = values[k], values[k + 1], values[k + 2], values[k + 3]
                xa, xb, xc, xd = x[col[k]], x[col[k + 1]], x[col[k + 2]], x[col[k + 3]]
                for t in range(y.shape[0]):
                    y[t] = (((y[t] + a * xa[t]) + b * xb[t]) + c * xc[t]) + d * xd[t]
                k += 4
            while k < end:
                a, xa = values[k], x[col[k]]
                for t in range(y.shape[0]):
                    y[t] += a * xa[t]
                k += 1


@jit("contract")
def _sddmm(crow: Array, col: Array, left: Array, right: Array, out: Array) -> None:
    """Add left[row of k] . right[column of k] to out[k], panel by panel."""
    tokens, sums = left.shape[2], np.empty((_BATCH, _VECTOR), left.dtype)
    whole = tokens == _TOKENS
    for panel in range(left.shape[0]):
        for row in range(crow.shape[0] - 1):
            g, end = left[panel, row], crow[row + 1]
            for start in range(crow[row], end, _BATCH):
                count = min(_BATCH, end - start)
                for t in range(0, tokens, _TOKENS if whole else _VECTOR):
                    for k in range(count):
                        x, s = right[panel, col[start + k]], sums[k]
                        if whole:
                            for i in range(_VECTOR):
                                s[i] = (
                                    (g[i] * x[i] + g[i + 16] * x[i + 16]) + g[i + 32] * x[i + 32]
                                ) + g[i + 48] * x[i + 48]
                        else:
                            for i in range(_VECTOR):
                                s[i] = g[t + i] * x[t + i]
                    for k in range(count):
                        s = sums[k]
                        even = ((s[0] + s[8]) + (s[4] + s[12])) + ((s[2] + s[10]) + (s[6] + s[14]))
                        odd = ((s[1] + s[9]) + (s[5] + s[13])) + ((s[3] + s[11]) + (s[7] + s[15]))
                        out[start + k] += even + odd
