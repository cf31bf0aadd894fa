"""The groups of a model's parameters: which options, and which optimizer, each parameter has.

Every rank finds the same groups from names and shapes, which all ranks know. The options of a step
travel from the pipeline to the layers' optimizers as one mapping for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from dynmo.errors import ConfigError, DynmoError, one_line, place
from dynmo.models.model import Model
from dynmo.runtime.optim.fused import AdamW, Fused
from dynmo.runtime.optim.trial import (
    NUMBER,
    Make,
    bytes_of,
    check_is_separable,
    find_state,
    is_cut,
    is_elementwise,
    make_optimizer,
    name_of,
)

GroupRule = Callable[[str, nn.Parameter], Mapping[str, Any] | None]
"""Takes name and parameter (on "meta"), and returns the options that differ from the others'."""
Rates = float | Sequence[Mapping[str, Any]]
"""Options of each group in a step. A number is the learning rate of all groups."""


@dataclass(frozen=True)
class OptimizerSettings:
    """A function from groups of parameters to an optimizer, and the rule that makes the groups.

    The weight decay of `Fused` optimizers acts on matrices only (parameters of two or more
    dimensions), unless `groups` gives it.
    """

    make: Make = AdamW
    groups: GroupRule | None = None


def fused_class(make: object) -> type[Fused] | None:
    """Returns dynmo's own class that a function makes, or None for a user's."""
    kind = make.func if isinstance(make, partial) else make
    return kind if isinstance(kind, type) and issubclass(kind, Fused) else None


