"""The model of DynMo's experiments (appendix A), by dynmo's account of memory.

The paper names hidden size, heads, tokens and microbatches. It names neither vocabulary nor
precision: GPT-2's vocabulary and bfloat16 with float32 masters stand in.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import dynmo
from benchmarks.cost_traces import profile_of
from dynmo.cost.layer_cost import LayerCost
from dynmo.pipeline.options import PipelineOptions
from dynmo.pipeline.shape_costs import shape_costs
from dynmo.plan.evaluate import Replica
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.problem import Mesh, Problem, Work
from dynmo.schedule.catalogue import full_schedule

HIDDEN, HEADS, SEQUENCE, MICROBATCH, VOCABULARY = 1024, 32, 2048, 2, 50257
PER_RANK = 4  # microbatches
H100 = 80 * 10**9  # bytes
# Softmax, its input and the dropout of all heads: 5as a token (Zero Bubble's transformer).
STORED = 5 * HEADS * SEQUENCE**2 * MICROBATCH


def layers_of(blocks: int, stored: bool = False) -> tuple[LayerCost, ...]:
    """Returns the bytes of embedding, half blocks and head.

    Args:
        blocks: Number of blocks.
        stored: Whether B reads the attention matrices, as before flash attention.
    """
    embedding, attention, feed_forward, head = _four()
    if stored:
        attention = replace(attention, activation_bytes=attention.activation_bytes + STORED)
    return (embedding, *(attention, feed_forward) * blocks, head)


@cache
def _four() -> tuple[LayerCost, ...]:
    """Returns the bytes of the layers of one block's model."""
    model = dynmo.load_model(
        dynmo.ModelOptions(
            blocks=1, hidden=HIDDEN, heads=HEADS, sequence=SEQUENCE, vocab=VOCABULARY
        )
    )
    options = PipelineOptions(microbatches=1, micro_batch=MICROBATCH, precision="bfloat16")
    return shape_costs(options, model)


def memory(blocks: int, ranks: int, stored: bool = False, schedule: str = "zb-h1") -> int:
    """Returns the bytes of the fullest rank if each rank has as many blocks."""
    counts = [2 * count for count in uniform(blocks, ranks).counts]
    counts[0] += 1
    counts[-1] += 1
    layers, made = layers_of(blocks, stored), full_schedule(schedule, ranks, PER_RANK * ranks)
    problem = Problem(profile_of(layers), Work(accumulation_groups=1))
    replica = Replica(problem, Mesh(ranks, 1, PER_RANK * ranks, 1, schedule))
    return max(replica.memory(layers, Partition(tuple(counts)), made))
