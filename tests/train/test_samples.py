"""Runs on samples: conversations and texts in files."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from dynmo.config import parse
from dynmo.data.batches import Padding, padding_of
from dynmo.data.order import Order
from dynmo.data.records import open_records
from dynmo.data.stream import HELD_OUT
from dynmo.errors import ConfigError
from dynmo.event_log import read
from dynmo.events import DataEvent, EndEvent, EvalEvent, HeldOutEvent, StepResult
from dynmo.train.data import open_batches
from dynmo.train.setup import model_of, plan_run
from tests.combinations import mostly_matrix
from tests.models.huggingface.saved_models import save
from tests.pool import JobFailed, Pool
from tests.train.hugging_face_jobs import run

RECORDS = 24


def texts() -> list[dict[str, Any]]:
    """Texts of very unequal lengths, and a conversation."""
    rows: list[dict[str, Any]] = [
        {"text": f"line {number}\n" * (1 + number * number % 7)} for number in range(RECORDS - 1)
    ]
    turns = [{"role": "user", "content": "import"}, {"role": "assistant", "content": "return 3"}]
    return [*rows, {"messages": turns}]


def settings(model: Path, lines: list[str], **sections: Any) -> dict[str, Any]:
    path = model.parent / "data.jsonl"
    path.write_text("\n".join(lines))
    return {
        "name": "run",
        "model": {"kind": "hf", "path": str(model), "sequence": 32},
        "train": {"steps": 4, "global_batch": 8, "micro_batch": 2, "reduction_slots": 2},
        **sections,
        "data": {"source": f"jsonl:{path}", **sections.get("data", {})},
    }


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    return [json.dumps(row) for row in rows]


def samples_of(microbatch: dict[str, Tensor]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the ids and the labels of each sample."""
    several = {name: rows.tolist() for name, rows in microbatch.items()}
    rows = zip(several["input_ids"], several["labels"], strict=True)
    if "attention_mask" in several:
        for (ids, labels), mask in zip(rows, several["attention_mask"], strict=True):
            yield ids[: sum(mask)], labels[: sum(mask)]
        return
    for (ids, labels), positions in zip(rows, several["position_ids"], strict=True):
        starts = [at for at, position in enumerate(positions) if position == 0]
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            assert positions[start:stop] == list(range(stop - start))
            if stop - start > 1:
                yield ids[start:stop], labels[start:stop]
            else:
                assert labels[start] == -100


def without(end: int, row: list[int]) -> list[int]:
    return row[:-1] if row[-1] == end else row


@pytest.mark.parametrize("batching", mostly_matrix(["rows", "grouped", "packed"], ["packed"]))
def test_any_ranks_and_resumes_train_the_same(
    pool: Pool, tiny_llama: Path, tmp_path: Path, batching: str
) -> None:
    config = settings(tiny_llama, lines_of(texts()), data={"batching": batching})
    alone = run(pool, config, tmp_path / "one")
    config |= {"checkpoint": {"every": 2}, "parallel": {"pipeline": 2, "replicas": 2}}
    assert run(pool, config, tmp_path / "cut", stop_after=0)["interrupted"]
    resumed = run(pool, config | {"parallel": {"pipeline": 2}}, tmp_path / "cut", resume=True)
    assert resumed["weights_digest"] == alone["weights_digest"]


@pytest.mark.matrix
def test_token_ids_train_like_their_text_without_a_tokenizer(
    pool: Pool, tiny_llama: Path, tmp_path: Path
) -> None:
    config = settings(tiny_llama, lines_of(texts()[:-1]))
    plain = run(pool, config, tmp_path / "text")
    batches = open_batches(parse(config), model_of(parse(config)))
    rows = [batches.encoded(number).ids for number in range(RECORDS - 1)]
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    config = settings(model, lines_of([{"input_ids": row} for row in rows]))
    assert run(pool, config, tmp_path / "ids")["weights_digest"] == plain["weights_digest"]


def test_each_sample_comes_once_an_epoch() -> None:
    """In committed steps, whatever the batching: `Order` says which samples a step has."""
    order = Order(RECORDS, 4, 2, seed=3)
    read_numbers = Counter(n for step in range(order.windows) for n in order.train(step).flat)
    assert set(read_numbers.values()) == {4}
    assert len(read_numbers) == order.windows == RECORDS - 1


