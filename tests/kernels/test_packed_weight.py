"""Modules with weights in a form of their own, on one rank."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynmo.cases.pruning.sparse_linear import SparseLinear
from dynmo.errors import RunError
from dynmo.kernels import packed_weight
from dynmo.kernels.packed_weight import (
    PackedWeight,
    dense_parameters,
    forms_of,
    guarded,
    take_forms,
    unknown_form,
)


class Halved(PackedWeight, nn.Linear):
    """Keeps the even rows of a weight."""

    plain, form = nn.Linear, ("rows",)
    rows: Tensor

    def packed_shape(self, name: str) -> tuple[int, ...]:
        if len(self.rows) > self.out_features:
            raise ValueError(f"{name} has {len(self.rows)} rows")
        return len(self.rows), self.in_features

    def pack(self, name: str, dense: Tensor) -> Tensor:
        return dense[self.rows]

    def unpack(self, name: str, values: Tensor) -> Tensor:
        dense = values.new_zeros(self.out_features, self.in_features)
        return dense.index_copy(0, self.rows, values)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.unpack("weight", self.values("weight"))
        return nn.functional.linear(input, weight, self.bias)


def halved(kind: Any = nn.Linear) -> tuple[Any, Tensor]:
    linear: Any = kind(3, 4)
    weight = linear.weight.detach()
    form = Halved.take_form(linear, {"rows": torch.tensor([0, 2])})
    linear.weight = nn.Parameter(form.pack("weight", weight))
    return linear, weight


def test_a_form_replaces_the_class_alone() -> None:
    linear, weight = halved()
    assert type(linear) is Halved
    kept = weight * torch.tensor([1.0, 0, 1, 0])[:, None]
    assert torch.equal(dict(dense_parameters(linear))["weight"], kept)
    x = torch.ones(2, 3)
    assert torch.equal(linear(x), nn.functional.linear(x, kept, linear.bias))


class Both(Halved):
    """Packs the bias, too."""

    form = ("kept_rows",)
    kept_rows: Tensor
    packed = ("weight", "bias")

    def packed_shape(self, name: str) -> tuple[int, ...]:
        rows = len(self.kept_rows)
        return (rows, self.in_features) if name == "weight" else (rows,)


def test_a_bias_that_is_none_is_not_packed() -> None:
    for bias in (True, False):
        linear = Both.take_form(nn.Linear(3, 4, bias=bias), {"kept_rows": torch.tensor([1])})
        assert linear.weight.shape == (1, 3)
        assert linear.bias.shape == (1,) if bias else linear.bias is None


def test_another_form_takes_the_place_of_the_buffers() -> None:
    linear = Both.take_form(halved()[0], {"kept_rows": torch.tensor([1])})
    assert [name for name, _ in linear.named_buffers()] == ["kept_rows"]


@pytest.mark.parametrize("packed", [True, False])
def test_a_module_that_cannot_take_a_form_stays_as_it_was(packed: bool) -> None:
    module = halved()[0] if packed else nn.Linear(3, 4)
    before = type(module), dict(module.named_buffers()), dict(module.named_parameters())
    wrong = {"rows": torch.zeros(5)}
    for form, told in (
        (wrong, "weight has 5 rows"),
        ({}, "Halved needs the buffers rows"),
        ({"rows": torch.tensor(5)}, r"^Halved\.packed_shape raised TypeError: len.*test_packed"),
    ):
        with pytest.raises(ValueError, match=told):
            Halved.take_form(module, form)
        assert type(module) is before[0]
        for now, was in ((module._buffers, before[1]), (module.named_parameters(), before[2])):
            assert [*dict(now).items()] == [*was.items()]


def test_a_parameter_that_cannot_be_packed_leaves_the_others_as_they_were() -> None:
    class Late(Both):
        def packed_shape(self, name: str) -> tuple[int, ...]:
            return super().packed_shape(name) if name == "weight" else (1, "two")  # pyright: ignore

    linear = nn.Linear(3, 4)
    before = dict(linear.named_parameters())
    with pytest.raises(ValueError, match=r"Late\.packed_shape raised TypeError"):
        Late.take_form(linear, {"kept_rows": torch.tensor([1])})
    assert all(linear._parameters[name] is value for name, value in before.items())


def test_take_forms_knows_forms_by_their_buffers() -> None:
    class Own(nn.Linear):
        pass

    source = nn.Sequential(halved()[0], Own(3, 4))
    target = nn.Sequential(nn.Linear(3, 4), Own(3, 4))
    buffers = {name: torch.tensor([0, 2]) for name in ("0.rows", "1.rows")}
    take_forms(target, buffers)
    assert [type(x) for x in target] == [Halved, Own], "a class that is not the plain one"
    assert target[0].weight.shape == source[0].weight.shape
    with pytest.raises(ValueError, match=r"^0\.weight has 5 rows"):
        take_forms(nn.Sequential(nn.Linear(3, 4)), {"0.rows": torch.zeros(5)})


def test_take_forms_wants_all_buffers_of_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form whose buffers are some of those of another, and is made later, is not that other."""
    monkeypatch.setattr(packed_weight, "_FORMS", [*packed_weight._FORMS])

    class Columns(Halved):
        form = ("col",)

    linear = nn.Linear(3, 2)
    take_forms(linear, {"crow": torch.tensor([0, 1, 2]), "col": torch.tensor([2, 0])})
    assert type(linear) is SparseLinear
    take_forms(linear, {"crow": torch.tensor([0, 1, 1]), "col": torch.tensor([2])})
    assert linear.weight.shape == (1, 1)
    assert type(linear) is not Columns


