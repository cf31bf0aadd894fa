"""A folder that holds more than the model: an export has all of it, under the folder's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dynmo
from docs.tools.folders import PAGE, row
from dynmo.errors import DynmoError
from dynmo.huggingface import from_pretrained, save_pretrained
from dynmo.huggingface.checkpoint import export_checkpoint
from dynmo.models.huggingface.adapters import WEIGHTS
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.models.huggingface.names import is_adapter, saved_name
from dynmo.pipeline.options import grouped
from tests.combinations import mostly_matrix
from tests.huggingface.test_export import weights
from tests.models.huggingface.folders import (
    FILE,
    WHOLE,
    classes,
    equal,
    save_folder,
    told,
)
from tests.models.huggingface.saved_models import change
from tests.models.huggingface.small import make_batch
from tests.pool import Pool

EVERYDAY = ("DeepseekV3ForCausalLM", "Qwen3_5ForCausalLM")
VISION = "Llama4ForCausalLM"  # both of its parts have a q_proj
BATCH = make_batch(0, padded=False)
IDS = BATCH["input_ids"]

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers' own code


@pytest.mark.parametrize("name", mostly_matrix(classes(), EVERYDAY))
def test_page_tells_what_a_class_keeps(name: str, tmp_path: Path) -> None:
    assert row(told(name, tmp_path)) in PAGE.read_text().splitlines(), (
        "python -m docs.tools.folders"
    )


def test_page_has_each_class_once() -> None:
    names = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert names == classes()


def pipeline_of(world: Any, model: HuggingFaceModel, **options: Any) -> dynmo.Pipeline:
    pipeline = dynmo.Pipeline(model, world, microbatches=4, schedule="1f1b", **grouped(options))
    pipeline.step(BATCH)
    return pipeline


def test_ranks_and_checkpoints_write_it_once(pool: Pool, tmp_path: Path) -> None:
    """The last shard has it. An export into the source folder has it, too, and again."""
    source = tmp_path / "source"
    extra, before = save_folder("Qwen3NextForCausalLM", source), weights(source)
    jobs = "tests.models.huggingface.folder_jobs:export"
    pool.run(jobs, 2, folder=str(source), out=str(tmp_path / "ranks"))
    shards = sorted((tmp_path / "ranks").glob("*.safetensors"))
    assert extra.keys() <= load_file(shards[1]).keys()
    index = json.loads((tmp_path / "ranks" / f"{FILE}.index.json").read_text())
    assert index["weight_map"] == {k: each.name for each in shards for k in load_file(each)}
    model = from_pretrained(source)
    assert model.weights is not None
    with dynmo.init(device="cpu") as world:
        pipeline = pipeline_of(world, model)
        pipeline.save(tmp_path / "saved")
        for _ in range(2):
            save_pretrained(pipeline, source)
    (checkpoint,) = (tmp_path / "saved").glob("step-*")
    export_checkpoint(checkpoint, model, tmp_path / "exported")
    for folder in (source, tmp_path / "exported", tmp_path / "ranks"):
        found = weights(folder)
        assert found.keys() == before.keys()
        assert all(equal(found[key], extra[key]) for key in extra)


def test_what_the_folder_has_lost_is_named(tmp_path: Path) -> None:
    extra = save_folder("GPT2LMHeadModel", tmp_path)
    with dynmo.init(device="cpu") as world:
        pipeline = pipeline_of(world, from_pretrained(tmp_path))
        change(tmp_path, lambda tensors: tensors.pop(sorted(extra)[0]))
        with pytest.raises(DynmoError, match=rf"no longer has {sorted(extra)[0]}"):
            save_pretrained(pipeline, tmp_path / "out")
    assert not (tmp_path / "out").exists()


LORA = LoraConfig(
    r=2, target_modules=r".*layers\.[12]\..*(q_proj|q_a_proj|out_proj)", rank_pattern={"q_proj": 3}
)
LANGUAGE = [name for name in WHOLE if name not in ("Emu3ForCausalLM", "WhisperForCausalLM")]


@pytest.mark.parametrize("name", mostly_matrix(LANGUAGE, [VISION]))
def test_adapters_fit_the_class_that_the_folder_names(name: str, tmp_path: Path) -> None:
    save_folder(name, tmp_path)
    with dynmo.init(device="cpu") as world:
        pipeline = pipeline_of(world, from_pretrained(tmp_path, lora=LORA))
        save_pretrained(pipeline, tmp_path / "adapters")
        logits = pipeline.evaluate({"input_ids": IDS}, outputs=True).outputs
        again = dynmo.Pipeline(
            from_pretrained(tmp_path, lora=tmp_path / "adapters"), world, microbatches=4
        )
        assert again.digest() == pipeline.digest()
    kind: Any = getattr(transformers, WHOLE[name])
    whole: Any = PeftModel.from_pretrained(kind.from_pretrained(tmp_path), tmp_path / "adapters")
    saved = load_file(tmp_path / "adapters" / WEIGHTS)
    adapted = {
        key.replace(".default", ""): p for key, p in whole.named_parameters() if "lora" in key
    }
    assert adapted.keys() == saved.keys()
    assert all(torch.equal(adapted[key], saved[key]) for key in saved)
    parts = [whole.eval()(input_ids=ids, use_cache=False).logits for ids in IDS.chunk(4)]
    assert isinstance(logits, torch.Tensor)
    # The classes may add the experts of a token in another order.
    atol = 1e-6 if "Moe" in name else 0
    torch.testing.assert_close(torch.cat(parts), logits, rtol=0, atol=atol)


def test_adapters_of_the_language_model_go_on(tmp_path: Path) -> None:
    """peft has written them for the class that trains, not for that of the folder."""
    save_folder(VISION, tmp_path)
    plain: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), LORA)
    plain.save_pretrained(tmp_path / "adapters")
    model = from_pretrained(tmp_path, lora=tmp_path / "adapters")
    saved = load_file(tmp_path / "adapters" / WEIGHTS)
    for layer in model.build(range(model.layers)):
        for name, parameter in layer.named_parameters():
            if is_adapter(name):
                assert torch.equal(parameter, saved.pop(saved_name(name)))
    assert not saved


def test_adapters_on_experts_keep_their_targets(tmp_path: Path) -> None:
    """Another part of the folder's class may have experts of the same name."""
    save_folder(VISION, tmp_path)
    lora = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["experts.down_proj"],
        layers_to_transform=[1],
        alpha_pattern={"layers.1.self_attn.q_proj": 7},
    )
    with dynmo.init(device="cpu") as world:
        pipeline = pipeline_of(world, from_pretrained(tmp_path, lora=lora))
        save_pretrained(pipeline, tmp_path / "adapters")
        again = from_pretrained(tmp_path, lora=tmp_path / "adapters")
        assert dynmo.Pipeline(again, world, microbatches=4).digest() == pipeline.digest()
    written = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    query = "language_model.model.layers.1.self_attn.q_proj"
    assert written["target_modules"] == [query]
    assert written["alpha_pattern"] == {query: 7}
    experts = "language_model.model.layers.{}.feed_forward.experts.down_proj"
    assert written["target_parameters"] == [experts.format(at) for at in range(3)]
