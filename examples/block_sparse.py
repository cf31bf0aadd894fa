"""Weights in a form of one's own: only the larger blocks of each matrix stay.

python examples/block_sparse.py saved 8                                     # 8 steps, alone
torchrun --standalone --nproc-per-node=2 examples/block_sparse.py moved 5   # 5 steps on two ranks
python examples/block_sparse.py moved 8                                     # goes on: same weights
"""

import sys
from pathlib import Path

import torch
from torch import nn

import dynmo
from dynmo.extend import PackedWeight

SIDE = 4  # rows and columns of a block


def in_blocks(matrix):
    rows, columns = (size // SIDE for size in matrix.shape)
    return matrix.view(rows, SIDE, columns, SIDE).transpose(1, 2)


class BlockSparse(PackedWeight, nn.Linear):
    """A linear whose weight is [blocks, SIDE, SIDE]."""

    plain, form = nn.Linear, ("rows", "columns")

    def packed_shape(self, name):
        return len(self.rows), SIDE, SIDE

    def pack(self, name, dense):
        return in_blocks(dense)[self.rows, self.columns]

    def unpack(self, name, values):
        blocks = in_blocks(values.new_zeros(self.out_features, self.in_features))
        blocks = blocks.index_put((self.rows, self.columns), values)
        return blocks.transpose(1, 2).reshape(self.out_features, self.in_features)

    def forward(self, input):
        weight = self.unpack("weight", self.values("weight"))
        return nn.functional.linear(input, weight, self.bias)


class DropBlocks(dynmo.Dynamism):
    """Drops half of the blocks of each linear before step 2."""

    name, divides_parameters = "drop_blocks", True

    def act(self, step, layers):
        if step != 2:
            return None
        for index in layers.own:
            moments = layers.moments(index)
            for name, linear in layers.modules[index].named_modules():
                if isinstance(linear, nn.Linear):
                    weight = linear.weight.detach()
                    sizes = in_blocks(weight).norm(dim=(2, 3))
                    rows, columns = (sizes > sizes.median()).nonzero(as_tuple=True)
                    form = BlockSparse.take_form(linear, {"rows": rows, "columns": columns})
                    packed, trains = form.pack("weight", weight), linear.weight.requires_grad
                    linear.weight = nn.Parameter(packed, trains)
                    prefix = f"{name}.weight/".lstrip(".")  # the layer itself has no name
                    for key, moment in moments.items():
                        if key.startswith(prefix) and moment.shape == weight.shape:
                            moments[key] = form.pack("weight", moment)
            layers.rebuild(index, moments)
        return dynmo.Change(tuple(range(layers.count)), "half of the blocks are gone")


folder, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
parts = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
model = dynmo.Sequential(parts, loss=nn.functional.mse_loss)
with dynmo.init(device="cpu") as world:
    resume = folder if Path(folder).exists() else None
    pipeline = dynmo.Pipeline(model, world, microbatches=2, cases=[DropBlocks()], resume=resume)
    while pipeline.steps < steps:
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(pipeline.steps))
        pipeline.step(data, data.sin())
        if pipeline.steps == 4 and world.size == 2:
            pipeline.move([1, 3])
    pipeline.save(folder)
    print(f"weights {pipeline.digest()}")
