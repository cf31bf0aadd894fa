"""What ranks say of themselves."""

from __future__ import annotations

import pytest

from dynmo.elastic.place import own_place, place_from
from dynmo.errors import RunError


def test_place_is_read_back() -> None:
    assert place_from(own_place(3).to_text()) == own_place(3)


@pytest.mark.parametrize("text", ["", "\x1b[31m", "[]", "3", '{"rank": 1}', "{}"])
def test_text_of_something_else_is_an_error_of_the_run(text: str) -> None:
    with pytest.raises(RunError, match="store of the run"):
        place_from(text)
