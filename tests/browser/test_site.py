"""The built site: pages, links, search, a phone's width. It needs no other machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest

from docs.tools.site import NAMES, ROOT, collect

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make site` builds it, in a folder of its own."""
    project = tmp_path_factory.mktemp("site")
    assert collect(pages=project / "build" / "pages") == []
    shutil.copy(ROOT / "zensical.toml", project)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f"]
    done = subprocess.run(
        [*command, project / "zensical.toml"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return project / "site"


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    """Its address on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_link_of_the_site_has_a_file(folder: Path) -> None:
    pages = list(folder.rglob("*.html"))
    assert len(pages) > len(NAMES)
    for page in pages:
        for link in re.findall(r' (?:href|src)="?([^">\s]*)', page.read_text()):
            address = urlsplit(link)
            if not address.scheme and address.path and page.name != "404.html":
                assert (page.parent / unquote(address.path)).exists(), f"{page}: {link}"


def test_front_page_leads_to_the_tutorial(page: Page, site: str) -> None:
    page.goto(f"{site}/index.html")
    assert page.locator("h1").inner_text().startswith("dynmo")
    page.locator("article").get_by_role("link", name="tutorial").first.click()
    page.get_by_role("heading", name="Tutorial", level=1).wait_for()
    for picture in page.locator("article img").all():
        assert picture.evaluate("image => image.naturalWidth") > 0


def test_pages_of_python_show_arguments(page: Page, site: str) -> None:
    page.goto(f"{site}/docs/reference/python.html")
    page.locator("article").get_by_role("link", name="Pipeline", exact=True).first.click()
    page.get_by_role("heading", name="Pipeline", level=1).wait_for()
    assert "Number of microbatches of a step" in page.locator("article").inner_text()


def test_search_finds_a_word(page: Page, site: str) -> None:
    page.goto(f"{site}/index.html")
    page.get_by_role("button", name="Search").first.click()
    page.keyboard.type("rollback")
    page.get_by_text(re.compile(r"\d+ results")).wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/docs/post-validation\.html"))


@pytest.mark.parametrize(
    "path", ["index", "docs/reference/configuration", "docs/reference/api/Pipeline"]
)
def test_no_page_scrolls_sideways_on_a_phone(page: Page, site: str, path: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(f"{site}/{path}.html")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("h1").is_visible()
