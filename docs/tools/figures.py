"""Figures in the documents that stem from benchmarks/results.

A figure stands between two comments that do not show on the page:

    x<!-- figure freezing.json v.speedup .2f -->1.48<!-- end -->

The first comment names the file, the path in it and the format. A path has keys and indices with
dots between them. `*` is each item of a list or an object, `0:4` a part of a list. `min` or `max`
before such a path takes one of the values. A format is one of Python's, `ms` for seconds shown in
milliseconds, or `GB` for bytes shown in gigabytes. `s` shows a name.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_FIGURE = re.compile(r"(<!-- figure (\S+\.json) (?:(min|max) )?(.+?) (\S+) -->)(.*?)<!-- end -->")


@cache
def result_of(file: str) -> Any:
    """The content of a result file."""
    return json.loads((RESULTS / file).read_text())


def figure(file: str, path: str, form: str, choose: str | None = None) -> str:
    """A figure of a result file as text.

    Args:
        file: The file's name in benchmarks/results.
        path: Keys and indices with dots between them. `*` is each item, `0:4` a part of a list.
        form: A format of Python's, `ms` or `GB`.
        choose: `min` or `max` of a path with several values. None for a path with one value.
    """
    values: list[Any] = [result_of(file)]
    for key in path.split("."):
        values = [item for value in values for item in _items(value, key)]
    value = {"min": min, "max": max}[choose](values) if choose else values[0]
    assert choose or len(values) == 1, f"{file} {path} has {len(values)} values"
    if form == "ms":
        return f"{1000 * value:.0f}"
    if form == "GB":
        return f"{value / 1e9:.0f}"
    return format(value, form).replace("%", " %")


def _items(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        return list(value.values()) if key == "*" else [value[key]]
    if match := re.fullmatch(r"(\d+):(\d+)", key):
        return value[int(match[1]) : int(match[2])]
    return value if key == "*" else [value[int(key)]]


def fill(text: str) -> str:
    """The text of a document with its figures replaced."""
    return _FIGURE.sub(lambda m: f"{m[1]}{figure(m[2], m[4], m[5], m[3])}<!-- end -->", text)


def differences(text: str) -> list[str]:
    """The figures of a text that differ from their result file.

    Marks that are no figure are included.
    """
    matches = list(_FIGURE.finditer(text))
    marks = text.count("<!-- figure ") - len(matches)
    unread = [f"{marks} marks of figures cannot be read"] if marks else []
    return unread + [
        f"{m[2]} {m[4]}: {m[6]}" for m in matches if m[6] != figure(m[2], m[4], m[5], m[3])
    ]
