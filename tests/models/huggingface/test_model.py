"""Folders whose model dynmo cannot train are refused with one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config

from dynmo.errors import ConfigError
from dynmo.models.huggingface.model import from_pretrained
from tests.models.huggingface.saved_models import config_of, copy_of, refusal

REMOTE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}


def write(folder: Path, **keys: Any) -> Path:
    known = config_of("llama").to_dict()
    (folder / "config.json").write_text(json.dumps({**known, **keys}))
    return folder


@pytest.mark.parametrize(
    ("method", "key"),
    [("bitsandbytes", "load_in_4bit"), ("bitsandbytes", "load_in_8bit"), ("gptq", "bits")],
)
def test_quantized_weights_are_refused(tmp_path: Path, method: str, key: str) -> None:
    quantization = {"quant_method": method, key: 4 if key == "bits" else True}
    write(tmp_path, quantization_config=quantization)
    assert refusal(tmp_path).startswith(f"{tmp_path} has quantized weights")


@pytest.mark.parametrize(("kind", "names"), [("own", [*REMOTE]), ("t5", ["AutoModelForCausalLM"])])
def test_code_in_the_folder_needs_leave(tmp_path: Path, kind: str, names: list[str]) -> None:
    write(tmp_path, model_type=kind, auto_map={name: REMOTE[name] for name in names})
    assert refusal(tmp_path) == (
        f"{tmp_path} has Python code that its model needs; read it, and allow it with "
        "trust_remote_code=True (model.trust_remote_code = true)"
    )


def test_a_known_type_needs_no_code_of_the_folder(tmp_path: Path) -> None:
    copy_of("llama", tmp_path)
    write(tmp_path, auto_map=REMOTE)
    assert from_pretrained(tmp_path).layers == 6


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    assert "no causal language model of the type 't5'" in refusal(tmp_path)
    with pytest.raises(ConfigError, match="T5Config: transformers has no causal"):
        from_pretrained(T5Config())


@pytest.mark.parametrize("content", ["", "{", '{"model_type": "unheard-of"}', "{}"])
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    assert refusal(tmp_path).startswith(f"{tmp_path} has no config.json")
    (tmp_path / "config.json").write_text(content)
    assert refusal(tmp_path).startswith(f"{tmp_path}: ")


def test_adapters_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "it has adapters of peft; give the folder of their model" in refusal(tmp_path)
    assert "name is no folder on this machine; download the model" in refusal(tmp_path / "name")
    assert f"org/name is no folder in {Path.cwd()}; download" in refusal(Path("org/name"))
    (tmp_path / "Llama-3.1-8B").mkdir()
    told = refusal(tmp_path / "LLama-3.1-8b")
    assert told.endswith(f"no folder on this machine; did you mean {tmp_path / 'Llama-3.1-8B'}?")


def test_weights_are_float32_whatever_the_config_says() -> None:
    config = config_of("llama", dtype="bfloat16")
    layers = from_pretrained(config).build(())
    assert {x.dtype for layer in layers for x in layer.parameters()} == {torch.float32}
    assert config.dtype == torch.bfloat16
