"""LoRA adapters of peft in a model of transformers.

peft puts its layers into the model on the meta device, before it is cut. An adapter belongs to the
layer of its weight. Its first values depend on the weight, the seed and the layer alone: peft's own
code sets them once the weight has its value.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    TaskType,
    get_peft_model_state_dict,
    inject_adapter_in_model,
)
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import LoraRuntimeConfig, VeloraConfig
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import get_pattern_key
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dynmo.errors import ConfigError, first_line
from dynmo.models.huggingface.load import Reader, Stored, header_of
from dynmo.models.huggingface.names import NAME, PREFIX, Renamed, saved_name
from dynmo.models.huggingface.stubs import has_no_values
from dynmo.models.options import LoraOptions

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# What peft raises. It asserts that there is a GPU, say.
REFUSALS = ValueError, TypeError, KeyError, AssertionError, ImportError, RuntimeError

_DATA = (
    "it takes its start from data that the whole model sees; let peft prepare it, save the "
    "adapters, and give their folder"
)
_BASE = (
    "the folder does not say which weights lie under its adapters; let peft save it with "
    "path_initial_model_for_weight_conversion"
)

# Options that cannot work, and the reason of each.
_REFUSED = {
    "megatron_config": "it is for layers of Megatron, which transformers has not; leave it out",
    "use_qalora": "it is for GPTQ weights, and dynmo trains beside float weights; leave it out",
    "arrow_config": "it chooses between several trained adapters, and dynmo trains one; leave it "
    "out",
    "monteclora_config": "it keeps random numbers outside of the layer, and they would not move "
    "with it; leave it out",
    "alora_invocation_tokens": "adapters look for these tokens in the ids, which go to the first "
    "layer alone; leave it out",
}
# Values of `init_lora_weights` that cannot start here.
_INITS = ("eva", "corda", "lora_ga")


class Adapters:
    """The adapters of one model.

    Args:
        model: The model on the meta device. It gets the adapters, and all else is frozen.
        lora: A config of peft, or the folder of adapters to go on from.
        base: Folder of the model, if it has one.
        names: The names that the class of the folder has.

    Attributes:
        config: The config, with everything that peft has found out, such as the names of targets.
        saved: Names that peft gives the tensors that are saved, by their names in the model.

    Raises:
        ConfigError: The config fits no weight of the model, or has an option that is not supported.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lora: LoraConfig | str | Path,
        base: Path | None,
        names: Renamed,
    ) -> None:
        self._files = AdapterFiles(Path(lora), names) if isinstance(lora, str | Path) else None
        given = lora if isinstance(lora, LoraConfig) or self._files is None else self._files.config
        for problem in _problems(given, is_folder=self._files is not None):
            raise ConfigError(problem)
        self.config = copy.deepcopy(cast(LoraConfig, given))
        self.config.task_type = self.config.task_type or TaskType.CAUSAL_LM
        if base is not None:
            self.config.base_model_name_or_path = str(base)
        self._inject(model)
        # peft is asked what it would save. The values that it sorts are names here.
        state = cast(Any, {name: name for name in model.state_dict()})
        found: Any = get_peft_model_state_dict(model, state, NAME, save_embedding_layers=False)
        self.saved = {name: key for key, name in found.items()}
        if self._files is not None:
            self._files.check(model, self.saved)

    @property
    def blocks(self) -> list[int] | None:
        """The block of the folder that each block is, if peft repeats some."""
        spans = self.config.layer_replication
        return None if spans is None else [at for start, end in spans for at in range(start, end)]

    def _inject(self, model: PreTrainedModel) -> None:
        config = self.config
        config.runtime_config = LoraRuntimeConfig()  # values come on the CPU
        init, velora = config.init_lora_weights, cast(VeloraConfig | None, config.velora_config)
        # Most starts need values, which weights do not have yet. "mica" makes other layers.
        config.init_lora_weights = init if init == "mica" else True
        config.velora_config = (
            None if velora is None else replace(velora, init_type="batch_average")
        )
        # Patterns, and the targets of a folder, are peft's own.
        is_checked = self._files is None and not isinstance(config.target_modules, str)
        names = [f".{name}" for name, _ in model.named_modules()]
        linears = _linears(model)
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=True)
        except REFUSALS as error:
            if is_checked:
                _check_targets(config, names, linears)
            raise _refusal(error, config, linears) from None
        if is_checked:
            _check_targets(config, names, linears)
        config.init_lora_weights, config.velora_config = init, velora
        if getattr(config, "target_modules_to_tie", None):
            raise ConfigError(
                "lora.ensure_weight_tying: embedding and output layer may be on two ranks, and one "
                "would train the other's adapters transposed; leave one of them out of "
                "target_modules"
            )
        for each in model.modules():
            if isinstance(each, LoraLayer):
                self._settle(each)

    def fill(self, layer: nn.Module) -> None:
        """Sets the values of a layer's adapters as peft does, or to those of files.

        peft may change the weight beside an adapter, too. The weight has its value before.
        """
        if has_no_values():
            return
        flags = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for path, each in list(layer.named_modules()):
                    self._start(path, each)
        except REFUSALS as error:
            raise _refusal(error, self.config) from None
        for name, parameter in layer.named_parameters():
            parameter.data = parameter.data.contiguous()
            parameter.requires_grad_(flags[name])
        if self._files is not None:
            self._files.fill(layer, self.saved)

    def _settle(self, module: Any) -> None:
        """Does now what peft leaves to the first forward, which is on any rank."""
        velora = cast(VeloraConfig | None, self.config.velora_config)
        if velora is not None:
            module.lora_velora_init_type[NAME] = velora.init_type
            module.lora_velora_initialized[NAME] = True
        if self.config.kasa_config is not None:
            module._lora_kasa_truncation_deferred.clear()  # `fill` has cut the weight

    def _start(self, path: str, module: Any) -> None:
        if isinstance(module, LoraLayer):
            module.update_layer(
                NAME,
                module.r[NAME],
                lora_alpha=module.lora_alpha[NAME],
                config=self.config,
                target_name=path,
            )
            self._settle(module)
        elif isinstance(module, TrainableTokensLayer):
            module.update_layer(NAME, token_indices=module.token_indices[NAME])
        elif isinstance(module, ModulesToSaveWrapper):
            module.modules_to_save[NAME].load_state_dict(module.original_module.state_dict())


