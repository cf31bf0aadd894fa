"""Photographs the report of a run at two widths, by headless Chromium.

dynmo train examples/demo.toml
python -m docs.tools.screenshots runs/demo     # writes docs/pictures/report*.png
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import ViewportSize, sync_playwright

from dynmo.report.page import page
from dynmo.report.run_record import RunRecord

CHROMIUM = Path("/usr/bin/chromium")
PICTURES = Path(__file__).parents[1] / "pictures"
SIZES = {"report": (1280, 1500), "report-phone": (390, 1500)}
"""Width and height of each picture, in pixels."""


def main() -> None:
    text = page([RunRecord.read(Path(sys.argv[1]))])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "report.html"
        file.write_text(text, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, (width, height) in SIZES.items():
            viewport = ViewportSize(width=width, height=height)
            shown = browser.new_page(viewport=viewport)
            shown.goto(file.as_uri())
            shown.screenshot(path=PICTURES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
