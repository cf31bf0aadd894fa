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

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dynmo.errors import PartitionError

if TYPE_CHECKING:
    from dynmo.plan.partition import Partition

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def blocks_of(names: Sequence[str]) -> tuple[int, list[range], range]:
    """Groups layers into blocks by the number in their names.

    Layers are a block each if none has a number.

    Returns:
        The number of layers before the first block, the layers of each block, and the layers after
        the last block.
    """
    numbers = [int(match[1]) if (match := _NUMBER.search(name)) else None for name in names]
    numbered = [i for i, number in enumerate(numbers) if number is not None]
    if not numbered:
        return 0, [range(i, i + 1) for i in range(len(names))], range(len(names), len(names))
    first, last = numbered[0], numbered[-1]
    blocks: list[range] = []
    for layer in range(first, last + 1):
        if numbers[layer] is None:
            raise PartitionError(
                f"layer {layer} ({names[layer]}) stands between numbered blocks; "
                "give it the number of the block that it belongs to"
            )
        if blocks and numbers[blocks[-1].start] == numbers[layer]:
            blocks[-1] = range(blocks[-1].start, layer + 1)
        else:
            blocks.append(range(layer, layer + 1))
    return first, blocks, range(last + 1, len(names))


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


def megatron(names: Sequence[str], partition: Partition) -> dict[str, Any]:
    """Returns Megatron's `--pipeline-model-parallel-layout`, and the rounded boundaries.

    E is the embedding, t a transformer block, L the loss, and | is between stages. `t*3` is `ttt`.
    Stages are in pipeline order. With several stages per rank, Megatron deals them out in turn
    (looped), rank by rank.
    """
    stages, rounded = _whole_blocks(names, partition)
    counts = [len(blocks) for blocks in stages]
    parts = ["t" * count if count < 3 else f"t*{count}" for count in counts]
    # Megatron's embedding is always first and its loss always last, whatever the names say.
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "L"
    return {"pipeline_model_parallel_layout": "|".join(parts), "rounded": rounded}


def torchtitan(names: Sequence[str], partition: Partition) -> dict[str, Any]:
    """Returns torchtitan's `module_fqns_per_model_part`, and the rounded boundaries."""
    stages, rounded = _whole_blocks(names, partition)
    modules = [[f"layers.{block}" for block in blocks] for blocks in stages]
    modules[0].insert(0, "tok_embeddings")
    modules[-1] += ["norm", "output"]
    if [] in modules:
        raise PartitionError(
            f"stage {modules.index([])} has less than half a block, so torchtitan would have "
            "nothing there; place whole blocks"
        )
    return {"module_fqns_per_model_part": modules, "rounded": rounded}


def deepspeed(names: Sequence[str], partition: Partition) -> dict[str, Any]:
    """Returns `PipelineModule.parts`: first layer of each stage, then their number.

    The layers are the list's own, halves and all.
    """
    return {"parts": list(partition.bounds)}


FORMATS = {"megatron": megatron, "torchtitan": torchtitan, "deepspeed": deepspeed}