@pytest.mark.parametrize("batching", ["rows", "grouped", "packed"])
def test_step_has_the_tokens_of_its_samples(tiny_llama: Path, batching: str) -> None:
    config = parse(settings(tiny_llama, lines_of(texts()), data={"batching": batching}))
    records = open_records(config.data.source)
    batches = open_batches(config, model_of(config))
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_llama)
    for step in range(3):
        numbers = batches.order.train(step).ravel().tolist()
        wanted = sorted(tokenizer(records[n]["text"])["input_ids"][:32] for n in numbers)
        made = batches.train(step)
        rows = [ids for each in made for ids, _ in samples_of(each)]
        shapes = [each["input_ids"].shape for each in made]
        assert all(shape.numel() <= 2 * 32 and shape[1] <= 32 for shape in shapes)
        tokens = sum(shape.numel() for shape in shapes)
        assert padding_of(made) == Padding(tokens, tokens - sum(map(len, rows)))
        end = tokenizer.eos_token_id
        assert sorted(map(partial(without, end), rows)) == [without(end, row) for row in wanted]


def test_packed_microbatch_has_the_loss_of_its_samples(tiny_llama: Path) -> None:
    told = settings(tiny_llama, lines_of(texts()), data={"batching": "packed"})
    told["train"] |= {"micro_batch": 4, "global_batch": 16}
    config = parse(told)
    loaded = model_of(config)
    batches = open_batches(config, loaded)
    layers = loaded.build(range(loaded.layers))
    whole: Any = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    shapes = set[tuple[bool, bool]]()
    for microbatch in batches.train(0):
        samples = [tuple(torch.tensor([x]) for x in each) for each in samples_of(microbatch)]
        rows = len(microbatch["input_ids"])
        shapes.add((rows > 1, len(samples) > rows))
        with torch.no_grad():
            out: Any = layers[0](microbatch["input_ids"], None, microbatch["position_ids"])
            for layer in layers[1:]:
                out = layer(*out)
            losses = [whole(input_ids=ids, labels=labels).loss for ids, labels in samples]
        counts = torch.tensor([float((labels[:, 1:] != -100).sum()) for _, labels in samples])
        wanted = (torch.stack(losses) * counts).sum() / counts.sum()
        assert loaded.count is not None
        assert loaded.count(microbatch["labels"]) == counts.sum()
        torch.testing.assert_close(loaded.loss(out, microbatch["labels"]), wanted)
    assert (True, True) in shapes


def test_packed_rows_of_another_model_pass_through_its_slices(pool: Pool, tmp_path: Path) -> None:
    """GPT-2 adds learned positions in its first layer. It is evaluated and recomputed, too."""
    lines = lines_of([{"input_ids": [n % 60 + 1] * (2 + n % 9)} for n in range(RECORDS)])
    save("gpt2", tmp_path / "model")
    config = settings(tmp_path / "model", lines, data={"batching": "packed"})
    config["train"] |= {"recompute": "all", "eval_every": 2, "eval_batches": 2}
    alone = run(pool, config, tmp_path / "one")
    told = run(pool, config | {"parallel": {"pipeline": 2}}, tmp_path / "two")
    assert told["weights_digest"] == alone["weights_digest"]


def test_model_that_ignores_positions_cannot_be_packed(pool: Pool, tmp_path: Path) -> None:
    lines = lines_of([{"input_ids": [1, 2, 3]}] * RECORDS)
    save("bloom", tmp_path / "model")
    config = settings(tmp_path / "model", lines, data={"batching": "packed"})
    says = r'BloomForCausalLM does not keep the samples of a row apart .* use "grouped"'
    with pytest.raises(JobFailed, match=says):
        run(pool, config | {"parallel": {"pipeline": 2}}, tmp_path / "run")


def test_conversations_are_padded_as_the_collator_of_transformers_does(tiny_llama: Path) -> None:
    said = ["import", "import os\nimport sys", "return 3", "x", "def f(x):\n    return x", "os"]
    talks = [
        [
            {"role": "user", "content": said[n % 6]},
            {"role": "assistant", "content": said[n * 5 % 6]},
        ]
        for n in range(RECORDS)
    ]
    config = parse(settings(tiny_llama, lines_of([{"messages": turns} for turns in talks])))
    batches = open_batches(config, model_of(config))
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    collate = DataCollatorForSeq2Seq(tokenizer)
    assert padding_of(batches.train(1)).padded > 0
    for numbers, made in zip(batches.order.train(1), batches.train(1), strict=True):
        rows = [
            tokenizer.apply_chat_template(
                talks[n], return_dict=True, truncation=True, max_length=config.model.sequence
            )
            for n in numbers
        ]
        wanted = collate([{**row, "labels": row["input_ids"]} for row in rows])
        assert made.keys() == wanted.keys()
        for name in made:
            assert made[name].numpy().tobytes() == wanted[name].numpy().tobytes()


