"""The tokens that a run trains on: bytes, a tokenizer's, or those of a file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from dynmo.data.corpus import VOCAB, Corpus, check_vocab, open_corpus
from dynmo.data.token_file import TokenFile
from dynmo.data.tokenizer import has_tokenizer, load_tokenizer, tokens_of
from dynmo.errors import ConfigError
from dynmo.models.options import ModelOptions


def check_tokens(source: str, options: ModelOptions) -> None:
    """Raises ConfigError if the model cannot read the tokens that a source has."""
    if source.startswith("tokens:"):
        open_text(source, options)
    elif options.kind == "hf":
        _tokenizer_of(Path(options.path), options.vocab, options.trust_remote_code)
    elif options.kind != "emulated":
        check_vocab(options.vocab)


def open_text(source: str, options: ModelOptions) -> Corpus:
    """Returns the tokens of a text.

    Args:
        source: "stdlib", "file:PATH" or "tokens:PATH".
        options: Those of the model, with the vocabulary of its folder.
    """
    if source.startswith("tokens:"):
        tokens = TokenFile(Path(source.removeprefix("tokens:")))
        if options.kind != "emulated" and tokens.vocab > options.vocab:
            raise ConfigError(
                f'data.source = "{source}": its tokens go up to {tokens.vocab - 1}, and the model '
                f"has {options.vocab}; use the model's own tokenizer, or a greater model.vocab"
            )
        return tokens
    if options.kind != "hf":
        return open_corpus(source)
    return _tokens(source, Path(options.path), options.vocab, options.trust_remote_code)


def text_tokenizer(source: str, options: ModelOptions) -> Any:
    """Returns the tokenizer that reads a text, or wrote it. None if bytes or numbers are tokens."""
    if options.kind != "hf":
        return None
    if source.startswith("tokens:") and not Path(options.path).is_dir():
        return None
    return _tokenizer_of(Path(options.path), options.vocab, options.trust_remote_code)


# A reshape opens the same texts again.
@lru_cache(maxsize=2)
def _tokens(source: str, folder: Path, vocab: int, trust_remote_code: bool) -> Corpus:
    corpus, tokenizer = open_corpus(source), _tokenizer_of(folder, vocab, trust_remote_code)
    if tokenizer is None:
        return corpus
    return tokens_of(corpus, tokenizer)


def _tokenizer_of(folder: Path, vocab: int, trust_remote_code: bool) -> Any:
    """Returns the tokenizer of the model's folder. None means that bytes are tokens."""
    if has_tokenizer(folder):
        return load_tokenizer(folder, vocab, trust_remote_code)
    if vocab < VOCAB:
        raise ConfigError(
            f"{folder} has no tokenizer, and its model has {vocab} tokens, fewer than the {VOCAB} "
            "bytes; save the tokenizer there"
        )
    return None
