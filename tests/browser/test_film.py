"""The film of layers: texts do not overlap in any frame, and it rests for those who ask for it."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest

from benchmarks.output import PICTURES
from docs.tools.figures import result_of
from docs.tools.film import FILE, SECONDS, TIMES, Frame

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser
FRAMES = [Frame(**each) for each in result_of(FILE)["frames"]]
_SEEK = "time => document.getAnimations().forEach(x => { x.pause(); x.currentTime = time; })"
_TEXTS = """() => [...document.querySelectorAll("text")]
    .filter(x => x.checkVisibility({opacityProperty: true}))
    .map(x => [x.textContent, x.getBoundingClientRect()])
    .map(([text, box]) => [text, box.left, box.top, box.right, box.bottom])"""

Box = tuple[str, float, float, float, float]


def overlapping(boxes: list[Box]) -> list[tuple[str, str]]:
    return [
        (one[0], other[0])
        for one, other in combinations(boxes, 2)
        if max(one[1], other[1]) < min(one[3], other[3])
        and max(one[2], other[2]) < min(one[4], other[4])
    ]


def test_frames_can_be_read(page: Page) -> None:
    page.goto((PICTURES / "film.svg").as_uri())
    width: float = page.evaluate("document.documentElement.getBoundingClientRect().width")
    for number, frame in enumerate(FRAMES):
        page.evaluate(_SEEK, 1000 * SECONDS * (number + 0.9))
        boxes: list[Box] = page.evaluate(_TEXTS)
        assert frame.text in [box[0] for box in boxes]
        assert overlapping(boxes) == []
        assert all(box[1] >= 0 and box[3] <= width for box in boxes)


def test_film_ends_at_the_last_frame(page: Page) -> None:
    page.goto((PICTURES / "film.svg").as_uri())
    page.evaluate(_SEEK, 1000 * SECONDS * (len(FRAMES) + 1) * TIMES)
    told = [box[0] for box in page.evaluate(_TEXTS) if box[0].startswith("Step")]
    assert told == [FRAMES[-1].text]


def test_film_rests_with_reduced_motion_and_in_print(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.goto((PICTURES / "film.svg").as_uri())
    assert page.evaluate("document.getAnimations().length") == 0
    page.emulate_media(reduced_motion="no-preference", media="print")
    assert page.evaluate("document.getAnimations().length") == 0
    page.emulate_media(media="screen")
    assert page.evaluate("document.getAnimations().length") > 0