@pytest.mark.matrix
def test_streams_train_the_same_on_any_ranks_and_resume(
    pool: Pool, tiny_llama: Path, tmp_path: Path
) -> None:
    rows = [{"text": f"line {number}\n" * (1 + number % 3)} for number in range(HELD_OUT + 12)]
    (tmp_path / "rows").mkdir()
    settings(tiny_llama, [])  # an empty file beside the model
    (tmp_path / "rows" / "data.jsonl").write_text("\n".join(lines_of(rows)))
    data = {"source": f"hf:{tmp_path}/rows", "streaming": True, "block": 10, "batching": "grouped"}
    config = settings(tiny_llama, [], data=data)
    alone = run(pool, config, tmp_path / "one")
    config |= {"checkpoint": {"every": 2}, "parallel": {"replicas": 2, "pipeline": 2}}
    assert run(pool, config, tmp_path / "cut", stop_after=2)["interrupted"]
    resumed = run(pool, config | {"parallel": {"pipeline": 2}}, tmp_path / "cut", resume=True)
    assert resumed["weights_digest"] == alone["weights_digest"]


def test_first_record_may_have_keys_without_values(tiny_llama: Path) -> None:
    """As a table has them that holds records of several kinds."""
    nothing = {"input_ids": None, "messages": None}
    config = parse(settings(tiny_llama, lines_of([nothing | row for row in texts()])))
    batches = open_batches(config, model_of(config))
    assert batches.encoded(0).ids


def test_broken_sample_ends_the_run_after_a_checkpoint(
    pool: Pool, tiny_llama: Path, tmp_path: Path
) -> None:
    """The step before it is saved. Once the line is mended, the run goes on."""
    rows = texts()
    numbers = Order(RECORDS, 8, 2, seed=0).train(2).ravel().tolist()
    lines = lines_of(rows)
    lines[numbers[0]] = '{"text": 3}'
    config = settings(tiny_llama, lines, checkpoint={"every": 100}, parallel={"pipeline": 2})
    remedy = r'correct it, or leave such samples out \(data.broken = "skip"\)'
    says = rf"data\.jsonl:{numbers[0] + 1}: text has the type int.*; {remedy}"
    with pytest.raises(JobFailed, match=says):
        run(pool, config, tmp_path / "run")
    settings(tiny_llama, lines_of(rows))
    resumed = run(pool, config, tmp_path / "run", resume=True)
    whole = run(pool, config | {"parallel": {}}, tmp_path / "whole")
    assert resumed["steps"] == 4
    assert resumed["weights_digest"] == whole["weights_digest"]


def test_broken_sample_that_no_step_reads_does_not_end_the_run(
    pool: Pool, tiny_llama: Path, tmp_path: Path
) -> None:
    lines = lines_of(texts())
    lines[Order(RECORDS, 8, 2, seed=0).train(1).ravel().tolist()[0]] = "{"
    config = settings(tiny_llama, lines, parallel={"pipeline": 2})
    config["train"]["steps"] = 1
    result = run(pool, config, tmp_path / "run")
    assert (result["steps"], result["interrupted"]) == (1, False)
    events = read(tmp_path / "run" / "events.jsonl")
    assert [each.reason for each in events if isinstance(each, EndEvent)] == ["done"]


def test_broken_sample_of_the_first_step_has_its_remedy(tiny_llama: Path) -> None:
    lines = lines_of(texts())
    number = next(n for n in Order(RECORDS, 8, 2, seed=0).train(0).ravel().tolist() if n)
    lines[number] = "{"
    config = parse(settings(tiny_llama, lines))
    says = rf'{number + 1}: not a line of JSON .*; correct it, or leave .*data.broken = "skip"'
    with pytest.raises(ConfigError, match=says):
        open_batches(config, model_of(config)).train(0)


def test_broken_sample_is_left_out_and_counted(
    pool: Pool, tiny_llama: Path, tmp_path: Path
) -> None:
    lines = lines_of(texts())
    for number in Order(RECORDS, 8, 2, seed=0).train(1).ravel()[:2].tolist():
        lines[number] = "{"
    config = settings(tiny_llama, lines, data={"broken": "skip", "batching": "grouped"})
    run(pool, config, tmp_path / "run")
    events = list(read(tmp_path / "run" / "events.jsonl"))
    data = [event for event in events if isinstance(event, DataEvent)]
    assert [event.step for event in data] == [0, 1, 2, 3]
    assert max(event.skipped for event in data) >= 2
    assert all(0 <= event.padding < event.tokens for event in data)
    steps = [event for event in events if isinstance(event, StepResult)]
    assert all(event.tokens_per_s > 0 for event in steps)
    # Every token that is no padding counts, but for the first of each sample.
    tokens = [event.tokens - event.padding for event in data]
    counted = [round(event.tokens_per_s * event.seconds) for event in steps]
    assert counted == [count - rows for count, rows in zip(tokens, (8, 6, 8, 8), strict=True)]


