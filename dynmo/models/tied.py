"""Weights that two layers share: the pairs that a model gives, and what they may be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from dynmo.errors import ConfigError

# (layer, parameter) of the owner and of the user.
Pair = tuple[tuple[int, str], tuple[int, str]]


def pairs_of(where: str, tied: Iterable[Any]) -> tuple[Pair, ...]:
    """Checks the form of pairs. Each weight has one owner."""
    pairs = list[Pair]()
    for each in tied:
        match each:
            case ((int(owner), str(owner_name)), (int(user), str(name))):
                pairs.append(((owner, owner_name), (user, name)))
            case _:
                raise ConfigError(
                    f"{where}: tied has {each!r}; give pairs like ((0, 'weight'), (9, 'weight'))"
                )
    users = [user for _, user in pairs]
    for index, (owner, user) in enumerate(pairs):
        if user in users[:index] or owner in users:
            layer, name = user if user in users[:index] else owner
            raise ConfigError(
                f"{where}: tied gives {name} of layer {layer} to two owners; let each pair of one "
                "weight begin with the same owner"
            )
    return tuple(pairs)


def _problems(layers: Sequence[nn.Module], tied: Sequence[Pair]) -> Iterator[str]:
    for pair in tied:
        for index, name in pair:
            if not 0 <= index < len(layers):
                yield f"tied names layer {index}, but the layers are 0 to {len(layers) - 1}"
            known = list(_names(layers[index]))
            if name not in known:
                yield (
                    f"tied names {name} of layer {index}, which has no such parameter; it has "
                    f"{', '.join(known) or 'none'}"
                )
        (owner, owner_name), (user, name) = pair
        owned, used = (layers[index].get_parameter(each) for index, each in pair)
        one, other = form_of(owned), form_of(used)
        if one != other:
            yield (
                f"tied names {owner_name} of layer {owner}, which is {one}, and {name} of layer "
                f"{user}, which is {other}; one weight has one shape"
            )
        if owned is used and _holder(layers, *pair[0]) == _holder(layers, *pair[1]):
            yield (
                f"{owner_name} of layer {owner} and {name} of layer {user} belong to one module; "
                "give each layer a module of its own"
            )


def _names(layer: nn.Module) -> Iterator[str]:
    """Yields the parameters as a move names them. Each module comes once."""
    for prefix, module in layer.named_modules():
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{name}".lstrip(".")


def form_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _holder(layers: Sequence[nn.Module], layer: int, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return layers[layer].get_submodule(path), key


def untie(where: str, layers: Sequence[nn.Module], tied: Sequence[Pair]) -> None:
    """Gives each user a parameter of its own over the same memory, where modules share one.

    Raises:
        ConfigError: No two parameters of the layers can be such a pair.
    """
    for problem in _problems(layers, tied):
        raise ConfigError(f"{where}: {problem}")
    for (owner, owner_name), (user, name) in tied:
        owned = layers[owner].get_parameter(owner_name)
        if layers[user].get_parameter(name) is owned:
            module, key = _holder(layers, user, name)
            setattr(module, key, nn.Parameter(owned.data, owned.requires_grad))
