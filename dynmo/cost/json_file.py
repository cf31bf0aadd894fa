"""Reads JSON files. Each error is one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path

from dynmo.errors import InputError


def read_json(path: Path, where: str, folder_hint: str = "give a file") -> object:
    """Reads a JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise InputError(f"{where}: a folder; {folder_hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InputError(f"{where}: cannot be read: {reason}") from None
    return parse_json(text, where)


def parse_json(text: str, where: str) -> object:
    """Parses the text of a JSON file.

    Args:
        text: Content of the file.
        where: Names the file in messages.

    Raises:
        InputError: The text is not JSON. The message has the line.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON that can be read: {error}") from None
