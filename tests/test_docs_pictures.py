"""docs/pictures: each is up to date, and easy to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.pyplot import close

from benchmarks.output import PICTURES, save_pictures
from docs.tools import film
from docs.tools.pictures import SOURCES, draw
from tests.pictures import defects

pytestmark = pytest.mark.docs


@pytest.fixture(autouse=True)
def _figures_closed() -> Iterator[None]:
    yield
    close("all")


@pytest.mark.parametrize("source", SOURCES)
def test_pictures_are_up_to_date_and_readable(source: str, tmp_path: Path) -> None:
    figures = draw(source)
    save_pictures(figures, tmp_path)
    for name, figure in figures.items():
        committed = PICTURES / f"{name}.svg"
        assert (tmp_path / committed.name).read_text() == committed.read_text(), (
            f"{name}: python -m docs.tools.pictures {source} draws it anew"
        )
        assert defects(figure) == [], name


def test_film_is_up_to_date() -> None:
    assert (PICTURES / "film.svg").read_text() == film.draw()


def test_each_picture_has_a_source() -> None:
    """No picture is left behind when what drew it is renamed."""
    named = {"film.svg"}
    for source in SOURCES:
        named |= {f"{name}.svg" for name in draw(source)}
        close("all")
    assert {path.name for path in PICTURES.glob("*.svg")} == named
