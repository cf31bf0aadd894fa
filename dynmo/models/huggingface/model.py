"""A causal language model of transformers as a list of layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from dynmo.errors import ConfigError
from dynmo.kernels.seeds import Purpose, mix
from dynmo.models.huggingface.building import Builder
from dynmo.models.huggingface.cut import Halves, halves_of
from dynmo.models.huggingface.structure import Structure, UnfitModelError, structure_of
from dynmo.models.huggingface.values import draw
from dynmo.models.loss import causal_lm_loss, count_labels
from dynmo.models.model import Model
from dynmo.models.options import ModelOptions

_logger = logging.getLogger(__name__)

INPUTS = ("input_ids", "attention_mask", "position_ids")

Cut = Literal["auto", "blocks"]


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel(Model):
    """A causal language model of transformers. `from_pretrained` makes it.

    Its parameters have the names that transformers gives them.

    Attributes:
        structure: The parts of the model, on the meta device.
        folder: The folder that the weights are read from. None means that they are drawn.
        whole: Why blocks are not cut into halves: reason by index of the block.
    """

    structure: Structure
    folder: Path | None = None
    whole: Mapping[int, str] = field(default_factory=dict)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Nothing, since parameters have their names in the whole model."""
        return ("",) * self.layers

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of transformers."""
        return self.structure.model.config


def from_pretrained(
    source: str | Path | PreTrainedConfig,
    *,
    cut: Cut = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
) -> HuggingFaceModel:
    """Makes a model for `dynmo.Pipeline` of a causal language model of transformers.

    The model's own code runs. Each layer is the embedding, a block or half a block, or the output
    layer. A rank reads the weights of its own layers.

    Args:
        source: A folder with a config and safetensors, or a config. The weights of a config are
            drawn as transformers draws them.
        cut: "auto" cuts a block into an attention half and a feed-forward half if a probe proves
            that it can be. "blocks" leaves blocks whole.
        seed: Seed of weights that are drawn.
        trust_remote_code: Whether to run Python code that the folder has.

    Returns:
        The model. `pipeline.step` takes `{"input_ids": ..., "labels": ...}`, and
        `attention_mask` and `position_ids`. Labels are those of transformers: not shifted, and
        -100 does not count.

    Raises:
        ConfigError: The folder has no such model, or it cannot be cut into layers.
    """
    folder = None if isinstance(source, PreTrainedConfig) else Path(source)
    config = source if isinstance(source, PreTrainedConfig) else _config(source, trust_remote_code)
    if cut not in ("auto", "blocks"):
        raise ConfigError(f'cut = {cut!r}; use "auto" or "blocks"')
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    structure = _structure(model, source)
    halves = [
        halves_of(structure, index) if cut == "auto" else "cut is 'blocks'"
        for index in range(structure.count)
    ]
    cuts = [each if isinstance(each, Halves) else None for each in halves]

    def fill(index: int, layer: nn.Module) -> None:
        torch.manual_seed(mix(seed, Purpose.INITIAL, index))
        draw(model, layer)

    builder = Builder(structure, cuts, fill)
    text = config.get_text_config()
    return HuggingFaceModel(
        names=tuple(place.name for place in builder.places),
        build=builder.build,
        loss=causal_lm_loss,
        tied=builder.tied(),
        code=(type(model).__module__,),
        options=ModelOptions(kind="hf", path=str(folder or ""), vocab=text.vocab_size),
        inputs=INPUTS,
        count=count_labels,
        structure=structure,
        folder=folder,
        whole={index: each for index, each in enumerate(halves) if isinstance(each, str)},
    )


def make(options: ModelOptions, seed: int, cases: Mapping[str, Any]) -> Model:
    """Makes the model that a configuration file names."""
    if not options.path:
        raise ConfigError('model.kind = "hf" needs model.path, the folder of a transformers model')
    return from_pretrained(
        options.path, cut=options.cut, seed=seed, trust_remote_code=options.trust_remote_code
    )


def _config(source: str | Path, trust_remote_code: bool) -> PreTrainedConfig:
    folder = Path(source)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json; give the folder of a transformers model (download it "
            "first)"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: {_first_line(error)}") from None
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{folder} has quantized weights, whose state could not move between ranks; give a "
            "folder of float weights"
        )
    return config


def _structure(model: nn.Module, source: object) -> Structure:
    try:
        return structure_of(model)
    except UnfitModelError as error:
        name = type(model).__name__
        raise ConfigError(
            f"{name} cannot be cut into layers: {error}; cut it by hand, as layers of "
            "dynmo.Sequential"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
