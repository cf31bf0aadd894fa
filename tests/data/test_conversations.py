"""Conversations in the forms that data sets have."""

from __future__ import annotations

from typing import Any

import pytest

from dynmo.data.conversations import conversation_of
from dynmo.data.records import BrokenSampleError


def test_sharegpt_becomes_messages() -> None:
    said = [
        {"from": "human", "value": "3 + 4?", "weight": None},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 3}}'},
        {"from": "observation", "value": "7"},
        {"from": "gpt", "value": "seven"},
        {"role": "user", "content": "thanks"},
    ]
    record = {"conversations": said, "system": "be kind", "tools": '[{"name": "add"}]'}
    call = {"name": "add", "arguments": {"x": 3}}
    assert conversation_of(record, "a:1", "") == (
        [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "3 + 4?"},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": "seven"},
            {"role": "user", "content": "thanks"},
        ],
        [{"name": "add"}],
        0,
    )


def test_prompt_and_completion_become_messages() -> None:
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    record = {"prompt": [asked], "completion": [said], "tools": ""}
    assert conversation_of(record, "a:1", "") == ([asked, said], None, 1)


def test_template_may_know_more_roles() -> None:
    record = {"messages": [{"role": "critic", "content": "a"}]}
    assert conversation_of(record, "a:1", "{% if role == 'critic' %}").messages
    with pytest.raises(BrokenSampleError, match="a:1: message 1 has the role 'critic'; known"):
        conversation_of(record, "a:1", "")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": "hi"}, "messages is not a list with messages"),
        ({"messages": ["hi"]}, "message 1 of messages is a str, not a dictionary"),
        ({"messages": [{"content": "hi"}]}, "message 1 has no role; known are system"),
        ({"messages": [{"from": "human", "value": "a"}]}, r"message 1 has no role \(with \"from"),
        ({"messages": [{"role": "bot"}]}, "message 1 has the role 'bot'; known are system"),
        ({"prompt": "hi", "completion": [{"role": "user"}]}, "prompt is not a list with messages"),
        ({"conversations": [{"from": "bard", "value": "a"}]}, "message 1 is from 'bard'; known"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "message 1 has no text as its value"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "message 1 is a function_"),
        ({"messages": [{"role": "user"}], "tools": "{"}, "tools is no JSON"),
    ],
)
def test_wrong_conversation_is_named(record: dict[str, Any], says: str) -> None:
    with pytest.raises(BrokenSampleError, match=f"a:1: {says}"):
        conversation_of(record, "a:1", "")
