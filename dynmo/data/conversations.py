"""Conversations in the forms that data sets have, and where their answers are.

    {"messages": [{"role": "user", "content": "..."}, ...]}
    {"prompt": [MESSAGE, ...], "completion": [MESSAGE, ...]}        TRL's
    {"conversations": [{"from": "human", "value": "..."}, ...]}     ShareGPT's

Each may have "tools", a list or its JSON. ShareGPT's may have "system", a text.

A chat template writes a conversation as text. An answer begins where the generation prompt ends. It
ends with the special token that ends its turn. A template with `{% generation %}` says itself where
they are. Otherwise the conversation is written again for each answer: up to it, and with a mark in
its place. A template that leaves the thoughts out of earlier answers writes these two in the same
way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

from dynmo.data.records import BrokenSampleError, Record
from dynmo.data.tokenizer import shared_start

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


def conversation_of(record: Record, template: str) -> Conversation:
    """Reads a conversation.

    Args:
        record: Has one of the forms above.
        template: The source of the chat template. It may know more roles.

    Raises:
        BrokenSampleError: The record is no conversation, or a message has an unknown role or no
            content.
    """
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except ValueError:
            raise BrokenSampleError("tools is no JSON") from None
    first, talk = 0, list[Message]()
    if record.get("messages") is not None:
        talk = _messages(record, "messages")
    elif record.get("conversations") is not None:
        said = _messages(record, "conversations")
        talk = [_from_sharegpt(each, n) for n, each in enumerate(said, 1)]
        if record.get("system") is not None:
            talk.insert(0, {"role": "system", "content": record["system"]})
    else:
        talk = _messages(record, "prompt")
        first = len(talk)
        talk += _messages(record, "completion")
    for number, message in enumerate(talk, 1):
        role = message.get("role")
        if role not in _ROLES and not (isinstance(role, str) and role and role in template):
            said = f"the role {role!r}"
            if role is None:
                said = "no role"
                if "from" in message:
                    said += ' (with "from" and "value", the key is "conversations")'
            raise BrokenSampleError(
                f"message {number} has {said}; known are {', '.join(_ROLES)}, and what the chat "
                "template names"
            )
        if message.get("content") is None and not message.get("tool_calls"):
            raise BrokenSampleError(f"message {number} has no content")
    return Conversation(talk, tools, first)


def is_conversation(record: Record) -> bool:
    """Whether a record needs a chat template."""
    has_lists = any(isinstance(record.get(key), list) for key in ("prompt", "completion"))
    return has_lists or any(record.get(key) is not None for key in ("messages", "conversations"))


def _messages(record: Record, key: str) -> list[Message]:
    """Returns messages without keys that have no value."""
    value = record.get(key)
    if not isinstance(value, list) or not value:
        raise BrokenSampleError(f"{key} is not a list with messages")
    messages = list[Message]()
    for number, each in enumerate(cast("list[object]", value), 1):
        if not isinstance(each, Mapping):
            kind = type(each).__name__
            raise BrokenSampleError(f"message {number} of {key} is a {kind}, not a dictionary")
        given = cast("Mapping[str, Any]", each)
        messages.append({name: part for name, part in given.items() if part is not None})
    return messages


def _from_sharegpt(said: Message, number: int) -> Message:
    if "role" in said:
        return said
    speaker, value = said.get("from"), said.get("value")
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        known = ", ".join(_SPEAKERS)
        raise BrokenSampleError(f"message {number} is from {speaker!r}; known are {known}")
    if not isinstance(value, str):
        raise BrokenSampleError(f"message {number} has no text as its value")
    if speaker != "function_call":
        return {"role": role, "content": value}
    try:
        found: Any = json.loads(value)
    except ValueError:
        raise BrokenSampleError(
            f"message {number} is a function_call whose value is no JSON"
        ) from None
    calls = cast("list[Any]", found if isinstance(found, list) else [found])
    return {"role": role, "tool_calls": [{"type": "function", "function": each} for each in calls]}


Span = tuple[int, int]
"""Letters from one place to another."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Letters that Unicode leaves to private use.
_ASKED, _SAID = "\ue000", "\ue001"


