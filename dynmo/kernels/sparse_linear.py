"""A pruned linear layer that does less work: its weight is CSR, and the kept values are the parameter.

Every product walks the kept weights once and works on whole vectors of tokens:

    F   y^T  = A   x^T         SpMM
    B   gx^T = A^T gy^T        SpMM with the transposed CSR, whose permutation is made once per prune
    W   gA   = gy^T x          SDDMM: one dot product over the tokens for each kept weight, nothing for the others

For that, tokens are packed in panels of at most 128, each [features, tokens] and contiguous: 1024 features of a panel fit a second-level
cache, where a row of a plain x^T would share its few cache sets with every other row (measured at 2048 tokens: two to three times slower).

Deferred or not, W adds into the gradient with the same kernel in microbatch order. On CPU the kernels are compiled here: each sum has one
order, given by the number of tokens; torch's own CSR products take several times as long (2.13, one thread). On CUDA they are torch's.
Values, tokens and what is kept for W may be of bfloat16 or float16: the products are then made in float32, and W's sum stays so.

Below the sparsity where CSR pays, a layer stays dense under a mask (`MaskedLinear`): the same numbers to within rounding, nothing saved.
"""

# numba has no types: its functions are given theirs by `_jit`.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar, cast

import numba
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dynmo.kernels.split import LOW, SplitLinear, WeightTape, accumulate_linear, add_to_gradient, float32_gradients, zero_gradient

_F = TypeVar("_F", bound=Callable[..., Any])
_PANEL = 128  # tokens, at most
_VECTOR = 16  # tokens that a panel is a multiple of


def _jit(*fast: str) -> Callable[[_F], _F]:
    def compiled(function: _F) -> _F:
        try:
            return cast(_F, numba.njit(nogil=True, fastmath=set(fast), cache=True)(function))
        except RuntimeError:  # nowhere to keep the compiled code: it is made anew in each process
            return cast(_F, numba.njit(nogil=True, fastmath=set(fast))(function))

    return compiled


Array = NDArray[Any]


# "contract" lets a product and a sum be one instruction: the same in the vector body and in its remainder, so the bits do not depend on
# where in a panel a token stands.
@_jit("contract")
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
@_jit("contract", "reassoc", "nsz")
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


def _summed(packed: Tensor) -> Tensor:
    """Over the tokens; of lower precision in float32."""
    dtype = torch.float32 if packed.dtype in LOW else packed.dtype
    return packed.sum(1, dtype=dtype) if packed.is_cuda else packed.sum((0, 2), dtype=dtype)


def _sparse(csr: Csr, values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(csr.crow, csr.col, values.detach(), csr.shape, check_invariants=False)


class _SparseFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, layer: SparseLinear) -> Tensor:
        columns = pack(x)
        if weight.requires_grad:
            ctx.save_for_backward(columns)
        ctx.weight, ctx.bias, ctx.layer, ctx.shape = weight, bias, layer, x.shape
        y = unpack(spmm(layer.csr, weight[0], columns), (*x.shape[:-1], layer.out_features))
        if bias is not None:
            y += bias
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        weight, bias, layer, gy = ctx.weight, ctx.bias, ctx.layer, gradients[0]
        rows = pack(gy)
        gx = None
        if ctx.needs_input_grad[0]:
            flipped, order = layer.flipped
            gx = unpack(spmm(flipped, weight.detach()[0].index_select(0, order), rows), ctx.shape)
        if not weight.requires_grad:
            return gx, None, None if bias is None or not bias.requires_grad else _summed(rows), None
        (columns,) = ctx.saved_tensors
        csr, tape = layer.csr, layer.tape
        if tape is None:
            gradient = zero_gradient(weight)
            sddmm_(csr, rows, columns, gradient[0])
            return gx, gradient, None if bias is None else _summed(rows), None
        tape.add(lambda: accumulate_sparse(csr, weight, bias, columns, rows), columns, rows)
        return gx, None, None, None


def accumulate_sparse(csr: Csr, weight: nn.Parameter, bias: nn.Parameter | None, columns: Tensor, rows: Tensor) -> None:
    """weight.grad += gy^T x at the kept positions, bias.grad += sum of gy. columns, rows: x and gy, packed."""
    with torch.no_grad():
        if weight.grad is None:
            weight.grad = zero_gradient(weight)
        sddmm_(csr, rows, columns, weight.grad[0])
        if bias is not None and bias.requires_grad:
            add_to_gradient(bias, _summed(rows))


