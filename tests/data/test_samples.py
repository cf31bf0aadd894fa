"""Records as token ids and labels, beside transformers' own chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dynmo.data.records import BrokenSampleError
from dynmo.data.samples import Encoder
from dynmo.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [
    {"role": "user", "content": "import os"},
    {"role": "assistant", "content": "def f"},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "return 3"},
]


@pytest.fixture
def tokenizer(small_llama: Path) -> Any:
    loaded: Any = AutoTokenizer.from_pretrained(small_llama)
    loaded.chat_template = TEMPLATE
    return loaded


def test_conversation_has_the_ids_of_the_template(tokenizer: Any) -> None:
    sample = Encoder(tokenizer, 1000).encode({"messages": TURNS}, "a:1")
    expected = tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    assert sample.ids == sample.labels == expected


def test_answers_alone_count(tokenizer: Any) -> None:
    sample = Encoder(tokenizer, 1000, answers_only=True).encode({"messages": TURNS}, "a:1")
    assert all(label in (-100, token) for token, label in zip(*sample, strict=True))
    spoken = tokenizer.decode([label for label in sample.labels if label != -100])
    assert spoken == "def f\nreturn 3\n"


def test_completion_counts_and_ends(tokenizer: Any) -> None:
    record = {"prompt": "import os", "completion": " return 3"}
    ids, labels = Encoder(tokenizer, 1000, answers_only=True).encode(record, "a:1")
    first = tokenizer("import os")["input_ids"]
    assert ids[: len(first)] == first
    assert labels == [-100] * len(first) + ids[len(first) :]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[len(first) : -1]) == " return 3"
    assert Encoder(tokenizer, 1000).encode(record, "a:1") == (ids, ids)


def test_text_is_cut_at_the_longest(tokenizer: Any) -> None:
    ids = tokenizer("import os\n")["input_ids"]
    end = [] if ids[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
    encoder = Encoder(tokenizer, 1000)
    assert encoder.encode({"text": "import os\n", "other": 3}, "a:1").ids == ids + end
    assert Encoder(tokenizer, 2).encode({"text": "import os\n"}, "a:1").ids == ids[:2]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"body": "a"}, "a:1: has body; a record needs messages"),
        ({"text": 3}, "a:1: text has the type int; it must be"),
        ({"text": None}, "a:1: has text; a record needs"),
        ({"messages": []}, "a:1: messages is not a list with messages"),
        ({"messages": [{"role": "user"}]}, "a:1: the chat template refuses it"),
        ({"messages": TURNS[:1]}, "a:1: none of its .* tokens counts"),
    ],
)
def test_broken_record_is_named(tokenizer: Any, record: dict[str, Any], says: str) -> None:
    tokenizer.chat_template = TEMPLATE.replace("m['content']", "(m['content'] ~ '')").replace(
        "{{ (m", "{% if m['content'] is undefined %}{{ raise_exception('no') }}{% endif %}{{ (m"
    )
    with pytest.raises(BrokenSampleError, match=says):
        Encoder(tokenizer, 1000, answers_only=True).encode(record, "a:1")


def test_template_that_rewrites_earlier_turns_cannot_tell_answers(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    with pytest.raises(ConfigError, match="answers cannot be told apart"):
        Encoder(tokenizer, 1000, answers_only=True).encode({"messages": TURNS}, "a:1")


def test_what_the_tokenizer_cannot_do_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"data.answers_only = true, but the records have no"):
        Encoder(tokenizer, 9, answers_only=True).check({"text": "a"})
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Encoder(tokenizer, 9).check({"messages": TURNS})
