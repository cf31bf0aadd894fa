"""The options of peft's `LoraConfig` that dynmo refuses, and why."""

from __future__ import annotations

from collections.abc import Iterator

from peft import LoraConfig

from dynmo.errors import ConfigError

_DATA = (
    "it takes its start from data that the whole model sees; let peft prepare it, save the "
    "adapters, and give their folder"
)
_BASE = (
    "the folder does not say which weights lie under its adapters; let peft save it with "
    "path_initial_model_for_weight_conversion"
)

REFUSED = {
    "megatron_config": "it is for layers of Megatron, which transformers has not; leave it out",
    "use_qalora": "it is for GPTQ weights, and dynmo trains beside float weights; leave it out",
    "arrow_config": "it chooses between several trained adapters, and dynmo trains one; leave it "
    "out",
    "monteclora_config": "it keeps random numbers outside of the layer, and they would not move "
    "with it; leave it out",
    "alora_invocation_tokens": "adapters look for these tokens in the ids, which go to the first "
    "layer alone; leave it out",
}
"""Options that cannot work, and the reason of each."""

INITS = {"eva": _DATA, "corda": _DATA, "lora_ga": _DATA}
"""Values of `init_lora_weights` that cannot start here."""


def check(lora: object, is_folder: bool) -> None:
    """Refuses what is no LoRA, and options that cannot work.

    Args:
        is_folder: Whether the config comes with the values of adapters.

    Raises:
        ConfigError: It names the option.
    """
    if not isinstance(lora, LoraConfig):
        raise ConfigError(f"lora is a {type(lora).__name__}; give a peft.LoraConfig, or a folder")
    for problem in _problems(lora, is_folder):
        raise ConfigError(f"lora.{problem}")


def _problems(lora: LoraConfig, is_folder: bool) -> Iterator[str]:
    for name, reason in REFUSED.items():
        if getattr(lora, name, None):
            yield f"{name}: {reason}"
    init = str(lora.init_lora_weights)
    is_unknown = init == "corda" or init.startswith("pissa_niter")
    if is_folder and is_unknown:
        yield f"init_lora_weights = {init!r}: {_BASE}"
    if init in INITS and not is_folder:
        yield f"init_lora_weights = {init!r}: {INITS[init]}"
    velora = lora.velora_config
    if velora is not None and getattr(velora, "init_type", "") == "batch_average_once":
        yield (
            "velora_config.init_type = 'batch_average_once': the first batch would decide on each "
            "rank anew; use 'batch_average' or 'random'"
        )