class SparseLinear(nn.Linear):
    """nn.Linear whose `weight` is [1, kept]: the kept values in row order (a matrix still, so that it decays as one does). `crow` and `col`
    say where they are. Made by `prune`, never by its constructor."""

    tape: WeightTape | None = None
    crow: Tensor
    col: Tensor
    # Derived from crow and col, so that neither travels: which CSR, its transposed and the order of the values there.
    _csr: Csr | None = None
    _flipped: tuple[Csr, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, _SparseFunction.apply(input, self.weight, self.bias, self))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kept={self.weight.numel()}"

    @property
    def csr(self) -> Csr:
        # Buffers are replaced as a layer moves or is restored; a CSR of others would be wrong.
        if self._csr is None or self._csr.crow is not self.crow or self._csr.col is not self.col:
            self._csr, self._flipped = Csr(self.crow, self.col, self.in_features), None
        return self._csr

    @property
    def flipped(self) -> tuple[Csr, Tensor]:
        csr = self.csr
        if self._flipped is None:
            self._flipped = csr.transposed()
        return self._flipped

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._csr = self._flipped = None
        return super()._apply(fn, recurse)


class _MaskedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, layer: MaskedLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.mask, ctx.tape = weight, bias, layer.kept_mask, layer.tape
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x = ctx.saved_tensors[0].detach()
        gy, weight, bias, mask = gradients[0], ctx.weight, ctx.bias, ctx.mask
        gx = torch.matmul(gy, weight) if ctx.needs_input_grad[0] else None
        if ctx.tape is None:
            x2, gy2 = x.reshape(-1, x.shape[-1]), gy.reshape(-1, gy.shape[-1])
            return gx, torch.mm(gy2.t(), x2) * mask, None if bias is None else gy2.sum(0), None
        ctx.tape.add(lambda: _accumulate_masked(weight, bias, mask, x, gy), x, gy)
        return gx, None, None, None


def _accumulate_masked(weight: nn.Parameter, bias: nn.Parameter | None, mask: Tensor, x: Tensor, gy: Tensor) -> None:
    accumulate_linear(weight, bias, x, gy)
    assert weight.grad is not None
    weight.grad.mul_(mask)


class MaskedLinear(SplitLinear):
    """A pruned nn.Linear that stays dense: dropped weights are 0 and get no gradient. Saves nothing; for sparsities below the crossover."""

    kept_mask: Tensor

    def forward(self, input: Tensor) -> Tensor:
        weight = cast(nn.Parameter, self.weight)
        if not weight.requires_grad or not torch.is_grad_enabled():
            return functional.linear(input, weight, self.bias)
        return cast(Tensor, _MaskedFunction.apply(input, weight, self.bias, self))


# -- pruning ------------------------------------------------------------------------------------------------------------------


# Exact types only: a subclass may mean something else by its weight.
_PRUNABLE = (nn.Linear, SplitLinear, MaskedLinear, SparseLinear)


def linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of a module that can be pruned, in order of their names in the tree. Also on the meta device."""
    for name, child in module.named_modules():
        if type(child) in _PRUNABLE:
            yield name, cast(nn.Linear, child)


def dense_size(linear: nn.Linear) -> int:
    return linear.out_features * linear.in_features


def survivors(linear: nn.Linear, master: Tensor | None = None) -> Tensor:
    """The weights that have not been pruned, [kept], in row order: as the float32 master has them, where one is given."""
    weight = linear.weight.detach() if master is None else master
    if isinstance(linear, SparseLinear):
        return weight[0]
    return weight[linear.kept_mask] if isinstance(linear, MaskedLinear) else weight.reshape(-1)


def _positions(linear: nn.Linear) -> Tensor:
    if isinstance(linear, SparseLinear):
        return linear.csr.positions()
    if isinstance(linear, MaskedLinear):
        return linear.kept_mask.reshape(-1).nonzero()[:, 0]
    return torch.arange(dense_size(linear), device=linear.weight.device)


def prune(linear: nn.Linear, keep: Tensor, sparse: bool, moments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drops survivors for good, and with them their part of the moments; returns what is left of those.

    keep: one bool per survivor. sparse: take the CSR form (which a layer that has it keeps anyway). moments: tensors of the weight's shape
    by name; others (step counts) pass through. Gradients are dropped.
    """
    assert type(linear) in _PRUNABLE
    weight = linear.weight
    kept = keep.nonzero()[:, 0]
    positions = _positions(linear)[kept]
    was_sparse = isinstance(linear, SparseLinear)
    shape = weight.shape

    def compact(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)[kept if was_sparse else positions].reshape(1, -1)

    def masked(tensor: Tensor) -> Tensor:
        out = torch.zeros_like(tensor)
        out.view(-1)[positions] = tensor.reshape(-1)[positions]
        return out

    change = compact if sparse or was_sparse else masked
    if sparse or was_sparse:
        csr = Csr.at(positions, (linear.out_features, linear.in_features))
        _become(linear, SparseLinear, {"crow": csr.crow, "col": csr.col})
    else:
        mask = torch.zeros(shape, dtype=torch.bool, device=weight.device)
        mask.view(-1)[positions] = True
        _become(linear, MaskedLinear, {"kept_mask": mask})
    linear.weight = nn.Parameter(change(weight.detach()), requires_grad=weight.requires_grad)
    return {name: change(t) if t.shape == shape else t for name, t in moments.items()}


