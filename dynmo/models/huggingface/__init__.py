"""Causal language models of transformers as lists of layers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from dynmo.errors import ConfigError, not_installed

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
        raise ConfigError(not_installed("transformers")) from None
    if tuple(int(number) for number in found.split(".")[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ConfigError(
            f"transformers {found} is older than {oldest}, which models of Hugging Face need; "
            "install a newer one"
        )


check_installed()
