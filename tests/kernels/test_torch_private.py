"""torch's private functions. Only one module uses them, for the tested versions of torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

from dynmo.errors import ConfigError
from dynmo.kernels import torch_private

ROOT = Path(__file__).parents[2]
# An attribute or a module of torch with one leading underscore.
_USE, _FROM = r"\b(?:torch|dist)(?:\.\w+)*\._[a-z]\w*", r"from torch(?:\.\w+)*\._\w+"
PRIVATE = re.compile(rf"{_USE}|{_FROM}|from torch\S* import _")


@pytest.mark.parametrize("version", ["2.14.0", "2.14.0+cpu", "3.0", "2.20.1"])
def test_untested_torch_version_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"torch<2\.14"):
        torch_private.check_version(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.11.0+cu130", torch.__version__])
def test_tested_torch_version_is_accepted(version: str) -> None:
    torch_private.check_version(version)


def test_package_metadata_has_the_same_torch_limit() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "torch>=2.10,<" + ".".join(map(str, torch_private.BELOW)) in needed


def test_torch_func_runs_while_saved_tensors_are_shown() -> None:
    shown = list[torch.Tensor]()
    x = torch.ones(3, requires_grad=True)
    slope = torch.func.grad(lambda y: torch.func.grad(lambda z: z.pow(3).sum())(y).sum())
    with torch_private.saved_tensors_shown(shown.append):
        assert slope(x).tolist() == [6.0, 6.0, 6.0]
        assert not shown
        _ = x * x
        assert len(shown) == 2
        with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="saved tensor"):
            slope(x)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="saved tensor"):
        slope(x)


def test_no_other_module_uses_private_torch_names() -> None:
    own = Path(torch_private.__file__)
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "dynmo").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if path != own and PRIVATE.search(line.split("#")[0]) and "getLogger" not in line
    ]
    assert wrong == []