def test_microbatch_without_a_good_sample_is_left_out(
    pool: Pool, tiny_llama: Path, tmp_path: Path
) -> None:
    """Also the first record, and each sample of a step. A run that was stopped goes on so."""
    order, lines = Order(RECORDS, 4, 1, seed=0), lines_of(texts())
    config = settings(tiny_llama, [], checkpoint={"every": 100}, parallel={"pipeline": 2})
    config["train"] |= {"micro_batch": 1, "global_batch": 4, "steps": 3}
    for number in {0, *order.train(1)[1:3].ravel().tolist(), *order.train(2).ravel().tolist()}:
        lines[number] = "{"
    settings(tiny_llama, lines)
    config["data"]["broken"] = "skip"
    alone = run(pool, config, tmp_path / "run")
    assert alone["steps"] == 3
    told = run(pool, config | {"parallel": {"replicas": 2}}, tmp_path / "two")
    assert told["weights_digest"] == alone["weights_digest"]
    parsed = parse(config)
    batches = open_batches(parsed, model_of(parsed))
    counted = [int((each["labels"] != -100).sum()) for each in batches.train(1)]
    assert counted[1:3] == [0, 0]
    assert counted[0] > 0 < counted[3]
    later = batches.train(2)
    assert all(
        torch.equal(a["labels"], b["labels"]) for a, b in zip(later, batches.train(3), strict=True)
    )


def test_source_of_its_own_is_evaluated(pool: Pool, tiny_llama: Path, tmp_path: Path) -> None:
    """Ranks agree, the event names it, and all records of the other source train."""
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(lines_of([{"text": "def f"}, {"text": "return 3"}])))
    config = settings(tiny_llama, lines_of(texts()), data={"held_out": f"jsonl:{other}"})
    config["train"] |= {"eval_every": 2, "eval_batches": 1}
    parsed = parse(config)
    batches = open_batches(parsed, model_of(parsed))
    assert {n for step in range(3) for n in batches.order.train(step).flat} == set(range(RECORDS))
    rows = {tuple(ids) for ids, _ in samples_of(batches.held_out(0))}
    assert rows == {tuple(batches.encoded(n).ids) for n in (-1, -2)}
    events = [
        list(read(tmp_path / str(ranks) / "events.jsonl"))
        for ranks in (1, 2)
        if run(pool, config | {"parallel": {"pipeline": ranks}}, tmp_path / str(ranks))
    ]
    losses = [[e.loss for e in each if isinstance(e, EvalEvent)] for each in events]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    named = {e.held_out for e in events[0] if isinstance(e, EvalEvent | HeldOutEvent)}
    text = f"2 samples of jsonl:{other}"
    many = f"{config['train']['eval_batches']} microbatches of {config['train']['micro_batch']}"
    assert named == {text, f"{text}; each evaluation reads {many} (train.eval_batches)"}


def test_one_record_and_nothing_but_broken_ones_are_refused(tiny_llama: Path) -> None:
    config = settings(tiny_llama, lines_of(texts()[:1]))
    with pytest.raises(ConfigError, match="has one record; one to train on and one held out"):
        plan_run(parse(config))
    config = settings(tiny_llama, ["{", "["], data={"broken": "skip"})
    with pytest.raises(ConfigError, match=r"all 2 records are broken; .*data\.jsonl:1: not a line"):
        plan_run(parse(config))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": {"answers_only": True}}, "data.answers_only = true, but the records have no"),
        ({"other": {"model": {"kind": "gpt", "sequence": 32}}}, "need a model of kind hf, not gpt"),
        ({"data": {"source": "jsonl:missing"}}, "cannot be read .No such file"),
        ({"data": {"source": "stdlib", "batching": "grouped"}}, "data.batching has no effect"),
        ({"data": {"streaming": True}}, "jsonl.*is read by number.*leave out data.streaming"),
        ({"data": {"held_out": "jsonl:missing"}}, "data.held_out = .*cannot be read .No such"),
        ({"data": {"held_out": "file:a"}}, "one has samples, and the other has text"),
        ({"data": {"held_out": 1.0}}, "data.held_out = 1.0: must be less than 1"),
        (
            {"data": {"source": "hf:x", "streaming": True, "held_out": 0.5}},
            "a stream has no end to take a share of",
        ),
        ({"data": {"block": 3}}, "data.block has no effect without data.streaming"),
        (
            {"data": {"source": "hf:x", "streaming": True, "shuffle": "batches"}},
            "needs samples that are read by number",
        ),
    ],
)
def test_wrong_input_is_one_line(tiny_llama: Path, changes: dict[str, Any], says: str) -> None:
    data, other = changes.get("data", {}), changes.get("other", {})
    config = settings(tiny_llama, lines_of(texts()), data=data) | other
    with pytest.raises(ConfigError, match=says) as raised:
        plan_run(parse(config))
    assert "\n" not in str(raised.value)
