"""The message of `load` about a configuration that it refuses."""

from pathlib import Path

import pytest

from dynmo.config import load
from dynmo.errors import ConfigError


def refusal(*overrides: str, path: Path | None = None) -> str:
    """Loads what must be refused, and returns the message, which is one line."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.isprintable()
    return message
