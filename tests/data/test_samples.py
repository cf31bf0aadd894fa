"""Records as token ids and labels, beside transformers' own chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dynmo.data.records import BrokenSampleError
from dynmo.data.samples import Encoder
from dynmo.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCAB = 500
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


def with_special_tokens(added: str) -> Any:
    """A tokenizer of letters that adds ids around each text."""
    special = ["<pad>", "<bos>", "<eos>"]
    vocab = {text: at for at, text in enumerate([*special, *"abcdefghijklmnopqrstuvwxyz "])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(special)
    ids = [(text, vocab[text]) for text in special]
    backend.post_processor = processors.TemplateProcessing(single=added, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


@pytest.mark.parametrize("added", ["<bos> $A", "<bos> $A <eos>", "$A <eos>", "$A"])
def test_row_begins_and_ends_once(added: str) -> None:
    tokenizer = with_special_tokens(added)
    encoder, first = Encoder(tokenizer, 1000, VOCAB), "<bos>" * added.startswith("<bos>")

    def written(**record: str) -> str:
        return tokenizer.decode(encoder.encode(record, "a:1").ids).replace(" ", "")

    assert written(text="hi") == f"{first}hi<eos>"
    assert written(text="<bos>hi<eos>") == "<bos>hi<eos>"
    assert written(prompt="hi", completion="yes") == f"{first}hiyes<eos>"
    assert written(prompt="<bos>hi", completion="yes<eos>") == "<bos>hiyes<eos>"
    assert encoder.has_special({"prompt": "<bos>hi", "completion": "yes"})
    assert not encoder.has_special({"text": "hi"})


def test_only_the_start_of_a_long_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_special_tokens("<bos> $A <eos>")
    text = "hello " * 50_000
    wanted = tokenizer(text)["input_ids"][:32]
    read, encode = list[int](), type(tokenizer).__call__

    def counting(self: Any, text: str, **options: Any) -> Any:
        read.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    encoder = Encoder(tokenizer, 32, VOCAB)
    assert encoder.encode({"text": text}, "a:1").ids == wanted
    assert encoder.encode({"prompt": text, "completion": "x"}, "a:1").ids == wanted
    tokenizer.chat_template = "<bos>{{ messages[0]['content'] }}"
    talk = {"messages": [{"role": "user", "content": text}]}
    assert encoder.encode(talk, "a:1").ids == wanted
    assert sum(read) < len(text) / 2


def test_unused_keys_are_named_once_and_tools_reach_the_template(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.chat_template = "{% if tools %}{{ tools[0]['name'] }}{% endif %}" + TEMPLATE
    encoder, tools = Encoder(tokenizer, 1000, VOCAB), [{"name": "def"}]
    plain = encoder.encode({"messages": TURNS}, "a:1").ids
    for given in (tools, json.dumps(tools)):
        record = {"messages": TURNS, "tools": given, "id": 3, "none": None}
        ids = encoder.encode(record, "a:2").ids
        assert ids == [*tokenizer("def", add_special_tokens=False)["input_ids"], *plain]
    assert [record.message for record in caplog.records] == [
        'a:2: nothing uses the key "id"; such a record has messages, tools'
    ]


def test_conversation_has_the_ids_of_the_template(tokenizer: Any) -> None:
    sample = Encoder(tokenizer, 1000, VOCAB).encode({"messages": TURNS}, "a:1")
    expected = tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    assert sample.ids == sample.labels == expected


def test_answers_alone_count(tokenizer: Any) -> None:
    sample = Encoder(tokenizer, 1000, VOCAB, answers_only=True).encode({"messages": TURNS}, "a:1")
    assert all(label in (-100, token) for token, label in zip(*sample, strict=True))
    spoken = tokenizer.decode([label for label in sample.labels if label != -100])
    assert spoken == "def f\nreturn 3\n"


def test_completion_counts_and_ends(tokenizer: Any) -> None:
    record = {"prompt": "import os", "completion": " return 3"}
    ids, labels = Encoder(tokenizer, 1000, VOCAB, answers_only=True).encode(record, "a:1")
    first = tokenizer("import os")["input_ids"]
    assert ids[: len(first)] == first
    assert labels == [-100] * len(first) + ids[len(first) :]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[len(first) : -1]) == " return 3"
    assert Encoder(tokenizer, 1000, VOCAB).encode(record, "a:1") == (ids, ids)


def test_text_is_cut_at_the_longest(tokenizer: Any) -> None:
    ids = tokenizer("import os\n")["input_ids"]
    end = [] if ids[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
    encoder = Encoder(tokenizer, 1000, VOCAB)
    assert encoder.encode({"text": "import os\n", "other": 3}, "a:1").ids == ids + end
    assert Encoder(tokenizer, 2, VOCAB).encode({"text": "import os\n"}, "a:1").ids == ids[:2]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"body": "a"}, "a:1: has body; a record needs messages"),
        ({"text": 3}, "a:1: text has the type int; it must be"),
        ({"text": "a\ud800"}, "a:1: text is no Unicode text"),
        ({"text": None}, "a:1: has text; a record needs"),
        ({"messages": []}, "a:1: messages is not a list with messages"),
        ({"messages": [{"role": "user", "tool_calls": [3]}]}, "a:1: the chat template refuses it"),
        ({"messages": TURNS[:1]}, "a:1: it has no answer, and"),
    ],
)
def test_broken_record_is_named(tokenizer: Any, record: dict[str, Any], says: str) -> None:
    tokenizer.chat_template = TEMPLATE.replace("m['content']", "(m['content'] ~ '')").replace(
        "{{ (m", "{% if m['content'] is undefined %}{{ raise_exception('no') }}{% endif %}{{ (m"
    )
    with pytest.raises(BrokenSampleError, match=says):
        Encoder(tokenizer, 1000, VOCAB, answers_only=True).encode(record, "a:1")


def test_a_prompt_without_room_for_an_answer_is_named(tokenizer: Any) -> None:
    talk = {"messages": [{"role": "user", "content": "import os\n" * 9}, TURNS[1]]}
    with pytest.raises(BrokenSampleError, match=r"within its first 9 tokens; raise model.sequence"):
        Encoder(tokenizer, 9, VOCAB, answers_only=True).encode(talk, "a:1")


@pytest.mark.parametrize(
    "written",
    [
        "{{ m.content }}",
        "{{ m.content if m.content is string else '' }}",
        "{% for each in m.content %}{{ each.text }}{% endfor %}",
        "{{ m.content if m.content is string else m.content[0].text }}",
    ],
)
def test_contents_in_parts_are_read_or_refused(tokenizer: Any, written: str) -> None:
    tokenizer.chat_template = "{% for m in messages %}<" + written + ">\n{% endfor %}"
    talk = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in TURNS]
    encoder = Encoder(tokenizer, 1000, VOCAB)
    if ".text" in written:
        ids = encoder.encode({"messages": talk}, "a:1").ids
        assert tokenizer.decode(ids) == "<import os>\n<def f>\n<x>\n<return 3>\n"
    else:
        with pytest.raises(BrokenSampleError, match="a:1: a content is a list of parts"):
            encoder.encode({"messages": talk}, "a:1")


def test_keys_of_messages_that_nothing_uses_are_named_once(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    answer = TURNS[1] | {"weight": 0, "name": "a", "tool_calls": [call]}
    talk = {"messages": [TURNS[0], answer], "tools": [{"name": "f"}]}
    encoder = Encoder(tokenizer, 1000, VOCAB, answers_only=True)
    for _ in range(2):
        encoder.encode(talk, "a:1")
    unused = ("tool_calls", "tools", "weight")
    assert caplog.messages == [f'a:1: the chat template does not use the key "{x}"' for x in unused]


def test_what_the_tokenizer_cannot_do_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"data.answers_only = true, but the records have no"):
        Encoder(tokenizer, 9, VOCAB, answers_only=True).check({"text": "a"})
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Encoder(tokenizer, 9, VOCAB).check({"messages": TURNS})


@pytest.mark.parametrize("as_tensors", [False, True])
def test_token_ids_are_taken_as_they_are(as_tensors: bool) -> None:
    given: dict[str, Any] = {"input_ids": [3, 1, 4, 1], "labels": [-100, 1, 4, 1]}
    if as_tensors:
        given = {name: torch.tensor(row) for name, row in given.items()}
    encoder = Encoder(None, 3, VOCAB)
    assert encoder.encode(given, "a:1") == ([3, 1, 4], [-100, 1, 4])
    del given["labels"]
    assert encoder.encode(given, "a:1") == ([3, 1, 4], [3, 1, 4])


def test_padding_of_token_ids_is_left_out() -> None:
    given: dict[str, Any] = {"input_ids": [9, 3, 1, 4, 9], "position_ids": [1, 0, 1, 2, 0]}
    for mask in ([0, 1, 1, 1, 0], [False, True, True, True, False]):
        record = given | {"attention_mask": mask}
        assert Encoder(None, 9, VOCAB).encode(record, "a:1") == ([3, 1, 4], [3, 1, 4])


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"input_ids": "text"}, "input_ids is no list of integers"),
        ({"input_ids": [1, 2.5]}, "input_ids is no list of integers"),
        ({"input_ids": [1, 500]}, "input_ids has 500; the model has tokens 0 to 499"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "labels has -1"),
        ({"input_ids": [1, 2], "labels": [1]}, "has 2 input_ids and 1 labels"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "none of its 2 tokens counts"),
        ({"text": "a"}, "has no input_ids, as the first record has"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "has 2 input_ids and 1 attention_mask"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 2, 2]}, "attention_mask tells of several"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "attention_mask tells of several"),
        ({"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1]}, "position_ids tells of"),
    ],
)
def test_wrong_token_ids_are_named(record: dict[str, Any], says: str) -> None:
    with pytest.raises(BrokenSampleError, match=f"a:1: {says}"):
        Encoder(None, 9, VOCAB).encode(record, "a:1")


def test_answers_of_token_ids_cannot_be_told() -> None:
    with pytest.raises(ConfigError, match="whose labels say what counts"):
        Encoder(None, 9, VOCAB, answers_only=True).check({"input_ids": [1, 2]})
