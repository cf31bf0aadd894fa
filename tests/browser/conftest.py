"""Pages in headless Chromium. A page must not fail, nor ask another machine for anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HERE = (None, "127.0.0.1", "localhost", "::1")
"""Hosts that are this machine. Files, data and blobs have none."""
RESOLVE = "MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1, EXCLUDE [::1]"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, which `.ci/install-chromium` installs, or Chrome."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("no Chromium: .ci/install-chromium")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", f"--host-resolver-rules={RESOLVE}"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def faults() -> list[str]:
    """Errors of the page and addresses on other machines that it asked for, so far."""
    return []


@pytest.fixture
def page(browser: Browser, faults: list[str]) -> Iterator[Page]:
    """An empty page of a desktop's width. It must end without faults."""

    def ask(request: Request) -> None:
        if urlsplit(request.url).hostname not in HERE:
            faults.append(f"asked {request.url}")

    def say(message: ConsoleMessage) -> None:
        if message.type == "error":
            faults.append(message.text)

    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        context.on("request", ask)
        context.on("console", say)
        context.on("weberror", lambda error: faults.append(str(error.error)))
        context.set_default_timeout(10_000)
        yield context.new_page()
    assert faults == []
