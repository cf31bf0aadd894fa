"""A causal language model of transformers as a list of layers."""

from __future__ import annotations

import copy
import importlib
import logging
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from dynmo.counterparts import counterpart
from dynmo.errors import ConfigError, first_line, not_installed
from dynmo.kernels.seeds import Purpose, mix
from dynmo.kernels.torch_private import unset_fake_temporarily
from dynmo.models.huggingface.build import (
    Builder,
    Freeze,
    frozen_layers,
    layer_specs,
)
from dynmo.models.huggingface.halves import BlockHalves, halves_of
from dynmo.models.huggingface.kinds import LayerKinds
from dynmo.models.huggingface.layers import HuggingFaceLayer, TypesAt
from dynmo.models.huggingface.load import Weights, has_weights, weights_of
from dynmo.models.huggingface.names import FolderClass, folder_class_of
from dynmo.models.huggingface.private import initialise, types_after_loading
from dynmo.models.huggingface.probe import (
    ModelStructure,
    UnfitModelError,
    find_blocks,
    structure_of,
)
from dynmo.models.huggingface.router import RouterLoss, router_loss_of
from dynmo.models.huggingface.rows import check_rows
from dynmo.models.huggingface.stubs import has_no_values
from dynmo.models.loss import Loss, causal_lm_loss, count_labels, is_sum
from dynmo.models.model import Model, check_loss
from dynmo.models.options import ModelOptions

if TYPE_CHECKING:
    from peft import LoraConfig

_logger = logging.getLogger(__name__)

INPUTS = ("input_ids", "attention_mask", "position_ids")

BlockCut = Literal["auto", "blocks"]

