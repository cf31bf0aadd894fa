"""A record as token ids and labels.

    {"messages": [{"role": "user", "content": "..."}, ...]}    the tokenizer's chat template
                                                               (`conversations.py` has more forms)
    {"prompt": "...", "completion": "..."}
    {"text": "..."}
    {"input_ids": [1, 2, ...], "labels": [-100, 2, ...]}       tokens as they are; labels by choice

A record of token ids may have `attention_mask` and `position_ids`, too, but no other sample.

Labels are the ids. Those that the loss does not count are -100: with `answers_only` all but what an
assistant says, and all but the completion. A row begins once, and ends once. What the tokenizer
adds to a text is left out if the text has it. Nothing ends between prompt and completion.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, cast

from dynmo.data import IGNORED
from dynmo.data.conversations import ChatTemplate, Conversation, conversation_of, is_conversation
from dynmo.data.options import AnswersOnly
from dynmo.data.records import BrokenSampleError, Record
from dynmo.data.tokenizer import SpecialTokens
from dynmo.errors import ConfigError
from dynmo.options import value_text

_logger = logging.getLogger(__name__)

# What a kind of record needs, and the keys that it uses.
_KINDS = (
    ({"input_ids"}, {"input_ids", "labels", "attention_mask", "position_ids"}),
    ({"messages"}, {"messages", "tools"}),
    ({"conversations"}, {"conversations", "tools", "system"}),
    ({"prompt", "completion"}, {"prompt", "completion", "tools"}),
    ({"text"}, {"text"}),
)
_MESSAGE_KEYS = {"role", "content", "name", "tool_call_id"}


class Sample(NamedTuple):
    """Ids and labels of equal length."""

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Encoder:
    """Makes samples.

    Attributes:
        tokenizer: A tokenizer of transformers. None if the records have token ids.
        vocab: Number of tokens of the model.
        longest: Tokens after which a sample is cut.
        answers_only: Whether the loss counts answers alone. "last" counts the last one.
    """

    tokenizer: Any
    longest: int
    vocab: int
    answers_only: AnswersOnly = False
    _named: set[str] = field(default_factory=set[str], init=False, compare=False)

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def check(self, record: Record) -> None:
        """Raises ConfigError if the tokenizer cannot encode records like the first one."""
        for problem in self._problems(record):
            raise ConfigError(problem)

    def _problems(self, record: Record) -> Iterator[str]:
        found = keys_of(record)
        has_ids = "input_ids" in found
        if self.answers_only and (has_ids or found == {"text"}):
            what = "token ids, whose labels say what counts"
            yield (
                f"data.answers_only = {value_text(self.answers_only)}, but the records have "
                f"{what if has_ids else 'no messages and no completion'}; leave it out"
            )
        if has_ids:
            return
        if self.tokenizer is None:
            yield (
                "the records have no token ids (input_ids), so a tokenizer is needed, and there is "
                "none; save it in the model's folder, or give token ids"
            )
        elif is_conversation(record) and not self.tokenizer.chat_template:
            yield (
                "the records have messages, but the tokenizer has no chat template; add one to "
                "the model's folder (chat_template.jinja)"
            )

    def encode(self, record: Record, place: str) -> Sample:
        """Returns the sample of a record.

        Raises:
            BrokenSampleError: The record is no sample, or no label counts.
        """
        with _told_at(place):
            sample = self._sample(record, place)
            # The first token of a row has no loss, for none comes before it.
            if all(label == IGNORED for label in sample.labels[1:]):
                raise BrokenSampleError(self._why_uncounted(sample))
            return sample

    def _sample(self, record: Record, place: str) -> Sample:
        found = self._usable_keys(record)
        if "input_ids" in found:
            sample = self._given(record)
        elif is_conversation(record):
            sample = self._conversation(record, place)
        elif {"prompt", "completion"} <= found:
            sample = self._completion(record["prompt"], record["completion"])
        else:
            ids = self._ended(self._special.whole(record["text"], self.longest))
            sample = Sample(ids, ids)
        self._name_unused(record, place)
        return Sample(*(each[: self.longest] for each in sample))

    def _why_uncounted(self, sample: Sample) -> str:
        if not self.answers_only or len(sample.ids) < 2:
            return f"none of its {len(sample.ids)} tokens counts"
        if len(sample.ids) < self.longest:
            return "it has no answer, and data.answers_only counts answers alone"
        return (
            f"no answer begins within its first {self.longest} tokens; raise model.sequence, or "
            "leave it out"
        )

    def look(self, record: Record, place: str) -> None:
        """Raises BrokenSampleError if keys or values are no sample. Tokenises nothing."""
        with _told_at(place):
            if "input_ids" in self._usable_keys(record):
                self._given(record)
            elif is_conversation(record):
                conversation_of(record, self._template.source)

    def has_special(self, record: Record) -> bool:
        """Whether a text of a record has ids of a beginning or an end already."""
        if "input_ids" in keys_of(record) or is_conversation(record):
            return False
        keys = keys_of(record) & {"text", "prompt", "completion"}
        return any(self._special.are_in(record[key]) for key in keys)

    def _usable_keys(self, record: Record) -> set[str]:
        """Returns the keys of a record whose texts and messages can be tokenised."""
        found = keys_of(record)
        if "input_ids" in found:
            return found
        if self.tokenizer is None:
            raise BrokenSampleError("has no input_ids, as the first record has")
        needed = next((needed for needed, _ in _KINDS if needed <= found), None)
        if needed is None:
            columns = ", ".join(sorted(map(str, record))) or "nothing"
            raise BrokenSampleError(
                f"has {columns}; a record needs messages, conversations, prompt and completion, "
                "text, or input_ids"
            )
        if is_conversation(record):
            return found
        for key in sorted(needed):
            _check_text(record, key)
        return found

    def _name_unused(self, record: Record, place: str) -> None:
        """Warns of keys that nothing uses, each once."""
        found = keys_of(record)
        used = next(used for needed, used in _KINDS if needed <= found)
        used = used if is_conversation(record) else used - {"tools"}
        for key in sorted(found - used - self._named):
            self._named.add(key)
            keys = ", ".join(sorted(used))
            _logger.warning(f'{place}: nothing uses the key "{key}"; such a record has {keys}')

    def _name_unused_by_template(self, talk: Conversation, place: str) -> None:
        keys = {key for message in talk.messages for key in message} - _MESSAGE_KEYS
        keys |= {"tools"} if talk.tools else set()
        for key in sorted(keys - self._named):
            self._named.add(key)
            if key not in self._template.source:
                _logger.warning(f'{place}: the chat template does not use the key "{key}"')

    def _ended(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _given(self, record: Record) -> Sample:
        ids = _numbers(record, "input_ids")
        labels = _numbers(record, "labels") if record.get("labels") is not None else ids
        if len(labels) != len(ids):
            raise BrokenSampleError(f"has {len(ids)} input_ids and {len(labels)} labels")
        for name, values in (("input_ids", ids), ("labels", set(labels) - {IGNORED})):
            wrong = next((value for value in values if not 0 <= value < self.vocab), None)
            if wrong is not None:
                raise BrokenSampleError(
                    f"{name} has {wrong}; the model has tokens 0 to {self.vocab - 1}"
                )
        return _of_one_sample(record, Sample(ids, labels))

    def _completion(self, prompt: str, completion: str) -> Sample:
        first = self._special.begun(prompt, self.longest)
        ids = self._ended([*first, *self._special.following(completion, self.longest)])
        hidden = len(first) if self.answers_only else 0
        return Sample(ids, [IGNORED] * hidden + ids[hidden:])

    def _conversation(self, record: Record, place: str) -> Sample:
        template = self._template
        talk = conversation_of(record, template.source)
        try:
            text = template.write(talk.messages, talk.tools)
        except Exception as error:  # a template raises what it wants
            said = str(error) or type(error).__name__
            raise BrokenSampleError(f"the chat template refuses it: {said}") from None
        _check_unicode(text, "the conversation")
        if template.leaves_out_parts(talk):
            raise BrokenSampleError(
                "a content is a list of parts, which the chat template does not read; give it as "
                "one text"
            )
        self._name_unused_by_template(talk, place)
        if not self.answers_only:
            ids = self._special.plain(text, self.longest)
            return Sample(ids, ids)
        first = talk.first
        if self.answers_only == "last":
            roles = [message["role"] for message in talk.messages]
            first = max((n for n, role in enumerate(roles) if role == "assistant"), default=0)
        spans = template.answers(talk, text, max(first, talk.first))
        if spans is None:
            other = "" if self.answers_only == "last" else 'set it to "last", or '
            raise BrokenSampleError(
                "the chat template changes earlier messages when later ones follow, so "
                f"data.answers_only = {value_text(self.answers_only)} cannot tell the answers "
                f"apart; {other}mark them in the template with {{% generation %}}"
            )
        ids, bounds = self._special.placed(
            text, self.longest, [at for span in spans for at in span]
        )
        labels = [IGNORED] * len(ids)
        for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
            labels[start:stop] = ids[start:stop]
        return Sample(ids, labels)


@contextmanager
def _told_at(place: str) -> Generator[None]:
    """Lets the message of a broken sample begin with its place."""
    try:
        yield
    except BrokenSampleError as error:
        raise BrokenSampleError(f"{place}: {error}") from None


def keys_of(record: Record) -> set[str]:
    """Returns the keys that have a value. None is no value."""
    return {key for key, value in record.items() if value is not None}


def _of_one_sample(record: Record, sample: Sample) -> Sample:
    """Leaves out the padding at both ends, and checks that there is one sample between them."""
    kinds = {"attention_mask": (int, bool), "position_ids": (int,)}
    there = keys_of(record) & kinds.keys()
    given = {name: _numbers(record, name, kinds[name]) for name in sorted(there)}
    for name, values in given.items():
        if len(values) != len(sample.ids):
            ids = len(sample.ids)
            raise BrokenSampleError(f"has {ids} input_ids and {len(values)} {name}")
    mask = given.get("attention_mask", [1] * len(sample.ids))
    real = [at for at, each in enumerate(mask) if each]
    start, stop = (real[0], real[-1] + 1) if real else (0, 0)
    positions = given.get("position_ids", range(len(mask)))[start:stop]
    is_broken = any(each != 1 for each in mask[start:stop])
    if is_broken or any(b != a + 1 for a, b in pairwise(positions)):
        what = "attention_mask" if is_broken else "position_ids"
        raise BrokenSampleError(
            f"{what} tells of several samples; give each sample a record, and leave out "
            'the mask (data.batching = "packed" packs)'
        )
    return Sample(sample.ids[start:stop], sample.labels[start:stop])


def _check_text(record: Record, key: str) -> None:
    value = record[key]
    if not isinstance(value, str):
        kind = type(value).__name__
        raise BrokenSampleError(f"{key} has the type {kind}; it must be a text")
    _check_unicode(value, key)


def _check_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BrokenSampleError(f"{name} is no Unicode text ({error.reason})") from None


def _numbers(record: Record, key: str, kinds: Collection[type] = (int,)) -> list[int]:
    value = record[key]
    if hasattr(value, "tolist"):  # an array or a tensor
        value = value.tolist()
    if not isinstance(value, list) or not all(type(each) in kinds for each in value):
        raise BrokenSampleError(f"{key} is no list of integers")
    return cast("list[int]", value)
