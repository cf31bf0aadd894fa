"""The report and the dashboard: at both widths, by keyboard, while a run goes on."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dynmo.event_log import EventLog
from dynmo.report.page import page as report
from tests.report.folders import LAYER, make_run, steps_of
from tests.report.test_page import HOSTILE

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


def written(folder: Path, steps: int = 40) -> Path:
    """The report of a run, as a file."""
    run = make_run(folder / "run", steps_of(steps), [LAYER] * 4)
    path = folder / "report.html"
    path.write_text(report([run]))
    return path


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_report_fits_its_window(page: Page, tmp_path: Path, size: dict[str, int]) -> None:
    page.set_viewport_size(size)  # pyright: ignore[reportArgumentType]
    page.goto(written(tmp_path).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert page.locator("figure svg[role=img]").count() == 7
    smallest = page.evaluate(
        """Math.min(...[...document.querySelectorAll("figure svg text")].map((text) =>
             parseFloat(getComputedStyle(text).fontSize)
             * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)))"""
    )
    assert smallest >= 9


def test_values_are_read_off_by_keyboard_alone(page: Page, tmp_path: Path) -> None:
    page.goto(written(tmp_path).as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "to the tables"
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "run-1-loss":
            break
    page.keyboard.press("Home")
    assert page.inner_text("#run-1-loss output") == "step 0: loss 3"
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#run-1-loss output").startswith("step 1: loss 2.9")
    page.keyboard.press("End")
    assert page.inner_text("#run-1-loss output").startswith("step 39: ")


def test_values_are_read_off_by_the_mouse(page: Page, tmp_path: Path) -> None:
    page.goto(written(tmp_path).as_uri())
    page.locator("#run-1-idleness .picture").hover()
    text = page.inner_text("#run-1-idleness output")
    assert re.fullmatch(r"step \d+: inherent bubble, % 10, other idle time, % 10", text), text


def test_long_run_loads_in_two_seconds(page: Page, tmp_path: Path) -> None:
    path = written(tmp_path, steps=5000)
    assert path.stat().st_size < 5_000_000
    page.goto(path.as_uri())
    entry = "performance.getEntriesByType('navigation')[0].loadEventEnd"
    page.wait_for_function(f"{entry} > 0")
    assert page.evaluate(entry) < 2000


def test_hostile_names_are_text(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / HOSTILE.replace("/", ":"), steps_of(3))
    path = tmp_path / "report.html"
    path.write_text(report([run, run]))
    page.on("dialog", lambda _: pytest.fail("a name was run as a script"))
    page.goto(path.as_uri())
    assert page.locator("img").count() == 0
    assert HOSTILE in page.inner_text("h1")


# -- live ------------------------------------------------------------------------------------------


@pytest.fixture
def served(page: Page, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a dashboard, and its folder of one run."""
    make_run(tmp_path / "runs" / "live", steps_of(5), [LAYER] * 4)
    arguments = [sys.executable, "-m", "dynmo", "dashboard", "runs", "--port", "0"]
    with subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http\S+", process.stdout.readline())
        assert found
        yield found.group(), tmp_path / "runs"
        page.close()  # it asks for more, and would find no server
        process.terminate()


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> float:
    """Waits until it holds. Returns how many seconds that took."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < seconds
        time.sleep(0.02)
    return time.monotonic() - begin


def test_new_step_is_seen_within_two_seconds(page: Page, served: tuple[str, Path]) -> None:
    address, runs = served
    page.goto(address)
    assert "token" not in page.url
    page.click("text=live >> nth=-1")
    page.wait_for_selector("dl.tiles")
    page.click("summary")
    page.focus("#run-1-loss")
    page.keyboard.press("Home")
    page.wait_for_timeout(1500)
    log = EventLog(runs / "live" / "events.jsonl")
    log.write(steps_of(1, begin=5)[0])
    log.close()
    steps = "dl.tiles dd >> nth=0"
    assert eventually(lambda: page.inner_text(steps) == "6") < 2
    assert page.evaluate("document.activeElement.id") == "run-1-loss"
    assert page.inner_text("#run-1-loss output").startswith("step 0: ")
    assert page.locator("details[open]").count() == 1


def test_notice_goes_once_there_are_steps(page: Page, served: tuple[str, Path]) -> None:
    address, runs = served
    (runs / "live" / "events.jsonl").write_text("")
    page.goto(address)
    page.click("td a")
    page.wait_for_selector(".verdict >> text=has no steps yet")
    log = EventLog(runs / "live" / "events.jsonl")
    for event in steps_of(2):
        log.write(event)
    log.close()
    page.wait_for_selector("text=has no steps yet", state="detached", timeout=20_000)
    assert page.locator("h1").inner_text() == "live"


def test_page_says_that_its_server_has_gone(
    page: Page, served: tuple[str, Path], faults: list[str]
) -> None:
    page.goto(served[0])
    page.context.clear_cookies()
    eventually(lambda: "the token has changed" in page.inner_text("#state"))
    page.close()
    faults.clear()  # the refused requests


def test_wrong_token_is_refused(page: Page, served: tuple[str, Path], faults: list[str]) -> None:
    with page.expect_console_message():  # of the refused request
        page.goto(served[0] + "x")
    assert "open the address that dynmo dashboard has printed" in page.inner_text("body")
    faults.clear()
