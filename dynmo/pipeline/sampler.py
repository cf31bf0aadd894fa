"""The samples of each replica, for a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized

import torch
from torch.utils.data import Sampler

from dynmo.errors import InputError


class ReplicaSampler(Sampler[list[int]]):
    """Yields the indices of this replica's part of each batch. See `Pipeline.sampler`."""

    def __init__(
        self,
        dataset: Sized,
        batch: int,
        place: Callable[[], tuple[int, int]],
        *,
        shuffle: bool,
        seed: int,
    ) -> None:
        replicas = place()[1]
        if batch < 1 or batch % replicas or batch > len(dataset):
            raise InputError(
                f"batch = {batch}: give a multiple of {replicas} replicas, of at most "
                f"{len(dataset)} samples of the dataset"
            )
        self._dataset, self._batch, self._place = dataset, batch, place
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0

    def __repr__(self) -> str:
        order = "shuffled" if self._shuffle else "in order"
        return (
            f"ReplicaSampler({len(self._dataset)} samples, {self._batch} a step, {order}, "
            f"epoch {self._epoch})"
        )

    def set_epoch(self, epoch: int) -> None:
        """Shuffles otherwise in the epochs that follow."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset) // self._batch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(len(self._dataset))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(len(self._dataset), generator=generator)
        for start in range(0, len(self) * self._batch, self._batch):
            replica, replicas = self._place()
            part = self._batch // replicas
            yield order[start + replica * part :][:part].tolist()
