"""The dashboard serves runs of one folder, to who has the token, and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from dynmo.event_log import EventLog
from dynmo.report.dashboard import application
from tests.report.folders import drawn, make_run, steps_of

TOKEN = "a-token"
HOME = "http://127.0.0.1:8642"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "one", steps_of(3))
    return tmp_path / "runs"


@pytest.fixture
def client(runs: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A browser that has opened the printed address."""
    monkeypatch.setattr("dynmo.report.page.pictures", drawn)
    client = TestClient(application(runs, TOKEN), base_url=HOME)
    assert client.get("/", params={"token": TOKEN}).status_code == 200
    return client


@pytest.mark.parametrize("address", ["/", "/?token=other", "/runs/one", "/runs/one/body"])
def test_stranger_is_refused(runs: Path, address: str) -> None:
    answer = TestClient(application(runs, TOKEN), base_url=HOME).get(address)
    assert answer.status_code == 403
    assert "open the address that dynmo dashboard has printed" in answer.text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1"])
def test_foreign_host_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 400


def test_token_leaves_the_address(client: TestClient) -> None:
    answer = client.get("/runs/one", params={"token": TOKEN}, follow_redirects=False)
    assert answer.headers["location"] == "/runs/one"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=lax" in answer.headers["set-cookie"]


def test_nothing_can_be_written(client: TestClient) -> None:
    assert client.post("/runs/one").status_code == 405
    assert client.delete("/runs/one").status_code == 405


@pytest.mark.parametrize("name", ["two", "..%2f..", "one%2f..%2fone", "/etc/passwd"])
def test_only_runs_are_served(client: TestClient, name: str) -> None:
    assert client.get(f"/runs/{name}").status_code == 404


def test_body_changes_with_the_log(client: TestClient, runs: Path) -> None:
    before = client.get("/runs/one/body")
    version = {"If-None-Match": before.headers["etag"]}
    assert client.get("/runs/one/body", headers=version).status_code == 304
    log = EventLog(runs / "one" / "events.jsonl")
    log.write(steps_of(1, begin=3)[0])
    log.close()
    after = client.get("/runs/one/body", headers=version)
    assert after.status_code == 200
    assert "<dd>4</dd>" in after.text


def test_run_without_steps_says_so(client: TestClient, runs: Path) -> None:
    (runs / "new").mkdir()
    (runs / "new" / "events.jsonl").touch()
    assert "has no steps yet" in client.get("/runs/new").text
    assert "has no steps yet" in client.get("/").text
    assert client.get("/").text.index("one") > 0


def test_run_that_breaks_hides_no_other(
    client: TestClient, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "link").symlink_to(runs / "one")
    (runs / "bad\udcff").symlink_to(runs / "one")
    assert "/runs/link" in client.get("/").text
    assert "/runs/bad%3F" in client.get("/").text
    assert client.get("/runs/bad%3F/body").status_code == 200

    def broken(_: object) -> str:
        raise ZeroDivisionError("<b>")

    monkeypatch.setattr("dynmo.report.dashboard.body", broken)
    assert "cannot be shown: ZeroDivisionError: &lt;b&gt;" in client.get("/runs/link/body").text


def test_folder_of_one_run_has_its_page(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynmo.report.page.pictures", drawn)
    client = TestClient(application(runs / "one", TOKEN), base_url=HOME)
    assert client.get("/runs/one", params={"token": TOKEN}).status_code == 200
