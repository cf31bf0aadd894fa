"""Folders that hold more than the model that trains, and models that keep types of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import dynmo
from dynmo.errors import ConfigError
from dynmo.huggingface import from_pretrained, save_pretrained
from dynmo.models.huggingface.model import meta_model
from dynmo.models.huggingface.private import types_after_loading
from tests.models.huggingface.families import kinds
from tests.models.huggingface.tiny import VOCABULARY, config

FILE = "model.safetensors"

# The class that a folder names, by the class that trains.
WHOLE = {
    "Dots3NoteForCausalLM": "Dots3NoteForConditionalGeneration",
    "Emu3ForCausalLM": "Emu3ForConditionalGeneration",
    "Llama4ForCausalLM": "Llama4ForConditionalGeneration",
    "MllamaForCausalLM": "MllamaForConditionalGeneration",
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForCausalLM": "Qwen4ExpForConditionalGeneration",
    "WhisperForCausalLM": "WhisperForConditionalGeneration",
}

# Classes whose own code makes tensors in float32, without a pattern.
BY_CODE = (
    "HunYuanMoEV1ForCausalLM",
    "Lfm2MoeForCausalLM",
    "XLNetLMHeadModel",
    "ZambaForCausalLM",
    "ZayaForCausalLM",
)

# Names that patterns of transformers mean, and that no block of a model has.
_NAMES = (
    "mtp.fc.weight",
    "model.mtp.layers.0.input_layernorm.weight",
    "model.mtp_layers.0.eh_proj.weight",
    "model.visual.blocks.9.norm1.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.0.mlp.post_mlp_layernorm.weight",
    "encoder.version",
    "decoder.version",
    "transformer.h.0.attn.bias",
    "transformer.h.0.crossattention.bias",
    "gpt_neox.layers.0.attention.bias",
    "gpt_neox.layers.0.attention.masked_bias",
)
_TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn)


def classes() -> list[str]:
    """Returns the classes with patterns of transformers, and those of a part of a folder."""
    known = {*WHOLE, *BY_CODE}
    return sorted(name for name in kinds() if name in known or any(_patterns(name)))


def config_of(name: str) -> PreTrainedConfig:
    """Returns the tiny config of a class. Its last blocks have experts if a block may have some."""
    kind = kinds()[name]
    made = config(kind)
    if hasattr(made, "first_k_dense_replace"):
        return config(kind, first_k_dense_replace=1)
    if kind == "beam":
        return config(kind, mlp_layer_types=["dense", "sparse", "sparse"])
    return made


def _patterns(name: str) -> tuple[list[str], list[str]]:
    """Returns the patterns of what a class ignores in files, and of what it keeps in float32."""
    kind: Any = getattr(transformers, name)
    kept = (kind._keep_in_fp32_modules_strict, kind._keep_in_fp32_modules)
    return (
        [*(kind._keys_to_ignore_on_load_unexpected or ())],
        [each for some in kept for each in some or ()],
    )


def save_folder(name: str, folder: Path) -> dict[str, Tensor]:
    """Saves a tiny model with other tensors beside it. Returns those that no model has."""
    made = config_of(name)
    torch.manual_seed(0)
    model: PreTrainedModel = (
        getattr(transformers, WHOLE[name])(made)
        if name in WHOLE
        else AutoModelForCausalLM.from_config(made)
    )
    model.save_pretrained(folder)
    tensors = load_file(folder / FILE)
    drawn, extra = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for at, key in enumerate(sorted({*_extra(name, tensors)} - {*tensors})):
        values = torch.randn(2, 3, generator=drawn)
        extra[key] = values.to(_TYPES[at % len(_TYPES)])
    save_file(tensors | extra, folder / FILE, metadata={"format": "pt"})
    return extra


def _extra(name: str, tensors: dict[str, Tensor]) -> Iterator[str]:
    """Yields names: a block beyond the last one, that block as a block of `mtp`, and others."""
    ignored, _ = _patterns(name)
    numbers = {int(n) for each in ignored for n in re.findall(r"layers\\\.(\d+)", each)}
    blocks = [key for key in tensors if re.search(r"(layers|h|blocks)\.2\.", key)]
    for key in blocks:
        for number in {3, *numbers}:
            yield re.sub(r"\.2\.", f".{number}.", key, count=1)
        yield re.sub(r".*?(layers|h|blocks)\.2\.", "mtp.layers.0.", key)
    yield from _NAMES


@dataclass
class Told:
    """What a class does with a folder.

    Attributes:
        beside: What of a folder the class does not use: patterns of transformers, or another class.
        kept: What stays float32 in bfloat16, and what else in float16.
        outcome: "yes" if it trained two steps, and the export loads again with all tensors.
    """

    name: str
    kind: str
    beside: list[str]
    kept: tuple[list[str], list[str]]
    outcome: str


def told(name: str, folder: Path) -> Told:
    """Trains a class for two steps from a folder, exports it and loads it again.

    Raises:
        AssertionError: Something of the folder is lost or changed.
    """
    kind, (beside, _) = kinds()[name], _patterns(name)
    low, lowest = (kept(name, dtype) for dtype in (torch.bfloat16, torch.float16))
    more = [each for each in lowest if each not in low]
    found = Told(name, kind, [*beside, *([WHOLE[name]] if name in WHOLE else [])], (low, more), "")
    extra, out = save_folder(name, folder), folder / "out"
    unseen = [each for each in beside if not any(re.search(each, key) for key in extra)]
    assert not unseen or name in WHOLE
    try:
        model = from_pretrained(folder)
    except ConfigError:
        found.outcome = "refused"
        return found
    assert model.weights is not None
    assert extra.keys() <= model.weights.beside.keys()
    ids = torch.randint(3, VOCABULARY - 1, (2, 7), generator=torch.Generator().manual_seed(2))
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(model, world, microbatches=1, schedule="1f1b")
        for _ in range(2):
            pipeline.step({"input_ids": ids, "labels": ids})
        logits = pipeline.evaluate({"input_ids": ids}, outputs=True).outputs
        save_pretrained(pipeline, out)
        check_files(folder, out, model.weights.beside)
        plain = loaded(AutoModelForCausalLM, out)
        assert isinstance(logits, Tensor)
        # The bits of a product with one column depend on the number of threads, which is the
        # world's here, and on the alignment of its weight, which a mapped file does not keep.
        for parameter in plain.parameters():
            parameter.data = parameter.data.clone()
        with torch.no_grad():
            assert torch.equal(logits, plain(input_ids=ids, use_cache=False).logits)
    if name in WHOLE:
        loaded(getattr(transformers, WHOLE[name]), out)
    found.outcome = "yes"
    return found


def kept(name: str, dtype: torch.dtype) -> list[str]:
    """Returns the parameters and saved buffers that a class keeps in float32, without blocks."""
    model = meta_model(name, config_of(name), trust_remote_code=False, dtype=dtype)
    types = types_after_loading(model, dtype, {})
    names = {_short(each) for each in model.state_dict() if types[each] == torch.float32}
    return sorted(names)


def _short(name: str) -> str:
    return re.sub(r"^.*?(layers?|h|blocks)\.\d+\.", "", name)


def check_files(folder: Path, out: Path, beside: Collection[str]) -> None:
    """Checks that an export has all of a folder, and what the model does not use unchanged."""
    before, after = load_file(folder / FILE), load_file(out / FILE)
    assert before.keys() == after.keys()
    same = {key for key in before if equal(before[key], after[key])}
    assert same >= {*beside}
    assert same < before.keys()
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, out)]
    assert configs[0] == configs[1]


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one type, and the same bits."""
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def loaded(kind: Any, folder: Path) -> Any:
    """Loads a folder with a class of transformers, which lacks nothing there."""
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return model
