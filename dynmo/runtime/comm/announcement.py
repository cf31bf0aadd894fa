"""What a process says of itself that wants to join a running run."""

from __future__ import annotations

import json
from dataclasses import asdict

from dynmo.cluster.releaser import Member
from dynmo.errors import RunError
from dynmo.models.identity import Identity, identity_from


def announcement(member: Member, identity: Identity) -> str:
    """Returns what a newcomer says of itself."""
    return json.dumps({"member": asdict(member), "identity": identity.model_dump()})


def announcement_from(text: str) -> tuple[Member, Identity]:
    """Reads the text of `announcement`.

    Raises:
        RunError: It is none.
    """
    try:
        record = json.loads(text)
        return Member(**record["member"]), identity_from(record["identity"])
    except (ValueError, TypeError, LookupError):
        raise RunError("what it says of itself cannot be read") from None
