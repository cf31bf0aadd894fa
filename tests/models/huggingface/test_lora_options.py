"""Each option of peft's LoraConfig works as in peft, or is refused by its name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from peft import LoraConfig, PeftConfig

from docs.tools.lora_options import PAGE, row
from tests.combinations import mostly_matrix
from tests.models.huggingface.lora_trials import TRIALS, told
from tests.pool import Pool

TRAIN = "tests.models.huggingface.lora_trials:train"
NAMED = {trial.name: trial for trial in TRIALS}
EVERYDAY = ("use_dora = True", 'bias = "lora_only"', "arrow_config = ArrowConfig()")

# What more than one layer has, what a forward changes, and what starts from the weight.
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("trainable_token_indices = [1, 5, 7], tied weights", {"move": [4, 2]}),
    ("ensure_weight_tying = True, modules_to_save", {}),
    ("layer_replication = [[1, 3], [0, 2]]", {"schedule": "zb-v"}),
    ("use_dora = True", {"move": [5, 3], "recompute": "all"}),
    ("velora_config = VeloraConfig()", {"move": [3, 2], "recompute": "all"}),
    ('velora_config = VeloraConfig(init_type="random")', {"move": [5, 3]}),
    ("kasa_config = KasaConfig()", {"move": [5, 3]}),
    ('target_parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]', {"move": [2, 2]}),
    ('bias = "all"', {"move": [5, 3], "precision": "bfloat16"}),
    ('modules_to_save = ["embed_tokens", "norm"]', {"move": [5, 3], "precision": "bfloat16"}),
    ('init_lora_weights = "mica"', {"move": [5, 3]}),
]


@pytest.mark.parametrize("name", mostly_matrix(NAMED, EVERYDAY))
@pytest.mark.filterwarnings("ignore")  # those of peft
def test_page_tells_what_an_option_gives(name: str) -> None:
    found = told(NAMED[name])
    assert not found.start
    assert max(found.steps, found.loaded) <= 1e-6
    assert "\n" not in found.reason
    written = PAGE.read_text().splitlines()
    # What is close on one processor has the same bits on another.
    rows = {row(NAMED[name], each) for each in (found, replace(found, steps=1e-7))}
    assert rows.intersection(written), "python -m docs.tools.lora_options"


def test_page_has_each_option() -> None:
    lines = [line.split("`") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [f"{line[1]} = {line[3]}" for line in lines] == [*NAMED]
    known = {each.name for each in fields(LoraConfig)} - {each.name for each in fields(PeftConfig)}
    assert {trial.option for trial in TRIALS} == known


@pytest.mark.parametrize(("name", "options"), mostly_matrix(RUNS, RUNS[:1]))
def test_any_ranks_have_the_bits_of_one(pool: Pool, name: str, options: dict[str, Any]) -> None:
    base = str(NAMED[name].folder())
    alone = {"name": name, "base": base, "precision": options.get("precision", "float32")}
    assert pool.run(TRAIN, 2, **alone | options) == pool.run(TRAIN, 1, **alone) * 2
