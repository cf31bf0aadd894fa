"""Placements in the notation of other trainers."""

import pytest

from dynmo.cli.placement_formats import blocks_of, deepspeed, megatron, torchtitan
from dynmo.errors import PartitionError
from dynmo.plan.partition import Partition


def names(blocks: int) -> tuple[str, ...]:
    return (
        "embedding",
        *(f"blocks.{i}.{half}" for i in range(blocks) for half in ("attention", "feed_forward")),
        "head",
    )


def layout(named: tuple[str, ...], *counts: int) -> str:
    return megatron(named, Partition(counts))["pipeline_model_parallel_layout"]


def modules(named: tuple[str, ...], *counts: int) -> list[list[str]]:
    return torchtitan(named, Partition(counts))["module_fqns_per_model_part"]


def test_whole_blocks_export_exactly():
    assert layout(names(6), 5, 4, 5) == "Ett|tt|ttL"
    assert modules(names(6), 5, 4, 5) == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4", "layers.5", "norm", "output"],
    ]
    assert deepspeed(names(6), Partition((5, 4, 5))) == {"parts": [0, 5, 9, 14]}
    assert layout(names(10), 7, 14, 1) == "Et*3|t*7|L"
    assert layout(names(2), 1, 5) == "E|ttL"


def test_half_blocks_are_rounded_and_reported():
    # The layers are: embedding b0 | b0 b1 b1 b2 | b2 head. The first cut is in block 0, the second
    # in block 2. Both cuts go to the end of the block.
    halves = Partition((2, 4, 2))
    answer = {"pipeline_model_parallel_layout": "Et|tt|L", "rounded": (0, 1)}
    assert megatron(names(3), halves) == answer
    assert torchtitan(names(3), halves)["rounded"] == (0, 1)
    assert deepspeed(names(3), halves) == {"parts": [0, 2, 6, 8]}
    # A block of four layers is cut nearer to its beginning.
    quarters = tuple(f"layers.{i // 4}.{i % 4}" for i in range(8))
    assert layout(quarters, 5, 3) == "Et|tL"


def test_stage_of_half_a_block_is_empty_or_refused():
    # Cuts on both sides of one half go to the same place: Megatron knows empty stages, torchtitan
    # does not.
    assert layout(names(3), 2, 1, 5) == "Et||ttL"
    with pytest.raises(PartitionError, match="stage 1 has less than half a block"):
        modules(names(3), 2, 1, 5)


def test_emulated_layers_and_custom_names_export():
    emulated = tuple(f"emulated.{i}" for i in range(4))
    assert layout(emulated, 1, 3) == "Et|t*3L"
    assert modules(emulated, 2, 2)[1] == ["layers.2", "layers.3", "norm", "output"]
    plain = ("0.Linear", "1.Linear", "2.Linear")
    assert blocks_of(plain) == (0, [range(0, 1), range(1, 2), range(2, 3)], range(3, 3))
    assert blocks_of(("a", "b")) == (0, [range(0, 1), range(1, 2)], range(2, 2))
    assert blocks_of(names(2)) == (1, [range(1, 3), range(3, 5)], range(5, 6))
    with pytest.raises(PartitionError, match=r"layer 1 \(norm\) stands between numbered blocks"):
        blocks_of(("layers.0", "norm", "layers.1"))
    with pytest.raises(PartitionError, match="8 names for a placement of 7 layers"):
        layout(names(3), 7)


@pytest.mark.parametrize("counts", [(5, 4, 5), (2, 6, 6), (1, 1, 12), (13, 1)])
def test_megatron_layouts_hold_every_block_once(counts: tuple[int, ...]):
    text = layout(names(6), *counts)
    for times in range(1, 7):
        text = text.replace(f"t*{times}", "t" * times)
    assert text.count("|") == len(counts) - 1
    assert text.replace("|", "") == "E" + "t" * 6 + "L"
