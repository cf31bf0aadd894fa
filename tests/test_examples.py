"""Examples end with one digest alone, on several ranks, and from a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cli.runs import free_port
from tests.pool import Pool

ROOT = Path(__file__).parents[1]
LOOP = ROOT / "examples" / "two_cases.py"


def run(pool: Pool, path: Path, ranks: int, *arguments: str) -> str:
    """What all ranks print."""
    given = {"path": str(path), "port": free_port(), "arguments": arguments}
    return "".join(pool.run("script", ranks, **given))


def test_loop_with_two_cases_gives_one_digest_on_any_ranks_and_from_a_file(
    pool: Pool, tmp_path: Path
) -> None:
    alone, spread = run(pool, LOOP, 1), run(pool, LOOP, 4, "2")
    (digest,) = {*re.findall(r"weights (\w{64})", alone + spread)}
    assert len(re.findall(digest, spread)) == 4
    line = ["train", str(LOOP.with_suffix(".toml")), "--json"]
    (status, out, _), *_ = pool.run(
        "command", 4, lines=[line] * 4, folder=str(tmp_path), port=free_port()
    )
    assert (status, json.loads(out)["weights_digest"]) == (0, digest)
    assert len(LOOP.read_text().splitlines()) <= 35


def test_ranks_leave_and_come_back_in_a_loop(pool: Pool) -> None:
    """4 ranks, 2, and 4 again end with the bits of one rank."""
    loop = ROOT / "examples" / "elastic_loop.py"
    alone, spread = run(pool, loop, 1), run(pool, loop, 4)
    (digest,) = {*re.findall(r"weights (\w{64})", alone + spread)}
    assert len(re.findall(digest, spread)) == 4
    sizes = {int(step): size for step, size in re.findall(r"step (\d+): rank 0 of (\d)", spread)}
    assert sizes == {step: "2" if 4 <= step < 8 else "4" for step in range(12)}


def test_loop_over_a_data_loader_gives_one_digest_on_any_ranks(pool: Pool) -> None:
    loop = ROOT / "examples" / "own_data.py"
    alone, spread = run(pool, loop, 1), run(pool, loop, 2)
    (held_out,) = {*re.findall(r"held out (.*), weights", alone)}
    (digest,) = {*re.findall(r"weights (\w{64})", alone + spread)}
    assert len(re.findall(digest, spread)) == 2
    assert held_out in spread, "outputs come on the last rank"
    assert "False" in spread, "and on no other"
    lines = [line for line in loop.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 40
