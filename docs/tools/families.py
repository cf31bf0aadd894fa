"""Writes docs/reference/hugging-face-families.md. It takes a few minutes.

python -m docs.tools.families
"""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from docs.tools.reference import FOLDER, table
from tests.models.huggingface.families import BATCHES, Family, family, kinds
from tests.models.huggingface.trained import FAMILIES

PAGE = FOLDER / "hugging-face-families.md"
_MARK, _END = "<!-- families -->", "<!-- end of families -->"
_HEAD = ("class", "model type", "layers", *BATCHES, "trained", "reason")


def row(told: Family) -> str:
    """The line of the page about a family."""
    halves, blocks = told.blocks
    layers = "halves" if halves == blocks else f"{halves} of {blocks} in halves"
    results = (told.outcome,) * len(BATCHES) if told.outcome == "bits" else (told.outcome, "", "")
    trained = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind, _ in FAMILIES.values()}
    is_trained = told.outcome == "bits" and told.name in trained
    cells = (
        f"`{told.name}`",
        f"`{told.kind}`",
        "" if told.outcome != "bits" else layers if halves else "whole",
        *results,
        "bits" if is_trained else "",
        told.reason,
    )
    return table(_HEAD, [cells]).splitlines()[-1]


def _row(name: str) -> str:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return row(family(name))


def write(page: Path) -> None:
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as workers:
        rows = list(workers.map(_row, sorted(kinds())))
    before, _, rest = page.read_text().partition(_MARK)
    _, _, after = rest.partition(_END)
    head = table(_HEAD, []).splitlines()
    lines = "\n".join((*head, *rows))
    page.write_text(f"{before}{_MARK}\n\n{lines}\n\n{_END}{after}")


if __name__ == "__main__":
    write(PAGE)
