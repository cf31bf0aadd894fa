"""The grammar of small modules for `python -m tests.fuzz --modules`.

A case is data: lines of Python for each layer, a loss, options of the pipeline, and a plan of steps
and changes. `source_of` makes the program of it.
"""

# ruff: noqa: E501  # a line of a table is a line of a program

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from dynmo.schedule.catalogue import AUTO, SCHEDULES, chunks_of
from tests.fuzz.layers import LAYERS

Tables = dict[str, Any]
Lines = tuple[str, ...]

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.fuzz.layers import LAYERS

W = 8


def draw(*shape):
    return torch.randn(*shape) / 3


class Symmetric(nn.Module):
    def forward(self, x):
        return (x + x.t()) / 2


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).flatten(0, -2).sum(0)


def double(module, inputs, output):
    return tuple(2 * y if y is output[0] else y for y in output) if type(output) is tuple else 2 * output


def halve(module, inputs):
    return (0.5 * inputs[0], *inputs[1:])


def shrink(module, before, after):
    return tuple(None if g is None else 0.5 * g for g in before)


def shrink_first(module, after):
    return tuple(None if g is None else 0.5 * g for g in after)
"""

_PARAMETER = "self.w{n} = nn.Parameter(draw({shape}))"


def _weight(shape: str, *expressions: str) -> tuple[Lines, Lines]:
    return (_PARAMETER.replace("{shape}", shape),), expressions


# How a layer reaches a [W, W] matrix: lines of its __init__, and expressions.
WEIGHTS: dict[str, tuple[Lines, Lines]] = {
    "own": _weight("W, W", "self.w{n}", "self.w{n}.t()", "self.w{n}.transpose(0, 1)"),
    "rows": _weight("2 * W, W", "self.w{n}[W:]", "self.w{n}[:W]", "self.w{n}[::2]"),
    "columns": _weight("W, 2 * W", "self.w{n}[:, W:]", "self.w{n}[:, 1::2]", "self.w{n}[:, :W].t()"),
    "chunk": _weight("2 * W, W", "self.w{n}.chunk(2)[1]", "self.w{n}.split([W, W])[0]"),
    "stacked": _weight("3, W, W", "self.w{n}.unbind(0)[1]", "self.w{n}[2]", "self.w{n}.select(0, 1).t()"),
    "last axis": _weight("W, W, 3", "self.w{n}[..., 1]", "self.w{n}.movedim(-1, 0)[2]"),
    "flat": _weight("W * W + 5", "self.w{n}[5:].view(W, W)", "self.w{n}[:-5].reshape(W, W).t()"),
    "narrow": _weight("3 * W, W", "self.w{n}.narrow(0, 5, W)", "self.w{n}.unflatten(0, (3, W))[1]"),
    "strided": _weight("2 * W * W", "self.w{n}.as_strided((W, W), (W, 1), 3)", "self.w{n}.as_strided((W, W), (1, W), 9)"),
    "expanded": _weight("1, W", "self.w{n}.expand(W, W)", "self.w{n}.t().expand(W, W)"),
    "computed": _weight("W, W", "self.w{n}.tril()", "self.w{n} * 0.5", "self.w{n}.flip(0)", "self.w{n}[torch.arange(W - 1, -1, -1)]"),
    "detached": _weight("W, W", "self.w{n}.detach()", "self.w{n}.data"),
    "column major": (("self.w{n} = nn.Parameter(draw(W, W).t())",), ("self.w{n}", "self.w{n}.t()")),
    "offset": (("self.w{n} = nn.Parameter(draw(2, W, W)[1])",), ("self.w{n}", "self.w{n}.t()")),
    "fused": (
        ("up, gate = draw(2, W, W)", "self.w{n}, self.v{n} = nn.Parameter(up), nn.Parameter(gate)"),
        ("self.w{n}", "self.v{n}", "(self.w{n} @ self.v{n})", "self.v{n}.t()"),
    ),
    "halves": (
        ("self.w{n}, self.v{n} = nn.Parameter(draw(3, W)), nn.Parameter(draw(5, W))",),
        ("torch.cat([self.w{n}, self.v{n}])",),
    ),
    "outer": (
        ("self.w{n}, self.v{n} = nn.Parameter(draw(W, 1)), nn.Parameter(draw(W))",),
        ("self.w{n} * self.v{n}", "torch.outer(self.w{n}[:, 0], self.v{n})"),
    ),
    "list": (
        ("self.p{n} = nn.ParameterList([draw(W, W), draw(2 * W, W)])",),
        ("self.p{n}[0]", "self.p{n}[1][W:]"),
    ),
    "dictionary": (
        ("self.p{n} = nn.ParameterDict({'a': draw(W, W), 'b': draw(W, W)})",),
        ("self.p{n}['a']", "self.p{n}['b'].t()"),
    ),
    "linear": (("self.w{n} = nn.Linear(W, W)",), ("self.w{n}.weight", "self.w{n}.weight.t()")),
    "wide linear": (
        ("self.w{n} = nn.Linear(W, 3 * W)",),
        ("self.w{n}.weight[W : 2 * W]", "self.w{n}.weight.chunk(3)[2]"),
    ),
    "buffer": (("self.register_buffer('w{n}', draw(W, W))",), ("self.w{n}", "self.w{n}[:, :]")),
    "half frozen": (
        ("self.w{n}, self.v{n} = nn.Parameter(draw(W, W)), nn.Parameter(draw(W, W), False)",),
        ("self.w{n} + self.v{n}", "self.v{n}"),
    ),
    "tied inside": (
        ("self.w{n}, self.v{n} = nn.Linear(W, W), nn.Linear(W, W)", "self.v{n}.weight = self.w{n}.weight"),
        ("self.w{n}.weight", "self.v{n}.weight", "self.v{n}.weight @ self.w{n}.weight"),
    ),
    "kept in a list": (
        ("self.w{n} = nn.Parameter(draw(W, W))", "self.kept{n} = [self.w{n}]"),
        ("self.kept{n}[0]", "self.kept{n}[0].t()"),
    ),
    "kept by a closure": (
        ("self.w{n} = nn.Parameter(draw(W, W))", "w{n} = self.w{n}", "self.get{n} = lambda: w{n}"),
        ("self.get{n}()",),
    ),
    "kept view": (
        ("self.w{n} = nn.Parameter(draw(2 * W, W))", "self.view{n} = self.w{n}.detach()[W:]"),
        ("self.view{n}",),
    ),
    "buffer over a weight": (
        ("self.w{n} = nn.Parameter(draw(2 * W, W))", "self.register_buffer('b{n}', self.w{n}.detach()[W:])"),
        ("self.b{n}", "self.w{n}[:W]"),
    ),
    "two over one memory": (
        ("self.w{n} = nn.Parameter(draw(W, W))", "self.v{n} = nn.Parameter(self.w{n}.detach())"),
        ("self.w{n}", "self.v{n}"),
    ),
    "weight norm": (
        ("self.w{n} = parametrizations.weight_norm(nn.Linear(W, W))",),
        ("self.w{n}.weight",),
    ),
    "orthogonal": (
        ("self.w{n} = parametrizations.orthogonal(nn.Linear(W, W))",),
        ("self.w{n}.weight", "self.w{n}.weight.t()"),
    ),
    "parametrized": (
        ("self.w{n} = nn.Linear(W, W)", "parametrize.register_parametrization(self.w{n}, 'weight', Symmetric())"),
        ("self.w{n}.weight",),
    ),
    "parametrized itself": (
        ("self.w{n} = nn.Parameter(draw(W, W))", "parametrize.register_parametrization(self, 'w{n}', Symmetric())"),
        ("self.w{n}",),
    ),
}  # fmt: skip

# What a layer does with x [rows, T, W] and a matrix {w}.
PRODUCTS: dict[str, str] = {
    "matmul": "x @ {w}",
    "method": "x.matmul({w})",
    "linear": "F.linear(x, {w})",
    "biased": "F.linear(x, {w}, {w}[0])",
    "mm": "torch.mm(x.flatten(0, 1), {w}).view_as(x)",
    "addmm": "torch.addmm({w}[1], x.flatten(0, 1), {w}).view_as(x)",
    "scaled addmm": "torch.addmm(x.flatten(0, 1), x.flatten(0, 1), {w}, alpha=0.5).view_as(x)",
    "einsum": "torch.einsum('rtw,wv->rtv', x, {w})",
    "bmm": "torch.bmm(x, ({w}).expand(len(x), W, W))",
    "baddbmm": "torch.baddbmm(x, x, ({w}).expand(len(x), W, W), beta=0.5)",
    "tensordot": "torch.tensordot(x, {w}, 1)",
    "from the left": "(({w}) @ x.transpose(1, 2)).transpose(1, 2)",
    "convolution": "F.conv1d(x.transpose(1, 2), ({w}).unsqueeze(-1)).transpose(1, 2)",
    "vectors": "torch.stack([torch.mv({w}, row) for row in x.flatten(0, 1)]).view_as(x)",
    "embedding": "x * F.embedding(torch.arange(x.shape[1]), {w})",
    "picked rows": "x * ({w})[torch.arange(x.shape[1])]",
    "norm": "F.layer_norm(x, (W,), ({w})[0], ({w})[1])",
    "scale": "x * ({w})[0] + ({w}).sum()",
    "own function": "Scale.apply(x, ({w})[0])",
    "attention": "F.scaled_dot_product_attention(x, x, x @ ({w}))",
    "bilinear": "F.bilinear(x, x, ({w}).expand(W, W, W))",
    "vmap": "torch.vmap(lambda row: row @ ({w}))(x)",
    "twice": "torch.tanh(x @ ({w})) @ ({w})",
    "checkpoint": "checkpoint(lambda z: torch.tanh(z @ ({w})), x, use_reentrant=False)",
    "slope": "torch.func.grad(lambda z: torch.tanh(z @ ({w})).square().sum())(x)",
    "wide": "(x.double() @ ({w}).double()).float()",
}

# What becomes of a product {p}.
USES: dict[str, Lines] = {
    "residual": ("x = x + torch.tanh({p})",),
    "bounded": ("x = torch.tanh({p})",),
    "gate": ("x = x * torch.sigmoid({p})",),
    "in place": ("y = {p}", "y = y.mul_(0.5)", "x = x + torch.tanh(y)"),
    "part in place": ("y = torch.tanh({p}) + 0", "y[..., :2] = 0.25", "x = x + y"),
    "view in place": ("y = torch.tanh({p}) + 0", "y[0].mul_(0.5)", "x = x + y"),
    "elu": ("x = x + torch.tanh(F.elu({p}, inplace=True))",),
    "aside": ("with torch.no_grad(): s = torch.tanh({p}).mean(-1, keepdim=True)", "x = x + s"),
}

# Writes to x, which is the layer's input if they come first.
WRITES: dict[str, str] = {
    "mul": "x.mul_(0.9)",
    "add": "x += 0.1",
    "element": "x[..., 0] = 0.5",
    "view": "x.view(-1, W)[0].add_(0.1)",
    "turned": "x.transpose(1, 2)[:, 0].zero_()",
    "slice": "z = x[..., :4]; z.mul_(0.5)",
    "clamp": "x.clamp_(-2, 2)",
    "tanh": "torch.tanh_(x)",
    "filled": "x.masked_fill_(torch.arange(W) == 3, 0.5)",
    "copied": "x[0].copy_(torch.zeros_like(x[0]))",
    "data": "x.data.mul_(0.9)",
    "detached": "x.detach().mul_(0.9)",
    "without gradient": "with torch.no_grad(): x.mul_(0.9)",
    "indexed": "x.index_add_(2, torch.tensor([1]), torch.ones_like(x[..., :1]))",
}

# More that layers have: lines of __init__, of forward, of the class, and changes between steps.
PARTS: dict[str, tuple[Lines, Lines, Lines, Lines]] = {
    "count": (
        ("self.register_buffer('count{n}', torch.zeros((), dtype=torch.int64))",),
        ("self.count{n} += 1", "x = x / (1 + 0.01 * self.count{n})"),
        (),
        ("with torch.no_grad(): layer.count{n}.fill_(7)",),
    ),
    "count aside": (
        ("self.register_buffer('count{n}', torch.zeros(()), persistent=False)",),
        ("self.count{n} += 1", "x = x / (1 + 0.01 * self.count{n})"),
        (),
        (),
    ),
    "mean": (
        ("self.register_buffer('mean{n}', torch.zeros(W))",),
        ("self.mean{n} = 0.9 * self.mean{n} + 0.1 * x.detach().mean((0, 1))", "x = x - self.mean{n}"),
        (),
        (),
    ),
    "mean in place": (
        ("self.register_buffer('mean{n}', torch.zeros(W))",),
        ("if self.training: self.mean{n}.lerp_(x.detach().mean((0, 1)), 0.1)", "x = x - self.mean{n}"),
        (),
        ("layer.eval()", "layer.mean{n} = torch.ones(W)"),
    ),
    "empty buffer": (
        ("self.register_buffer('last{n}', None)",),
        (
            "if self.last{n} is not None: x = x + 0.1 * self.last{n}",
            "self.last{n} = x.detach().mean((0, 1))",
        ),
        (),
        (),
    ),
    "cache": ((), ("self.seen{n} = x.detach().mean()", "x = x + 0.1 * self.seen{n}"), (), ()),
    "calls": (
        ("self.calls{n} = 0",),
        ("self.calls{n} += 1", "x = x / (1 + 0.1 * self.calls{n})"),
        (),
        (),
    ),
    "generator": (
        ("self.generator{n} = torch.Generator().manual_seed(3)",),
        ("x = x * (torch.rand(x.shape, generator=self.generator{n}) > 0.3)",),
        (),
        (),
    ),
    "extra state": (
        ("self.factor{n} = 0.5",),
        ("x = x * self.factor{n}",),
        (
            "def get_extra_state(self): return {'factor': self.factor{n}}",
            "def set_extra_state(self, state): self.factor{n} = state['factor']",
        ),
        ("layer.factor{n} = 0.75",),
    ),
    "attribute": (("self.factor{n} = 0.5",), ("x = x * self.factor{n}",), (), ("layer.factor{n} = 0.75",)),
    "constant": (("self.table{n} = torch.linspace(0.5, 1.5, W)",), ("x = x * self.table{n}",), (), ()),
    "mode": ((), ("x = x * (0.5 if self.training else 0.75)",), (), ("layer.eval()", "layer.train(not layer.training)")),
    "weight": (
        ("self.w{n} = nn.Parameter(draw(W, W))",),
        ("x = x + torch.tanh(x @ self.w{n})",),
        (),
        (
            "layer.w{n}.requires_grad_(False)",
            "layer.w{n}.requires_grad_(not layer.w{n}.requires_grad)",
            "with torch.no_grad(): layer.w{n}.mul_(0.5)",
            "layer.w{n}.data = layer.w{n}.data * 0.5",
            "layer.w{n}.data.clamp_(-0.1, 0.1)",
            "nn.init.ones_(layer.w{n})",
            "layer.w{n} = nn.Parameter(layer.w{n}.detach() * 0.5)",
            "layer.late = nn.Parameter(torch.ones(W))",
            "layer.w{n}.register_hook(lambda gradient: 0.5 * gradient)",
            "nn.utils.prune.l1_unstructured(layer, 'w{n}', amount=0.5)",
        ),
    ),
    "unused": (("self.w{n} = nn.Linear(W, W)",), (), (), ("for p in layer.w{n}.parameters(): p.requires_grad_(False)",)),
    "hook": (
        ("self.w{n} = nn.Linear(W, W)", "self.w{n}.register_forward_hook(double)"),
        ("x = x + torch.tanh(self.w{n}(x))",),
        (),
        ("layer.w{n}.register_forward_hook(double)", "layer.w{n}._forward_hooks.clear()"),
    ),
    "hook before": (
        ("self.w{n} = nn.Linear(W, W)", "self.w{n}.register_forward_pre_hook(halve)"),
        ("x = x + torch.tanh(self.w{n}(x))",),
        (),
        ("layer.w{n}.register_forward_pre_hook(halve)",),
    ),
    "hook behind": (
        ("self.w{n} = nn.Linear(W, W)", "self.w{n}.register_full_backward_hook(shrink)"),
        ("x = x + torch.tanh(self.w{n}(x))",),
        (),
        ("layer.w{n}.register_full_backward_hook(shrink)",),
    ),
    "hook of the layer": (
        ("self.register_forward_pre_hook(halve)", "self.register_forward_hook(double)"),
        (),
        (),
        ("layer.register_forward_hook(double)", "layer.register_forward_pre_hook(halve)"),
    ),
    "backward hook of the layer": (
        ("self.register_full_backward_hook(shrink)",),
        (),
        (),
        ("layer.register_full_backward_hook(shrink)", "layer.register_full_backward_pre_hook(shrink_first)"),
    ),
    "hook of a tensor": (
        (),
        ("if x.requires_grad: x.register_hook(lambda gradient: 0.5 * gradient)",),
        (),
        (),
    ),
    "hook of a parameter": (
        ("self.w{n} = nn.Parameter(draw(W, W))", "self.w{n}.register_hook(lambda gradient: 0.5 * gradient)"),
        ("x = x + torch.tanh(x @ self.w{n})",),
        (),
        (),
    ),
    "partial": (
        ("self.w{n} = nn.Linear(W, W)", "self.call{n} = self.w{n}.forward"),
        ("x = x + torch.tanh(self.call{n}(x))",),
        (),
        (),
    ),
    "called": (
        ("self.w{n} = nn.Sequential(nn.Linear(W, W), nn.Tanh())",),
        ("x = x + torch.func.functional_call(self.w{n}, dict(self.w{n}.named_parameters()), x)",),
        (),
        (),
    ),
    "reentrant": (
        ("self.w{n} = nn.Linear(W, W)",),
        ("x = x + (checkpoint(self.w{n}, x, use_reentrant=True) if x.requires_grad else self.w{n}(x))",),
        (),
        (),
    ),
    "batch norm": (("self.w{n} = nn.BatchNorm1d(W)",), ("x = x + self.w{n}(x.flatten(0, 1)).view_as(x)",), (), ("layer.w{n}.eval()",)),
    "spectral norm": (
        ("self.w{n} = parametrizations.spectral_norm(nn.Linear(W, W))",),
        ("x = x + self.w{n}(x)",),
        (),
        (),
    ),
}  # fmt: skip

_ODD = [name for name, kind in LAYERS.items() if not kind.draws and "norm" not in name]

# More tensors that a layer hands on: an expression, and uses of it by a later layer.
EXTRAS: dict[str, tuple[str, Lines]] = {
    "same": ("x", ("x = x + 0.5 * {o}", "{o}.mul_(0.5)", "{o}.add_(0.1); x = x + {o}", "x.mul_(0.9); x = x + {o}")),
    "part": ("x[..., :4]", ("x = x + F.pad({o}, (0, 4))", "{o}.mul_(0.5)", "x.mul_(0.9); x = x + F.pad({o}, (4, 0))")),
    "turned": ("x.transpose(1, 2)", ("x = x + {o}.transpose(1, 2)", "{o}[:, 0].zero_()")),
    "detached": ("x.detach()", ("x = x + {o}", "{o}.mul_(0.5)")),
    "new": ("x * 0.5", ("x = x + {o}", "{o}.mul_(0.5); x = x + {o}")),
    "mean": ("x.mean()", ("x = x + {o}", "x = x * torch.sigmoid({o})")),
    "numbers": ("torch.arange(x.shape[1])", ("x = x + 0.01 * {o}.unsqueeze(-1)",)),
    "mask": ("torch.arange(W) > 3", ("x = torch.where({o}, x, 0.5 * x)",)),
    "wide": ("x.double()", ("x = x + {o}.float()",)),
    "expanded": ("x[:, :1].expand_as(x)", ("x = x + 0.5 * {o}",)),
    "weight": ("self.edge", ("x = x + 0.5 * {o}", "x = x * {o}")),
    "half": ("x.bfloat16()", ("x = x + {o}.float()",)),
    "none": ("None", ("x = x if {o} is None else x + {o}",)),
}  # fmt: skip

LOSSES: dict[str, str] = {
    "mean": "loss = F.mse_loss",
    "module": "loss = nn.MSELoss()",
    "sum": "loss = nn.MSELoss(reduction='sum')",
    "function": "def loss(out, y): return F.smooth_l1_loss(out, y)",
    "in place": "def loss(out, y): return out.sub_(y).square().mean()",
    "targets in place": "def loss(out, y): return (y.mul_(0.5) - out).abs().square().mean()",
    "buffer": (
        "class Weighted(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.register_buffer('scale', torch.linspace(0.5, 1.5, W))\n"
        "    def forward(self, out, y):\n"
        "        return ((out - y).square() * self.scale).mean()\n"
        "loss = Weighted()"
    ),
    "parameter": (
        "class Weighted(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, W))\n"
        "    def forward(self, out, y):\n"
        "        return ((out - y).square() * self.scale).mean()\n"
        "loss = Weighted()"
    ),
    "count": (
        "class Counting(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.register_buffer('count', torch.zeros(()))\n"
        "    def forward(self, out, y):\n"
        "        self.count += 1\n"
        "        return (out - y).square().mean() / (1 + 0.1 * self.count)\n"
        "loss = Counting()"
    ),
    "generator": (
        "generator = torch.Generator().manual_seed(5)\n"
        "def loss(out, y): return (F.mse_loss(out, y, reduction='none') "
        "* torch.rand(out.shape, generator=generator)).mean()"
    ),
    "penalty": (
        "def loss(out, y): return F.mse_loss(out, y) + 0.01 * sum(p.square().sum() for p in "
        "LAYERS_OF_MODEL[0].parameters())"
    ),
}  # fmt: skip

# Autograd keeps nothing of this sum, so the next line may write to it.
NEW = "x = x + 0"

# Kinds that dynmo refuses, alone or with others. Fewer of them are drawn.
_ALIASES = {"same", "part", "turned", "detached", "expanded"}
REFUSED = {"tied inside", "calls", "hook of a parameter", "parameter", "penalty", "none"} | _ALIASES


def draw(seed: int, number: int, attempt: int = 0) -> Tables:
    """Draws a case. It is the same for the same arguments."""
    return _Draw(Random(f"modules {seed} {number} {attempt}")).case() | {"number": number}


class _Draw:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._count = 0
        self._kinds = list[str]()
        self._weights = list[Lines]()
        self._layer: Tables = {}
        self._changes = list[tuple[int, str, str]]()

    def _pick(self, what: str, table: dict[str, Any]) -> Any:
        names = [*table]
        name = self._random.choice(names)
        while name in REFUSED and self._random.random() < 0.8:
            name = self._random.choice(names)
        self._kinds.append(f"{what}: {name}")
        return table[name]

    def _allows(self, kind: str, share: float) -> bool:
        """Draws whether the case has something of this kind."""
        if self._random.random() >= share:
            return False
        self._kinds.append(kind)
        return True

    def case(self) -> Tables:
        random = self._random
        extras, layers = list[str](), list[Tables]()
        count = random.choice([3, 4, 4, 5])
        for index in range(count):
            layers.append(self._draw_layer(index, extras, index == count - 1))
        made, tied = self._ties(layers)
        microbatches = random.choice([1, 2, 3])
        schedules = [
            name
            for name in (*SCHEDULES, AUTO)
            if 2 * chunks_of(name, None) <= count
            and (name != "interleaved-1f1b" or not microbatches % 2)
        ]
        some = sorted(random.sample(range(count), random.randrange(1, count)))
        options: Tables = {
            "schedule": random.choice(schedules),
            "microbatches": microbatches,
            "recompute": random.choice(["none", "all", some]),
            "post_validation": random.random() < 0.2,
            "max_grad_norm": random.choice([0.0, 0.0, 1.0]),
        }
        return {
            "seed": random.randrange(1000),
            "layers": layers,
            "made": made,
            "tied": tied,
            "loss": self._pick("loss", LOSSES) if random.random() < 0.4 else LOSSES["mean"],
            "inputs": random.choice(["tensor", "tensor", "dictionary", "without"]),
            "options": options,
            "plan": self._plan(count),
            "kinds": sorted(set(self._kinds)),
        }

    def _draw_layer(self, index: int, extras: list[str], is_last: bool) -> Tables:
        """Draws a layer, and changes `extras`: the kinds of tensors that come beside x."""
        random = self._random
        self._layer = layer = {"init": [], "body": [], "class": [], "returns": "x"}
        self._weights = []
        if extras and random.random() < 0.8:
            at = random.randrange(len(extras))
            use = random.choice(EXTRAS[extras[at]][1])
            layer["body"].append(use.replace("{o}", f"others[{at}]"))
        statements = [self._product, self._product, self._write, self._part, self._odd]
        for _ in range(random.choice([1, 2, 2, 3])):
            random.choice(statements)(index)
        layer["body"].append(NEW)
        if is_last or random.random() < 0.3:
            extras.clear()
            return layer
        handed = [f"others[{at}]" for at in range(len(extras))]
        if random.random() < 0.4:
            expression, _ = self._pick("extra", EXTRAS)
            name = self._kinds[-1].removeprefix("extra: ")
            extras.append(name)
            handed.append(expression)
            if name == "weight":
                layer["init"].append("self.edge = nn.Parameter(draw(W))")
        if handed:
            layer["returns"] = ", ".join(["x", *handed])
        elif self._allows("returns: tuple of one", 0.1):
            layer["returns"] = "x,"
        elif self._allows("returns: list", 0.02):
            layer["returns"] = "[x, 0.5 * x]"
            extras.append("new")
        elif self._allows("returns: dictionary", 0.02):
            layer["returns"] = "{'x': x}"
        elif self._allows("returns: x twice", 0.04):
            layer["returns"] = "x, x"
            extras.append("same")
        return layer

    def _add(self, init: Sequence[str], body: Sequence[str], of: Sequence[str] = ()) -> None:
        for section, lines in (("init", init), ("body", body), ("class", of)):
            self._layer[section] += [line.replace("{n}", str(self._count)) for line in lines]

    def _product(self, index: int) -> None:
        random = self._random
        if not self._weights or random.random() < 0.6:
            init, expressions = self._pick("weight", WEIGHTS)
            self._count += 1
            self._add(init, ())
            self._weights.append(
                tuple(each.replace("{n}", str(self._count)) for each in expressions)
            )
        weight = random.choice(random.choice(self._weights))
        product = self._pick("product", PRODUCTS).replace("{w}", weight)
        use = self._pick("use", USES)
        self._layer["body"] += [line.replace("{p}", product) for line in use]

    def _write(self, index: int) -> None:
        if self._layer["body"]:
            self._layer["body"].append(NEW)
        self._layer["body"].append(self._pick("write", WRITES))

    def _part(self, index: int) -> None:
        self._count += 1
        init, body, methods, changes = self._pick("part", PARTS)
        if methods and self._layer["class"]:
            return  # a class has one of each method
        self._add(init, body, methods)
        self._changes += [
            (index, line.replace("{n}", str(self._count)), f"change: {line}") for line in changes
        ]

    def _odd(self, index: int) -> None:
        self._count += 1
        name = self._random.choice(_ODD)
        self._kinds.append(f"layer: {name}")
        self._add([f"self.w{{n}} = LAYERS[{name!r}].make()"], ["x = torch.tanh(self.w{n}(x))"])

    def _ties(self, layers: list[Tables]) -> tuple[list[str], list[Any]]:
        """Lines that share something between two layers, and the pairs of `tied`."""
        first, second = sorted(self._random.sample(range(len(layers)), 2))
        tie = "self.tie = nn.Parameter(draw(W, W))", "x = x + torch.tanh(x @ self.tie)"
        shared = [f"layers[{second}].tie = layers[{first}].tie"]
        pair = [[[first, "tie"], [second, "tie"]]]

        def add(index: int, init: str, body: str) -> None:
            layers[index]["init"].append(init)
            layers[index]["body"].append(body)

        if self._allows("tie: pair", 0.1):
            add(first, *tie)
            add(second, *tie)
            return (shared if self._random.random() < 0.5 else []), pair
        if self._allows("tie: undeclared", 0.02):
            add(first, *tie)
            add(second, *tie)
            return shared, []
        if self._allows("tie: read", 0.02):
            add(first, *tie)
            add(second, "self.other = []", "x = x + torch.tanh(x @ self.other[0].tie)")
            return [f"layers[{second}].other.append(layers[{first}])"], []
        alike = all(layers[at]["returns"] == "x" for at in (first, second))
        if alike and self._allows("tie: layer twice", 0.02):
            return [f"layers[{second}] = layers[{first}]"], []
        return [], []

    def _plan(self, layers: int) -> list[Any]:
        random = self._random
        plan: list[Any] = [["step"], ["step"], ["step"]]

        def insert(*events: list[Any]) -> None:
            at = random.randrange(1, len(plan))
            plan[at:at] = events

        if random.random() < 0.4:
            if random.random() < 0.5:
                insert(["save"], ["step"], ["load"])
            else:
                insert(["save"], ["resume"])
        if random.random() < 0.2:
            frozen = list(range(random.randrange(1, layers)))
            insert(["freeze", frozen], ["step"], ["unfreeze", frozen])
        if random.random() < 0.3:
            insert(["evaluate"])
        if random.random() < 0.7:
            insert(["move", random.randrange(1000)])
        if self._changes and random.random() < 0.5:
            index, line, kind = random.choice(self._changes)
            self._kinds.append(kind)
            # Nothing of a change is in the state_dict, so none comes before a load.
            late = max([at for at, e in enumerate(plan) if e[0] in ("load", "resume")], default=0)
            plan.insert(random.randrange(late + 1, len(plan) + 1), ["change", index, line])
        return plan


def source_of(case: Tables) -> str:
    """Returns the program that makes the layers and the loss of a case."""
    lines = [HEAD, ""]
    for index, layer in enumerate(case["layers"]):
        given = "x, *others"
        body = list(layer["body"])
        if index == 0 and case["inputs"] != "tensor":
            given = "x, given=None"
            body.insert(0, "x = x if given is None else x + given")
        init = ["super().__init__()", *layer["init"]]
        lines += ["", f"class Layer{index}(nn.Module):", "    def __init__(self):"]
        lines += [f"        {line}" for line in init]
        lines += ["", f"    def forward(self, {given}):"]
        lines += [f"        {line}" for line in [*body, f"return {layer['returns']}"]]
        for method in layer["class"]:
            lines += ["", f"    {method}"]
        lines.append("")
    names = ", ".join(f"Layer{index}()" for index in range(len(case["layers"])))
    lines += ["", "def make():", f"    layers = [{names}]"]
    lines += [f"    {line}" for line in case["made"]]
    lines += ["    LAYERS_OF_MODEL[:] = layers"] if "LAYERS_OF_MODEL" in case["loss"] else []
    lines += ["    return layers", "", "", *case["loss"].splitlines()]
    lines.insert(1, "LAYERS_OF_MODEL = []" if "LAYERS_OF_MODEL" in case["loss"] else "")
    return "\n".join(lines) + "\n"
