"""A loop of your own: a DataLoader, dictionaries, lengths, parameter groups, a scheduler."""
# pyright: reportIncompatibleMethodOverride=false

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import dynmo


class Embed(nn.Embedding):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return super().forward(input_ids), attention_mask


class Block(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return x + super().forward(x).relu() * mask.unsqueeze(-1), mask


class Head(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x)


def pad(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = pad_sequence(rows, batch_first=True)
    labels = pad_sequence([row.roll(-1) for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": ids > 0, "labels": labels}


def collate(rows: list[Tensor]) -> list[dict[str, Tensor]]:
    return [pad(rows[i : i + 4]) for i in range(0, len(rows), 4)]  # microbatches of any lengths


with dynmo.init(device="cpu") as world:
    torch.manual_seed(0)
    data: Any = [torch.arange(1, n).repeat(2) for n in torch.randint(3, 20, (96,)).tolist()]
    model = dynmo.Sequential([Embed(20, 32), *(Block(32, 32) for _ in range(4)), Head(32, 20)])
    adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    training = dynmo.Training(groups=lambda _, p: {} if p.dim() > 1 else {"weight_decay": 0.0})
    pipeline = dynmo.Pipeline(model, world, microbatches=4, optimizer=adamw, training=training)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(pipeline.optimizer, T_max=18)
    sampler = pipeline.sampler(data, batch=16)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, batch_sampler=sampler, collate_fn=collate):
            print(pipeline.step(batch))
            rate.step()
    loss = pipeline.evaluate(pad(data[:16]), outputs=True)
    print(f"held out {loss:.6f}, {loss.outputs is not None}, weights {pipeline.digest()}")
