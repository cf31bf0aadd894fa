"""`model.kind = "hf"`: a run trains a folder of transformers on the tokens of its tokenizer."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynmo.config import load, parse
from dynmo.errors import ConfigError
from dynmo.train.data import check_tokens
from dynmo.train.setup import model_of, plan_run
from tests.combinations import mostly_matrix
from tests.models.huggingface.saved_models import save
from tests.pool import Pool
from tests.train.hugging_face_jobs import run as run_in

WORDS = "".join(f"line {number}: {number * number % 97}\n" for number in range(200))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text").write_text(WORDS)
    return f"file:{tmp_path / 'text'}"


def settings(folder: Path, text: str, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"kind": "hf", "path": str(folder), "sequence": 16},
        "data": {"source": text},
        "train": {"steps": 4, "global_batch": 4, "micro_batch": 2, "lr": 1e-3},
        **sections,
    }


def run(pool: Pool, ranks: int, config: dict[str, Any], folder: Path, **options: Any) -> Any:
    return run_in(pool, config | {"parallel": {"pipeline": ranks}}, folder, **options)


def test_runs_have_one_digest_on_any_ranks_and_after_a_resume(
    pool: Pool, tiny_llama: Path, text: str, tmp_path: Path
) -> None:
    config = settings(tiny_llama, text, checkpoint={"every": 2})
    alone = run(pool, 1, config, tmp_path / "one")
    cut = run(pool, 2, config, tmp_path / "cut", stop_after=1)
    resumed = run(pool, 2, config, tmp_path / "cut", resume=True)
    assert cut["interrupted"]
    assert cut["steps"] < 4
    assert alone["weights_digest"] == resumed["weights_digest"]


def test_a_step_has_the_loss_of_transformers(
    pool: Pool, tiny_llama: Path, text: str, tmp_path: Path
) -> None:
    job = "tests.train.hugging_face_jobs:batches"
    config = settings(tiny_llama, text)
    ((inputs, labels, held_out, held_out_labels),) = pool.run(job, 1, config=config)
    assert (inputs, held_out) == (labels, held_out_labels)
    ids: list[int] = AutoTokenizer.from_pretrained(tiny_llama)(WORDS)["input_ids"]
    rows = [ids[start : start + 16] for start in range(len(ids) - 15)]
    assert all(row in rows for row in (*inputs, *held_out))

    plain = AutoModelForCausalLM.from_pretrained(tiny_llama)
    halves = torch.tensor(inputs).chunk(2)
    wanted = sum(plain(input_ids=half, labels=half).loss.item() for half in halves) / 2
    one = config | {"train": {**config["train"], "steps": 1}}
    assert run(pool, 1, one, tmp_path / "run")["loss"] == pytest.approx(wanted, rel=1e-6)


def test_only_the_end_ranks_read_text(pool: Pool, tiny_llama: Path, text: str) -> None:
    config = settings(tiny_llama, text, parallel={"pipeline": 3})
    first, middle, last = pool.run("tests.train.hugging_face_jobs:batches", 3, config=config)
    assert first == last
    assert middle == [None] * 4


def test_bytes_are_tokens_without_a_tokenizer(pool: Pool, text: str, tmp_path: Path) -> None:
    save("llama", tmp_path / "model", vocab_size=256)
    config = settings(tmp_path / "model", text)
    ((inputs, *_),) = pool.run("tests.train.hugging_face_jobs:batches", 1, config=config)
    assert all(bytes(row) in WORDS.encode() for row in inputs)


def test_fewer_tokens_than_bytes_need_a_tokenizer(tmp_path: Path) -> None:
    save("llama", tmp_path, vocab_size=255)
    model = model_of(parse(settings(tmp_path, "stdlib")))
    assert model.options is not None
    with pytest.raises(ConfigError, match=r"has no tokenizer, and its model has 255 tokens"):
        check_tokens("stdlib", model.options)


def test_a_sequence_needs_positions(tiny_llama: Path) -> None:
    parsed = load(overrides=["model.kind=hf", f"model.path={tiny_llama}", "model.sequence=129"])
    with pytest.raises(ConfigError, match=r"sequence = 129, but .* has 128 positions .*use 128"):
        model_of(parsed)


def test_the_vocabulary_is_that_of_the_folder(tiny_llama: Path) -> None:
    config = settings(tiny_llama, "stdlib")
    options = model_of(parse(config)).options
    assert options is not None
    assert options.vocab == 300
    assert "vocab" not in parse(config).to_toml()
    with pytest.raises(ConfigError, match=r'model.vocab is in the folder of model.kind = "hf"'):
        parse(config | {"model": {**config["model"], "vocab": 300}})
    assert load(overrides=["model.kind=hf", "model.path=folder"]).model.kind == "hf"


def test_checkpointing_of_transformers_is_off_with_a_warning(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "asking")
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, "gradient_checkpointing": True}))
    with caplog.at_level(logging.WARNING, "dynmo"):
        layers = model_of(parse(settings(folder, "stdlib"))).build(())
    (said,) = [record.getMessage() for record in caplog.records]
    assert "train.recompute" in said
    modules = [x for layer in layers for x in layer.modules()]
    asking = [getattr(x, "gradient_checkpointing", None) for x in modules]
    assert False in asking
    assert True not in asking


def test_dropout_of_the_model_excludes_cached_outputs(tmp_path: Path, text: str) -> None:
    save("gpt2", tmp_path, vocab_size=256)
    freezing = {"schedule": [[1, 2]], "cache_bytes": 1 << 20}
    sections = {"dynamism": {"cases": ["freezing"], "freezing": freezing}}
    data = {"source": text, "shuffle": "batches"}
    with pytest.raises(ConfigError, match=r"cache_bytes = 1048576 with model.dropout = 0.1"):
        plan_run(parse(settings(tmp_path, text, data=data, **sections)))


def test_case_whose_layers_the_model_lacks_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="no layer of the model has experts"):
        plan_run(parse(settings(tiny_llama, "stdlib", dynamism={"cases": ["experts"]})))


def test_layers_are_frozen_and_pruned(
    pool: Pool, tiny_llama: Path, text: str, tmp_path: Path
) -> None:
    cases = {
        "cases": ["freezing", "pruning"],
        "freezing": {"schedule": [[2, 3]]},
        "pruning": {"start": 1, "end": 3, "final_sparsity": 0.8},
    }
    config = settings(tiny_llama, text, dynamism=cases)
    alone = run(pool, 1, config, tmp_path / "one")
    spread = run(pool, 2, config, tmp_path / "two")
    assert alone["weights_digest"] == spread["weights_digest"]
    events = (tmp_path / "two" / "events.jsonl").read_text()
    assert "froze layers 0 to 2" in events
    assert "pruned to sparsity 0.8" in events


@pytest.mark.parametrize(
    ("kind", "changes", "halves"),
    mostly_matrix(
        [("gpt2", {}, 2), ("mixtral", {}, 2), ("phi", {"num_key_value_heads": 4}, 0)],
        everyday=[("gpt2", {}, 2), ("mixtral", {}, 2)],
    ),
)
def test_a_dry_run_says_what_is_read_and_which_blocks_are_cut(
    tmp_path: Path, text: str, kind: str, changes: dict[str, Any], halves: int
) -> None:
    save(kind, tmp_path, dtype=torch.float32, vocab_size=256, **changes)
    plan = plan_run(parse(settings(tmp_path, text, parallel={"pipeline": 2})))
    assert plan.activations_unknown is None
    assert len(plan.halves) == halves
    assert set(plan.halves) | set(plan.whole) == {0, 1}
    assert min(plan.memory) > 0
    assert plan.disk is not None
    tied = kind == "gpt2"
    assert tied or sum(plan.disk) == 4 * sum(plan.parameters)
