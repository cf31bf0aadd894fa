"""What two processes compare of their models."""

from __future__ import annotations

import enum
import json
import math
import random
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dynmo.errors import RunError
from dynmo.models.identity import Identity, code_of, first_of, identity_from, identity_of
from dynmo.models.loss import next_token_loss
from dynmo.models.model import Factory, from_factories
from dynmo.models.sequential import Sequential


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.line = value, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


class AliasedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.randn(2))
        self.kept = [self.scale]


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain: float) -> None:
        self.gain = gain


def shifted(by: float) -> Any:
    return lambda x: x + by


def cyclic(value: int) -> list[Any]:
    ring: list[Any] = [value]
    ring.append(ring)
    return ring


def described(*factories: Factory, own: tuple[int, ...] = ()) -> Identity:
    names = [f"l{index}" for index in range(len(factories))]
    model = from_factories(names, factories, 0, next_token_loss)
    return identity_of(model, model.build(own))


PAIRS: list[tuple[Any, Any]] = [
    (0.5, 0.25),
    (1, 1.0),
    (math.nan, math.inf),
    ("gelu", "relu"),
    (Mode.FAST, Mode.EXACT),
    ((1, 2), (2, 1)),
    ({"a": [1]}, {"a": [2]}),
    ({1, 2}, {1, 3}),
    (torch.float32, torch.float64),
    (torch.ones(3), torch.zeros(3)),
    (np.float32(1), np.float32(2)),
    (np.arange(3), np.arange(3) + 1),
    (partial(torch.add, alpha=1), partial(torch.add, alpha=2)),
    (shifted(1.0), shifted(2.0)),
    (lambda x: x * 2, lambda x: x * 3),
    (torch.tanh, torch.sigmoid),
    (Slotted(1.0), Slotted(2.0)),
    ([Slotted(1.0)], [Slotted(2.0)]),
    (range(3), range(4)),
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda value: type(value).__name__)
def test_attribute_counts(one: Any, other: Any) -> None:
    identity = described(partial(Holder, one))
    assert identity.differences(described(partial(Holder, other))) != []
    assert identity.differences(described(partial(Holder, one))) == []


ALIKE: list[tuple[Any, Any]] = [
    (torch.device("cpu"), torch.device("meta")),
    (Path("/here"), Path("/there")),
    ("/here", "/there"),
    (threading.Lock(), threading.Lock()),
    ({"c", "b", "a"}, {"b", "a", "c"}),
    (object(), object()),
    (cyclic(1), cyclic(2)),
    (torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)),
    (random.Random(), random.Random()),
    (np.random.default_rng(), np.random.default_rng()),
]


@pytest.mark.parametrize(("one", "other"), ALIKE, ids=lambda value: type(value).__name__)
def test_what_belongs_to_a_process_does_not_count(one: Any, other: Any) -> None:
    assert described(lambda: Holder(one)).differences(described(lambda: Holder(other))) == []


def test_layer_is_described_alike_here_and_elsewhere() -> None:
    """A rank holds some layers. The others are on the meta device."""
    modules = (partial(nn.Linear, 2, 2), partial(nn.BatchNorm1d, 2), partial(nn.LSTM, 2, 2))
    factories: list[Factory] = [*modules, partial(Holder, [1, "a"]), AliasedBuffer]
    assert described(*factories) == described(*factories, own=(0, 1, 2, 3, 4))
    recurrent = Sequential([nn.RNN(2, 2), nn.RNN(2, 2)])
    first, last = (identity_of(recurrent, recurrent.build((own,))) for own in (0, 1))
    assert first.differences(last) == [], "copies have their attributes in another order"


def test_message_names_layer_attribute_and_values() -> None:
    one = described(partial(nn.Dropout, 0.0), partial(nn.Linear, 2, 2))
    assert one.differences(described(partial(nn.Dropout, 0.5), partial(nn.Linear, 2, 2))) == [
        "layer 0 (l0), p (0.0, not 0.5)"
    ]
    wider = one.differences(described(partial(nn.Dropout, 0.0), partial(nn.Linear, 2, 3)))
    weight = "layer 1 (l1), parameter weight (float32 [2, 2], trains, not float32 [3, 2], trains)"
    assert weight in wider
    longer = one.differences(described(*[partial(nn.Dropout, 0.0)] * 9))
    assert "and" in first_of(longer)
    assert "number of layers (2, not 9)" in longer


