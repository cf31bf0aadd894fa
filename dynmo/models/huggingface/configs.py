"""Reads the config of a folder, and makes its model without memory."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from dynmo.errors import ConfigError


def read_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Returns the config of a folder.

    Raises:
        ConfigError: There is none, or dynmo cannot train its model.
    """
    if not folder.is_dir():
        where = "on this machine" if folder.is_absolute() else f"in {Path.cwd()}"
        raise ConfigError(f"{folder} is no folder {where}; download the model, and give its folder")
    if not (folder / "config.json").is_file():
        advice = "give the folder of a transformers model (download it first)"
        if (folder / "adapter_config.json").is_file():
            advice = (
                "it has adapters of peft; give the folder of their model (in Python, and lora=)"
            )
        raise ConfigError(f"{folder} has no config.json; {advice}")
    with one_line(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{folder} has quantized weights, whose state could not move between ranks; give a "
            "folder of float weights"
        )
    return config


def meta_model(
    where: Path | str,
    config: PreTrainedConfig,
    trust_remote_code: bool,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Returns a config's model on the meta device.

    Args:
        where: What error messages name.
        config: The config, which is left alone.
        trust_remote_code: Whether to run Python code that the folder has.

    Raises:
        ConfigError: transformers has no causal language model of it.
    """
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        raise ConfigError(
            f"{where}: transformers has no causal language model of the type "
            f"{config.model_type!r}; give the folder of one"
        )
    with one_line(where), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code
        )


@contextmanager
def one_line(where: object) -> Generator[None]:
    """Raises what transformers raises as ConfigError of one line."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{where} has Python code that its model needs; read it, and allow it with "
                "trust_remote_code=True (model.trust_remote_code = true)"
            ) from None
        first = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"{where}: {type(error).__name__}: {first}") from error
