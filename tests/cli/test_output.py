"""The message that dynmo is compiling its loops."""

from __future__ import annotations

import pytest
from numba import njit

from dynmo.cli.output import compilation_told


def test_compilation_message_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (njit(lambda x: x + 1), njit(lambda x: x + 2))
    with compilation_told():
        assert (first(1), second(1)) == (2, 3)
    assert "compiling" in capsys.readouterr().err
    with compilation_told():
        assert (first(1), second(1)) == (2, 3)
    assert capsys.readouterr().err == ""


def test_each_command_prints_its_own_compilation_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in range(2):
        with compilation_told():
            njit(lambda x: x)(number)
        assert capsys.readouterr().err.count("\n") == 1
