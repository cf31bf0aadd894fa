"""Each option of peft's LoraConfig in dynmo beside peft: start, two steps, and loading."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import (
    ArrowConfig,
    BdLoraConfig,
    CordaConfig,
    EvaConfig,
    KasaConfig,
    LoraGAConfig,
    LoraRuntimeConfig,
    MontecloraConfig,
    VeloraConfig,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import dynmo
from dynmo.errors import ConfigError
from dynmo.huggingface import from_pretrained, save_pretrained
from dynmo.pipeline.options import grouped
from dynmo.runtime.comm.meeting import Meeting as RankWorld
from tests.models.huggingface.saved_models import folder_of
from tests.models.huggingface.small import make_batch, steps_of
from tests.models.huggingface.tiny import VOCABULARY

STEPS, PARTS = 2, 2


@dataclass(frozen=True)
class Trial:
    """One option with a value.

    Attributes:
        option: Name of the option.
        values: What the config has beside `r`, `lora_alpha` and `target_modules`.
        shown: The value, as the page writes it. Empty: as Python does.
        base: The kind of the model, and what its config has beside its sizes.
    """

    option: str
    values: Mapping[str, Any]
    shown: str = ""
    base: Mapping[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> str:
        return self.shown or repr(self.values[self.option]).replace("'", '"')

    @property
    def name(self) -> str:
        return f"{self.option} = {self.value}"

    def config(self) -> LoraConfig:
        given = {"target_modules": ["q_proj", "v_proj"], **self.values}
        return LoraConfig(**{"r": 4, "lora_alpha": 8, **given})

    def folder(self) -> Path:
        llama = {"kind": "llama", "num_hidden_layers": 3, "attention_bias": True}
        return folder_of(dtype=torch.float32, vocab_size=VOCABULARY, **(dict(self.base) or llama))


def _trial(option: str, value: Any, shown: str = "", base: Any = None, **others: Any) -> Trial:
    return Trial(option, {option: value, **others}, shown, base or {})


_GPT2 = {"kind": "gpt2", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_MIXTRAL = {"kind": "mixtral"}
_TIED = {"kind": "llama", "tie_word_embeddings": True}
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_LOFTQ = {"loftq_bits": 4, "loftq_iter": 1}

TRIALS = (
    _trial("r", 2),
    _trial("lora_alpha", 3),
    _trial("lora_dropout", 0.1),
    _trial("target_modules", ["q_proj", "down_proj"]),
    _trial("target_modules", "all-linear"),
    _trial("target_modules", ["embed_tokens", "q_proj"]),
    _trial("target_modules", ["lm_head", "q_proj"]),
    _trial("exclude_modules", ["v_proj"]),
    _trial("fan_in_fan_out", True, base=_GPT2, target_modules=["c_attn", "c_fc"]),
    _trial("fan_in_fan_out", False, base=_GPT2, target_modules=["c_attn", "c_fc"]),
    _trial("bias", "all"),
    _trial("bias", "lora_only"),
    _trial("use_rslora", True),
    _trial("modules_to_save", ["lm_head"]),
    _trial("modules_to_save", ["embed_tokens", "norm"]),
    _trial("modules_to_save", ["layers.1.mlp"]),
    _trial("init_lora_weights", False),
    _trial("init_lora_weights", "gaussian"),
    _trial("init_lora_weights", "pissa"),
    _trial("init_lora_weights", "pissa_niter_2"),
    _trial("init_lora_weights", "olora"),
    _trial("init_lora_weights", "orthogonal"),
    _trial("init_lora_weights", "mica"),
    _trial("init_lora_weights", "loftq", loftq_config=_LOFTQ),
    _trial("init_lora_weights", "eva"),
    _trial("init_lora_weights", "corda"),
    _trial("init_lora_weights", "lora_ga"),
    _trial("loftq_config", _LOFTQ, init_lora_weights="loftq"),
    _trial("eva_config", EvaConfig(), "EvaConfig()", init_lora_weights="eva"),
    _trial("corda_config", CordaConfig(), "CordaConfig()", init_lora_weights="corda"),
    _trial("lora_ga_config", LoraGAConfig(), "LoraGAConfig()", init_lora_weights="lora_ga"),
    _trial("layers_to_transform", [1]),
    _trial("layers_pattern", "layers", layers_to_transform=[0]),
    _trial("rank_pattern", {"q_proj": 2}),
    _trial("alpha_pattern", {"q_proj": 2}),
    _trial("megatron_config", {"hidden_size": 32}),
    _trial("megatron_core", "megatron.core"),
    _trial("trainable_token_indices", [1, 5, 7]),
    _trial("trainable_token_indices", {"lm_head": [1, 5]}),
    _trial("trainable_token_indices", [1, 5, 7], "[1, 5, 7], tied weights", base=_TIED),
    _trial("use_dora", True),
    _trial("use_dora", True, 'True, init_lora_weights="pissa"', init_lora_weights="pissa"),
    _trial("use_dora", True, "True, on an embedding", target_modules=["embed_tokens", "q_proj"]),
    _trial("velora_config", VeloraConfig(num_groups=4), "VeloraConfig()"),
    _trial(
        "velora_config",
        VeloraConfig(num_groups=4, init_type="random"),
        'VeloraConfig(init_type="random")',
    ),
    _trial(
        "velora_config",
        VeloraConfig(num_groups=4, init_type="batch_average_once"),
        'VeloraConfig(init_type="batch_average_once")',
    ),
    _trial("alora_invocation_tokens", [3, 4]),
    _trial("use_qalora", True),
    _trial("qalora_group_size", 8),
    _trial("monteclora_config", MontecloraConfig(), "MontecloraConfig()"),
    _trial("layer_replication", [[1, 3], [0, 2]]),
    _trial("runtime_config", LoraRuntimeConfig(), "LoraRuntimeConfig()"),
    _trial("lora_bias", True),
    _trial("target_parameters", _EXPERTS, base=_MIXTRAL, target_modules=[]),
    _trial(
        "use_bdlora",
        BdLoraConfig(target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj"], nblocks=2),
        "BdLoraConfig()",
        target_modules=["o_proj", "q_proj"],
    ),
    _trial("arrow_config", ArrowConfig(), "ArrowConfig()"),
    _trial("kasa_config", KasaConfig(), "KasaConfig()"),
    _trial(
        "ensure_weight_tying",
        True,
        "True, modules_to_save",
        base=_TIED,
        modules_to_save=["embed_tokens"],
    ),
    _trial(
        "ensure_weight_tying",
        True,
        "True, trainable_token_indices",
        base=_TIED,
        trainable_token_indices=[1, 5],
    ),
    _trial(
        "ensure_weight_tying",
        True,
        "True, adapters on the embedding",
        base=_TIED,
        target_modules=["embed_tokens", "q_proj"],
    ),
)


@dataclass
class Told:
    """What an option gives.

    Attributes:
        reason: Why it is refused. Empty if it works.
        start: What differs from peft before the first step.
        steps: Largest difference from peft in two steps, as a share of the loss or the weight.
        loaded: The same of the loss, once peft and dynmo have loaded what was saved.
    """

    reason: str = ""
    start: list[str] = field(default_factory=list)
    steps: float = 0.0
    loaded: float = 0.0


def told(trial: Trial) -> Told:
    """Compares dynmo with peft in one process."""
    with warnings.catch_warnings(), _loftq_on_cpu():
        warnings.simplefilter("ignore")
        return _told(trial)


@contextmanager
def _loftq_on_cpu() -> Generator[None]:
    """Rounds in place of LoftQ's quantization, for which peft needs a GPU and two packages."""

    def rounded(weight: Tensor, reduced_rank: int, **_: int) -> tuple[Tensor, Tensor, Tensor]:
        low = weight.detach().to(torch.float8_e4m3fn).float()
        u, s, v = torch.linalg.svd(weight.detach() - low, full_matrices=False)
        root = s[:reduced_rank].sqrt().diag()
        return low, root @ v[:reduced_rank], u[:, :reduced_rank] @ root

    with (
        patch("peft.tuners.lora.layer.loftq_init", rounded),
        patch("importlib.util.find_spec", lambda name, *_: name == "scipy" or find_spec(name)),
    ):
        yield


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)


