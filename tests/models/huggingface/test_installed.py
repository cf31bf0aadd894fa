"""transformers is an optional dependency, and old versions are refused."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError

import pytest

from dynmo.errors import ConfigError
from dynmo.models import huggingface


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        *((version, None) for version in ("5.20.0", "5.23.0", "5.30.0.dev0", "10.1.0")),
        (None, "is not installed; install it with pip install transformers"),
        ("4.57.1", "4.57.1 is older than 5.20, which models of Hugging Face need;"),
        ("5.3.0", "5.3.0 is older than 5.20, which models of Hugging Face need;"),
    ],
)
def test_a_missing_or_old_transformers_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str | None, problem: str | None
) -> None:
    def found(_: str) -> str:
        if version is None:
            raise PackageNotFoundError
        return version

    monkeypatch.setattr(huggingface, "version", found)
    if problem is None:
        huggingface.check_installed()
    else:
        with pytest.raises(ConfigError, match=f"^transformers {re.escape(problem)}"):
            huggingface.check_installed()
