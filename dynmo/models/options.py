"""Options of dynmo's own models: `dynmo.ModelOptions`, and the section [model]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from dynmo.options import (
    OWN,
    BelowOne,
    Count,
    Listed,
    NonNegative,
    Options,
    Positive,
    Whole,
    written,
)
from dynmo.plan.partition import nearest_divisors

OneTime: TypeAlias = Annotated[float, Field(ge=0, le=1e9)]
Seconds: TypeAlias = OneTime | Listed[OneTime]

# Keys of [model] that only one kind has. All kinds have the others.
_OF_GPT = ("blocks", "hidden", "heads", "dropout", "tied", "init_std")
_OF_EXPERTS = (
    "experts",
    "top_k",
    "shared_experts",
    "moe_every",
    "routing",
    "router_loss",
    "bias_rate",
    "capacity_factor",
)
KEYS_OF_KIND: dict[str, tuple[str, ...]] = {
    "gpt": _OF_GPT,
    "moe": (*_OF_GPT, *_OF_EXPERTS),
    "emulated": ("layers", "f", "b", "w", "bytes", "speeds"),
    "hf": ("path", "cut", "trust_remote_code", "train_last", "lora", "saves_base"),
}
# Keys of all other kinds. The folder says what they are.
_NOT_OF_HF = ("vocab",)


def keys_of_other_kinds(kind: str) -> frozenset[str]:
    """The keys of [model] that a model of this kind does not have."""
    own = KEYS_OF_KIND.get(kind, ())
    strange = [key for keys in KEYS_OF_KIND.values() for key in keys if key not in own]
    return frozenset([*strange, *(_NOT_OF_HF if kind == "hf" else ())])


class LoraOptions(Options):
    """Adapters of a model of transformers, as peft makes them. All other weights are frozen."""

    r: Count = 16
    """Width of an adapter."""
    alpha: Count = 32
    """An adapter's output counts `alpha / r` times."""
    targets: Literal["all-linear"] | Listed[str] = "all-linear"
    """Names of the linears that get adapters, such as `["q_proj", "v_proj"]`. `all-linear` is all
    but the output layer."""
    layers: Listed[Whole] = ()
    """Blocks whose linears get adapters. Empty means all. Needs `targets` by name."""
    dropout: BelowOne = 0.0
    """Probability that an adapter's input is dropped."""
    float32: bool = False
    """Whether adapters stay in float32 in any `train.precision`."""


class ModelOptions(Options):
    """The model that is trained.

    `KEYS_OF_KIND` has the keys that belong to one kind only.
    """

    kind: (
        Literal["gpt", "moe", "emulated", "hf"]
        | Annotated[str, written(OWN, "python:package.module:function")]
    ) = "gpt"
    """`gpt`, `moe` (a GPT with experts), `emulated` (layers that sleep), `hf` (a folder of
    transformers), or your own: `python:package.module:function`."""
    blocks: Count = 8
    """Number of transformer blocks. Each block is two layers: attention and feed-forward."""
    hidden: Count = 256
    """Width of the residual stream. A multiple of `heads`."""
    heads: Count = 4
    """Number of attention heads."""
    vocab: Count = 256
    """Number of different tokens. The data are bytes, so 256 is enough. The folder of `hf` has
    its own."""
    sequence: Count = 256
    """Tokens in a sequence."""
    dropout: BelowOne = 0.0
    """Probability that dropout sets an activation to zero."""
    tied: bool = False
    """Whether the embedding and the head share one weight."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights."""
    experts: Count = 8
    """Number of experts of a feed-forward half."""
    top_k: Count = 2
    """Experts that compute a token."""
    shared_experts: Whole = 0
    """Experts that compute every token."""
    moe_every: Count = 1
    """Every so many-th block has experts."""
    routing: Literal["aux-loss", "sinkhorn", "auction", "bias"] = "aux-loss"
    """How the load of the experts is kept even: by a loss, by a balanced assignment (`sinkhorn`,
    `auction`), or by a bias of each expert."""
    router_loss: NonNegative = 0.01
    """Weight of the loss of `routing = "aux-loss"`."""
    bias_rate: NonNegative = 0.001
    """Change of a bias in a step with `routing = "bias"`."""
    capacity_factor: Positive | None = None
    """Most tokens of an expert, over the mean. What is over it is dropped. Not set: nothing."""
    layers: Count = 8
    """Number of layers of the emulated model."""
    f: Seconds = 0.01
    """Seconds of F, the forward. One number for all layers, or one per layer."""
    b: Seconds = 0.01
    """Seconds of B, the gradient of the input. One number for all layers, or one per layer."""
    w: Seconds = 0.01
    """Seconds of W, the gradient of the weights. One number for all layers, or one per layer."""
    bytes: Count = 65536
    """Bytes of a message between two stages of the emulated model."""
    speeds: Listed[Positive] = ()
    """Speed of each process that emulates layers. Not set: all are 1. One of 0.5 takes twice the
    seconds."""
    path: str = ""
    """Folder of a causal language model of transformers: a config and safetensors."""
    cut: Literal["auto", "blocks"] = "auto"
    """`auto` cuts blocks into halves if a probe proves that it can be. `blocks` does not."""
    trust_remote_code: bool = False
    """Whether to run Python code that the folder of the model has."""
    train_last: Whole | None = None
    """Number of last blocks that train, with the output layer. Not set: all train."""
    lora: LoraOptions | None = None
    """Adapters that train instead of the weights. Not set: none."""
    saves_base: bool | None = None
    """Whether checkpoints have frozen weights. If not, they have the folder and a hash of each. Not
    set: they do without `lora`."""

    @model_serializer(mode="wrap")
    def _without_other_kinds(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        others = keys_of_other_kinds(self.kind)
        return {key: value for key, value in write(self).items() if key not in others}

    @property
    def is_gpt(self) -> bool:
        """True if the model is a GPT, with experts or without."""
        return self.kind in ("gpt", "moe")

    @property
    def residual_std(self) -> float:
        """Standard deviation of initial weights that write to the stream."""
        return self.init_std / (2 * self.blocks) ** 0.5

    @property
    def layer_count(self) -> int | None:
        """Number of layers as placements count them. None for the user's own model."""
        if self.is_gpt:
            # Each block is two layers. Embedding and head are one layer each.
            return 2 * self.blocks + 2
        return self.layers if self.kind == "emulated" else None

    def _problems(self) -> Iterator[str]:
        if self.is_gpt:
            if self.hidden % self.heads:
                near = nearest_divisors(self.heads, self.hidden)
                yield (
                    f"model.heads = {self.heads} does not divide model.hidden = {self.hidden}; "
                    f"nearest that do: {near}"
                )
            elif self.hidden // self.heads % 2:
                yield (
                    f"model.hidden / model.heads = {self.hidden // self.heads} is odd, but rotary "
                    f"positions turn pairs; use hidden = {self.hidden + self.heads}, or other heads"
                )
        if self.kind == "emulated":
            for key, times in (("f", self.f), ("b", self.b), ("w", self.w)):
                if isinstance(times, tuple) and len(times) != self.layers:
                    yield (
                        f"model.{key} lists {len(times)} layers, model.layers = {self.layers}; "
                        "give one number, or one per layer"
                    )
        if self.kind == "moe":
            if self.top_k > self.experts:
                yield (
                    f"model.top_k = {self.top_k} is more than model.experts = {self.experts}; use "
                    f"{self.experts} or less"
                )
            if self.moe_every > self.blocks:
                yield (
                    f"model.moe_every = {self.moe_every} gives none of the {self.blocks} blocks "
                    f"experts; use {self.blocks} or less"
                )
