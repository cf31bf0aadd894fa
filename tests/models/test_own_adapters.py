"""Adapters of peft in layers of one's own."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional

import dynmo
from dynmo.pipeline.options import grouped
from dynmo.runtime.comm.meeting import Meeting
from tests.pool import Pool

WIDTH, STEPS = 12, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    made = nn.ModuleList([nn.Linear(4, WIDTH), *(Block() for _ in range(3))])
    targets = ["2.up", "2.down", "3.up", "3.down"]
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    inject_adapter_in_model(config, made)
    return list(made)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=draws), torch.randn(8, WIDTH, generator=draws)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)


def train(world: Meeting, **options: Any) -> dict[str, Any]:
    model = dynmo.Sequential(layers(), loss=nn.functional.mse_loss)
    options |= {"microbatches": 2, "optimizer": sgd, "max_grad_norm": 1e9}
    pipeline = dynmo.Pipeline(model, world, **grouped(options))
    losses = [pipeline.step(*batch(step)).loss for step in range(STEPS)]
    state = pipeline.state_dict(everywhere=True)
    return {"losses": losses, "weights": {k: t.tolist() for k, t in state.items()}}


def test_any_ranks_have_the_bits_of_plain_torch(pool: Pool) -> None:
    plain = nn.Sequential(*layers())
    optimizer = sgd([p for p in plain.parameters() if p.requires_grad])
    losses = list[float]()
    for step in range(STEPS):
        optimizer.zero_grad()
        pairs = zip(*(each.chunk(2) for each in batch(step)), strict=True)
        parts = [functional.mse_loss(plain(x), y) / 2 for x, y in pairs]
        for part in parts:
            part.backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    wanted = {"losses": losses, "weights": {k: t.tolist() for k, t in plain.state_dict().items()}}
    for ranks, schedule in ((2, "zb-v"), (1, "1f1b")):
        found = pool.run("tests.models.test_own_adapters:train", ranks, schedule=schedule)
        assert found == [wanted] * ranks
