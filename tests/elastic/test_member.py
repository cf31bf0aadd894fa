"""What ranks say of themselves."""

from __future__ import annotations

import pytest

from dynmo.elastic.member import member_from, member_text, own_member
from dynmo.errors import RunError


def test_member_is_read_back() -> None:
    assert member_from(member_text(own_member(3))) == own_member(3)


@pytest.mark.parametrize("text", ["", "\x1b[31m", "[]", "3", '{"rank": 1}', "{}"])
def test_text_of_something_else_is_an_error_of_the_run(text: str) -> None:
    with pytest.raises(RunError, match="store of the run"):
        member_from(text)
