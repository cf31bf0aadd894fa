"""What ranks say of themselves."""

from __future__ import annotations

from dynmo.elastic.place import own_place, place_from


def test_place_is_read_back() -> None:
    assert place_from(own_place(3).to_text()) == own_place(3)