class ChatTemplate:
    """The chat template of a tokenizer of transformers.

    Attributes:
        source: Its text. That of all templates, if there are several.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.source = tokenizer, str(tokenizer.chat_template)

    @cached_property
    def _special(self) -> list[str]:
        """Special tokens, the longest first."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        special = {token.content for token in added if token.special}
        return sorted(special | set(self._tokenizer.all_special_tokens), key=len, reverse=True)

    @cached_property
    def _end(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special)) or "(?!)")

    def write(self, messages: list[Message], tools: Any, prompt: bool = False) -> str:
        """Raises what the template raises."""
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt
        )

    def leaves_out_parts(self, talk: Conversation) -> bool:
        """Whether a message in parts loses its text, or is written as Python writes a list."""
        in_parts = [isinstance(each.get("content"), list) for each in talk.messages]
        if not any(in_parts):
            return False
        pairs = list(zip(talk.messages, in_parts, strict=True))
        parts = [_with(message, _SAID) if split else message for message, split in pairs]
        texts = [{**message, "content": _SAID} if split else message for message, split in pairs]
        with suppress(Exception):  # a template may want parts
            written = self.write(parts, talk.tools)
            lost = written.count(_SAID) < self.write(texts, talk.tools).count(_SAID)
            return lost or str(_with(parts[in_parts.index(True)], _SAID)["content"]) in written
        return False

    def answers(self, talk: Conversation, text: str, first: int) -> list[Span] | None:
        """Returns where the answers are in the text that the template writes.

        Args:
            talk: The conversation.
            text: What the template writes for it.
            first: The first message that may count.

        Returns:
            The letters of each answer. None if the template does not tell them.
        """
        template: str = self._tokenizer.get_chat_template(tools=talk.tools)
        try:
            if _GENERATION.search(template):
                before = self._marked(talk.messages[:first], talk.tools, template)
                return self._marked(talk.messages, talk.tools, template)[len(before) :]
            turns = range(first, len(talk.messages))
            spans = [
                self._answer(talk, text, turn)
                for turn in turns
                if talk.messages[turn]["role"] == "assistant"
            ]
        except Exception:  # a template may refuse a part of a conversation, by any exception
            return None
        return None if None in spans else [span for span in spans if span is not None]

    def _marked(self, messages: list[Message], tools: Any, template: str) -> list[Span]:
        from transformers.utils.chat_template_utils import render_jinja_template

        if not messages:
            return []
        spans: Any = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )[1][0]
        return [(start, stop) for start, stop in spans]

    def _answer(self, talk: Conversation, text: str, turn: int) -> Span | None:
        messages, tools = talk.messages, talk.tools
        prompt = self.write(messages[:turn], tools, prompt=True) if turn else None
        start = len(prompt) if prompt is not None and text.startswith(prompt) else None
        with suppress(Exception):  # a template may want the calls of tools that follow
            span = self._replaced(talk, text, turn, start)
            if span is not None:
                return span
        whole = self.write(messages[: turn + 1], tools)
        if start is None or not text.startswith(whole):
            return None
        shown = whole.rstrip()
        return start, len(shown if shown.endswith(tuple(self._special)) else whole)

    def _replaced(self, talk: Conversation, text: str, turn: int, start: int | None) -> Span | None:
        """Finds an answer by what stands around another one in its place."""
        messages, write = talk.messages, partial(self.write, tools=talk.tools)
        earlier, later = messages[:turn], messages[turn + 1 :]
        said = _with(messages[turn], _SAID)
        said.pop("tool_calls", None)
        before, found, after = write([*earlier, said, *later]).partition(_SAID)
        if not found or not text.endswith(after):
            return None
        if start is None and not turn:
            start = len(before)
        elif start is None:
            # A prompt may open a thought that the row does not have.
            asked = [*earlier[:-1], _with(earlier[-1], _ASKED)]
            header = write([*asked, said, *later]).partition(_ASKED)[2].partition(_SAID)[0]
            opened = write(asked, prompt=True).partition(_ASKED)[2]
            if not header or not before.endswith(header):
                return None
            start = len(before) - len(header) + shared_start(header, opened)
        if text[:start] != before[:start]:
            return None
        stop = len(text) - len(after)
        # What follows an answer belongs to its turn if it also does without later messages.
        most = stop + shared_start(after, write([*earlier, said]).partition(_SAID)[2])
        end = self._end.search(text, stop)
        return start, end.end() if end and end.start() <= most else most


def _with(message: Message, text: str) -> Message:
    """Returns a message with another text."""
    in_parts = isinstance(message.get("content"), list)
    return {**message, "content": [{"type": "text", "text": text}] if in_parts else text}
