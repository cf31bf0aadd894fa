"""Recipes say what the dry run prints, and train once their models are cut."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from docs.tools import recipes
from docs.tools.recipes import PAGE, RECIPES, config_of
from dynmo.config import Config, load
from tests.cli.runs import free_port
from tests.combinations import mostly_matrix
from tests.data.test_samples import TEMPLATE
from tests.pool import Pool
from tests.train.hugging_face_jobs import prepare

NAMES = {path.stem: path for path in RECIPES}
CUT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
SMALL: dict[str, object] = {
    "model.sequence": 32,
    "data.held_out": 0,
    "train.global_batch": 8,
    "train.warmup": 1,
    "parallel.pipeline": 2,
    "parallel.device": '"cpu"',
}


def write_data(folder: Path, records: int) -> None:
    said = [{"role": "user", "content": "import"}, {"role": "assistant", "content": "return 3"}]
    talk = json.dumps({"messages": said})
    (folder / "talks.jsonl").write_text("\n".join([talk] * records))
    (folder / "books.txt").write_text("some text to learn\n" * 30_000)


def write_tokenizer(small_llama: Path, model: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(small_llama)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)


def command(
    pool: Pool, folder: Path, config: Config, path: Path, *options: str, **sets: object
) -> tuple[int, str, str]:
    """Runs `dynmo train` on all ranks of a config, and returns what rank 0 says."""
    line = ["train", str(path), "--json", *options]
    line += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    ranks = config.ranks
    given = {"lines": [line] * ranks, "folder": str(folder), "port": free_port()}
    return pool.run("command", ranks, timeout=300, **given)[0]


def test_there_are_ten_and_the_page_has_their_figures() -> None:
    page = PAGE.read_text()
    assert len(RECIPES) == 10
    assert len(re.findall(r"/examples/recipes/[\w.-]+\.toml", page)) == 10
    for path in RECIPES:
        text = path.read_text()
        name, method, number, card, size = recipes.first_line(path)
        config = load(path, [])
        assert int(number) == config.ranks
        assert (method == "LoRA") == (config.model.lora is not None)
        (memory,) = re.findall(r"# Fullest rank: (.+ MiB) \(", text)
        (speed,) = re.findall(r"# Estimate: (\S+) tokens/s", text)
        cells = (name, method, f"{number} x {card} ({size} GB)", memory, speed)
        assert f"| {' | '.join(cells)} | [{path.stem}]" in page


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_figures_are_those_of_the_commands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipes.write_folders(tmp_path)
    made = recipes.measure(NAMES[name])
    assert made.filled() == made.path.read_text(), "python -m docs.tools.recipes writes them"


@pytest.mark.parametrize("name", mostly_matrix(NAMES, {"llama-3.1-8b-lora"}))
def test_a_recipe_trains_three_steps_with_a_model_of_two_blocks(
    pool: Pool, small_llama: Path, tmp_path: Path, name: str
) -> None:
    prepare(pool)
    sets = SMALL | ({"balance.initial": [3, 3]} if "\ninitial" in NAMES[name].read_text() else {})
    config = load(NAMES[name], [f"{key}={value}" for key, value in sets.items()])
    model = tmp_path / config.model.path
    made: Any = AutoModelForCausalLM.from_config(config_of(config.model.path, **CUT))
    made.save_pretrained(model)
    write_tokenizer(small_llama, model)
    write_data(tmp_path, 3 * config.train.global_batch)
    steps = {"train.steps": 3} if config.train.epochs is None else {}
    status, out, err = command(pool, tmp_path, config, NAMES[name], **sets, **steps)
    assert status == 0, err
    assert json.loads(out)["steps"] == 3
