"""The fixture `page` notices errors and requests to other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("console.error('wrong')", "wrong"),
        ("throw new Error('broken')", "broken"),
        ("new Image().src = 'http://other.invalid/x.png'", "asked http://other.invalid/x.png"),
    ],
)
def test_page_notices(page: Page, faults: list[str], script: str, fault: str) -> None:
    page.set_content(f"<p>text</p><script>{script}</script>")
    page.wait_for_load_state("networkidle")
    assert page.inner_text("p") == "text"
    assert any(fault in text for text in faults)
    faults.clear()