def test_hook_counts() -> None:
    def hooked(factor: float) -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.register_forward_hook(lambda *given: factor * given[2])
        return layer

    assert described(partial(hooked, 1.0)).differences(described(partial(hooked, 2.0)))


def test_files_of_layers_and_loss_are_part_of_it() -> None:
    own_loss = Sequential([nn.Linear(2, 2)], loss=lambda out, targets: out.mean())
    with_loss = identity_of(own_loss, own_loss.build(()))
    own, plain = described(partial(Holder, 1)), described(partial(nn.Linear, 2, 2))
    found = ["tests/models/test_identity.py" in each.code for each in (own, plain, with_loss)]
    assert found == [True, False, True]


def test_identity_is_read_back_from_json() -> None:
    identity = described(partial(Holder, 1), partial(Holder, 1))
    assert len(identity.descriptions) == 1, "equal layers share one"
    assert identity_from(json.loads(json.dumps(identity.model_dump()))) == identity
    broken = {**identity.model_dump(), "descriptions": {}}
    for record in ({}, [], None, "text", broken):
        with pytest.raises(RunError):
            identity_from(record)


class Numbered(Holder):
    def __init__(self, index: int, value: Any) -> None:
        super().__init__(value)
        self.layer_idx = index
        self.inner = nn.ModuleDict({f"block{index}": nn.Linear(2, 2)})


def test_layers_of_a_kind_differ_in_their_indices_alone() -> None:
    layers = [Numbered(0, 1), Numbered(1, 1), Numbered(2, 3), Holder(1)]
    model = Sequential(layers, loss=nn.functional.mse_loss)
    identity = identity_of(model, layers)
    assert len({key for _, key in identity.layers}) == 4
    first, second, *others = identity.kinds
    assert first == second
    assert len({first, *others}) == 3


MODEL = '''"""A model."""
from torch import nn
import helpers
from parts.norm import Norm

class Gain(nn.Module):
    """A layer."""

    def forward(self, x):
        import late
        return x * helpers.GAIN * late.SHIFT
'''
FILES = {
    "own_model.py": MODEL,
    "helpers.py": "GAIN = 2.0\n",
    "late.py": "SHIFT = 1\n",
    "parts/__init__.py": "",
    "parts/norm.py": "from . import scale\nfrom .scale import root as r\n\nclass Norm: ...\n",
    "parts/scale.py": "def root(x):\n    return x**0.5\n",
    "unused.py": "X = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def changed(folder: Path, name: str, old: str, new: str) -> set[str]:
    before = code_of(["own_model"])
    path = folder / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    after = code_of(["own_model"])
    return {file for file, _ in before.items() ^ after.items()}


def test_imports_are_followed_without_loading_them(folder: Path) -> None:
    assert set(code_of(["own_model"])) == {*FILES} - {"unused.py"}
    assert "own_model" not in sys.modules


@pytest.mark.parametrize(
    ("counts", "name", "old", "new"),
    [
        (True, "own_model.py", "x * helpers", "x + helpers"),
        (True, "helpers.py", "2.0", "3.0"),
        (True, "late.py", "1", "2"),
        (True, "parts/scale.py", "0.5", "0.25"),
        (True, "parts/__init__.py", "", "import unused"),
        (False, "own_model.py", '"""A layer."""', '"""Another text."""'),
        (False, "own_model.py", "        import late", "        # Late.\n\n        import late"),
        (False, "helpers.py", "GAIN = 2.0", "GAIN  =  (2.0)  # twice"),
        (False, "unused.py", "1", "2"),
    ],
)
def test_changed_constant_counts(folder: Path, counts: bool, name: str, old: str, new: str) -> None:
    """A comment, a docstring or a file that nothing imports does not."""
    found = changed(folder, name, old, new)
    assert name in found if counts else not found


def test_installed_package_counts_by_its_version(folder: Path) -> None:
    (folder / "uses.py").write_text("import numpy\nimport torch, json\nimport safetensors.torch\n")
    code = code_of(["uses"])
    assert set(code) == {"uses.py", "numpy", "safetensors"}
    assert code["numpy"] == np.__version__


def test_file_that_is_no_python_counts_by_its_bytes(folder: Path) -> None:
    (folder / "broken.py").write_text("this is no Python")
    before = code_of(["broken", "nowhere", "nowhere.at_all"])
    (folder / "broken.py").write_text("this is no python.")
    assert set(before) == {"broken.py"}
    assert code_of(["broken"]) != before
