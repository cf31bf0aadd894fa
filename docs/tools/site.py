"""Collects the pages of the site: `python -m docs.tools.site`. `make site` builds them.

They lie in build/pages as in the repository, with the files that they link to, so that links stay
as they are. Each public name of dynmo has a page that is made from its docstring.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import dynmo

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "build" / "pages"
DOCUMENTS = ("*.md", "docs/**/*.md", "dynmo/cases/*/README.md")
NAMES = [name for name in sorted(dynmo.__all__, key=str.lower) if name != "__version__"]
NAVIGATION = """\
* [dynmo](README.md)
* [Documentation](docs/index.md)
* [Tutorial](docs/tutorial.md)
* How-to guides
    * docs/how-to/*
* Explanation
    * docs/*.md
    * [Dynamic cases](docs/cases/index.md)
    * dynmo/cases/*
* Reference
    * [Reference](docs/reference/index.md)
    * docs/reference/*.md
    * Python API
        * docs/reference/api/*
    * Results
        * [Results](docs/reference/results/index.md)
        * docs/reference/results/*
* [Changes](CHANGELOG.md)
* [Working on dynmo](CONTRIBUTING.md)
"""


def collect(root: Path = ROOT, pages: Path = PAGES) -> list[str]:
    """Makes the folder of pages anew. Returns links to files that do not exist."""
    shutil.rmtree(pages, ignore_errors=True)
    documents = [path for pattern in DOCUMENTS for path in sorted(root.glob(pattern))]
    links = [(path, link) for path in documents for link in _links(path)]
    files = {path.parent.joinpath(link).resolve(): f"{path}: {link}" for path, link in links}
    for path in (*documents, *files):
        if path.is_file():
            target = pages / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (pages / "SUMMARY.md").write_text(NAVIGATION)
    _describe_names(pages / "docs" / "reference")
    return [place for path, place in files.items() if not path.exists()]


def _links(document: Path) -> Iterator[str]:
    """The files that a document links to."""
    for link in re.findall(r"\]\(([^)\s#]+)", document.read_text()):
        if "://" not in link:
            yield link


def _describe_names(reference: Path) -> None:
    """Makes the page of each public name, and links to it from the page of all names."""
    (reference / "api").mkdir()
    page = reference / "python.md"
    text = page.read_text()
    for name in NAMES:
        (reference / "api" / f"{name}.md").write_text(f"::: dynmo.{name}\n")
        text = text.replace(f"\n- `{name}`:", f"\n- [`{name}`](api/{name}.md):")
    page.write_text(text)


if __name__ == "__main__":
    sys.exit("\n".join(f"{place}: no such file; mend the link" for place in collect()) or 0)