def _linears(model: nn.Module) -> str:
    kinds = nn.Linear | Conv1D
    found = {name for name, each in model.named_modules() if isinstance(each, kinds)}
    return ", ".join(sorted({name.rpartition(".")[2] for name in found}))


def _check_targets(config: LoraConfig, names: Sequence[str], linears: str) -> None:
    """Refuses a target that no module has. peft has put present names for old ones."""
    targets = config.target_modules or ()
    missing = [each for each in targets if not any(name.endswith(f".{each}") for name in names)]
    if missing:
        raise ConfigError(
            f"lora.target_modules: no linear is named {' or '.join(sorted(missing))}; its linears "
            f"are {linears}"
        )


def _refusal(error: Exception, config: LoraConfig, linears: str = "") -> ConfigError:
    text = first_line(error)
    if "layers_to_transform" in text:
        return ConfigError(
            f"lora.layers_to_transform: no target is in the blocks {config.layers_to_transform}; "
            "blocks have numbers from 0 on"
        )
    if "not found in the base model" in text:
        return ConfigError(f"lora.target_modules: {text} Its linears are {linears}.")
    return ConfigError(f"lora: {text}")


def lora_config(options: LoraOptions) -> LoraConfig:
    """Returns the config of peft that [model.lora] means.

    Raises:
        ConfigError: peft refuses it.
    """
    targets = options.targets
    if options.layers and isinstance(targets, str):
        raise ConfigError(
            'model.lora.layers needs model.lora.targets by name, such as ["q_proj", "v_proj"]'
        )
    try:
        return LoraConfig(
            r=options.r,
            lora_alpha=options.alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            layers_to_transform=list(options.layers) or None,
            lora_dropout=options.dropout,
        )
    except ValueError as error:
        raise ConfigError(f"model.lora: {first_line(error)}") from None


