"""A loop whose ranks leave and come back, with the bits of one rank.

torchrun --nproc-per-node=4 examples/elastic_loop.py     4 ranks, 2 from step 4 on, 4 from step 8 on
python examples/elastic_loop.py                          1 rank
"""

import torch
from torch import nn

import dynmo

with dynmo.init(device="cpu") as world:
    torch.manual_seed(0)  # every rank makes the same layers, and keeps its own
    layers = [nn.Linear(64, 64) for _ in range(8)]
    model = dynmo.Sequential(layers, loss=nn.functional.mse_loss)
    meshes = [[4, 2, 1], [8, 4, 1]] if world.size == 4 else []  # [step, pipeline, replicas]
    elastic = dynmo.Elastic(reshape_at=meshes)
    pipeline = dynmo.Pipeline(model, world, microbatches=4, steps=12, elastic=elastic)
    while pipeline.steps < 12:
        pipeline.adapt()  # ranks leave and come here
        if pipeline.left and not pipeline.join():
            break
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(pipeline.steps))
        result = pipeline.step(batch, batch.roll(1, 1))
        print(f"step {result.step}: rank {world.rank} of {world.size}, loss {result.loss:.4f}")
    print(f"rank {world.rank}: weights {pipeline.digest()}")
    pipeline.close()
