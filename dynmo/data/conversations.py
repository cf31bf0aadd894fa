"""Conversations in the forms that data sets have.

    {"messages": [{"role": "user", "content": "..."}, ...]}
    {"prompt": [MESSAGE, ...], "completion": [MESSAGE, ...]}        TRL's
    {"conversations": [{"from": "human", "value": "..."}, ...]}     ShareGPT's

Each may have "tools", a list or its JSON. ShareGPT's may have "system", a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from dynmo.data.records import BrokenSampleError, Record

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


class Conversation(NamedTuple):
    """Messages for a chat template.

    Attributes:
        tools: What the template gets as tools. None if there are none.
        first: The number of the first message that may count. Those before it are a prompt.
    """

    messages: list[Message]
    tools: Any = None
    first: int = 0


def conversation_of(record: Record, place: str, template: str) -> Conversation:
    """Reads a conversation.

    Args:
        record: Has one of the forms above.
        place: Where the record is, for messages.
        template: The source of the chat template. It may know more roles.

    Raises:
        BrokenSampleError: The record is no conversation, or has an unknown role.
    """
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except ValueError:
            raise BrokenSampleError(f"{place}: tools is no JSON") from None
    first, talk = 0, list[Message]()
    if record.get("messages") is not None:
        talk = _messages(record, "messages", place)
    elif record.get("conversations") is not None:
        said = _messages(record, "conversations", place)
        talk = [_from_sharegpt(each, f"{place}: message {n}") for n, each in enumerate(said, 1)]
        if record.get("system") is not None:
            talk.insert(0, {"role": "system", "content": record["system"]})
    else:
        talk = _messages(record, "prompt", place)
        first = len(talk)
        talk += _messages(record, "completion", place)
    for number, message in enumerate(talk, 1):
        role = message.get("role")
        if role not in _ROLES and not (isinstance(role, str) and role and role in template):
            said = f"the role {role!r}"
            if role is None:
                said = "no role"
                if "from" in message:
                    said += ' (with "from" and "value", the key is "conversations")'
            raise BrokenSampleError(
                f"{place}: message {number} has {said}; known are {', '.join(_ROLES)}, and what "
                "the chat template names"
            )
    return Conversation(talk, tools, first)


def is_conversation(record: Record) -> bool:
    """Whether a record needs a chat template."""
    has_lists = any(isinstance(record.get(key), list) for key in ("prompt", "completion"))
    return has_lists or any(record.get(key) is not None for key in ("messages", "conversations"))


def _messages(record: Record, key: str, place: str) -> list[Message]:
    """Returns messages without keys that have no value."""
    value = record.get(key)
    if not isinstance(value, list) or not value:
        raise BrokenSampleError(f"{place}: {key} is not a list with messages")
    messages = list[Message]()
    for number, each in enumerate(cast("list[object]", value), 1):
        if not isinstance(each, Mapping):
            kind = type(each).__name__
            raise BrokenSampleError(
                f"{place}: message {number} of {key} is a {kind}, not a dictionary"
            )
        given = cast("Mapping[str, Any]", each)
        messages.append({name: part for name, part in given.items() if part is not None})
    return messages


def _from_sharegpt(said: Message, place: str) -> Message:
    if "role" in said:
        return said
    speaker, value = said.get("from"), said.get("value")
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        known = ", ".join(_SPEAKERS)
        raise BrokenSampleError(f"{place} is from {speaker!r}; known are {known}")
    if not isinstance(value, str):
        raise BrokenSampleError(f"{place} has no text as its value")
    if speaker != "function_call":
        return {"role": role, "content": value}
    try:
        found: Any = json.loads(value)
    except ValueError:
        raise BrokenSampleError(f"{place} is a function_call whose value is no JSON") from None
    calls = cast("list[Any]", found if isinstance(found, list) else [found])
    return {"role": role, "tool_calls": [{"type": "function", "function": each} for each in calls]}
