"""The loops of the products in csr.py on CPU, compiled by numba.

Packed tokens are [panels, features, tokens of one]. The loops go through a panel in blocks of
columns, each small enough for a second-level cache: every row's kept weights of the first block,
then of the second. Inside, LLVM code of our own keeps 64 tokens of a row in vector registers until
all of its kept weights there are done:

    _add_columns   y[j : j+64] += values[k] * x[col[k], j : j+64]     for start <= k < end, in order
    _add_dots      out[k] += g[j : j+64] . x[col[k], j : j+64]        for start <= k < end

numba alone also makes vectors of such a loop over tokens. But its code asks anew for every few k
whether the arrays overlap, and its sums go through memory. The order of every sum is the one
written here, on any machine. `spmm` and `sddmm` go through blocks in the same way. numba compiles
each as a whole, so their loops stay apart.
"""

# Neither numba nor llvmlite has types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownParameterType=false, reportMissingParameterType=false

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numpy.typing import NDArray

from dynmo.jit import jit

Array = NDArray[Any]

TOKENS = 64
"""Most tokens of a panel."""
VECTOR = 16
"""The tokens of a panel are a multiple of this."""
_COLUMNS = 512  # of a block

_LANES = 8
# A product and a sum may be one instruction. This holds for all tokens, so the bits do not depend
# on a token's place in a panel.
_FUSED = ("contract",)
_INT = ir.IntType(64)


class _Code:
    """Builds the parts of both loops.

    Attributes:
        arrays: numba's arrays, by their places among the arguments.
    """

    def __init__(self, context: Any, builder: Any, kinds: Any, arguments: Any) -> None:
        if any(kind.layout != "C" for kind in kinds[:4]):
            raise TypingError(f"arrays here are contiguous, not {kinds[:4]}")
        self.builder = builder
        self.arrays = [
            context.make_array(kind)(context, builder, given)
            for kind, given in zip(kinds[:4], arguments[:4], strict=True)
        ]
        self.number = context.get_data_type(kinds[1].dtype)
        self.vector = ir.VectorType(self.number, _LANES)
        self._align = context.get_abi_sizeof(self.number)

    def item(self, array: Any, at: Any) -> Any:
        return self.builder.gep(array.data, [at])

    def row(self, x: Any, index: Any, j: Any) -> Any:
        """Return the address of x[index, j] in an array of two dimensions."""
        width = self.builder.extract_value(x.shape, 1)
        return self.builder.gep(
            x.data, [self.builder.add(self.builder.mul(self.builder.sext(index, _INT), width), j)]
        )

    def part(self, start: Any, at: int) -> Any:
        """Return the address of the vector that lies `at` numbers behind `start`."""
        return self.builder.bitcast(
            self.builder.gep(start, [ir.Constant(_INT, at)]), self.vector.as_pointer()
        )

    def load(self, pointer: Any) -> Any:
        return self.builder.load(pointer, align=self._align)

    def store(self, value: Any, pointer: Any) -> None:
        self.builder.store(value, pointer, align=self._align)

    def add_product(self, total: Any, a: Any, b: Any) -> Any:
        return self.builder.fadd(total, self.builder.fmul(a, b, flags=_FUSED), flags=_FUSED)

    def everywhere(self, value: Any) -> Any:
        """Make a vector of this number alone."""
        nothing = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(
            first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        )

    def total(self, vector: Any) -> Any:
        """Sum the numbers of a vector: halves are added until one is left."""
        count = _LANES
        while count > 1:
            count //= 2
            low, high = (
                self.builder.shuffle_vector(
                    vector,
                    vector,
                    ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(at, at + count))),
                )
                for at in (0, count)
            )
            vector = self.builder.fadd(low, high)
        return self.builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    def each(self, start: Any, end: Any) -> Any:
        return cgutils.for_range_slice(self.builder, start, end, ir.Constant(_INT, 1), _INT)