@dataclass(eq=False)
class Group:
    """Parameters with equal options.

    Attributes:
        number: Its place among the groups.
        options: All options that the optimizer has at first.
        given: The options that the group rule gave.
        parameters: On "meta", by name.
    """

    make: Make = AdamW
    given: dict[str, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    number: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    _states: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def dims(self) -> list[int]:
        """Numbers of dimensions of the parameters that train."""
        return sorted({p.dim() for p in self.parameters.values() if p.requires_grad})

    def state(self, dims: int) -> Mapping[str, Any]:
        """Returns the state of a small parameter with so many dimensions."""
        if dims not in self._states:
            self._states[dims] = find_state(self.make, self.given, dims, self.device)
        return self._states[dims]

    def moments(self, dims: int) -> tuple[str, ...]:
        """Returns the names that the state of a parameter may have."""
        state = self.state(dims).items()
        tried = [f"{key}{NUMBER}" if isinstance(x, int | float) else key for key, x in state]
        return tuple(dict.fromkeys([*tried, *self._own_moments]))

    def is_cut(self, moment: str, dims: int) -> bool:
        """Returns whether a moment has an element for each of the parameter's."""
        return moment in self._own_moments or is_cut(self.state(dims).get(moment), dims)

    @property
    def _own_moments(self) -> tuple[str, ...]:
        """The moments that dynmo's own optimizer may have, whatever its options are."""
        kind = fused_class(self.make)
        return () if kind is None else kind.moments

    def state_bytes(self, shape: Sequence[int], element: int) -> int:
        """Returns the bytes of the state of a parameter that trains, but for its numbers."""
        return sum(bytes_of(x, shape, element) for x in self.state(len(shape)).values())

    def spares(self, dims: int) -> bool:
        """Returns whether weight decay does not act on parameters with so many dimensions."""
        return dims < 2 and "weight_decay" not in self.given and bool(fused_class(self.make))


class ParameterGroups:
    """The distinct groups of a model.

    Args:
        modules: All layers, on "meta" or not, as the model made them.
        device: Where optimizers are tried.

    Attributes:
        groups: In the order of their first parameters.
        name: Names of the optimizers, as a checkpoint has them.
        inverts: Whether a step can be taken back without copies.

    Raises:
        ConfigError: An optimizer cannot train these parameters layer by layer.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        model: Model,
        modules: Sequence[nn.Module],
        device: torch.device,
    ) -> None:
        self._settings = settings
        self.inverts = fused_class(settings.make) is not None
        self.groups: list[Group] = []
        self._of: list[dict[str, Group]] = []
        for index, module in enumerate(modules):
            users = {name for _, (layer, name) in model.tied if layer == index}
            self._of.append(
                {
                    name: self._place(model.full_name(index, name), p, device)
                    for name, p in module.named_parameters()
                    if name not in users
                }
            )
        if not self.groups:
            self._place("", nn.Parameter(torch.empty(0, device="meta")), device)
        self.name = "+".join(sorted(self._try(device)))

    def group(self, layer: int, name: str) -> Group:
        """Returns the group of a layer's parameter. The default is the first."""
        return (self._of[layer] if self._of else {}).get(name, self.groups[0])

    @property
    def code(self) -> list[object]:
        """Functions of the user's own that decide the groups and their optimizers."""
        makes = [] if self.inverts else [group.make for group in self.groups]
        return [each for each in (*makes, self._settings.groups) if each is not None]

    @property
    def is_plain(self) -> bool:
        """Whether all parameters have the options of one of dynmo's own optimizers."""
        return self.inverts and self._settings.groups is None

    @property
    def moments(self) -> int:
        """The largest number of state tensors of a parameter's size."""
        return max(
            (
                sum(is_cut(value, dims) for value in group.state(dims).values())
                for group in self.groups
                for dims in group.dims
            ),
            default=0,
        )

    def texts(self) -> list[str]:
        """Returns what must be the same on all ranks."""
        return [
            f"{name_of(group.make)} {sorted(group.options.items())} {[*group.parameters]}"
            for group in self.groups
        ]

    def check_is_elementwise(self, key: str) -> None:
        """Raises ConfigError if some optimizer does not work element by element.

        Args:
            key: The option that needs it.
        """
        for group in self.groups:
            # torch's fused functions work element by element.
            can_divide = self.inverts or is_elementwise(group.make, group.given, group.device)
            if not can_divide:
                raise ConfigError(
                    f"{key}: {name_of(group.make)} does not work element by element, but here each "
                    "parameter is divided; use AdamW, SGD or another one that does, or leave it out"
                )

    def _place(self, name: str, parameter: nn.Parameter, device: torch.device) -> Group:
        """Returns a parameter's group, which is made if it is new."""
        meta = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
            requires_grad=parameter.requires_grad,
        )
        given = self._given(name, meta) if name else {}
        if "optimizer" in given and self.inverts:
            raise ConfigError(
                f"groups: {name} gets an optimizer of its own, but the others have dynmo's; give "
                "the pipeline a function for these too, such as torch.optim.AdamW"
            )
        make = given.pop("optimizer", self._settings.make)
        # Another function that does the same may have been given for an earlier parameter.
        make = next((g.make for g in self.groups if _parts(g.make) == _parts(make)), make)
        group = next((g for g in self.groups if g.make is make and g.given == given), None)
        if group is None:
            group = Group(make, given, device, len(self.groups))
            self.groups.append(group)
        group.parameters[name] = meta
        return group

    def _given(self, name: str, meta: nn.Parameter) -> dict[str, Any]:
        rule = self._settings.groups
        if rule is None:
            return {}
        try:
            given = rule(name, meta)
        except DynmoError:
            raise
        except Exception as error:  # anything that the user's code raises
            raise ConfigError(
                one_line(f"groups: {name} raised {type(error).__name__}: {error}{place(error)}")
            ) from error
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(
                f"groups: {name} gets an object of {type(given).__name__}; return a dict of "
                'options, such as {"weight_decay": 0.0}, or None'
            )
        return dict(given or {})

    def _try(self, device: torch.device) -> set[str]:
        """Tries the optimizers of all groups, completes the options, and returns their names."""
        names = set[str]()
        for make in dict.fromkeys(group.make for group in self.groups):
            groups = [group for group in self.groups if group.make is make]
            tried = make_optimizer(make, [(group.given, [torch.zeros(2, 3)]) for group in groups])
            for group, made in zip(groups, tried.param_groups, strict=True):
                if tried.defaults:
                    _check_known(group, tried.defaults)
                group.options = {key: value for key, value in made.items() if key != "params"}
                for dims in group.dims:
                    _try_one(group, dims)
            check_is_separable(make, [(group.given, group.dims or [2]) for group in groups], device)
            if not names:
                self.defaults = dict(tried.defaults)
            names.add(_class_name(type(tried)))
        return names


def _parts(make: object) -> object:
    return (make.func, make.args, make.keywords) if isinstance(make, partial) else make


def _class_name(kind: type[torch.optim.Optimizer]) -> str:
    """torch's optimizers have the name that a configuration file has."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    is_known = name.startswith("torch.optim.") or issubclass(kind, Fused)
    return kind.__name__.lower() if is_known else name


def _check_known(group: Group, known: Collection[str]) -> None:
    unknown = next((key for key in group.given if key not in known), None)
    if unknown is not None:
        optimizer = name_of(group.make)
        if fused_class(group.make) is not None:
            optimizer = f"dynmo's {optimizer.lower()}"
        raise ConfigError(
            f"groups: {next(iter(group.parameters))} gets {unknown!r}, which {optimizer} does not "
            f"know; it knows {', '.join(known)}"
        )


def _try_one(group: Group, dims: int) -> None:
    """Finds the state of parameters with so many dimensions. An error names one of them."""
    try:
        group.state(dims)
    except ConfigError as error:
        first = next(name for name, p in group.parameters.items() if p.dim() == dims)
        raise ConfigError(
            f"{error} (tried for {first}; groups can give parameters another optimizer)"
        ) from error.__cause__
