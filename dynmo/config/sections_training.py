"""The sections about what is trained: [model], [data] and [train]."""

from __future__ import annotations

from typing import Annotated

from pydantic import SerializerFunctionWrapHandler, model_serializer

from dynmo.config.section import Section
from dynmo.config.values import (
    BelowOne,
    Count,
    DataSource,
    Lax,
    LossScale,
    ModelKind,
    NonNegative,
    Positive,
    Recompute,
    Seconds,
    Share,
    Whole,
    word,
)

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
KEYS_OF_KIND = {
    "gpt": _OF_GPT,
    "moe": (*_OF_GPT, *_OF_EXPERTS),
    "emulated": ("layers", "f", "b", "w", "bytes"),
}


def keys_of_other_kinds(kind: str) -> frozenset[str]:
    """The keys of [model] that a model of this kind does not have."""
    own = KEYS_OF_KIND.get(kind, ())
    return frozenset(key for keys in KEYS_OF_KIND.values() for key in keys if key not in own)


class ModelSection(Section):
    """The model that is trained.

    `KEYS_OF_KIND` has the keys that belong to one kind only.
    """

    kind: ModelKind = "gpt"
    """`gpt`, `moe` (a GPT with experts), `emulated` (layers that sleep), or your own:
    `python:package.module:function`."""
    blocks: Count = 8
    """Number of transformer blocks. Each block is two layers: attention and feed-forward."""
    hidden: Count = 256
    """Width of the residual stream. A multiple of `heads`."""
    heads: Count = 4
    """Number of attention heads."""
    vocab: Count = 256
    """Number of different tokens. The data are bytes, so 256 is enough."""
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
    routing: Annotated[str, word(("aux-loss", "sinkhorn", "auction", "bias"))] = "aux-loss"
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

    @model_serializer(mode="wrap")
    def _without_other_kinds(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        others = keys_of_other_kinds(self.kind)
        return {key: value for key, value in write(self).items() if key not in others}

    @property
    def is_gpt(self) -> bool:
        """True if the model is a GPT, with experts or without."""
        return self.kind in ("gpt", "moe")

    @property
    def layer_count(self) -> int | None:
        """Number of layers as placements count them. None for the user's own model."""
        if self.is_gpt:
            # Each block is two layers. Embedding and head are one layer each.
            return 2 * self.blocks + 2
        return self.layers if self.kind == "emulated" else None


class DataSection(Section):
    """The text that the model is trained on."""

    source: DataSource = "stdlib"
    """`stdlib` (the sources of the running Python, as bytes) or `file:PATH`."""
    shuffle: Annotated[str, word(("windows", "batches"))] = "windows"
    """The unit that each epoch shuffles: `windows` puts other sequences together in each epoch.
    `batches` repeats the batches of the first epoch in another order."""


class TrainSection(Section):
    """The training loop, the optimizer and the precision."""

    steps: Count = 100
    """Number of optimizer steps."""
    global_batch: Count = 32
    """Sequences in a step, over all replicas."""
    micro_batch: Count = 4
    """Sequences in a microbatch."""
    optimizer: Annotated[str, word(("adamw", "sgd"), ("adam", "muon"))] = "adamw"
    """The optimizer."""
    lr: NonNegative = 3e-4
    """Peak learning rate."""
    warmup: Whole = 0
    """Steps in which the learning rate rises to `lr`."""
    decay: Annotated[str, word(("cosine", "linear", "constant"))] = "cosine"
    """How the learning rate falls after the warmup."""
    min_lr_ratio: Share = 0.1
    """The last learning rate, as a share of `lr`."""
    weight_decay: NonNegative = 0.1
    """Weight decay of the optimizer."""
    betas: Annotated[tuple[BelowOne, BelowOne], Lax] = (0.9, 0.95)
    """AdamW's two decay rates."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    momentum: BelowOne = 0.9
    """SGD's momentum."""
    max_grad_norm: NonNegative = 1.0
    """Largest norm of the gradients. Larger gradients are clipped to it. 0 never clips."""
    clip_scope: Annotated[str, word(("global", "local"))] = "global"
    """The norm that clips: `global` takes the norm over all layers, `local` clips each layer by its
    own norm."""
    precision: Annotated[str, word(("float32", "bfloat16", "float16"))] = "float32"
    """Number format of F, B and W. `bfloat16` and `float16` keep float32 master weights and
    gradients."""
    loss_scale: LossScale = None
    """A power of two, or `dynamic`: halved after an overflow, whose step is skipped. Not set:
    `dynamic` for `float16`, otherwise none."""
    loss_scale_window: Count = 2000
    """Good steps after which a dynamic loss scale doubles."""
    recompute: Recompute = "none"
    """Layers that recompute their activations in B: `none`, `all`, a list of layer indices, or
    `auto` (as many as the memory limit needs)."""
    reduction_slots: Count | None = None
    """Number of groups in which gradients are summed. With an equal number, any number of replicas
    gives the same bits. Not set: one per replica."""
    compile: bool = False
    """Whether torch.compile runs the parts of a layer between its linear layers."""
    deterministic: bool = False
    """On CUDA, whether to use only kernels that give the same bits in each run."""
    eval_every: Whole = 0
    """Steps between two evaluations. 0 never evaluates."""
    eval_batches: Count = 4
    """Batches in an evaluation."""
