"""The manifest of a checkpoint: its content, and the SHA-256 of every file.

It also has the SHA-256 of itself.

    {
     "version": 2,
     "step": 120,
     ...
     "sha256": "e3b0..."         always last: the SHA-256 of all bytes before the comma above it
    }

The bytes are hashed as they are in the file, white space included, so every flipped bit is noticed.
A manifest of version 1 has no such field.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dynmo.errors import CheckpointError

MANIFEST = "manifest.json"
VERSION = 2
# Version 1 has no hash of its own: damage to the manifest itself goes unnoticed.
UNSEALED = 1

_SEALED = re.compile(rb'(.*),\n "sha256": "([0-9a-f]{64})"\n\}', re.DOTALL)


class CheckpointManifest(BaseModel):
    """Description of a checkpoint: SHA-256 of each file, and the run's own part."""

    # JSON has no infinity, but the state of a user's scheduler may. Python reads it back.
    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")
    version: int
    step: int
    layers: list[str]
    files: dict[str, str]
    state: dict[str, Any]
    sha256: str | None = None


def sealed(manifest: CheckpointManifest) -> str:
    """Returns the text of a manifest, with its own SHA-256 at the end."""
    body = manifest.model_dump_json(indent=1, exclude={"sha256"}).removesuffix("\n}")
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body},\n "sha256": "{digest}"\n}}'


def read(checkpoint: Path) -> CheckpointManifest:
    """Reads the manifest in the folder `checkpoint`, and checks its own hash."""
    path = checkpoint / MANIFEST
    if path.exists() and not path.is_file():  # a pipe, say, would be waited for
        raise CheckpointError(f"{path} cannot be read: it is not a file")
    try:
        text = path.read_bytes()
        seal = _SEALED.fullmatch(text)
        if seal is not None and hashlib.sha256(seal[1]).hexdigest().encode() != seal[2]:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one at its end")
        manifest = CheckpointManifest.model_validate_json(text)
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path} {unread(error)}") from None
    if manifest.version not in (UNSEALED, VERSION):
        known = f"this dynmo reads versions {UNSEALED} and {VERSION}"
        raise CheckpointError(f"{checkpoint} has version {manifest.version}; {known}")
    if (seal is None) != (manifest.version == UNSEALED):
        raise CheckpointError(f"{path} is damaged: the SHA-256 at its end does not fit its version")
    return manifest


def unread(error: OSError | ValidationError | KeyError) -> str:
    """Returns why a JSON file cannot be used, in words that follow its name."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    if isinstance(error, KeyError):
        return f"is damaged: it has the dtype {error}, which this dynmo does not know"
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return "is damaged: it is not valid JSON"
    field = ".".join(map(str, first["loc"]))
    messages = {"missing": "is missing", "extra_forbidden": "is not one that this dynmo knows"}
    problem = messages.get(first["type"], "has a wrong value")
    return f"is damaged: {f'its field {field} {problem}' if field else 'it holds no object'}"
