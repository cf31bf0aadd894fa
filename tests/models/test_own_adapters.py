"""Adapters of peft in layers of one's own."""

from __future__ import annotations

from torch import nn
from torch.nn import functional

from tests.models.own_adapters import STEPS, batch, layers, sgd
from tests.pool import Pool


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
        assert pool.run("tests.models.own_adapters:train", ranks, schedule=schedule) == (
            [wanted] * ranks
        )