def test_a_name_tells_forms_with_the_same_buffers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weight, "_FORMS", [*packed_weight._FORMS])

    class Odd(Halved):
        """Has the buffers of another form."""

        form = ("rows",)

        def packed_shape(self, name: str) -> tuple[int, ...]:
            return len(self.rows), self.in_features + 1

    buffers = {"rows": torch.tensor([0, 2])}
    for kind, columns in ((Halved, 3), (Odd, 4)):
        forms = forms_of(kind.take_form(nn.Linear(3, 4), buffers))
        assert forms == {"": f"{__name__}:{kind.__qualname__}"}
        for linear in (nn.Linear(3, 4), Odd.take_form(nn.Linear(3, 4), buffers)):
            take_forms(linear, buffers, forms)
            assert (type(linear), linear.weight.shape) == (kind, (2, columns))
            take_forms(linear, buffers)
            assert type(linear) is kind, "without a name it stays as it is"
    take_forms(linear := nn.Linear(3, 4), buffers)
    assert type(linear) is Odd, "the last one"


def test_unknown_form() -> None:
    known = ["dynmo:SparseLinear", f"{__name__}:Halved", "__main__:Halved"]
    assert unknown_form(dict(enumerate(known))) is None  # pyright: ignore[reportArgumentType]
    for name in ("dynmo:Halved", f"{__name__}:Absent", "json:Halved"):
        assert unknown_form({"": known[0], "a": name}) == name


@pytest.mark.parametrize("fails", [True, False])
def test_only_the_module_reads_its_packed_weight(fails: bool) -> None:
    linear, _ = halved()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear

        def forward(self, x: Tensor) -> Tensor:
            assert not torch.backends.mha.get_fastpath_enabled()
            return x @ self.inner.weight.t() if fails else self.inner(x)

    layer = Layer()
    run = guarded(3, layer, layer)
    if fails:
        with pytest.raises(RunError, match=r"layer 3 uses the weight of 'inner' by itself"):
            run(torch.ones(1, 3))
    else:
        run(torch.ones(1, 3))
    assert linear.weight is not None, "allowed again"
    assert torch.backends.mha.get_fastpath_enabled()


def test_forms_of_cases_that_do_not_run_are_known() -> None:
    """Runs in a process of its own, which has not loaded pruning."""
    code = """
import sys, torch
from torch import nn
from dynmo.kernels.packed_weight import take_forms
module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
take_forms(module, dict(module.named_buffers()))
assert "dynmo.cases" not in sys.modules
take_forms(module, {"0.crow": torch.tensor([0, 1, 2]), "0.col": torch.tensor([2, 0])})
print(type(module[0]).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "SparseLinear\n"


def test_a_form_without_one_of_its_methods_is_refused() -> None:
    with pytest.raises(TypeError, match="Half is a PackedWeight without pack; write it"):

        class Half(PackedWeight, nn.Linear):  # pyright: ignore[reportUnusedClass]
            plain, form = nn.Linear, ("half",)

            def packed_shape(self, name: str) -> tuple[int, ...]:
                return (1,)
