"""Folders of small models of transformers, with a tokenizer of digits."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.models.huggingface.tiny import config


def save_model(folder: Path, kind: str = "llama", **options: Any) -> PreTrainedModel:
    """Writes a model of random weights, whose padding is id 0 and whose end is id 2."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config(kind, **options))
    with contextlib.redirect_stderr(io.StringIO()):  # it shows progress
        model.save_pretrained(folder)
    return model.eval()


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer for which a digit is a token."""
    words = ["<pad>", "<s>", "</s>", *map(str, range(10)), *(f"w{at}" for at in range(83))]
    model = WordLevel({word: at for at, word in enumerate(words)}, unk_token="<pad>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")  # pyright: ignore
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    made.save_pretrained(folder)
