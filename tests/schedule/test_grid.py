from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Costs, StageCost, uniform_costs
from dynmo.schedule.catalogue import make
from dynmo.schedule.grid import MIN_WIDTH
from dynmo.schedule.grid import draw as draw_text
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import Timeline, simulate
from tests.schedule.samples import BY_HAND, from_text, schedules, whole_costs, with_time


def draw(timeline: Timeline, width: int) -> str:
    return draw_text(timeline, width).plain


def picture(name: str, p: int, m: int, width: int = 120, **costs: float) -> str:
    given = uniform_costs(p, **({"f": 1, "b": 1, "w": 1} | costs))
    return draw(simulate(make(name, p, m), given), width)


def cells(text: str, ranks: int) -> list[str]:
    """The text between the bars."""
    return [line[line.index("|") + 1 : line.rindex("|")] for line in text.splitlines()[:ranks]]


def test_grid_of_zb_h1() -> None:
    assert picture("zb-h1", 3, 4, 76) == (
        "0 |F0   F1   F2   ..........B0   W0   F3   B1   W1   B2   W2   B3   W3   |\n"
        "1 |.....F0   F1   .....B0   F2   B1   W0   F3   B2   W1   B3   W2   W3   |\n"
        "2 |..........F0   B0   F1   B1   F2   B2   W0   F3   B3   W1   W2   W3   |\n"
        "  +---------+---------+---------+---------+---------+---------+----------\n"
        "  0         2         4         6         8         10        12\n"
        "F forward, B input gradient, W weight gradient, . idle, one column is 0.2\n"
    )


def test_costs_and_links_are_to_scale() -> None:
    costs = Costs((StageCost(1, 2, 3), StageCost(2, 2, 1)), (1,))
    # F0 1 | link 1 | F0 2, B0 2, W0 1 | link 1 after B0 | B0 2, W0 3
    assert cells(draw(simulate(make("zb-h1", 2, 1), costs), 64), 2) == [
        "F0   ..............................B0        W0             ",
        "..........F0        B0        W0   .........................",
    ]


def test_a_fused_backward_never_reads_as_two_ops() -> None:
    wide = cells(picture("1f1b", 2, 3), 2)
    assert [re.findall(r"[A-Z]+\d", row) for row in wide] == [
        ["F0", "F1", "BW0", "F2", "BW1", "BW2"],
        ["F0", "BW0", "F1", "BW1", "F2", "BW2"],
    ]
    narrow = picture("1f1b", 2, 20, 67)
    assert re.findall(r"[A-Z]", cells(narrow, 2)[1]) == ["F", "X"] * 20
    assert "X a narrow BW" in narrow
    assert "X" not in "".join(wide)


def test_columns_that_are_too_narrow_drop_numbers_or_mark_several_ops() -> None:
    row = cells(picture("zb-h1", 1, 12, 76), 1)[0]
    assert row == "F0B0W0F1B1W1F2B2W2F3B3W3F4B4W4F5B5W5F6B6W6F7B7W7F8B8W8F9B9W9F B W F B W "
    text = picture("zb-h1", 4, 500, 80)
    top = cells(text, 4)[0]
    assert set(top) <= set("FBWX#.")
    assert "#" in top
    assert "# several ops in one column" in text
    assert "# several" not in picture("zb-h1", 4, 8)
    # GPipe's halves stay visible, however dense.
    assert re.fullmatch(r"F+\.*X+", cells(picture("gpipe", 4, 1000, 100), 4)[0])


def test_a_rank_of_several_stages_names_them_or_writes_the_upper_one_small() -> None:
    schedule = from_text(
        "# v  ranks=2 microbatches=1 placement=0,1,1,0\n0 | 0F0 3F0 3B0 3W0 0BW0\n"
        "1 | 1F0 2F0 2BW0 1B0 1W0\n"
    )
    timeline = simulate(schedule, uniform_costs(4, 1, 1, 1))
    # 4 columns for each unit of time, then 3, where only BW (6 of them) has room for two numbers
    # and a space.
    assert cells(draw(timeline, 52), 2) == [
        "0F0 ........3F0 3B0 3W0 ........0BW0    ",
        "....1F0 2F0 ........2BW0    1B0 1W0 ....",
    ]
    assert cells(draw(timeline, 40), 2) == [
        "F0 ......f0 b0 w0 ......0BW0  ",
        "...F0 f0 ......2BW0  B0 W0 ...",
    ]
    assert "small letters the upper of a rank's stages" in draw(timeline, 40).replace("\n", " ")
    assert "small letters" not in draw(timeline, 52)


def test_small_letters_mark_every_other_stage() -> None:
    timeline = simulate(make("interleaved-1f1b", 2, 8, chunks=2), uniform_costs(4, 1, 1, 1))
    assert cells(draw(timeline, 56), 2) == [
        "FFffF.x Fx fX fX Fx Fx fX fX Fx Fx fX fX .x .x X X ",
        ".FFfx fx FX FX fx fx FX FX fx fx FX FX fx fx X X ..",
    ]
    legend = draw(timeline, 56).replace("\n", " ")
    assert "X a narrow BW, small letters the upper of a rank's stages" in legend
    three = draw(simulate(make("interleaved-1f1b", 2, 4, chunks=3), uniform_costs(6, 1, 1, 1)), 60)
    assert "small letters a rank's second, fourth, .. stage" in three.replace("\n", " ")


def test_ops_without_time_are_not_drawn() -> None:
    assert "W" not in cells(picture("zb-h1", 2, 3, w=0), 2)[0]
    assert cells(picture("zb-h1", 2, 3, f=0, b=0, w=0), 2) == ["", ""]


def test_width_below_the_minimum_is_refused() -> None:
    with pytest.raises(AssertionError, match="at least 32"):
        picture("zb-h1", 2, 2, MIN_WIDTH - 1)


@given(schedules(), st.integers(MIN_WIDTH, 160), st.data())
def test_grid_is_no_wider_than_requested(
    schedule: Schedule, width: int, data: st.DataObject
) -> None:
    timeline = simulate(schedule, data.draw(whole_costs(schedule.stages)))
    text = draw(timeline, width)
    assert max(map(len, text.splitlines())) <= width
    assert len({len(row) for row in cells(text, schedule.ranks)}) == 1


@settings(max_examples=settings().max_examples // 2)
@given(st.sampled_from(BY_HAND), st.integers(1, 5), st.integers(1, 8), st.data())
def test_every_op_is_drawn_at_its_time(name: str, p: int, m: int, data: st.DataObject) -> None:
    schedule = make(name, p, m)
    timeline = simulate(schedule, with_time(data.draw(whole_costs(p))))
    # 12 columns for each unit of time, and every time is whole: nothing is rounded.
    scale = 12
    text = draw(timeline, width=scale * int(timeline.makespan) + len("0 ||"))
    for spans, row in zip(timeline.ranks, cells(text, p), strict=True):
        ops = [(match.start(), match[0].rstrip()) for match in re.finditer(r"[A-Z]+\d *", row)]
        assert ops == [
            (span.start * scale, f"{span.op.kind}{span.op.microbatch}") for span in spans
        ]
        idle = timeline.makespan - sum(span.end - span.start for span in spans)
        assert row.count(".") == idle * scale