def _become(linear: nn.Linear, kind: type[nn.Linear], buffers: dict[str, Tensor]) -> None:
    """Replaces the class, not the module: names, bias, hooks and place in the tree stay as they are."""
    for name in ("kept_mask", "crow", "col"):
        linear._buffers.pop(name, None)
    linear.__class__ = kind
    for name, tensor in buffers.items():
        linear.register_buffer(name, tensor)


def conform(module: nn.Module, buffers: dict[str, Tensor]) -> frozenset[str]:
    """Gives the linears of `module` (on any device) the form, not the contents, that a layer with these buffers by name has.

    Returns the names of the weights whose shape is now their own. Raises ValueError where a pruned weight cannot be this module's.
    """
    own: set[str] = set()
    for name, linear in list(linears(module)):
        prefix = f"{name}." if name else ""
        crow, col, mask = (buffers.get(prefix + key) for key in ("crow", "col", "kept_mask"))
        if crow is not None and col is not None:
            if crow.shape != (linear.out_features + 1,) or (crow.device.type != "meta" and not _fits(crow, col, linear.in_features)):
                raise ValueError(f"{prefix}weight is sparse, but not of {linear.out_features} x {linear.in_features}")
            _become(linear, SparseLinear, {"crow": crow, "col": col})
            own.add(prefix + "weight")
        elif mask is not None:
            _become(linear, MaskedLinear, {"kept_mask": mask})
        elif isinstance(linear, SparseLinear | MaskedLinear):
            raise ValueError(f"{prefix}weight is pruned here and not there; pruned weights do not return")
    return frozenset(own)


def _fits(crow: Tensor, col: Tensor, width: int) -> bool:
    ascending = int(crow[0]) == 0 and bool((crow.diff() >= 0).all()) and int(crow[-1]) == len(col)
    return ascending and (not len(col) or (int(col.min()) >= 0 and int(col.max()) < width))


def dense_weight(linear: nn.Linear, master: Tensor | None = None) -> Tensor:
    """[out, in], 0 where pruned: of the float32 master, where one is given."""
    weight = linear.weight.detach() if master is None else master
    if not isinstance(linear, SparseLinear):
        return weight
    out = weight.new_zeros(dense_size(linear))
    out[linear.csr.positions()] = weight[0]
    return out.view(linear.out_features, linear.in_features)


def dense_parameters(module: nn.Module, masters: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, in order, pruned ones in dense form. In place of a parameter that has a float32 master stands that."""
    masters = masters or {}
    sparse = {f"{name}.weight" if name else "weight": x for name, x in linears(module) if isinstance(x, SparseLinear)}
    for name, parameter in module.named_parameters():
        master = masters.get(name)
        yield name, dense_weight(sparse[name], master) if name in sparse else parameter.detach() if master is None else master


# -- where CSR pays -----------------------------------------------------------------------------------------------------------


def seconds(linear: nn.Linear, tokens: int, repeats: int = 5) -> tuple[float, float, float]:
    """F, B and W seconds of one microbatch of so many tokens: each the median of several, after one that is not counted."""
    device = linear.weight.device
    x, gy = (torch.randn(tokens, width).to(device, linear.weight.dtype) for width in (linear.in_features, linear.out_features))
    tape = WeightTape()
    tape.deferred = True
    before, made = getattr(linear, "tape", None), cast(Any, linear)
    made.tape = tape

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    rows: list[tuple[float, float, float]] = []
    for _ in range(repeats + 1):
        leaf = x.requires_grad_()
        marks = [now()]
        y = linear(leaf)
        marks.append(now())
        y.backward(gy)
        marks.append(now())
        for work, _ in tape.take():
            work()
        marks.append(now())
        rows.append((marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]))
        leaf.grad = None
    linear.weight.grad = None
    made.tape = before
    f, b, w = zip(*rows[1:], strict=True)
    return median(f), median(b), median(w)


def make_pruned(
    rows: int, columns: int, sparsity: float, sparse: bool, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    """A linear without bias, pruned at random places (the same for the same arguments): for measurements and tests."""
    generator = torch.Generator().manual_seed(1)
    linear = SplitLinear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.randn(rows, columns, generator=generator).to(device or "cpu", dtype))
    keep = torch.rand(rows * columns, generator=generator).argsort() >= round(sparsity * rows * columns)
    if sparsity > 0 or sparse:
        prune(linear, keep.to(linear.weight.device), sparse, {})
    float32_gradients(linear)
    return linear


def crossover(rows: int, columns: int, tokens: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> float:
    """The sparsity from which F + B + W of the CSR form takes less time than dense: both timed here, to 1/64 by bisection; 1.0 if never.

    A measurement: it differs from run to run and from rank to rank, so one rank's must be everyone's, and a run that goes on must use
    the one it began with.
    """

    def faster(sparsity: float) -> bool:
        return sum(seconds(make_pruned(rows, columns, sparsity, True, device, dtype), tokens)) < dense

    dense = sum(seconds(make_pruned(rows, columns, 0.0, False, device, dtype), tokens))
    low, high = 0.0, 1.0
    while high - low > 1 / 64:
        middle = (low + high) / 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    return high