def _told(trial: Trial) -> Told:
    try:
        model = from_pretrained(trial.folder(), lora=trial.config())
    except ConfigError as error:
        return Told(str(error))
    with dynmo.init(device="cpu") as world:
        pipeline = dynmo.Pipeline(
            model,
            world,
            microbatches=PARTS,
            optimizer=sgd,
            training=dynmo.Training(max_grad_norm=1e9),
        )
        state = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
        plain = _peft(trial, 1)
        found = Told(start=list(_differences(state, plain, _peft(trial, 2))))
        if not found.start and not trial.values.get("lora_dropout"):
            plain.load_state_dict(state)
            found.steps = _far_in_steps(pipeline, plain)
        found.loaded = _far_once_loaded(trial, pipeline, world)
    return found


def _base(trial: Trial) -> Any:
    return AutoModelForCausalLM.from_pretrained(trial.folder(), dtype=torch.float32)


def _peft(trial: Trial, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made: Any = get_peft_model(_base(trial), trial.config())
    return made.base_model.model


def _differences(state: Mapping[str, Tensor], one: nn.Module, other: nn.Module) -> Iterator[str]:
    """What peft does not draw has peft's values. What it draws has peft's spread."""
    wanted = one.state_dict()
    yield from sorted(state.keys() ^ wanted.keys())
    for name, tensor in other.state_dict().items():
        if torch.equal(tensor, wanted[name]):
            if not torch.equal(state[name], tensor):
                yield name
        elif tensor.numel() > 16 and not 0.5 < (state[name].std() / tensor.std()).item() < 2:
            yield name


def _far(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)).item()


