"""Recognizes files that hold something else than plain text, by their first bytes."""

from __future__ import annotations

import re
from pathlib import Path

from dynmo.files import parse_json

_HEAD = 1 << 16
# A file with more zero bytes than this is no text. A text may have some as separators.
_MOST_ZEROS = 0.05

# First bytes of a kind of file. The first that fits counts.
_SIGNATURES = (
    (rb"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19", "a torch file"),
    (rb"\x80[\x02-\x05]", "a Python pickle"),
    (rb"PK\x03\x04(?s:.){26}[\w.-]+/data\.pkl", "a torch file"),
    (rb"PK\x03\x04(?s:.){26}[\w.-]+\.npy", "a numpy archive"),
    (rb"PK\x03\x04", "a zip file"),
    (rb"\x93NUMPY", "a numpy array"),
    (rb"(?s:.){8}\{\s*\"", "a safetensors file"),
    (rb"PAR1", "a parquet file"),
    (rb"ARROW1|\xff\xff\xff\xff(?s:.){4}\x10\x00\x00\x00", "an arrow file"),
    (rb"\x89HDF\r\n", "an HDF5 file"),
    (rb"\x1f\x8b", "a gzip file"),
    (rb"BZh[1-9]1AY", "a bzip2 file"),
    (rb"\xfd7zXZ\x00", "an xz file"),
    (rb"\x28\xb5\x2f\xfd", "a zstd file"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z file"),
    (rb"(?s:.){257}ustar", "a tar file"),
    (rb"SQLite format 3\x00", "an SQLite database"),
    (rb"%PDF-", "a PDF file"),
    (rb"GGUF", "a GGUF file"),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16"),
)


def kind_of(path: Path) -> str | None:
    """Name the kind of a file that is no plain text, such as "JSON lines"."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    for signature, kind in _SIGNATURES:
        if re.match(signature, head):
            return kind
    if head.count(b"\0") > _MOST_ZEROS * len(head):
        return "binary data, such as token numbers"
    # A line that the head cuts off is no record.
    lines = [line for line in head.splitlines() if line.strip()][:2]
    if lines and all(map(_is_record, lines)):
        return "JSON lines"
    is_json = re.match(rb'\s*(\[\s*(\{|\[\s*["\d{])|\{\s*")', b" ".join(lines))
    return "a JSON file" if is_json else None


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict | list)
    except ValueError:  # also text that is not UTF-8
        return False
