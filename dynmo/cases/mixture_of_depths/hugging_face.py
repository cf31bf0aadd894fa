"""Blocks of a model of transformers that only some tokens pass.

    x' = f(x)    for the selected tokens, with f the block
    x' = x       for the others

The block runs as transformers has it, on rows of the selected tokens with the positions that these
have. So a model keeps its numbers if all tokens are selected, and the routers can be left out then.
A router learns by the gradient that a weight r = 1 of f(x) - x would get.

With a predictor, rows have unequally many selected tokens, and end with padding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from dynmo.cases.mixture_of_depths.layers import Router
from dynmo.cases.mixture_of_depths.options import MixtureOfDepths
from dynmo.extend import ConfigError, hugging_face

Tensors = tuple[Tensor, ...]


class RoutedBlock(hugging_face.BlockLayer):
    """A block with a router."""

    varying_time = True

    def __init__(
        self,
        shared_model: hugging_face.SharedModel,
        index: int,
        block: nn.Module,
        router: Router,
        std: float,
    ) -> None:
        super().__init__(shared_model, index, block)
        # No other layer has these names.
        self.depth_routers = nn.ModuleDict({str(index): router})
        self._std = std

    @property
    def router(self) -> Router:
        (router,) = self.depth_routers.values()
        assert isinstance(router, Router)
        return router

    @property
    def of_folder(self) -> nn.Module:
        own = nn.Module()
        for name, each in self.named_children():
            if each is not self.depth_routers:
                own.add_module(name, each)
        return own

    def start_own(self) -> None:
        nn.init.normal_(self.router.weight.weight, std=self._std)
        for each in self.router.predictor or ():
            if isinstance(each, nn.Linear):
                each.reset_parameters()

    def forward(self, hidden: Tensor, *carried: Tensor) -> Tensors:
        rows, tokens, width = hidden.shape
        mask, positions = hugging_face.unpacked(carried)
        if mask is not None and mask.dim() > 2:
            raise ConfigError("mixture_of_depths takes a mask [rows, tokens], not one of pairs")
        real = None if mask is None else mask.flatten() > 0
        stream, chosen, _, index = self.router(hidden.reshape(-1, width), rows, real)
        # Slots of the selected tokens, in rows of equal length.
        length, slots = len(index) // rows, torch.arange(len(index), device=index.device)
        if not self.training or self.router.by_threshold:
            row = index // tokens
            counts = torch.bincount(row, minlength=rows)
            length = max(1, int(counts.max()))
            slots += row * length - (counts.cumsum(0) - counts)[row]
        few = torch.zeros(rows * length, width, dtype=hidden.dtype, device=hidden.device)
        few = few.index_copy(0, slots, chosen).view(rows, length, width)

        def selected(x: Tensor, rest: int) -> Tensor:
            """Returns what the selected tokens have of [rows, tokens]."""
            given = x.expand(rows, -1).flatten().index_select(0, index)
            return given.new_full((rows * length,), rest).index_copy(0, slots, given).view(rows, -1)

        every = torch.arange(tokens, device=index.device)[None] if positions is None else positions
        places = selected(every, 0)
        filled = selected(torch.ones_like(every) if mask is None else mask, 0)
        filled[:, 0] += filled.sum(1) == 0  # no row is without a token
        pairs = filled
        if positions is not None and mask is None:
            sample = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
            pairs = self._within(selected(sample, -1), hidden.dtype)
        arguments = self.arguments(few, pairs, places)
        out, *rest = self.run(few, carried, arguments, filled)
        passed = out.flatten(0, 1).index_select(0, slots)
        # The weight is 1, and the router gets its gradient.
        scores = self.router.weight(chosen.detach())
        passed = passed + (scores - scores.detach()) * (passed - chosen)
        return stream.index_copy(0, index, passed).view_as(hidden), *rest

    def _within(self, sample: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a mask of pairs that keeps samples of a row apart, [rows, 1, length, length].

        Args:
            sample: Number of the sample of each token, [rows, length].
            dtype: The type of a mask that is added to scores.
        """
        allowed = (sample[:, None, :, None] == sample[:, None, None, :]).tril()
        if self.shared_model.structure.model.config._attn_implementation != "eager":
            return allowed
        least = torch.finfo(dtype).min
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(
            ~allowed, least
        )


def layers_of(options: MixtureOfDepths, kinds: hugging_face.LayerKinds) -> hugging_face.LayerKinds:
    """Returns what makes the layers of a model of transformers with routed blocks."""
    routed = frozenset(options.routed_blocks(kinds.blocks))
    if not routed:
        raise ConfigError(
            f"dynamism.mixture_of_depths.every = {options.every} routes none of the model's "
            f"{kinds.blocks} blocks; use {kinds.blocks} or less"
        )
    make = kinds.block

    def block(
        shared_model: hugging_face.SharedModel, spec: hugging_face.LayerSpec, own: nn.Module
    ) -> hugging_face.BlockLayer:
        if spec.block not in routed:
            return make(shared_model, spec, own)
        router = Router(kinds.width, kinds.std, options)
        return RoutedBlock(shared_model, spec.block or 0, own, router, kinds.std)

    return replace(kinds, block=block, whole=kinds.whole | routed)
