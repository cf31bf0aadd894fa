"""A loop that a process of its own joins, in a folder that all share.

torchrun --nproc-per-node=2 tests/pipeline/joining.py FILE    three ranks from step 3 on
python tests/pipeline/joining.py FILE join                    the third of them
python tests/pipeline/joining.py                              one rank
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import dynmo


def main(file: str | None = None, *options: str) -> None:
    joins = "join" in options
    with dynmo.init(device="cpu", timeout=60, rendezvous=file, join=joins) as world:
        torch.manual_seed(0)
        model = dynmo.Sequential([nn.Linear(8, 8) for _ in range(6)], loss=nn.functional.mse_loss)
        meshes = [] if world.size == 1 and not joins else [[3, 3, 1]]
        pipeline = dynmo.Pipeline(
            model,
            world,
            microbatches=3,
            optimizer=dynmo.AdamW(lr=1e-2),
            elastic=dynmo.Elastic(reshape_at=meshes),
            log=dynmo.Log(trace=1),
            parallel=dynmo.Parallel(pipeline=1 if world.size == 1 and not joins else 2),
        )
        schedule = torch.optim.lr_scheduler.StepLR(pipeline.optimizer, 1, 0.5)
        while pipeline.steps < 6:
            pipeline.adapt()
            if pipeline.left and not pipeline.join():
                break
            batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(pipeline.steps))
            pipeline.step(batch, batch.roll(1, 1))
            if not joins:
                schedule.step()
            else:
                pipeline.optimizer.param_groups[0]["lr"] *= 0.5
        print(f"rank {world.rank} of {world.size}: weights {pipeline.digest()}", flush=True)
        pipeline.measured.save_trace(None if file is None else f"{file}.trace")
        pipeline.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
