"""transformers is an optional dependency, and old versions are refused."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from dynmo.errors import ConfigError
from dynmo.models.huggingface import installed


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, "is not installed; install it with pip install 'dynmo[hf]'"),
        ("4.57.1", "4.57.1 is older than 5.20, which models of Hugging Face need;"),
        ("5.3.0", "5.3.0 is older than 5.20, which models of Hugging Face need;"),
    ],
)
def test_a_missing_or_old_transformers_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str | None, problem: str
) -> None:
    def found(_: str) -> str:
        if version is None:
            raise PackageNotFoundError
        return version

    monkeypatch.setattr(installed, "version", found)
    with pytest.raises(ConfigError) as caught:
        installed.check_installed()
    assert str(caught.value).startswith(f"transformers {problem}")


@pytest.mark.parametrize("version", ["5.20.0", "5.23.0", "5.30.0.dev0", "10.1.0"])
def test_a_newer_transformers_will_do(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(installed, "version", lambda _: version)
    installed.check_installed()
