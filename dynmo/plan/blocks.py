"""Finds the layers of each transformer block, by their names.

names     embedding  blocks.0.attention  blocks.0.feed_forward  blocks.1.attention  ...  head
blocks    before     |------------ block 0 ------------|        |-- block 1 --          after
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dynmo.errors import PartitionError

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
