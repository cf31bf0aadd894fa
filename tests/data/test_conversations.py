"""Conversations of data sets, and where their answers are."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dynmo.data.conversations import conversation_of
from dynmo.data.options import AnswersOnly
from dynmo.data.records import BrokenSampleError
from dynmo.data.samples import Encoder, Sample
from tests.data.chat_templates import FAMILIES, TALK


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
    assert conversation_of(record, "") == (
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
    assert conversation_of(record, "") == ([asked, said], None, 1)


def test_template_may_know_more_roles() -> None:
    record = {"messages": [{"role": "critic", "content": "a"}]}
    assert conversation_of(record, "{% if role == 'critic' %}").messages
    with pytest.raises(BrokenSampleError, match=r"^message 1 has the role 'critic'; known"):
        conversation_of(record, "")


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
        (
            {"messages": [TALK[0], {"role": "assistant", "contents": "a"}]},
            "message 2 has no content",
        ),
    ],
)
def test_wrong_conversation_is_named(record: dict[str, Any], says: str) -> None:
    with pytest.raises(BrokenSampleError, match=f"^{says}"):
        conversation_of(record, "")


SPEAKERS = ["human", "gpt", "human", "gpt"]
QWEN = FAMILIES["qwen3"]


def tokenizer_of(special: str, template: str) -> Any:
    """A tokenizer of bytes, but for special tokens and a few pairs."""
    alphabet, pairs = sorted(pre_tokenizers.ByteLevel.alphabet()), [("Ċ", "Ċ"), ("a", "1")]
    vocab = [*special.split(), *alphabet, *map("".join, pairs)]
    backend = Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(vocab)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special.split())
    made: Any = PreTrainedTokenizerFast(tokenizer_object=backend)
    made.chat_template = template
    return made


def sample_of(
    special: str, template: str, record: dict[str, Any], counted: AnswersOnly = True
) -> tuple[Any, Sample]:
    tokenizer = tokenizer_of(special, template)
    return tokenizer, Encoder(tokenizer, 1000, 1000, counted).encode(record, "a.jsonl:3")


def wanted(tokenizer: Any, row: str) -> Sample:
    """The ids and labels of a row in which « and » mark what counts."""
    ids, labels = list[int](), list[int]()
    for at, piece in enumerate(re.split("[«»]", row)):
        found = tokenizer(piece, add_special_tokens=False)["input_ids"]
        ids += found
        labels += found if at % 2 else [-100] * len(found)
    return Sample(ids, labels)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_and_their_ends_count(name: str) -> None:
    special, template, row = FAMILIES[name]
    tokenizer, found = sample_of(special, template, {"messages": TALK})
    assert found == wanted(tokenizer, row)
    whole = tokenizer.apply_chat_template(TALK, tokenize=True)["input_ids"]
    assert found.ids == whole
    first, answer, rest = re.split("[«»]", row, maxsplit=2)
    last = wanted(tokenizer, first + answer + rest)
    assert sample_of(special, template, {"messages": TALK}, "last")[1] == last
    given = {"prompt": TALK[:3], "completion": TALK[3:]}
    assert sample_of(special, template, given)[1] == last
    said = [{"from": a, "value": m["content"]} for a, m in zip(SPEAKERS, TALK, strict=True)]
    assert sample_of(special, template, {"conversations": said})[1] == wanted(tokenizer, row)


def test_thoughts_of_the_last_answer_alone_are_in_the_row() -> None:
    talk = [dict(m) for m in TALK]
    row = QWEN.row.replace("<think>\n\n", "<think>\nt2\n")
    talk[1]["content"], talk[3]["content"] = (
        "<think>\nt1\n</think>\n\na1",
        "<think>\nt2\n</think>\n\na2",
    )
    tokenizer, found = sample_of(*QWEN[:2], {"messages": talk})
    assert found == wanted(tokenizer, row)
    talk[1] |= {"content": "a1", "reasoning_content": "t1"}
    talk[3] |= {"content": "a2", "reasoning_content": "t2"}
    assert sample_of(*QWEN[:2], {"messages": talk})[1] == wanted(tokenizer, row)
    harmony = FAMILIES["harmony"]
    talk = [m | {"thinking": f"t{n}"} for n, m in enumerate(TALK)]
    tokenizer, found = sample_of(*harmony[:2], {"messages": talk})
    thought = "<|channel|>analysis<|message|>t3<|end|><|start|>assistant<|channel|>final"
    at = harmony.row.rindex("<|channel|>final")
    row = harmony.row[:at] + thought + harmony.row[at + len("<|channel|>final") :]
    assert found == wanted(tokenizer, row)


def test_calls_of_tools_are_answers() -> None:
    """Also in a round whose thoughts are left out once a question follows."""
    call = {"name": "add", "arguments": {"x": 3}}
    asked = {"role": "assistant", "reasoning_content": "t", "tool_calls": [{"function": call}]}
    round_ = [TALK[0], asked, {"role": "tool", "content": "7"}, TALK[1]]
    written = '<tool_call>\n{"name": "add", "arguments": {"x": 3}}\n</tool_call><|im_end|>'
    start, result = "<|im_start|>assistant\n", "\n<|im_start|>user\n7<|im_end|>\n"
    question = f"<|im_start|>user\nq1<|im_end|>\n{start}"
    tokenizer, found = sample_of(*QWEN[:2], {"messages": round_})
    first = f"{question}«<think>\nt\n</think>\n\n{written}»{result}{start}"
    assert found == wanted(tokenizer, f"{first}«<think>\n\n</think>\n\na1<|im_end|>»\n")
    later = f"{question}«{written}»{result}{start}«a1<|im_end|>»\n"
    _, found = sample_of(*QWEN[:2], {"messages": [*round_, *TALK[2:]]})
    assert found == wanted(tokenizer, later + QWEN.row[QWEN.row.index("<|im_start|>user\nq2") :])


def test_template_may_refuse_another_answer_in_the_place_of_a_call() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls"
        " %}{{ raise_exception('no call') }}{% endif %}<{{ m.role }}>"
        "{{ m.tool_calls or m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    asked = {"role": "assistant", "tool_calls": [7]}
    talk = [TALK[0], asked, {"role": "tool", "content": "8"}, TALK[1]]
    tokenizer, found = sample_of("<|im_end|>", template, {"messages": talk})
    row = (
        "<user>q1<|im_end|>\n<assistant>«[7]<|im_end|>»\n"
        "<tool>8<|im_end|>\n<assistant>«a1<|im_end|>»\n"
    )
    assert found == wanted(tokenizer, row)


def test_marks_of_a_template_say_what_counts() -> None:
    special, _, row = FAMILIES["chatml"]
    marked = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    row = row.replace("<|im_end|>»", "»<|im_end|>")
    tokenizer, found = sample_of(special, marked, {"messages": TALK})
    assert found == wanted(tokenizer, row)
    first, answer, rest = re.split("[«»]", row, maxsplit=2)
    last = wanted(tokenizer, first + answer + rest)
    assert sample_of(special, marked, {"messages": TALK}, "last")[1] == last
    given = {"prompt": TALK[:3], "completion": TALK[3:]}
    assert sample_of(special, marked, given)[1] == last
    told = tokenizer.apply_chat_template(TALK, return_assistant_tokens_mask=True, return_dict=True)[
        "assistant_masks"
    ]
    assert [label != -100 for label in found.labels] == list(map(bool, told))


def test_slow_tokenizers_tell_the_same() -> None:
    special, template, row = FAMILIES["qwen3"]
    tokenizer = tokenizer_of(special, template)

    class Slow:
        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, **options: Any) -> Any:
            return tokenizer(text, **options)

    found = Encoder(Slow(), 1000, 1000, True).encode({"messages": TALK}, "a:1")
    assert found == wanted(tokenizer, row)


@pytest.mark.parametrize(
    ("counted", "advice"), [(True, 'set it to "last", or mark'), ("last", "apart; mark")]
)
def test_answers_that_cannot_be_told_apart_are_refused(counted: AnswersOnly, advice: str) -> None:
    template = (
        "{% for m in messages | reverse %}{{ m.content | length }}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(BrokenSampleError, match=rf"a\.jsonl:3: the chat template.*{advice}"):
        sample_of("", template, {"messages": TALK}, counted)
