"""`dynmo.Loader`: samples for a loop of one's own."""

from __future__ import annotations

import csv
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import dynmo
from dynmo.errors import ConfigError, RunError
from tests.models.huggingface.saved_models import folder_of
from tests.pipeline.loading import COUNT, HELD_OUT
from tests.pool import Pool
from tests.train.hugging_face_jobs import prepare

JOB = "tests.pipeline.loading:train"


def model() -> str:
    return str(folder_of("llama", vocab_size=256))


@pytest.mark.parametrize(
    ("streaming", "replicas", "groups"),
    [
        pytest.param(False, 4, 4, marks=pytest.mark.matrix),
        (True, 3, None),
        pytest.param(True, 4, 4, marks=pytest.mark.matrix),
    ],
)
def test_loop_goes_on_with_the_next_sample_on_other_replicas(
    pool: Pool, tmp_path: Path, streaming: bool, replicas: int, groups: int | None
) -> None:
    prepare(pool)
    given: dict[str, Any] = {"model": model(), "streaming": streaming, "groups": groups}
    whole = pool.run(JOB, 1, steps=5, **given)[0]
    assert whole["events"] == list(range(5))
    kept: dict[str, Any] = {**given, "folder": str(tmp_path)}
    first = pool.run(JOB, 2, steps=2, replicas=2, **kept)
    rest = pool.run(JOB, replicas, steps=5, replicas=replicas, load=True, **kept)
    for row in rest if groups else []:
        assert (row["digest"], row["loss"]) == (whole["digest"], whole["loss"])
    read = [
        sorted(number for rank in ranks for number in rank["read"][step])
        for ranks, steps in ((first, 2), (rest, 3))
        for step in range(steps)
    ]
    assert read == [sorted(step) for step in whole["read"]]
    with (tmp_path / "numbers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert all(float(row["data/tokens"]) > 0 and float(row["step/loss"]) > 0 for row in rows)
    if streaming:  # six passes of 20
        assert all(row["taken"] < whole["taken"] for row in rest), "it does not begin anew"
        assert Counter(n for step in whole["read"] for n in step) == dict.fromkeys(
            range(HELD_OUT, COUNT), 6
        )


def test_ends_of_a_pipeline_read_alone(pool: Pool) -> None:
    rows = pool.run(JOB, 3, model=model(), steps=1)
    assert [bool(row["read"][0]) for row in rows] == [True, False, True]
    assert rows[0]["read"] == rows[2]["read"]


def test_checkpoint_of_a_loop_skips_no_batch(tmp_path: Path) -> None:
    """`step` saves before it trains, when the loop has drawn its batch already."""
    with dynmo.init(device="cpu") as world:
        options = dynmo.ModelOptions(kind="hf", path=model(), sequence=32)
        saves = dynmo.Checkpoints(
            folder=tmp_path, every=2, extra=lambda: {"data": loader.state_dict()}
        )
        pipeline = dynmo.Pipeline(
            dynmo.load_model(options), world, microbatches=2, checkpoint=saves
        )
        source = [{"input_ids": [number, 2]} for number in range(20)]
        loader = dynmo.Loader(pipeline, source, micro_batch=1, sequence=32)
        for batch in loader:
            pipeline.step(batch)
            if pipeline.steps == 3:
                break
        pipeline.load(tmp_path)
        assert pipeline.steps == 2
        assert pipeline.extra["data"]["step"] == 2
        loader.close()
        pipeline.close()


def test_a_rank_reads_on_by_itself_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may have drawn its next batch already. With newcomers, all compare anew."""

    def compare(*_: object) -> None:
        raise RunError("compared")

    with dynmo.init(device="cpu") as world:
        options = dynmo.ModelOptions(kind="hf", path=model(), sequence=32)
        elastic = dynmo.Elastic(recover="memory", recover_every=3)
        pipeline = dynmo.Pipeline(dynmo.load_model(options), world, microbatches=2, elastic=elastic)
        source = [{"input_ids": [number, 2]} for number in range(40)]
        loader = dynmo.Loader(pipeline, source, micro_batch=1, sequence=32, held_out=0)
        drawn = [[each["input_ids"].tolist() for each in next(loader) or []] for _ in range(3)]
        monkeypatch.setattr("dynmo.pipeline.views.agree", compare)
        monkeypatch.setattr(loader, "_opened", ())  # the mesh was another one
        loader._open(loader._position(1))
        assert [[each["input_ids"].tolist() for each in next(loader) or []]] == drawn[1:2]
        again = loader.drawn(0)
        assert [each["input_ids"].tolist() for each in again or []] == drawn[1]
        found = pipeline._changes.elastic
        assert found is not None
        found.grown = 1
        with pytest.raises(RunError, match="compared"):
            next(loader)
        loader.close()
        pipeline.close()


def test_wrong_options_are_one_line() -> None:
    with dynmo.init(device="cpu") as world:
        options = dynmo.ModelOptions(kind="hf", path=model(), sequence=32)
        pipeline = dynmo.Pipeline(dynmo.load_model(options), world, microbatches=2)

        def load(source: Any, **options: Any) -> dynmo.Loader:
            return dynmo.Loader(pipeline, source, micro_batch=1, sequence=32, **options)

        with pytest.raises(ConfigError, match=r"have no token ids .* a tokenizer is needed"):
            load([{"text": "a"}] * 3)
        with pytest.raises(ConfigError, match=r"data.source has one record"):
            load([{"input_ids": [1, 2]}])
        with pytest.raises(ConfigError, match="is a function; with streaming"):
            load(lambda: [])
        with pytest.raises(ConfigError, match=r"needs a function.*not a list"):
            load([], streaming=True)
        with pytest.raises(ConfigError, match=r"dynmo.Loader: batching"):
            load([{"input_ids": [1, 2]}] * 3, batching="other")
        with pytest.raises(ConfigError, match="tokenizer is a str; give what AutoTokenizer"):
            load([{"text": "a"}] * 3, tokenizer="my-model")
        with pytest.raises(ConfigError, match=r"epochs = 1: a stream has no known length"):
            load(lambda: [], streaming=True, epochs=1)
        whole = load([{"input_ids": [1, 2]}] * 20, epochs=1, held_out=0)
        assert whole.steps == 10
        with pytest.raises(ConfigError, match="held_out = 0 holds out nothing"):
            whole.held_out(1)
        whole.close()
        loader = load([{"input_ids": [1, 2]}] * 21, epochs=1.5)  # one of 21 is held out
        assert loader.steps == len(list(loader)) == 15
        pipeline.close()


def test_position_is_that_of_the_next_step(tmp_path: Path) -> None:
    """A checkpoint in the middle of a loop has the batch that is not trained yet."""
    with dynmo.init(device="cpu") as world:
        options = dynmo.ModelOptions(kind="hf", path=model(), sequence=8)
        positions = list[int]()

        def extra() -> dict[str, Any]:
            positions.append(loader.state_dict()["step"])
            return {}

        pipeline = dynmo.Pipeline(
            dynmo.load_model(options),
            world,
            microbatches=2,
            checkpoint=dynmo.Checkpoints(folder=tmp_path, every=1, extra=extra),
            training=dynmo.Training(stop_after=1),
        )
        records = [{"input_ids": [1, 2, number]} for number in range(20)]
        loader = dynmo.Loader(pipeline, records, micro_batch=1, sequence=8, held_out=0)
        for number, batch in enumerate(loader):
            assert loader.state_dict()["step"] == number
            pipeline.step(batch)
            assert loader.state_dict()["step"] == number + 1
            if number == 2:
                break
        next(iter(pipeline.mesh.modules[0].parameters())).data[1] = math.nan
        with pytest.raises(RunError, match="step 3: loss nan"):
            pipeline.step(next(loader))
        assert positions == [1, 2, 3]
        assert (tmp_path / "step-000003").is_dir()
        assert loader.state_dict()["step"] == 3, "the batch of the step that failed comes again"
        loader.close()
        pipeline.close()
