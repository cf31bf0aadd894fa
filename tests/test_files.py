"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynmo.files import LineLog
from tests.full_disk import files_up_to


def test_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a\ntorn")
    log = LineLog(path)
    log.write("b")
    with files_up_to(8), pytest.raises(OSError, match="File too large"):
        log.write("c" * 20)
    assert path.read_text() == "a\nb\n"
    log.write("d")
    log.close()
    assert path.read_text() == "a\nb\nd\n"


def test_file_that_was_removed_is_an_error(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "log")
    (tmp_path / "log").unlink()
    with pytest.raises(OSError, match="it has been removed"):
        log.write("a")
    log.close()
