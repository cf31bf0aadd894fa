"""Refuses to start without a transformers that this version supports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from dynmo.errors import ConfigError

# Earlier ones have other private functions.
_OLDEST = (5, 20)


def check_installed() -> None:
    """Checks that transformers is there.

    Raises:
        ConfigError: transformers is not installed, or too old.
    """
    try:
        found = version("transformers")
    except PackageNotFoundError:
        problem = "transformers is not installed"
    else:
        if tuple(int(number) for number in found.split(".")[:2]) >= _OLDEST:
            return
        problem = f"transformers {found} is older than {'.'.join(map(str, _OLDEST))}"
    raise ConfigError(f"{problem}, which models of Hugging Face need; pip install 'dynmo[hf]'")
