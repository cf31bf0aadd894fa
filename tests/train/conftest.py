"""A model of transformers for all tests of runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.train.hugging_face_jobs import prepare


@pytest.fixture(scope="session")
def tiny_llama(pool: Pool, small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama of 6 layers, whose tokenizer has a chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.data.test_samples import TEMPLATE

    prepare(pool)
    folder = Path(shutil.copytree(small_llama, tmp_path_factory.mktemp("models") / "tiny-llama"))
    model: Any = AutoModelForCausalLM.from_pretrained(small_llama, num_hidden_layers=2)
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
