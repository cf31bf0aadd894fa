"""A loop of one's own with two dynamic cases, ZeRO-1 and no barrier at the end of a step.

python examples/two_cases.py                                              # alone
torchrun --standalone --nproc-per-node=4 examples/two_cases.py 2          # 2 replicas of 2 ranks
dynmo train examples/two_cases.toml                                       # the same from a file
"""

import sys

import dynmo
from dynmo.data.batches import Batches
from dynmo.data.corpus import open_corpus

STEPS, MICROBATCHES, SIZE = 16, 8, 2
replicas = int(sys.argv[1]) if len(sys.argv) > 1 else 1
sizes = dynmo.ModelOptions(blocks=3, hidden=32, heads=4, sequence=16)
cases = [dynmo.Freezing(schedule=[(8, 3)]), dynmo.Pruning(start=4, end=12, every=4)]
batches = Batches(open_corpus("stdlib"), sizes.sequence, MICROBATCHES * SIZE, SIZE, seed=0)
with dynmo.init(device="cpu") as world:
    pipeline = dynmo.Pipeline(
        dynmo.load_model(sizes, cases=cases),
        world,
        microbatches=MICROBATCHES // replicas,
        replicas=replicas,
        cases=cases,
        parallel=dynmo.Parallel(reduction_slots=2, zero=1),  # equal groups give equal bits
        training=dynmo.Training(post_validation=True),
    )
    while pipeline.steps < STEPS:
        mesh = pipeline.mesh
        start, count = mesh.replica * mesh.microbatches, mesh.microbatches
        batch = (x[start : start + count].flatten(0, 1) for x in batches.train(pipeline.steps))
        for result in pipeline.advance(*batch):
            print(f"rank {world.rank}: {result}")
    print(f"rank {world.rank}: weights {pipeline.digest()}")
