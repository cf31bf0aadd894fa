"""`save_pretrained(merge=True)`: transformers loads what a pipeline with adapters computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

import dynmo
from dynmo.errors import ConfigError
from dynmo.huggingface import from_pretrained, save_pretrained
from dynmo.huggingface.checkpoint import export_checkpoint, find_checkpoint
from tests.combinations import mostly_matrix
from tests.models.huggingface.lora_trials import PARTS, TRIALS, sgd
from tests.models.huggingface.saved_models import copy_of
from tests.models.huggingface.small import make_batch
from tests.models.huggingface.tiny import config

NAMED = {trial.name: trial for trial in TRIALS}
MERGED = (
    "use_dora = True",
    'target_modules = "all-linear"',
    "fan_in_fan_out = True",
    'bias = "all"',
    "use_rslora = True",
    'modules_to_save = ["embed_tokens", "norm"]',
    'modules_to_save = ["layers.1.mlp"]',
    'init_lora_weights = "pissa_niter_2"',
    "trainable_token_indices = [1, 5, 7]",
    'use_dora = True, init_lora_weights="pissa"',
    "lora_bias = True",
    'target_parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]',
    "kasa_config = KasaConfig()",
)
# A logit may differ by this share of the largest, in float32: a product has another order of sums.
CLOSE = 1e-4


def loaded(folder: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.filterwarnings("ignore")  # those of peft
@pytest.mark.parametrize("name", mostly_matrix(MERGED, MERGED[:1]))
def test_merged_model_has_the_logits_of_the_pipeline(name: str, tmp_path: Path) -> None:
    trial, batch, made = NAMED[name], make_batch(0, padded=False), tmp_path / "made"
    with dynmo.init(device="cpu") as world:
        model = from_pretrained(trial.folder(), lora=trial.config())
        pipeline = dynmo.Pipeline(model, world, microbatches=PARTS, optimizer=sgd)
        pipeline.step(batch)
        logits = pipeline.evaluate(batch, outputs=True).outputs
        save_pretrained(pipeline, made, merge=True)
        save_pretrained(pipeline, tmp_path / "adapters")
        pipeline.save(tmp_path)
        export_checkpoint(find_checkpoint(tmp_path)[0], model, tmp_path / "cut", merge=True)
    assert isinstance(logits, Tensor)
    plain: Any = AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        found = torch.cat([plain(input_ids=ids).logits for ids in batch["input_ids"].chunk(PARTS)])
    assert (found - logits).abs().max() < CLOSE * logits.abs().max()
    exported = loaded(tmp_path / "cut")
    assert all(torch.equal(exported[key], tensor) for key, tensor in plain.state_dict().items())
    if name == MERGED[0]:
        base: Any = AutoModelForCausalLM.from_pretrained(trial.folder())
        theirs: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapters")).merge_and_unload()
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, exported[key]), key


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer_replication = [[1, 3], [0, 2]]", "gives one weight several adapters"),
        ("trainable_token_indices = [1, 5, 7], tied weights", r"embed_tokens.weight is tied"),
        ("", "the model has no adapters"),
    ],
)
def test_adapters_that_cannot_be_merged_are_named(name: str, message: str, tmp_path: Path) -> None:
    with dynmo.init(device="cpu") as world:
        trial = NAMED.get(name)
        model = (
            from_pretrained(config("llama"))
            if trial is None
            else from_pretrained(trial.folder(), lora=trial.config())
        )
        pipeline = dynmo.Pipeline(model, world, microbatches=PARTS)
        with pytest.raises(ConfigError, match=f"merge: .*{message}"):
            save_pretrained(pipeline, tmp_path / "made", merge=True)
    assert not (tmp_path / "made").exists()


def test_nothing_is_written_beside_the_weights_under_the_adapters(tmp_path: Path) -> None:
    base = copy_of("llama", tmp_path / "base")
    before = {path: path.read_bytes() for path in base.iterdir()}
    lora = LoraConfig(r=1, target_modules=["q_proj"])
    with dynmo.init(device="cpu") as world:
        tuned = dynmo.Pipeline(from_pretrained(base, lora=lora), world, microbatches=1)
        for merge, harm in ((True, "be lost"), (False, "no longer load without adapters")):
            with pytest.raises(ConfigError, match=f"adapters were trained on, which would {harm}"):
                save_pretrained(tuned, tmp_path / "x" / ".." / "base", merge=merge)
    assert {path: path.read_bytes() for path in base.iterdir()} == before
