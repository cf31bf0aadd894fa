"""The pages of the site lie as in the repository, with the files that they link to."""

from __future__ import annotations

from pathlib import Path

from docs.tools.site import collect


def test_site_takes_what_pages_link_to_and_names_broken_links(tmp_path: Path) -> None:
    root, pages = tmp_path / "root", tmp_path / "pages"
    files = {
        "README.md": "[a](docs/reference/python.md#names) [b](https://other.invalid/b)",
        "docs/reference/python.md": "[c](../../examples/c.py) [d](d.md)\n\n- `Pipeline`: trains\n",
        "examples/c.py": "",
        "examples/unused.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (wrong,) = collect(root, pages)
    assert wrong.endswith("python.md: d.md")
    assert (pages / "examples" / "c.py").exists()
    assert not (pages / "examples" / "unused.py").exists()
    assert "[`Pipeline`](api/Pipeline.md)" in (pages / "docs/reference/python.md").read_text()
    assert (pages / "docs/reference/api/Pipeline.md").read_text() == "::: dynmo.Pipeline\n"