# Keys of a configuration file, by the arguments in Python.
_KEYS = {
    "lora.target_modules": "model.lora.targets",
    "lora.layers_to_transform": "model.lora.layers",
}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel(Model):
    """A causal language model of transformers. `from_pretrained` makes it.

    Its parameters have the names that transformers gives them.

    Attributes:
        config: The configuration of transformers.
        structure: The parts of the model, on the meta device.
        folder: The folder that the weights are read from. None means that they are drawn.
        lora: The config of the model's adapters, if it has some.
        saved: Names that peft gives what is saved of such a model, by names in the model.
        weights: The weights in that folder.
        whole: Why blocks are not cut into halves: reason by index of the block.
        types: The types of its tensors in each precision.
        folder_class: The class that the folder names.
    """

    config: PreTrainedConfig
    structure: ModelStructure
    folder: Path | None = None
    lora: LoraConfig | None = None
    saved: Mapping[str, str] = field(default_factory=dict)
    weights: Weights | None = None
    whole: Mapping[int, str] = field(default_factory=dict)
    types: TypesAt
    folder_class: FolderClass

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Nothing, since parameters have their names in the whole model."""
        return ("",) * self.layers


def from_pretrained(  # noqa: PLR0913
    source: str | Path | PreTrainedConfig,
    *,
    cut: BlockCut = "auto",
    lora: LoraConfig | str | Path | None = None,
    float32_adapters: bool = False,
    saves_base: bool | None = None,
    freeze: Iterable[Freeze] = (),
    train_last: int | None = None,
    sequence: int = 256,
    seed: int = 0,
    trust_remote_code: bool = False,
    loss: Loss = causal_lm_loss,
    cases: Iterable[Any] = (),
    **config_values: Any,
) -> HuggingFaceModel:
    """Makes a model for `dynmo.Pipeline` of a causal language model of transformers.

    The model's own code runs. Each layer is the embedding, a block or half a block, or the output
    layer. A rank reads the weights of its own layers.

    Args:
        source: A folder with a config and safetensors, or a config. The weights of a config are
            drawn as transformers draws them.
        cut: "auto" cuts a block into an attention half and a feed-forward half if a probe proves
            that it can be. "blocks" leaves blocks whole.
        lora: Adapters of peft, or the folder of adapters to go on from. All other weights are then
            frozen.
        float32_adapters: Whether adapters stay in float32 in any `precision` of the pipeline.
        saves_base: Whether checkpoints have frozen weights. If not, they have the folder and a
            hash of each. None saves them if there are no adapters.
        freeze: Blocks by index, and layers by name, that do not train: `("embedding", range(8))`.
        train_last: Number of last blocks that train, with the output layer. All else is frozen.
        sequence: Tokens of a row, for the account of memory before a step has run.
        seed: Seed of weights that are drawn, and of adapters.
        trust_remote_code: Whether to run Python code that the folder has.
        loss: Takes logits [rows, tokens, vocabulary] and labels [rows, tokens], and returns the
            mean over the labels from the second on that are not -100. A loss with
            `reduction="sum"`, an argument or an attribute as in torch, is added up instead.
        cases: Options of the dynamic cases of the run. Some need other layers.
        config_values: Values that replace those of the config, such as
            `output_router_logits=True`, which adds the loss of the routers.

    Returns:
        The model. `pipeline.step` takes `{"input_ids": ..., "labels": ...}`, and
        `attention_mask` and `position_ids`. Labels are those of transformers: not shifted, and
        -100 does not count.

    Raises:
        ConfigError: The folder has no such model, or it cannot be cut into layers.
    """
    if isinstance(source, PreTrainedConfig):
        folder, config = None, copy.deepcopy(source)
    else:
        folder, config = Path(source), read_config(Path(source), trust_remote_code)
    _replace(config, config_values)
    where = folder or type(config).__name__
    made_in = partial(meta_model, where, config, trust_remote_code)
    model = made_in()
    if _stop_checkpointing(model) and os.environ.get("RANK", "0") == "0":
        _logger.warning(
            "gradient_checkpointing in the model's config is switched off; use train.recompute in "
            "a file, or recompute= in Python"
        )
    weights = weights_of(folder, model, seed) if folder is not None else None
    with one_line(where):
        stored, used = ((), {}) if weights is None else (weights.stored, weights.names)
        folder_class = folder_class_of(config, model, stored, used)
    adapters = None
    if lora is not None:
        adapters = _adapters_module().Adapters(model, lora, folder, folder_class.names)
        if adapters.blocks is not None and weights is not None:
            weights.repeat(find_blocks(model), adapters.blocks)

    types = _types_of(model, made_in)
    router = router_loss_of(model)
    if router is not None:
        # dynmo sums it over the layers. The model's own forward need not.
        model.config.get_text_config().output_router_logits = False
    structure = _structure(model)
    kinds = _kinds_of(structure, config, cases)
    halves = _halves(structure, cut, kinds)
    cuts = [each if isinstance(each, BlockHalves) else None for each in halves]
    specs = layer_specs(cuts, kinds.heads)

    is_own = loss is not causal_lm_loss
    if is_own:
        _check_own_loss(loss, router, kinds)
    check_loss("from_pretrained", loss, ())
    builder = Builder(
        structure,
        specs,
        _Fill(model, seed, weights, adapters),
        router,
        types,
        frozen_layers(specs, freeze, train_last),
        float32_adapters,
        None
        if folder is None or (lora is None if saves_base is None else saves_base)
        else str(folder),
        kinds,
    )
    if not any(p.requires_grad for layer in builder.build(()) for p in layer.parameters()):
        raise ConfigError("nothing is left to train; freeze less")
    text = config.get_text_config()
    return HuggingFaceModel(
        names=tuple(spec.name for spec in specs),
        build=builder.build,
        loss=kinds.loss(loss, router)
        if kinds.loss is not None
        else loss
        if router is None
        else partial(router.whole, loss=loss),
        router_loss=None if router is None else router.part,
        piece_loss=None if router is None or is_own or kinds.loss else router.of_pieces,
        tied=builder.tied(),
        code=(type(model).__module__,),
        options=ModelOptions(
            kind="hf", path=str(folder or ""), vocab=text.vocab_size, sequence=sequence
        ),
        takes_targets=kinds.takes_labels,
        inputs=INPUTS,
        gaps=True,
        check=partial(check_rows, vocab=text.vocab_size),
        count=None if is_sum(loss) else count_labels,
        config=config,
        structure=structure,
        folder=folder,
        lora=None if adapters is None else adapters.config,
        saved={} if adapters is None else adapters.saved,
        weights=weights,
        whole={index: each for index, each in enumerate(halves) if isinstance(each, str)},
        types=types,
        folder_class=folder_class,
    )


def _halves(structure: ModelStructure, cut: BlockCut, kinds: LayerKinds) -> list[BlockHalves | str]:
    """Returns how each block is cut, or why it stays whole."""
    if cut not in ("auto", "blocks"):
        raise ConfigError(f'cut = {cut!r}; use "auto" or "blocks"')
    if cut == "blocks":
        return ["cut is 'blocks'"] * structure.count
    return [
        "a case takes it whole" if index in kinds.whole else halves_of(structure, index)
        for index in range(structure.count)
    ]


@dataclass(frozen=True)
class _Fill:
    """Sets the values of layers.

    Attributes:
        model: The model on the meta device.
        seed: Seed of what is drawn.
        weights: The weights in the model's folder. None draws all.
        adapters: The adapters, if there are some.
    """

    model: PreTrainedModel
    seed: int
    weights: Weights | None
    adapters: Any

    def __call__(self, index: int, layer: nn.Module) -> None:
        assert isinstance(layer, HuggingFaceLayer)
        of_folder = layer.of_folder
        torch.manual_seed(mix(self.seed, Purpose.INITIAL, index))
        if self.weights is None:
            initialise(self.model, of_folder)
        else:
            self.weights.fill(index, of_folder)
        if self.adapters is not None:
            self.adapters.fill(of_folder)
        if of_folder is not layer and not has_no_values():
            layer.take(of_folder)
            layer.start_own()
            self._read_own(layer, of_folder)

    @torch.no_grad()
    def _read_own(self, layer: nn.Module, of_folder: nn.Module) -> None:
        """Reads what cases have added to a layer, if an export of such a model has it."""
        known = {id(each) for each in of_folder.state_dict(keep_vars=True).values()}
        own = {n: x for n, x in layer.state_dict(keep_vars=True).items() if id(x) not in known}
        if self.weights is not None:
            for name, value in self.weights.read_beside(own.keys() & self.weights.beside.keys()):
                own[name].copy_(value)


def _check_own_loss(loss: Loss, router: RouterLoss | None, kinds: LayerKinds) -> None:
    if router is not None and is_sum(loss):
        raise ConfigError(
            "the loss is a sum, and the model adds the mean loss of its routers; let the loss "
            "return a mean, or set output_router_logits=False"
        )
    if kinds.loss is not None:
        raise ConfigError(
            "a case adds up the losses of several heads, and knows only the usual loss of each; "
            "leave out the loss, or the case"
        )


def _kinds_of(
    structure: ModelStructure, config: PreTrainedConfig, cases: Iterable[Any]
) -> LayerKinds:
    """Returns what makes the layers, as the options of cases change it in their turns."""
    std = getattr(config.get_text_config(), "initializer_range", 0.02)
    kinds = LayerKinds(structure.count, structure.hidden.shape[-1], std)
    changing = [case for case in cases if hasattr(case, "hugging_face_layers")]
    for case in sorted(changing, key=lambda case: case.turn):
        kinds: LayerKinds = case.hugging_face_layers(kinds)
    return kinds


def make(
    options: ModelOptions,
    seed: int,
    loss: Loss | None = None,
    cases: Iterable[Any] = (),
    *,
    only_shapes: bool = False,
) -> HuggingFaceModel:
    """Makes the model that a configuration file names.

    Args:
        options: The section `model` of the file.
        seed: Seed of weights that are drawn, and of adapters.
        loss: As `from_pretrained` takes it.
        cases: As `from_pretrained` takes them.
        only_shapes: Whether a folder with a config alone is enough.
    """
    if not options.path:
        raise ConfigError('model.kind = "hf" needs model.path, the folder of a transformers model')
    lora = options.lora
    source: str | PreTrainedConfig = options.path
    if only_shapes and not has_weights(Path(source)):
        source = read_config(Path(source), options.trust_remote_code)
        _logger.warning(
            f"{options.path} has no weights, and a plan needs none; download them before you train"
        )
    try:
        model = from_pretrained(
            source,
            cut=options.cut,
            lora=None if lora is None else _adapters_module().lora_config(lora),
            float32_adapters=lora is not None and lora.float32,
            saves_base=options.saves_base,
            train_last=options.train_last,
            seed=seed,
            trust_remote_code=options.trust_remote_code,
            loss=loss or causal_lm_loss,
            cases=cases,
        )
    except ConfigError as error:  # of an argument in Python, where the file has a key
        name, colon, rest = str(error).partition(":")
        raise ConfigError(f"{_KEYS.get(name, name)}{colon}{rest}") from error
    text = model.config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < options.sequence:
        raise ConfigError(
            f"model.sequence = {options.sequence}, but {options.path} has {most} positions "
            f"(max_position_embeddings in its config.json); use {most} or less"
        )
    found = {"vocab": text.vocab_size, "dropout": _dropout(model.structure.model)}
    return replace(model, options=options.model_copy(update=found))


def _types_of(model: PreTrainedModel, make: Callable[[torch.dtype], PreTrainedModel]) -> TypesAt:
    """Returns the types after `from_pretrained(dtype=...)` of transformers in each precision.

    Some models keep some tensors in float32.
    """

    @cache
    def types(dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        with unset_fake_temporarily():
            return types_after_loading(make(dtype), dtype, tied)

    return types


def disk_bytes(model: HuggingFaceModel) -> tuple[int, ...]:
    """Returns the bytes in files that each layer is read from. 0 if weights are drawn.

    A weight that two layers share counts for both.
    """
    if model.weights is None:
        return (0,) * model.layers
    return tuple(model.weights.bytes_of(layer) for layer in model.build(()))


def _replace(config: PreTrainedConfig, values: Mapping[str, Any]) -> None:
    text = config.get_text_config()
    for name, value in values.items():
        if not hasattr(text, name):
            advice = counterpart(name, python=True) or "see the model's config.json"
            raise ConfigError(f"{type(text).__name__} has no {name}; {advice}")
        setattr(text, name, value)


def _dropout(model: nn.Module) -> float:
    """Returns the largest probability of dropout in the model's code."""
    modules = [x for x in model.modules() if isinstance(x, nn.modules.dropout._DropoutNd)]
    attention = [getattr(x, "attention_dropout", 0.0) for x in model.modules()]
    return max(0.0, *(x.p for x in modules), *(x for x in attention if isinstance(x, float)))


