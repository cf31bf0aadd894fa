"""`save_pretrained` of a model with adapters: peft loads what a pipeline has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import dynmo
from dynmo.errors import ConfigError
from dynmo.huggingface import from_pretrained, save_pretrained
from dynmo.huggingface.checkpoint import export_checkpoint, find_checkpoint
from dynmo.models.huggingface.adapters import WEIGHTS
from tests.huggingface.jobs import equal
from tests.huggingface.saved import save_tokenizer
from tests.models.huggingface import adapter_jobs
from tests.models.huggingface.saved_models import copy_of, folder_of
from tests.models.huggingface.small import make_batch
from tests.models.huggingface.tiny import VOCABULARY, config
from tests.pool import Pool

EXPORT = "tests.models.huggingface.adapter_jobs:export"


@pytest.fixture(scope="module")
def base() -> Path:
    return folder_of("llama", dtype=torch.float32, vocab_size=VOCABULARY, num_hidden_layers=3)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_peft_loads_what_a_pipeline_has(base: Path, tmp_path: Path) -> None:
    folder, batch = tmp_path / "adapters", make_batch(0, padded=False)
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(adapter_jobs.model_of(str(base)), world, microbatches=4)
        pipeline.step(batch)
        save_pretrained(pipeline, folder)
        logits = pipeline.evaluate(batch, outputs=True).outputs
        assert isinstance(logits, torch.Tensor)
        state = pipeline.state_dict()
        again = dynmo.Pipeline(from_pretrained(base, lora=folder), world, microbatches=4)
        assert again.digest() == pipeline.digest()
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", WEIGHTS]
    plain: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    for name, tensor in plain.base_model.model.state_dict().items():
        assert torch.equal(state[name], tensor), name
    parts = batch["input_ids"].chunk(4)
    with torch.no_grad():
        assert torch.equal(logits, torch.cat([plain(input_ids=ids).logits for ids in parts]))


def test_the_tokenizer_goes_with_the_adapters(tmp_path: Path) -> None:
    source, folder = copy_of("llama", tmp_path / "base"), tmp_path / "tuned"
    save_tokenizer(source)
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with dynmo.init(device="cpu") as world:
        model = from_pretrained(source, lora=LoraConfig(r=1, target_modules=["q_proj"]))
        pipeline = dynmo.Pipeline(model, world, microbatches=1)
        save_pretrained(pipeline, folder)
        pipeline.save(tmp_path / "checkpoints")
        step = find_checkpoint(tmp_path / "checkpoints")[0]
        export_checkpoint(step, model, tmp_path / "exported")
    for made in (folder, tmp_path / "exported"):
        tokenizer: Any = AutoTokenizer.from_pretrained(made)
        assert (
            tokenizer("123")["input_ids"] == AutoTokenizer.from_pretrained(source)("123").input_ids
        )
        message = [{"role": "user", "content": "12"}]
        assert tokenizer.apply_chat_template(message, tokenize=False) == "12"
        assert not (made / "generation_config.json").exists()


@pytest.mark.matrix
def test_changed_and_resumed_runs_save_the_same(pool: Pool, base: Path, tmp_path: Path) -> None:
    runs = {
        "alone": (1, {"checkpoints": "saved"}),
        "changing": (3, {"meshes": [[1, 2, 1], [3, 3, 1]]}),
        "resumed": (2, {"resume": "saved", "schedule": "zb-v"}),
    }
    found = {}
    for name, (ranks, options) in runs.items():
        paths = {key: str(tmp_path / "saved") for key, value in options.items() if value == "saved"}
        given = {**options, **paths, "base": str(base), "folder": str(tmp_path / name)}
        found[name] = [told for told in pool.run(EXPORT, ranks, **given) if told]
    assert len({told["weights"] for tolds in found.values() for told in tolds}) == 1
    first, *others = (load_file(tmp_path / name / WEIGHTS) for name in runs)
    assert all(equal(other, first) for other in others)


def test_adapters_of_another_base_are_refused(base: Path, tmp_path: Path) -> None:
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(adapter_jobs.model_of(str(base)), world, microbatches=4)
        save_pretrained(pipeline, tmp_path / "adapters")
    others = {"intermediate_size": 64}, {"num_hidden_layers": 2}
    for other, message in zip(others, (r" .*down_proj.*\[4, 48\]", ""), strict=True):
        with pytest.raises(ConfigError, match=f"adapters of another base{message}"):
            from_pretrained(config("llama", **other), lora=tmp_path / "adapters")
    (tmp_path / "adapters" / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=f"has no {WEIGHTS}"):
        from_pretrained(base, lora=tmp_path / "adapters")


@pytest.mark.filterwarnings("ignore")  # those of peft
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},  # peft saves the embedding, too
        {"target_modules": ["q_proj"], "init_lora_weights": "eva"},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "use_dora": True},
    ],
)
def test_folder_of_peft_has_its_loss_in_a_pipeline(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    made: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**options))
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1
    made.save_pretrained(tmp_path)
    ids = make_batch(0, padded=False)["input_ids"]
    with dynmo.init(device="cpu") as world, torch.no_grad():
        model = from_pretrained(base, lora=tmp_path)
        found = dynmo.Pipeline(model, world, microbatches=1).evaluate(
            {"input_ids": ids, "labels": ids}
        )
        assert found == made(input_ids=ids, labels=ids).loss.item()


def test_checkpoint_of_a_random_cut_fits_the_folder(base: Path, tmp_path: Path) -> None:
    start: Any = "pissa_niter_1"
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=start, use_rslora=True)
    batch = make_batch(0, padded=False)
    with dynmo.init(device="cpu") as world:
        model = from_pretrained(base, lora=config)
        pipeline = dynmo.Pipeline(model, world, microbatches=4)
        pipeline.step(batch)
        loss = pipeline.evaluate(batch)
        pipeline.save(tmp_path / "checkpoints")
        export_checkpoint(find_checkpoint(tmp_path / "checkpoints")[0], model, tmp_path / "made")
        again = from_pretrained(base, lora=tmp_path / "made")
        found = dynmo.Pipeline(again, world, microbatches=4).evaluate(batch)
    assert found == pytest.approx(loss, rel=1e-6)
