"""docs/reference is generated from the package.

Each key, option and name has a description.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import dynmo
from docs.tools import reference
from dynmo.options import Options

pytestmark = pytest.mark.docs


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.name)
def test_page_is_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert reference.fill(text) == text, "python -m docs.tools writes it"


@pytest.mark.parametrize(("name", "section"), list(reference.sections()))
def test_each_config_key_has_a_description_and_a_row(name: str, section: type[Options]) -> None:
    for key, field in section.model_fields.items():
        assert field.description, f"{name}.{key} has no description under it"
        assert len(field.description) <= 200, f"{name}.{key}: more than two lines of a table"
    if reference.keys(section):
        text = (reference.FOLDER / "configuration.md").read_text()
        assert f"<!-- keys: {name} -->" in text


@pytest.mark.parametrize("name", list(reference.commands()))
def test_each_option_has_a_help_text_and_each_command_a_table(name: str) -> None:
    assert f"<!-- options: {name} -->" in (reference.FOLDER / "commands.md").read_text()
    for option in reference.commands()[name].params:
        assert option.help, f"dynmo {name}: {option.name} has no help text"


@pytest.mark.parametrize("name", dynmo.__all__)
def test_each_public_name_has_a_line(name: str) -> None:
    assert f"\n- `{name}`: " in (reference.FOLDER / "python.md").read_text()


def test_generator_restores_a_changed_row() -> None:
    text = (reference.FOLDER / "configuration.md").read_text()
    changed = text.replace("| `seed` | integer", "| `seed` | number")
    assert reference.fill(changed) == reference.fill(text)


def test_every_mark_of_a_page_is_parsed() -> None:
    for page in reference.PAGES:
        text = page.read_text()
        assert text.count("<!-- end -->") == text.count("<!-- ") - text.count("<!-- end -->")
        assert len(reference.MARK.findall(text)) == text.count("<!-- end -->"), page.name
