"""Examples end with one digest alone, on several ranks, and from a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.runs import free_port
from tests.pool import Pool

pytestmark = pytest.mark.docs

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


@pytest.mark.matrix
def test_fine_tuning_gives_one_digest_on_any_ranks(
    pool: Pool, small_llama: Path, tmp_path: Path
) -> None:
    script, saved = ROOT / "examples" / "finetune.py", tmp_path / "saved"
    alone = run(pool, script, 1, str(small_llama), str(tmp_path / "alone"))
    spread = run(pool, script, 2, str(small_llama), str(saved))
    (digest,) = {*re.findall(r"weights (\w{64})", alone + spread)}
    assert len(re.findall(digest, spread)) == 2
    losses = [float(loss) for loss in re.findall(r"loss=([\d.]+)", alone)]
    assert losses[-1] < losses[0] - 0.5
    assert len(list(saved.glob("*.safetensors"))) == 2
    assert (saved / "tokenizer.json").read_text() == (small_llama / "tokenizer.json").read_text()
    assert len(script.read_text().splitlines()) <= 25


def test_adapters_give_one_digest_on_any_ranks(
    pool: Pool, small_llama: Path, tmp_path: Path
) -> None:
    script, saved = ROOT / "examples" / "lora.py", tmp_path / "saved"
    alone = run(pool, script, 1, str(small_llama), str(tmp_path / "alone"))
    spread = run(pool, script, 2, str(small_llama), str(saved))
    (digest,) = {*re.findall(r"weights (\w{64})", alone + spread)}
    assert len(re.findall(digest, spread)) == 2
    losses = [float(loss) for loss in re.findall(r"loss=([\d.]+)", alone)]
    assert losses[-1] < losses[0]
    adapters = {"adapter_config.json", "adapter_model.safetensors"}
    tokenizer = {path.name for path in small_llama.glob("tokenizer*")}
    assert {path.name for path in saved.iterdir()} == adapters | tokenizer


def test_fine_tuning_from_a_file(pool: Pool, small_llama: Path, tmp_path: Path) -> None:
    config = ROOT / "examples" / "finetune.toml"
    (tmp_path / "small-llama").symlink_to(small_llama)
    (tmp_path / "text").write_text("some text to learn\n" * 500)
    sets = ["--set", "data.source=file:text", "--set", "train.steps=4"]
    line = ["train", str(config), "--json", *sets]
    (status, out, _), *_ = pool.run(
        "command", 2, lines=[line] * 2, folder=str(tmp_path), port=free_port()
    )
    assert (status, json.loads(out)["steps"]) == (0, 4)
    assert len(config.read_text().splitlines()) <= 15
