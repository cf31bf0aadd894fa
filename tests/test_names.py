"""Names that the style guide replaced are gone.

The list is the left column of the style guide's table of names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("dynmo", "tests", "benchmarks", "examples")

# The words `line`, `address`, `changed` and `settle` are fine with another meaning, such as a line
# of a text.
OLD = frozenset(
    {
        "Holding",
        "Lanes",
        "OneLane",
        "Pieces",
        "PendingStep",
        "Passage",
        "Caution",
        "stands",
        "StepEnd",
        "StepTable",
        "circle",
        "called",
        "beside",
        "judging",
        "Job",
        "judge",
        "within",
        "nearest",
        "placed",
        "words",
        "again",
        "slots",
        "aside_bytes",
        "copy_bytes",
        "Feed",
        "Given",
        "looks",
        "due",
        "patience",
        "Slice",
        "Outcome",
        "found",
        "made",
    }
)

# Files that still use an old name. Whoever renames the last one in a file removes its entry.
KNOWN: tuple[str, ...] = ()


class Use(NamedTuple):
    name: str
    line: int


def identifiers(text: str) -> Iterator[Use]:
    """Every identifier of a Python text.

    Also those inside f-strings, which the tokenizer of Python 3.11 hides.
    """
    for node in ast.walk(ast.parse(text)):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield Use(name, line)
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield Use(name, line)
            case ast.alias(name=name, asname=other):
                yield from (
                    Use(part, line) for part in (*name.split("."), *([other] if other else []))
                )
            case ast.ImportFrom(module=str(name)):
                yield from (Use(part, line) for part in name.split("."))
            case ast.Call(func=called_by, keywords=keywords):
                ours = ast.unparse(called_by) not in ("dataclass", "dataclasses.dataclass")
                yield from (Use(keyword.arg, line) for keyword in keywords if keyword.arg and ours)
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield Use(name, line)
            case _:
                pass


WORD = re.compile(rf"\b(?:{'|'.join(sorted(OLD))})\b")


def old_names(text: str) -> list[Use]:
    return [use for use in identifiers(text) if use.name in OLD] if WORD.search(text) else []


def code_blocks(text: str) -> Iterator[str]:
    """The Python blocks of a Markdown text.

    A block that is only a part of a file may be indented.
    """
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        yield "\n".join(line[indent:] for line in lines)


@cache
def all_old_names() -> dict[str, list[Use]]:
    """File -> its old names. Files without one are left out."""
    uses: dict[str, list[Use]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            uses[str(path.relative_to(ROOT))] = old_names(path.read_text(encoding="utf-8"))
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        uses[str(path.relative_to(ROOT))] = [
            use
            for block in code_blocks(path.read_text(encoding="utf-8"))
            for use in old_names(block)
        ]
    return {name: names for name, names in uses.items() if names}


def test_old_names_are_gone() -> None:
    uses = {name: names for name, names in all_old_names().items() if name not in KNOWN}
    assert [f"{name}:{use.line}: {use.name}" for name, names in uses.items() for use in names] == []


def test_known_exceptions_are_still_needed() -> None:
    assert [name for name in KNOWN if name not in all_old_names()] == []


def test_old_names_at_any_position_are_detected() -> None:
    texts = (
        "found = 1",
        "x.found",
        "def found(): pass",
        "class Job: pass",
        "def f(found): pass",
        "f(found=1)",
        "f'{found}'",
        "from dynmo import judging",
        "import dynmo.judging",
        "import x as found",
        "from dynmo.judging import x",
        "try: pass\nexcept E as found: pass",
        "lambda found: 0",
        "[0 for found in x]",
        "def f(*, slots): pass",
    )
    assert [text for text in texts if not old_names(text)] == []


def test_old_words_in_prose_and_dataclass_options_are_allowed() -> None:
    text = (
        '"""What was found."""\nkey = "found"\n@dataclass(slots=True)\nclass A:\n'
        "    pass  # made again\n"
    )
    assert old_names(text) == []


def test_old_names_in_markdown_code_are_detected() -> None:
    text = (
        "# made\n\n```python\n  found = 1\n  if found:\n      pass\n```\n\n```toml\nslots = 2\n"
        "```\n"
    )
    assert [use.name for block in code_blocks(text) for use in old_names(block)] == [
        "found",
        "found",
    ]
