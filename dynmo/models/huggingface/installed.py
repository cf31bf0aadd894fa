"""Refuses to start without a transformers that this version supports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from dynmo.errors import ConfigError

_OLDEST = 5


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
        if int(found.partition(".")[0]) >= _OLDEST:
            return
        problem = f"transformers {found} is older than {_OLDEST}.0"
    raise ConfigError(f"{problem}, which models of Hugging Face need; pip install 'dynmo[hf]'")
