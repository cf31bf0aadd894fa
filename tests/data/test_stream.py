"""Records that come in order, shuffled in blocks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.data.order import StreamOrder
from dynmo.data.records import BrokenSampleError
from dynmo.data.stream import HELD_OUT, Position, Stream, open_stream
from dynmo.errors import ConfigError


class Rows:
    """Items 0, 1, 2, .. that count how often they are read."""

    def __init__(self, count: int, reads: list[int]) -> None:
        self._count, self._reads, self._next = count, reads, 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self._next < self._count:
            self._reads.append(self._next)
            self._next += 1
            yield {"number": self._next - 1}


class WithState(Rows):
    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Stale(WithState):
    """Once a state is loaded, `state_dict()` stays at the beginning, as in datasets 5.0.0."""

    _loaded = False

    def state_dict(self) -> dict[str, int]:
        return {"next": 0 if self._loaded else self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self._loaded = True


class Ahead(WithState):
    """The state is some records ahead, which a resume loses, as those of a buffer."""

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next + self._next % 3}


def stream(count: int, block: int, kind: type[Rows] = Rows, **options: Any) -> Stream:
    reads: list[int] = options.pop("reads", [])
    return Stream("own", lambda: kind(count, reads), block, seed=3, **options)


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 9))
def test_each_record_comes_once_a_pass(trained: int, block: int, global_batch: int) -> None:
    records = stream(HELD_OUT + trained, block)
    order = StreamOrder(HELD_OUT, global_batch, 1)
    numbers = [n for step in range(3 * trained * block) for n in order.train(step).ravel().tolist()]
    blocks = numbers[: trained * block]  # the passes end where a block ends
    counts = Counter(records[number]["number"] for number in blocks)
    assert counts == dict.fromkeys(range(HELD_OUT, HELD_OUT + trained), block)


def test_records_are_shuffled_within_a_block() -> None:
    records = stream(HELD_OUT + 300, 100)
    read = [records[HELD_OUT + at]["number"] - HELD_OUT for at in range(300)]
    for start in (0, 100, 200):
        block = read[start : start + 100]
        assert sorted(block) == list(range(start, start + 100))
        assert block != sorted(block)
    assert [n - 100 for n in read[100:200]] != read[:100]


def test_held_out_records_are_the_first_ones() -> None:
    records = stream(HELD_OUT + 5, 4)
    assert [records[at]["number"] for at in range(HELD_OUT)] == list(range(HELD_OUT))
    numbers = StreamOrder(HELD_OUT, 8, 4).held_out(HELD_OUT // 4)
    assert numbers.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [Rows, WithState, Stale, Ahead])
@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 150), st.integers(1, 20))
def test_stream_goes_on_anywhere(
    kind: type[Rows], trained: int, block: int, stop: int, other_block: int
) -> None:
    count = HELD_OUT + trained
    whole = stream(count, block, kind)
    rest = [whole[HELD_OUT + at] for at in range(stop, stop + 30)]
    before = stream(count, block, kind)
    for at in range(stop):
        before[HELD_OUT + at]
    # What a checkpoint keeps.
    position = Position(*json.loads(json.dumps(before.position(HELD_OUT + stop))))
    after = stream(count, block, kind, position=position)
    assert [after[HELD_OUT + at] for at in range(stop, stop + 30)] == rest
    # A position of blocks of another size only says where to read.
    other = stream(count, other_block, kind)
    moved = stream(count, other_block, kind, position=position)
    for at in range(stop, stop + 30):
        assert moved[HELD_OUT + at] == other[HELD_OUT + at]


@pytest.mark.parametrize("kind", [Rows, WithState, Stale, Ahead])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 20))
def test_stream_goes_on_again_and_again(kind: type[Rows], parts: list[int], block: int) -> None:
    whole, position, at = stream(HELD_OUT + 50, block, kind), None, HELD_OUT
    for part in parts:
        records = stream(HELD_OUT + 50, block, kind, position=position)
        for number in range(at, at + part):
            assert records[number] == whole[number]
        at += part
        position = Position(*json.loads(json.dumps(records.position(at))))


def test_stream_of_other_records_does_not_go_on() -> None:
    before = stream(HELD_OUT + 50, 10)
    for at in range(25):
        before[HELD_OUT + at]
    later = [{"number": at + 1} for at in range(HELD_OUT + 50)]
    with pytest.raises(ConfigError, match='"own": gives other records than before the resume'):
        Stream("own", lambda: later, 10, 3, before.position(HELD_OUT + 25))


def test_state_spares_reading_from_the_beginning() -> None:
    before = stream(10_000, 100, WithState)
    for at in range(5_050):
        before[HELD_OUT + at]
    position, reads = before.position(HELD_OUT + 5_050), list[int]()
    after = stream(10_000, 100, WithState, position=position, reads=reads)
    assert after[HELD_OUT + 5_050] == before[HELD_OUT + 5_050]
    assert reads == [*range(HELD_OUT), *range(HELD_OUT + 5_000, HELD_OUT + 5_150)]


def test_each_record_that_is_used_reads_one_of_the_next_block() -> None:
    reads = list[int]()
    records = stream(10_000, 100, reads=reads)
    for at in range(300):
        records[HELD_OUT + at]
        assert len(reads) == HELD_OUT + at + 100


def test_numbers_behind_are_read_again() -> None:
    records = stream(HELD_OUT + 50, 10)
    first = [records[HELD_OUT + at] for at in range(40)]
    assert [records[HELD_OUT + at] for at in range(40)] == first


def test_datasets_of_hugging_face_are_streamed(tmp_path: Path) -> None:
    with (tmp_path / "rows.jsonl").open("w") as file:
        for at in range(HELD_OUT + 40):
            file.write(json.dumps({"text": f"row {at}"}) + "\n")
    records = open_stream(f"hf:{tmp_path}", 16, 0)
    texts = [records[HELD_OUT + at]["text"] for at in range(120)]
    assert set(texts[:32]) == {f"row {HELD_OUT + at}" for at in range(32)}
    position = records.position(HELD_OUT + 85)
    assert position[:3] == (HELD_OUT + 80, 1, HELD_OUT + 40)
    assert position.state is not None
    for stop in (101, 120):
        again = open_stream(f"hf:{tmp_path}", 16, 0, position)
        start = position.number - HELD_OUT
        assert [again[HELD_OUT + at]["text"] for at in range(start, stop)] == texts[start:stop]
        position = again.position(HELD_OUT + stop)


def test_buffer_that_a_resume_loses_is_refused() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"n": n} for n in range(HELD_OUT + 40)])

    def shuffled() -> Any:
        found = rows.to_iterable_dataset().shuffle(seed=1, buffer_size=30)
        return datasets.interleave_datasets([rows.to_iterable_dataset(), found.take(9)])

    says = r"shuffle\(buffer_size=30\); leave it out, and set data.block = 30"
    with pytest.raises(ConfigError, match=says):
        open_stream(shuffled, 16, 0)


def test_short_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 100 records.*more than the 128"):
        stream(100, 4)
    with pytest.raises(ConfigError, match=r"has 128 records"):
        stream(HELD_OUT, 4)[HELD_OUT]


def test_item_that_is_no_record_is_named() -> None:
    rows = [*({"text": "a"} for _ in range(HELD_OUT)), 3]
    records = Stream("own", lambda: rows, 1, 0)
    with pytest.raises(BrokenSampleError, match="own, item 128 of pass 1: a int, not a dictionary"):
        records[HELD_OUT]


def test_stream_that_raises_is_named() -> None:
    def rows() -> Iterator[dict[str, str]]:
        for _ in range(HELD_OUT + 2):
            yield {"text": "a"}
        raise OSError("the network is gone")

    records = Stream("own", rows, 2, 0)
    with pytest.raises(ConfigError, match="own, item 130 of pass 1: raised OSError: the network"):
        records[HELD_OUT + 2]


def test_stream_without_held_out_records_gives_all() -> None:
    made = Stream("own", lambda: [{"n": n} for n in range(6)], 3, 0, held_out=0)
    assert sorted(made[at]["n"] for at in range(6)) == list(range(6))
    position = Position(*json.loads(json.dumps(made.position(3))))
    again = Stream("own", lambda: [{"n": n} for n in range(6)], 3, 0, position, held_out=0)
    assert [again[at] for at in range(3, 9)] == [made[at] for at in range(3, 9)]
    numbers = StreamOrder(0, 4, 2, own=3)
    assert numbers.train(1).tolist() == [[4, 5], [6, 7]]
    assert numbers.held_out(1).tolist() == [-3, -1]
