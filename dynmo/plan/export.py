"""A placement in the formats of other trainers.

Layers are grouped into blocks by their names. Usual names are `embedding`, `blocks.0.attention`,
`blocks.0.feed_forward`, ..., `head`. In any other names, all layers that share a number
(`blocks.3.*`, `layers.3`) are one block. Layers before the first block are the input side, and
layers after the last block are the output side.

    names       embedding  b0.att  b0.ff | b1.att  b1.ff  b2.att | b2.ff  head
    Megatron    Et|tt|L    a block is one letter: the cut in the middle of block 2 is rounded
    torchtitan  [[tok_embeddings, layers.0], [layers.1, layers.2], [norm, output]]
    DeepSpeed   [0, 3, 6, 8]       layer indices, halves and all

Megatron and torchtitan know whole blocks only. A cut inside a block goes to its nearer end, by
layers, and to its last end if both are as near. `rounded` lists the
boundaries whose cut was moved (i is between stages i and i + 1). A stage may be left without a
block. torchtitan accepts this only if something else is on the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dynmo.errors import PartitionError
from dynmo.plan.blocks import blocks_of
from dynmo.plan.partition import Partition


def _whole_blocks(
    names: Sequence[str], partition: Partition
) -> tuple[list[range], tuple[int, ...]]:
    """The blocks on each stage, and the cuts that were moved to the end of a block."""
    if partition.layers != len(names):
        raise PartitionError(
            f"{len(names)} names for a placement of {partition.layers} layers; "
            "give one name per layer"
        )
    first, blocks, _ = blocks_of(names)
    ends = [first, *(block.stop for block in blocks)]
    cuts, rounded = [0], list[int]()
    for boundary, bound in enumerate(partition.bounds[1:-1]):
        cut = min(range(len(ends)), key=lambda i: (abs(ends[i] - bound), -i))
        if ends[cut] != bound:
            rounded.append(boundary)
        cuts.append(cut)
    cuts.append(len(blocks))
    return [range(a, b) for a, b in pairwise(cuts)], tuple(rounded)


def megatron_layout(names: Sequence[str], partition: Partition) -> tuple[str, tuple[int, ...]]:
    """Returns Megatron's `--pipeline-model-parallel-layout`, and the rounded boundaries.

    E is the embedding, t a transformer block, L the loss, and | is between stages. `t*3` is `ttt`.
    Stages are in pipeline order. With several stages per rank, Megatron deals them out in turn
    (looped), rank by rank.
    """
    stages, rounded = _whole_blocks(names, partition)
    last = len(stages) - 1
    parts: list[str] = []
    for index, blocks in enumerate(stages):
        count = len(blocks)
        body = "t" * count if count < 3 else f"t*{count}"
        # Megatron's embedding is always first and its loss always last, whatever the names say.
        parts.append(("E" if index == 0 else "") + body + ("L" if index == last else ""))
    return "|".join(parts), rounded


def torchtitan_modules(
    names: Sequence[str], partition: Partition
) -> tuple[list[list[str]], tuple[int, ...]]:
    """Returns torchtitan's `module_fqns_per_model_part`, and the rounded boundaries."""
    stages, rounded = _whole_blocks(names, partition)
    last = len(stages) - 1
    out: list[list[str]] = []
    for index, blocks in enumerate(stages):
        own = [
            *(("tok_embeddings",) if index == 0 else ()),
            *(f"layers.{block}" for block in blocks),
            *(("norm", "output") if index == last else ()),
        ]
        if not own:
            raise PartitionError(
                f"stage {index} has less than half a block, so torchtitan would have nothing "
                "there; place whole blocks"
            )
        out.append(own)
    return out, rounded


def deepspeed_parts(partition: Partition) -> list[int]:
    """Returns `PipelineModule.parts`: first layer of each stage, then their number.

    The layers are the list's own, halves and all.
    """
    return list(partition.bounds)