def _add_columns(width: int) -> Any:
    """Make a function of (col, values, x, y, j, start, end).

    x is [columns, tokens] and contiguous.

    `width` is a multiple of 8.
    """

    @intrinsic
    def add(_typing, col, values, x, y, j, start, end):
        def generate(context, builder, signature, arguments):
            code = _Code(context, builder, signature.args, arguments)
            (col, values, x, y), (j, start, end) = code.arrays, arguments[4:]
            places = [code.part(code.item(y, j), at) for at in range(0, width, _LANES)]
            sums = [cgutils.alloca_once_value(builder, code.load(place)) for place in places]
            with code.each(start, end) as (k, _):
                row = code.row(x, builder.load(code.item(col, k)), j)
                value = code.everywhere(builder.load(code.item(values, k)))
                for i, each in enumerate(sums):
                    builder.store(
                        code.add_product(
                            builder.load(each), value, code.load(code.part(row, i * _LANES))
                        ),
                        each,
                    )
            for each, place in zip(sums, places, strict=True):
                code.store(builder.load(each), place)
            return context.get_dummy_value()

        return types.void(col, values, x, y, types.int64, types.int64, types.int64), generate

    return add


def _add_dots(width: int) -> Any:
    """Make a function of (col, g, x, out, j, start, end).

    x is [columns, tokens] and contiguous.

    `width` is a multiple of 16.
    """

    @intrinsic
    def add(_typing, col, g, x, out, j, start, end):
        def generate(context, builder, signature, arguments):
            code = _Code(context, builder, signature.args, arguments)
            (col, g, x, out), (j, start, end) = code.arrays, arguments[4:]
            left = [code.load(code.part(code.item(g, j), at)) for at in range(0, width, _LANES)]
            with code.each(start, end) as (k, _):
                row = code.row(x, builder.load(code.item(col, k)), j)
                right = [code.load(code.part(row, at)) for at in range(0, width, _LANES)]
                # Two sums side by side: no product needs to wait for the one before.
                sums = [
                    builder.fmul(a, b, flags=_FUSED)
                    for a, b in zip(left[:2], right[:2], strict=True)
                ]
                for i, (a, b) in enumerate(zip(left[2:], right[2:], strict=True)):
                    sums[i % 2] = code.add_product(sums[i % 2], a, b)
                place = code.item(out, k)
                builder.store(
                    builder.fadd(builder.load(place), code.total(builder.fadd(*sums))), place
                )
            return context.get_dummy_value()

        return types.void(col, g, x, out, types.int64, types.int64, types.int64), generate

    return add


_columns_64 = _add_columns(TOKENS)
_columns_16 = _add_columns(VECTOR)
_dots_64 = _add_dots(TOKENS)
_dots_16 = _add_dots(VECTOR)


@jit()
def _blocks(crow: Array, col: Array, columns: int) -> Array:
    """Find where each row's kept weights of a block begin, and the last ones end.

    Returns an array [blocks + 1, rows].
    """
    rows, count = crow.shape[0] - 1, max(1, -(-columns // _COLUMNS))
    out = np.empty((count + 1, rows), np.int64)
    for row in range(rows):
        k, end = crow[row], crow[row + 1]
        for block in range(count):
            out[block, row] = k
            while k < end and col[k] < (block + 1) * _COLUMNS:
                k += 1
        out[count, row] = end
    return out


@jit()
def spmm(crow: Array, col: Array, values: Array, panels: Array, out: Array) -> None:
    """Compute out = A x in each panel."""
    tokens, starts = panels.shape[2], _blocks(crow, col, panels.shape[1])
    for panel in range(panels.shape[0]):
        x = panels[panel]
        for block in range(starts.shape[0] - 1):
            for row in range(starts.shape[1]):
                y, start, end, j = out[panel, row], starts[block, row], starts[block + 1, row], 0
                if block == 0:
                    y[:] = 0
                while j + TOKENS <= tokens:
                    _columns_64(col, values, x, y, j, start, end)
                    j += TOKENS
                while j < tokens:
                    _columns_16(col, values, x, y, j, start, end)
                    j += VECTOR


@jit()
def sddmm(crow: Array, col: Array, left: Array, right: Array, out: Array) -> None:
    """Add left[row of k] . right[column of k] to out[k], panel by panel."""
    tokens, starts = left.shape[2], _blocks(crow, col, right.shape[1])
    for panel in range(left.shape[0]):
        x = right[panel]
        for block in range(starts.shape[0] - 1):
            for row in range(starts.shape[1]):
                g, start, end, j = left[panel, row], starts[block, row], starts[block + 1, row], 0
                while j + TOKENS <= tokens:
                    _dots_64(col, g, x, out, j, start, end)
                    j += TOKENS
                while j < tokens:
                    _dots_16(col, g, x, out, j, start, end)
                    j += VECTOR