def _far_in_steps(pipeline: dynmo.Pipeline, plain: nn.Module) -> float:
    optimizer, far = sgd([p for p in plain.parameters() if p.requires_grad]), 0.0
    plain.train()
    for step in range(STEPS):
        batch, total = make_batch(step, padded=False), 0.0
        optimizer.zero_grad()
        for ids in batch["input_ids"].chunk(PARTS):
            loss = plain(input_ids=ids, labels=ids, use_cache=False).loss / PARTS
            loss.backward()
            total += loss.item()
        optimizer.step()
        far = max(far, abs(pipeline.step(batch).loss / total - 1))
    state = pipeline.state_dict()
    return max(far, *(_far(state[name], tensor) for name, tensor in plain.state_dict().items()))


def _far_once_loaded(trial: Trial, pipeline: dynmo.Pipeline, world: dynmo.World) -> float:
    for step in range(STEPS):
        pipeline.step(make_batch(step, padded=False))
    batch = make_batch(9, padded=False)
    loss = pipeline.evaluate(batch)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(pipeline, folder)
        torch.manual_seed(3)
        loaded = PeftModel.from_pretrained(_base(trial), folder).eval()
        again = dynmo.Pipeline(
            from_pretrained(trial.folder(), lora=folder), world, microbatches=PARTS
        )
    with torch.no_grad():
        parts = [loaded(input_ids=x, labels=x).loss for x in batch["input_ids"].chunk(PARTS)]
    found = (sum(part.item() / PARTS for part in parts), again.evaluate(batch))
    return max(abs(each / loss - 1) for each in found)


def train(
    world: RankWorld, name: str, base: str, move: list[int] | None = None, **options: Any
) -> dict[str, Any]:
    """Trains with an option, for the pool of ranks."""
    trial = next(each for each in TRIALS if each.name == name)
    with warnings.catch_warnings(), _loftq_on_cpu():
        warnings.simplefilter("ignore")
        model = from_pretrained(base, lora=trial.config())
        pipeline = dynmo.Pipeline(
            model,
            world,
            microbatches=4,
            optimizer=sgd,
            **grouped({"max_grad_norm": 1e9, **options}),
        )
        return steps_of(pipeline, 3, False, None if move is None else tuple(move))
