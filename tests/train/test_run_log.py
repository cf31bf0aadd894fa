from __future__ import annotations

from pathlib import Path

import pytest

from dynmo.config import parse
from dynmo.errors import ConfigError
from dynmo.train.run_log import RunLog


def test_the_next_rank_0_goes_on_without_a_sink_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacks(*_: object) -> None:
        raise ConfigError("wandb is not installed")

    monkeypatch.setattr("dynmo.train.run_log.open_sink", lacks)
    config = parse({"metrics": {"to": ["wandb"]}})
    for name in ("first", "next"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="not installed"):
        RunLog(config, tmp_path / "first", None)
    RunLog(config, tmp_path / "next", None, goes_on=True).close()
    assert caplog.messages == ["wandb is not installed; the run goes on without it"]
