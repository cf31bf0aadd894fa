"""The loops of the products in csr.py on CPU, compiled by numba.

Packed tokens are [panels, features, tokens of one]. The loops over tokens become vector
instructions. The order of every sum is the one written here, on any machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynmo.jit import jit

Array = NDArray[Any]

TOKENS = 64
"""Most tokens of a panel."""
VECTOR = 16
"""The tokens of a panel are a multiple of this."""
_BATCH = 64  # dot products whose partial sums stay in the first-level cache


# A product and a sum may be one instruction ("contract"). This holds for all tokens, so the bits
# do not depend on a token's place in a panel.
@jit("contract")
def spmm(crow: Array, col: Array, values: Array, panels: Array, out: Array) -> None:
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
def sddmm(crow: Array, col: Array, left: Array, right: Array, out: Array) -> None:
    """Add left[row of k] . right[column of k] to out[k], panel by panel."""
    tokens, sums = left.shape[2], np.empty((_BATCH, VECTOR), left.dtype)
    whole = tokens == TOKENS
    for panel in range(left.shape[0]):
        for row in range(crow.shape[0] - 1):
            g, end = left[panel, row], crow[row + 1]
            for start in range(crow[row], end, _BATCH):
                count = min(_BATCH, end - start)
                for t in range(0, tokens, TOKENS if whole else VECTOR):
                    for k in range(count):
                        x, s = right[panel, col[start + k]], sums[k]
                        if whole:
                            for i in range(VECTOR):
                                s[i] = (
                                    (g[i] * x[i] + g[i + 16] * x[i + 16]) + g[i + 32] * x[i + 32]
                                ) + g[i + 48] * x[i + 48]
                        else:
                            for i in range(VECTOR):
                                s[i] = g[t + i] * x[t + i]
                    for k in range(count):
                        s = sums[k]
                        even = ((s[0] + s[8]) + (s[4] + s[12])) + ((s[2] + s[10]) + (s[6] + s[14]))
                        odd = ((s[1] + s[9]) + (s[5] + s[13])) + ((s[3] + s[11]) + (s[7] + s[15]))
                        out[start + k] += even + odd
