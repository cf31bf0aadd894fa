"""Which modules leave their weight gradients on the tape of their layer.

- nn.Linear and nn.Embedding.
- Modules whose class opts in with the attribute `tape = None`.
- Classes that a user registers (`register_split`).
- All other modules that own a matrix, as far as they multiply by it with torch's functions
  (`products.py`).

All other weight gradients are computed in B.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.kernels.products import Products, SplitEmbedding
from dynmo.kernels.split import SplitLinear, WeightTape, float32_gradients, splits

_logger = logging.getLogger(__name__)

# By exact type. A subclass may compute something else in `forward`.
_REGISTERED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: SplitLinear,
    nn.Embedding: SplitEmbedding,
}

# They use their matrices in kernels of their own.
_CLOSED = (nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.Bilinear, nn.EmbeddingBag)


def register_split(kind: type[nn.Module], split: type[nn.Module]) -> None:
    """Makes modules of a class leave their weight gradients on their layer's tape.

    Each module of exactly this class becomes one of `split` as its layer is made. Nothing else of
    the module changes.

    Args:
        kind: A class of modules that dynmo would otherwise leave as they are.
        split: A subclass with the class attribute `tape = None`. Its backward hands the work of a
            weight gradient to `tape.add(work, *tensors)` if `tape` is set and `tape.takes(weight)`.

    Raises:
        ConfigError: `split` is no subclass of `kind`, or has no such attribute.
    """
    if not issubclass(split, kind) or getattr(split, "tape", split) is not None:
        raise ConfigError(
            f"{split.__name__} must be a subclass of {kind.__name__} with the class attribute "
            "tape = None"
        )
    _REGISTERED[kind] = split


def install(module: nn.Module, tape: WeightTape | None) -> None:
    """Give the tape to every module of the tree that can split its backward.

    The class of a module is replaced, not the module: names, parameters, hooks and state stay as
    they are.
    """
    float32_gradients(module)
    products = None if tape is None else Products(tape)
    for child in module.modules():
        if not hasattr(child, "tape"):
            if (known := _REGISTERED.get(type(child))) is not None:
                child.__class__ = known
            elif _owns_matrix(child):
                child.__class__ = _caught(type(child))
        if splits(child):
            child.tape = tape
            if isinstance(child, CaughtProducts):
                child._products = products


def uninstall(module: nn.Module) -> bool:
    """Gives modules their own classes back. Returns whether a tape was there."""
    found = False
    for child in module.modules():
        kind, own = type(child), vars(child)
        if isinstance(own.get("tape"), WeightTape) and splits(child):
            found = True
            del own["tape"]
            own.pop("_products", None)
            object.__setattr__(child, "__class__", plain_class(kind))
    return found


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that a module had before it got a tape."""
    if issubclass(kind, CaughtProducts):
        kind = kind.__bases__[1]
    return next((plain for plain, split in _REGISTERED.items() if split is kind), kind)


def warn_of_early_gradients(index: int, module: nn.Module, taken: Collection[Tensor]) -> bool:
    """Warns if B has computed the gradients of most weights of a layer.

    Those of norms and biases do not count, since they take no time.

    Args:
        taken: Parameters whose gradients the layer's tape has taken.

    Returns:
        Whether that is known. It is not if all tokens have left before, so no weight took part.
    """
    trained = [p for p in module.parameters() if p.requires_grad and p.dim() > 1]
    if not taken and all(p.grad is None or not p.grad.any() for p in trained):
        return False
    if not trained or (splits(module) and not isinstance(module, CaughtProducts)):
        return True  # a class that has opted in need not name its parameters
    waiting = sum(p.numel() for p in trained if p in taken)
    share = waiting / max(1, sum(p.numel() for p in trained))
    if share < 0.5:
        kind = type(getattr(module, "block", module)).__name__
        _logger.warning(
            f"layer {index} ({kind}), and those like it: the gradients of {share:.0%} of the "
            "weights can wait for W, and B computes the others, so zero bubble gains little; see "
            "dynmo.register_split"
        )
    return True


def _owns_matrix(module: nn.Module) -> bool:
    if isinstance(module, (*_CLOSED, torch.jit.ScriptModule)):
        return False
    lists = [x for x in module.children() if isinstance(x, nn.ParameterList | nn.ParameterDict)]
    return not isinstance(module, nn.ParameterList | nn.ParameterDict | nn.ModuleList) and any(
        parameter.dim() > 1
        for each in (module, *lists)
        for parameter in each._parameters.values()
        if parameter is not None
    )


class CaughtProducts(nn.Module):
    """A module whose products with parameters are seen by `Products`."""

    tape: WeightTape | None = None
    _products: Products | None = None


@cache
def _caught(kind: type[nn.Module]) -> type[nn.Module]:
    @wraps(kind.forward)  # dynmo and transformers read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A compiler traces the module as it is.
        if self._products is None or torch.compiler.is_compiling():
            return kind.forward(self, *args, **kwargs)
        return self._products.run(kind.forward, self, *args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "forward": forward}
    return type(kind.__name__, (CaughtProducts, kind), names)
