"""Writes the figures of examples/recipes and of docs/how-to/recipes.md. It takes some minutes.

python -m docs.tools.recipes                 # writes them
python -m docs.tools.recipes --folders DIR   # the folders of the models, with a config alone

Memory is that of the dry run. Speed is an estimate: products of matrices at a share of the card's
FLOP/s, without attention and messages, on the placement that `dynmo plan` finds for these times.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from docs.tools.reference import table
from dynmo import load_model
from dynmo.config import Config, load
from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost
from dynmo.models.flops import product_weights
from dynmo.models.model import Model
from dynmo.pipeline.dry_run import first_plan
from dynmo.pipeline.results import peak_of
from dynmo.pipeline.shape_costs import known_costs
from dynmo.plan.alternatives import plan_or_suggest
from dynmo.plan.problem import Allowed, Problem, Work
from dynmo.schedule.bounds import Objective

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))
PAGE = ROOT / "docs" / "how-to" / "recipes.md"
SHARE = 0.4
"""Share of the card's FLOP/s that products of matrices are assumed to reach."""

_MARK, _END = "<!-- recipes -->", "<!-- end of recipes -->"
_HEAD = ("model", "method", "cards", "fullest rank", "estimated tokens/s", "file")
_FIRST = re.compile(r"# (.+), (LoRA|full fine-tuning), (\d+) x ([\w ]+) \((\d+) GB\): .+")

_LLAMA: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA_8B = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_MISTRAL: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_window": None,
}

# The published sizes of each model, by the name of its folder: type of transformers and config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": ("llama", _LLAMA_8B),
    "Llama-3.1-8B-Instruct": ("llama", _LLAMA_8B),
    "Llama-3.1-70B-Instruct": (
        "llama",
        _LLAMA
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
    "Qwen3-14B": (
        "qwen3",
        _QWEN3 | {"intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    ),
    "Qwen3-32B": (
        "qwen3",
        _QWEN3 | {"intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    ),
    "Mistral-7B-v0.3": ("mistral", _MISTRAL | {"vocab_size": 32768}),
    "Mixtral-8x7B-Instruct-v0.1": (
        "mixtral",
        _MISTRAL | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "gemma-2-9b-it": (
        "gemma2",
        {
            "vocab_size": 256000,
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    ),
    "phi-4": (
        "phi3",
        {
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 25e4},
            "sliding_window": None,
            "bos_token_id": 100257,
            "eos_token_id": 100265,
            "pad_token_id": 100349,
        },
    ),
    "OLMo-2-1124-13B": (
        "olmo2",
        {
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "eos_token_id": 100257,
            "pad_token_id": 100277,
        },
    ),
}


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    """Makes the config of a model with its published sizes, or with some of them changed."""
    kind, sizes = MODELS[name]
    return AutoConfig.for_model(kind, **{**sizes, **changes})


def write_folders(folder: Path) -> None:
    """Writes the folder of each model, with config.json alone."""
    for name in MODELS:
        config_of(name).save_pretrained(folder / name)


@dataclass(frozen=True)
class Recipe:
    """A recipe and its figures.

    Attributes:
        memory: Bytes of the fullest rank by the dry run.
        limit: Bytes that a rank may have.
        tokens_per_s: The estimate of all cards together.
    """

    path: Path
    memory: int
    limit: int
    tokens_per_s: float

    @property
    def memory_text(self) -> str:
        return f"{self.memory / 2**20:,.1f} of {self.limit / 2**20:,.1f} MiB"

    @property
    def speed_text(self) -> str:
        return f"{float(f'{self.tokens_per_s:.2g}'):,.0f}"

    def filled(self) -> str:
        """Returns the text of the file with its figures."""
        text = self.path.read_text()
        text = re.sub(r"# Fullest rank: .+ \(", f"# Fullest rank: {self.memory_text} (", text)
        return re.sub(r"# Estimate: \S+ tokens", f"# Estimate: {self.speed_text} tokens", text)

    def row(self) -> tuple[str, ...]:
        name, method, cards, card, size = first_line(self.path)
        file = f"[{self.path.stem}](../../examples/recipes/{self.path.name})"
        kind = f"{cards} x {card} ({size} GB)"
        return (name, method, kind, self.memory_text, self.speed_text, file)


def first_line(path: Path) -> tuple[str, ...]:
    """Returns model, method, number, name and GB of the cards, from a recipe's first line."""
    found = _FIRST.fullmatch(path.read_text().splitlines()[0])
    assert found, f"{path.name} begins with no line such as {_FIRST.pattern}"
    return found.groups()


def measure(path: Path) -> Recipe:
    """Finds the figures of a recipe. The model's folder is in the working folder."""
    config = load(path, [])
    with torch.device("meta"):
        model = load_model(config.model, config.seed)
    costs, unknown = known_costs(config.options, model)
    assert unknown is None, unknown
    plan = first_plan(config.options, model, costs)
    assert isinstance(plan.limit, int)
    card = first_line(path)[3]
    rate = _tokens_per_s(config, model, costs, plan.schedule, card)
    return Recipe(path, max(plan.memory), plan.limit, rate)


def _tokens_per_s(
    config: Config, model: Model, costs: tuple[LayerCost, ...], schedule: str, card: str
) -> float:
    options, train = config.options, config.train
    peak = peak_of(card, train.precision)
    assert peak is not None, f"the FLOP/s of {card} are unknown"
    timed = tuple(_timed(model, costs, SHARE * peak, train.micro_batch * config.model.sequence))
    problem = Problem(
        Profile(timed, model.names, microbatch=train.micro_batch),
        Work(Objective.MAKESPAN),
        options.memory_limit,
    )
    mesh = problem.mesh(options.pipeline, options.microbatches, schedule, options.replicas)
    allowed = Allowed(options.pipeline, train.global_batch, recompute="auto")
    seconds = plan_or_suggest(problem, mesh, allowed).seconds
    return train.global_batch * config.model.sequence / seconds


def _timed(
    model: Model, costs: tuple[LayerCost, ...], rate: float, tokens: int
) -> Iterator[LayerCost]:
    """Yields costs with seconds. A frozen prefix has no B, and a frozen weight no W."""
    trains = False
    for cost, layer in zip(costs, model.build(()), strict=True):
        seconds = 2 * tokens * (product_weights(model, [layer]) or 0) / rate
        trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
        w = seconds * trained / max(1, cost.parameters)
        yield replace(cost, f=seconds, b=seconds * trains, w=w)
        trains = trains or trained > 0


def measured() -> Iterator[Recipe]:
    """Yields all recipes with their figures."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_folders(Path(folder))
        yield from map(measure, RECIPES)


def write() -> None:
    rows = list[tuple[str, ...]]()
    for recipe in measured():
        recipe.path.write_text(recipe.filled())
        rows.append(recipe.row())
        print(" | ".join(rows[-1]), flush=True)
    before, _, rest = PAGE.read_text().partition(_MARK)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_MARK}\n\n{table(_HEAD, rows)}\n\n{_END}{after}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--folders"]:
        write_folders(Path(sys.argv[2]))
    else:
        write()