def _stop_checkpointing(model: nn.Module) -> bool:
    """Turns transformers' own recomputation off. Returns whether it was on."""
    asking = [x for x in model.modules() if getattr(x, "gradient_checkpointing", False)]
    for module in asking:
        setattr(module, "gradient_checkpointing", False)  # noqa: B010 (a module of any class)
    return bool(asking)


def _structure(model: PreTrainedModel) -> ModelStructure:
    try:
        return structure_of(model)
    except UnfitModelError as error:
        name = type(model).__name__
        raise ConfigError(
            f"{name} cannot be cut into layers: {error}; cut it by hand, as layers of "
            "dynmo.Sequential"
        ) from None


def read_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Returns the config of a folder.

    Raises:
        ConfigError: There is none, or dynmo cannot train its model.
    """
    if not folder.is_dir():
        where = "on this machine" if folder.is_absolute() else f"in {Path.cwd()}"
        near = get_close_matches(folder.name, [each.name for each in folder.parent.glob("*/")], 1)
        advice = "download the model, and give its folder"
        if near:
            advice = f"did you mean {folder.with_name(near[0])}?"
        raise ConfigError(f"{folder} is no folder {where}; {advice}")
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
        raise ConfigError(f"{where}: {type(error).__name__}: {first_line(error)}") from error


def _adapters_module() -> ModuleType:
    """Imports what needs peft."""
    try:
        return importlib.import_module("dynmo.models.huggingface.adapters")
    except ImportError as error:
        raise ConfigError(not_installed("peft")) from error
