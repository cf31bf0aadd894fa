"""How long steps wait for samples that are tokenised live.

A Llama of drawn weights trains with `dynmo train` on a file of JSON lines, on one rank of one
thread. The samples are the functions of Python's standard library. The tokenizer is trained on
them. In the first run the source is as fast as it can be. In the others it gives 1.2 and 0.8 times
as many samples a second as the steps of the first run took.

`seconds` is the median step. `waited` is the share of the steps' seconds that they waited for
samples, without the first step. `bound` is the share that no reader can avoid: what the source
takes longer for a step's samples than the step computes.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.harness import train
from benchmarks.output import add_number, markdown, parser_of, run
from dynmo.data.records import JsonLines, Record

_SPEEDS = (None, 1.2, 0.8)
_BATCH, _SEQUENCE, _VOCAB = 8, 128, 2000
# Where the process that trains finds the file and the speed.
_PATH, _PER_S = "WAITING_SAMPLES", "WAITING_PER_S"


class Paced(JsonLines):
    """Lines of a file that come at most at a given number a second."""

    def __init__(self) -> None:
        super().__init__(os.environ[_PATH])
        self._pause, self._due = 1 / float(os.environ[_PER_S]), 0.0

    def __getitem__(self, number: int) -> Record:
        now = time.perf_counter()
        self._due = max(self._due, now) + self._pause
        time.sleep(self._due - now)
        return super().__getitem__(number)


def functions() -> Iterator[str]:
    """Yields the functions of the modules of Python's standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                yield ast.get_source_segment(text, node) or ""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dynmo-benchmark-") as name:
        folder = Path(name)
        texts = list(functions())
        lines = folder / "functions.jsonl"
        lines.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        save_model(folder / "model", texts, options.hidden, _SEQUENCE)
        os.environ[_PATH] = str(lines)
        steps_per_s = 0.0
        for speed in _SPEEDS:
            os.environ[_PER_S] = str(_BATCH * steps_per_s * speed if speed else 1e9)
            row = {"speed": speed, **_run(folder / "model", options.steps)}
            steps_per_s = steps_per_s or 1 / row["mean"]
            computed = row["mean"] * (1 - row["waited"])
            row["bound"] = max(0.0, 1 - computed * steps_per_s * speed) if speed else 0.0
            rows.append(row)
    return {"samples": len(texts), "steps": options.steps, "rows": rows}


def save_model(folder: Path, texts: list[str], hidden: int, sequence: int) -> None:
    """Saves a Llama of 4 blocks, with a tokenizer that is trained on texts."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts, vocab_size=_VOCAB, special_tokens=["<end>"], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=sequence,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _run(model: Path, steps: int) -> dict[str, float]:
    events = train(
        {
            "model": {"kind": "hf", "path": str(model), "sequence": _SEQUENCE},
            "data": {"source": "python:benchmarks.waiting:Paced", "batching": "grouped"},
            "train": {"steps": steps, "global_batch": _BATCH, "micro_batch": 2},
        }
    )
    seconds = [event["seconds"] for event in events if event["event"] == "step"][1:]
    waits = [event["waited"] for event in events if event["event"] == "data"][1:]
    times = [event["time"] for event in events if event["event"] == "step"]
    taken = times[-1] - times[0]
    return {
        "seconds": median(seconds),
        "mean": taken / len(seconds),
        "waited": sum(waits) / taken,
    }


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            "as fast as it can" if x["speed"] is None else f"{x['speed']} of the steps'",
            f"{x['seconds'] * 1000:.0f}",
            f"{x['waited']:.1%}",
            f"{x['bound']:.1%}",
        ]
        for x in result["rows"]
    ]
    return markdown(["samples", "step, ms", "waited", "bound"], rows, "lrrr")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    add_number(parser, "steps", 60, "steps of a run")
    add_number(parser, "hidden", 256, "hidden size")
    run(parser, measure, lambda result: print(table(result)))
