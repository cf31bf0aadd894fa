"""The loss that keeps the load of experts even, over all layers of a pipeline.

transformers multiplies two sums over all layers, so the loss is no sum over layers. Each layer adds
its part to two vectors that go from layer to layer. The last layer has both sums, and the loss and
its gradients are exact.

    probabilities  [experts]      sum of the routing probabilities, which get a gradient
    counts         [experts + 1]  tokens that each expert got, and the number of rows
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from dynmo.errors import ConfigError
from dynmo.models.loss import Loss, PieceLoss, causal_lm_loss, next_labels, next_token_loss


@dataclass(frozen=True)
class RouterLoss:
    """The loss of the routers of one model.

    Attributes:
        kind: Class of the modules whose output has the logits of a router.
        index: Place of the logits in a tuple that the module returns.
        within: Part of the path of such a module. None for any path.
        experts: Number of experts.
        top_k: Experts that compute a token.
        weight: Weight of the loss.
    """

    kind: type[nn.Module]
    index: int
    within: str | None
    experts: int
    top_k: int
    weight: float

    def routers(self, layer: nn.Module) -> Iterator[nn.Module]:
        for path, module in layer.named_modules():
            if isinstance(module, self.kind) and f".{self.within or ''}" in f".{path}":
                yield module

    @contextmanager
    def noted(self, layer: nn.Module) -> Generator[list[Tensor]]:
        """Notes the logits of the routers of a layer while it runs."""
        logits: list[Tensor] = []

        def note(_: nn.Module, __: Any, output: Any) -> None:
            logits.append(output[self.index] if isinstance(output, tuple) else output)

        handles = [module.register_forward_hook(note) for module in self.routers(layer)]
        try:
            yield logits
        finally:
            for each in handles:
                each.remove()

    def start(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns probabilities and counts of no layers."""
        return (
            torch.zeros(self.experts, device=device),
            torch.zeros(self.experts + 1, device=device),
        )

    def added(
        self, probabilities: Tensor, counts: Tensor, logits: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Adds one layer to probabilities and counts.

        Args:
            logits: [rows x tokens, experts].
            mask: [rows, tokens], 0 for padding. None means that there is none.
        """
        weights = functional.softmax(logits, dim=-1)
        chosen = torch.topk(weights, self.top_k, dim=-1)[1].reshape(-1)
        weights = weights.float()
        if mask is None:
            ones, rows = (
                torch.ones_like(chosen, dtype=torch.float32),
                weights.new_tensor(len(logits)),
            )
        else:
            flat = mask.reshape(-1).to(torch.float32)
            ones, rows = flat.repeat_interleave(self.top_k), flat.sum()
            weights = weights * flat.unsqueeze(-1)
        count = torch.zeros(self.experts, device=logits.device).scatter_add_(0, chosen, ones)
        now = torch.cat((count, rows.reshape(1)))
        return probabilities + weights.sum(dim=0), counts + now.detach()

    def loss(self, probabilities: Tensor, counts: Tensor) -> Tensor:
        tokens, rows = counts[:-1], counts[-1]
        return torch.sum(tokens / rows * (probabilities / rows).unsqueeze(0)) * self.experts

    def whole(
        self, output: tuple[Tensor, Tensor], labels: Tensor, loss: Loss = causal_lm_loss
    ) -> Tensor:
        """Returns the loss of the logits, and the weighted loss of the routers.

        Args:
            output: Logits [rows, tokens, vocabulary], and the loss of the routers.
            labels: [rows, tokens], as transformers has them.
            loss: That of the logits.
        """
        return loss(output[0], labels) + self.part(output)

    def part(self, output: tuple[Tensor, Tensor]) -> Tensor:
        return self.weight * output[1]

    @property
    def of_pieces(self) -> PieceLoss:
        """The whole loss of some tokens. The loss of the routers is that of all tokens."""
        return PieceLoss(next_labels, partial(self.whole, loss=next_token_loss))


def router_loss_of(model: PreTrainedModel) -> RouterLoss | None:
    """Returns the loss of a model's routers. None if its config asks for none.

    Raises:
        ConfigError: The model computes it in a way that dynmo does not know.
    """
    config = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return None
    weight: Any = _attribute(model, config, "router_aux_loss_coef")
    theirs: Any = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    recorder = _recorder(model)
    experts: Any = _attribute(model, config, "num_experts")
    top_k: Any = _attribute(model, config, "num_experts_per_tok")
    if None not in (weight, theirs, recorder, experts, top_k):
        kind, index, within = recorder
        made = RouterLoss(kind, index, within, experts, top_k, float(weight))
        if _is_same(made, theirs):
            return made
    raise ConfigError(
        f"{type(model).__name__} computes the loss of its routers in a way that dynmo does not "
        "know; set output_router_logits = false in its config"
    )


def _attribute(model: nn.Module, config: Any, name: str) -> Any:
    found = getattr(model, name, None)
    return getattr(config, name, None) if found is None else found


def _recorder(model: nn.Module) -> Any:
    """Returns class, index and path of the modules whose outputs have the logits."""
    for module in model.modules():
        found = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(found, "target_class", found)
        if isinstance(kind, type):
            return kind, getattr(found, "index", 1), getattr(found, "layer_name", None)
    return None


def _is_same(ours: RouterLoss, theirs: Callable[..., Any]) -> bool:
    """Whether both losses have the same bits on two layers, padded and not."""
    draws = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(12, ours.experts, generator=draws) for _ in range(2))
    for mask in (None, torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]])):
        sums = ours.start(torch.device("cpu"))
        for logits in layers:
            sums = ours.added(*sums, logits, mask)
        try:
            wanted = theirs(layers, ours.experts, ours.top_k, mask)
        except (TypeError, RuntimeError):
            return False
        if not torch.equal(ours.loss(*sums), wanted):
            return False
    return True
