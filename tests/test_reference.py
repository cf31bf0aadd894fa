"""docs/reference is generated from the package, and each key, option and name has a description."""

from __future__ import annotations

import pytest

from dynmo.config.section import Section
from tests import reference


def test_pages_are_up_to_date() -> None:
    assert not reference.stale(), "python -m tests.reference writes them"


@pytest.mark.parametrize(("name", "section"), list(reference.sections()))
def test_each_key_has_a_description_and_a_row(name: str, section: type[Section]) -> None:
    for key, field in section.model_fields.items():
        assert field.description, f"{name}.{key} has no description under it"
        assert len(field.description) <= 200, f"{name}.{key}: more than two lines of a table"
    if reference.keys(section):
        text = (reference.FOLDER / "configuration.md").read_text()
        assert f"<!-- keys: {name} -->" in text
