from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import make
from dynmo.schedule.torch_csv import from_torch_csv, to_torch_csv
from tests.schedule.samples import wander


def test_csv_of_small_schedules() -> None:
    assert (
        to_torch_csv(make("zb-h1", 2, 3))
        == "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n"
    )
    assert to_torch_csv(make("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@given(
    st.sampled_from([[0], [0, 1], [0, 1, 2], [0, 1, 0, 1], [0, 1, 1, 0], [2, 0, 1]]),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_csv_round_trip(placement: list[int], microbatches: int, random: Random) -> None:
    schedule = wander(placement, microbatches, 0, random)
    text = to_torch_csv(schedule)
    assert from_torch_csv(text, "wandered") == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("0F0,0X0", "row 0, cell 1 of torch's CSV: '0X0'"),
        ("0F0,0B0\n1F0,F1", "row 1, cell 1 of torch's CSV: 'F1'"),
        ("(0F0;0SEND_F0)OVERLAP_F_B", "row 0, cell 0 of torch's CSV"),
        ("0F0,0B0\n\n1F0,1B0", "row 1 of torch's CSV has no ops"),
        ("0F0,0B0\n1F0,0F1,1B0", "row 1, cell 1 of torch's CSV: 0F1 is on rank 1"),
        ("0F0,0B0\n2F0,2B0", "no op of stage 1 of 3"),
        ("0F0,0I0", "0 of 1 W"),
        ("0F0,0F1,0B1,0B0", "where microbatch 0 of B is due"),
        ("0B0,0F0\n1F0,1B0", "a circle"),
    ],
)
def test_bad_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)) as error:
        from_torch_csv(text)
    assert "\n" not in str(error.value)


def test_frozen_prefix_cannot_be_written() -> None:
    with pytest.raises(ScheduleError, match="stages below 1"):
        to_torch_csv(make("zb-h1", 3, 4, first_trainable=1))
