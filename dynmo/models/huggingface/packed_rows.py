"""Rejects ids that a model lacks, and packed rows that have an attention mask.

A packed row holds several samples. Its position ids start again with each sample. transformers
separates the samples only if the batch has no mask. It reads every nonzero number of a mask as 1,
so a mask cannot separate them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dynmo.errors import InputError
from dynmo.options import LARGEST


def check_rows(batch: Mapping[str, Tensor], where: str, vocab: int = LARGEST) -> None:
    """Checks ids, mask and position ids of a batch.

    Args:
        batch: Tensors by name.
        where: What the message names.
        vocab: Number of tokens of the model. Ids on a GPU are not looked at.

    Raises:
        InputError: The model has no such id, the mask numbers samples, or the position ids of a
            row start again beside it.
    """
    ids = batch.get("input_ids")
    if ids is not None and ids.numel() and ids.device.type == "cpu":
        wrong = ids[(ids < 0) | (ids >= vocab)]
        if len(wrong):
            raise InputError(
                f"input_ids of {where} has {int(wrong[0])}; the model has tokens 0 to {vocab - 1}"
            )
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is None or mask.dim() != 2:
        return
    if ((mask != 0) & (mask != 1)).any():
        raise InputError(
            f"attention_mask of {where} has other numbers than 0 and 1, which transformers takes "
            "as 1; if they count the samples of a row, leave out the mask, and give position_ids "
            "that start again with each sample"
        )
    if positions is None or positions.dim() != 2:
        return
    if _restarts(mask == 1, positions.expand(len(mask), -1)).any():
        raise InputError(
            f"position_ids of {where} start again within a row, but transformers keeps its samples "
            "apart only without a mask; leave out the mask (attention_mask)"
        )


def _restarts(is_real: Tensor, positions: Tensor) -> Tensor:
    """Returns which tokens do not come after the token before them, apart from padding."""
    places = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    last = torch.where(is_real, places, -1).cummax(1).values[:, :-1]
    before = positions.gather(1, last.clamp(min=0))
    return is_real[:, 1:] & (last >= 0) & (positions[:, 1:] <= before)
