"""Digests of weights over replicas."""

from __future__ import annotations

import pytest
import torch

from dynmo.runtime.comm.world import World
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer
from tests.equality import BALANCERS, config
from tests.jobs import parsed
from tests.pool import JobFailed, Pool


def digest_after_a_flipped_bit(world: World, config: dict[str, object], rank: int) -> str:
    """The digest of the weights, after this rank's first weight has changed in its last bit."""
    loaded = parsed(config)
    pipeline = Trainer(loaded, world, model_of(loaded), None).pipeline
    if world.rank == rank:
        module, _ = next(iter(pipeline._engine.store.own.values()))
        with torch.no_grad():
            next(module.parameters()).view(torch.int32).flatten()[0] ^= 1
    return pipeline.digest()


def test_replicas_with_other_weights_are_named(pool: Pool) -> None:
    replicated = config(1, "1f1b", BALANCERS["none"], freezing=False, clipping=False)
    replicated["parallel"]["replicas"], replicated["train"]["global_batch"] = 2, 12
    job = "tests.runtime.state.test_digest:digest_after_a_flipped_bit"
    with pytest.raises(JobFailed, match="disagree on the weights"):
        pool.run(job, 2, config=replicated, rank=1)
    first, second = pool.run(job, 2, config=replicated, rank=2)
    assert first == second