class AdapterFiles:
    """Adapters to go on from.

    Args:
        folder: A folder that peft or dynmo has written.
        names: The names of another class. The adapters may be of either class.

    Attributes:
        config: The config of the adapters.

    Raises:
        ConfigError: A file is missing or damaged, or the adapters are no LoRA.
    """

    def __init__(self, folder: Path, names: Renamed) -> None:
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise ConfigError(f"{folder} has no {name}; give a folder that peft has written")
        try:
            config = PeftConfig.from_pretrained(str(folder))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{folder / CONFIG}: {first_line(error)}") from None
        if not isinstance(config, LoraConfig):
            raise ConfigError(f"{folder / CONFIG} is of {config.peft_type}; dynmo trains LoRA")
        config.inference_mode = False
        self._stored: dict[str, Stored] = dict(header_of(folder / WEIGHTS))
        others = {f"{PREFIX}{other}" for own, other in names.modules.items() if own != other}
        is_other = any(key.partition(".lora_")[0] in others for key in self._stored)
        self._names = names if is_other else Renamed()
        if is_other:
            config = renamed_config(config, names.reversed())
        self.folder, self.config = folder, config

    def check(self, model: nn.Module, saved: Mapping[str, str]) -> None:
        """Checks that the adapters fit a model that has such ones.

        peft may save the embedding beside its adapters.

        Args:
            saved: Names in the file of what is saved, by names in the model.

        Raises:
            ConfigError: They were trained on another base.
        """
        state = model.state_dict()
        wanted = {self._key(key): state[name].shape for name, key in saved.items()}
        known = wanted | {self._key(name): tensor.shape for name, tensor in state.items()}
        for name in sorted(wanted.keys() | self._stored.keys()):
            stored, shape = self._stored.get(name), known.get(name)
            if stored is None:
                problem = f"the file has no {name}"
            elif shape is None:
                problem = f"the file has {name}"
            elif stored.shape != shape:
                problem = f"{name} is {list(stored.shape)}, and the model's is {list(shape)}"
            else:
                continue
            base = self.config.base_model_name_or_path or "unknown"
            raise ConfigError(f"{self.folder} has adapters of another base ({base}): {problem}")

    def fill(self, layer: nn.Module, saved: Mapping[str, str]) -> None:
        """Sets the values of a layer that the file has."""
        with Reader() as reader, torch.no_grad():
            for name, tensor in layer.state_dict().items():
                key = self._key(saved.get(name, name))
                if key in self._stored:
                    tensor.copy_(reader.tensor(self.folder / WEIGHTS, key))

    def _key(self, name: str) -> str:
        return saved_name(name, self._names)


def _problems(lora: object, is_folder: bool) -> Iterator[str]:
    """Yields why no model can have such adapters: it is no LoRA, or has an option that cannot work.

    Args:
        is_folder: Whether the config comes with the values of adapters.
    """
    if not isinstance(lora, LoraConfig):
        yield f"lora is a {type(lora).__name__}; give a peft.LoraConfig, or a folder"
        return
    for name, reason in _REFUSED.items():
        if getattr(lora, name, None):
            yield f"lora.{name}: {reason}"
    init = str(lora.init_lora_weights)
    is_unknown = init == "corda" or init.startswith("pissa_niter")
    if is_folder and is_unknown:
        yield f"lora.init_lora_weights = {init!r}: {_BASE}"
    if init in _INITS and not is_folder:
        yield f"lora.init_lora_weights = {init!r}: {_DATA}"
    velora = lora.velora_config
    if velora is not None and getattr(velora, "init_type", "") == "batch_average_once":
        yield (
            "lora.velora_config.init_type = 'batch_average_once': the first batch would decide on "
            "each rank anew; use 'batch_average' or 'random'"
        )


def renamed_config(config: LoraConfig, names: Renamed) -> LoraConfig:
    """Returns a config whose targets are named one by one, as another class names them.

    So nothing else in that class is a target.

    Args:
        config: The config for the class whose names are replaced.
    """
    made = copy.deepcopy(config)
    modules = [path for path in names.modules if check_target_module_exists(config, path)]
    ends = config.target_parameters or ()
    parameters = [
        name for name in names.parameters if any(f".{name}".endswith(f".{end}") for end in ends)
    ]
    if config.target_modules is not None:
        made.target_modules = sorted(names.modules[path] for path in modules)
    if config.target_parameters is not None:
        made.target_parameters = sorted(names.parameters[name] for name in parameters)
    if config.modules_to_save:
        made.modules_to_save = _ending(config.modules_to_save, names)
    if isinstance(config.trainable_token_indices, dict):
        made.trainable_token_indices = {
            path: indices
            for key, indices in config.trainable_token_indices.items()
            for path in _ending([key], names)
        }
    made.layers_to_transform = made.layers_pattern = made.exclude_modules = None
    every = {path: names.modules[path] for path in modules}
    every |= {name: names.parameters[name] for name in parameters}
    made.rank_pattern = _by_target(config.rank_pattern, every)
    made.alpha_pattern = _by_target(config.alpha_pattern, every)
    return made


def _ending(keys: list[str], names: Renamed) -> list[str]:
    """Returns the modules whose paths end with a key, by their paths in the other class."""
    return sorted(other for path, other in names.modules.items() if path.endswith(tuple(keys)))


def _by_target(pattern: Mapping[str, Any] | None, targets: Mapping[str, str]) -> dict[str, Any]:
    """Returns the value of each target that a pattern matches, by its other name."""
    values = pattern or {}
    keys = {name: get_pattern_key([*values], name) for name in targets}
    return {targets[name]: values[key] for name, key in keys.items() if key in values}
