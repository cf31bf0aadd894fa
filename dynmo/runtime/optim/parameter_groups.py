"""The groups of a model's parameters: which options, and which optimizer, each parameter has.

Every rank finds the same groups from names and shapes, which all ranks know. The options of a step
travel from the pipeline to the layers' optimizers as one mapping for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError, DynmoError, one_line, place
from dynmo.models.model import Model
from dynmo.runtime.optim.state_form import Forms, Make, name_of

GroupRule = Callable[[str, nn.Parameter], Mapping[str, Any] | None]
"""Takes name and parameter (on "meta"), and returns the options that differ from the others'."""
Rates = float | Sequence[Mapping[str, Any]]
"""Options of each group in a step. A number is the learning rate of all groups."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of dynmo's own optimizers.

    Weight decay acts on matrices only (parameters of two or more dimensions), unless `groups` gives
    it. It is decoupled in AdamW and added to the gradient in SGD.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    lr: float = 0.0
    groups: GroupRule | None = None

    @property
    def moments(self) -> int:
        """The number of state tensors of a parameter's size."""
        return 2 if self.name == "adamw" else int(self.momentum > 0)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.name == "sgd" else ("step", "exp_avg", "exp_avg_sq")

    @property
    def options(self) -> dict[str, Any]:
        """The options of a group."""
        shared = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.name == "sgd":
            return {**shared, "momentum": self.momentum}
        return {**shared, "betas": self.betas, "eps": self.eps}


@dataclass(frozen=True)
class TorchSettings:
    """A user's optimizer: a function from groups of parameters to one of torch's optimizers."""

    make: Make
    groups: GroupRule | None = None


Settings = OptimizerSettings | TorchSettings


@dataclass
class Group:
    """Parameters with equal options.

    Attributes:
        options: All options that the optimizer has at first.
        given: The options that the group rule gave.
        make: Makes the optimizer. None for dynmo's own.
        names: Names of the parameters.
    """

    options: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    make: Make | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    _forms: dict[int, Forms] = field(default_factory=dict)

    @property
    def dims(self) -> list[int]:
        """Numbers of dimensions of the parameters that train."""
        return sorted({p.dim() for p in self.parameters if p.requires_grad})

    def forms(self, dims: int) -> Forms:
        """Returns the state of a parameter with so many dimensions."""
        assert self.make is not None
        if dims not in self._forms:
            from dynmo.runtime.optim.trial import find_forms

            self._forms[dims] = find_forms(self.make, self.given, dims, self.device)
        return self._forms[dims]

    def state_bytes(self, shape: Sequence[int], element: int) -> int:
        """Returns the bytes of the state of a parameter that trains, but for its numbers."""
        return sum(form.bytes(shape, element) for form in self.forms(len(shape)).values())


@dataclass(frozen=True)
class LayerGroups:
    """The groups of one layer's parameters, by name. The default is the first group."""

    groups: Sequence[Group] = (Group(),)
    of: Mapping[str, int] = field(default_factory=dict)

    def group(self, name: str) -> Group:
        return self.groups[self.of.get(name, 0)]


class ParameterGroups:
    """The distinct groups of a model.

    Args:
        modules: All layers, on "meta" or not, as the model made them.
        device: Where optimizers are tried.

    Attributes:
        groups: In the order of their first parameters.
        name: Names of the optimizers, as a checkpoint has them.

    Raises:
        ConfigError: An optimizer cannot train these parameters layer by layer.
    """

    def __init__(
        self, settings: Settings, model: Model, modules: Sequence[nn.Module], device: torch.device
    ) -> None:
        self.settings = settings
        self.groups: list[Group] = []
        self._of: list[dict[str, int]] = []
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
        if isinstance(settings, OptimizerSettings):
            self.name = settings.name
            for group in self.groups:
                _check_known(group, settings.options, f"dynmo's {settings.name}")
                group.options = settings.options | group.given
            self.defaults = settings.options
        else:
            self.name = "+".join(sorted(self._try(device)))

    def layer(self, index: int) -> LayerGroups:
        return LayerGroups(self.groups, self._of[index])

    @property
    def code(self) -> list[object]:
        """Functions of the user's own that decide the groups and their optimizers."""
        rule = self.settings.groups
        makes = [group.make for group in self.groups if group.make is not None]
        return [*makes, *([] if rule is None else [rule])]

    @property
    def is_plain(self) -> bool:
        """Whether all parameters have the options of one of dynmo's own optimizers."""
        return isinstance(self.settings, OptimizerSettings) and self.settings.groups is None

    @property
    def inverts(self) -> bool:
        """Whether a step can be taken back without copies."""
        return isinstance(self.settings, OptimizerSettings)

    @property
    def moments(self) -> int:
        """The largest number of state tensors of a parameter's size."""
        if isinstance(self.settings, OptimizerSettings):
            return self.settings.moments
        return max(
            (
                sum(form.is_cut for form in group.forms(dims).values())
                for group in self.groups
                for dims in group.dims
            ),
            default=0,
        )

    def state_bytes(self, layer: int, name: str, parameter: Tensor, element: int) -> int:
        """Returns the bytes of the state of a parameter that trains, but for its numbers."""
        if isinstance(self.settings, OptimizerSettings):
            return self.settings.moments * parameter.numel() * element
        return self.groups[self._of[layer].get(name, 0)].state_bytes(parameter.shape, element)

    def texts(self) -> list[str]:
        """Returns what must be the same on all ranks."""
        return [
            f"{name_of(group.make)} {sorted(group.options.items())} {group.names}"
            for group in self.groups
        ]

    def check_is_elementwise(self, key: str) -> None:
        """Raises ConfigError if some optimizer does not work element by element.

        Args:
            key: The option that needs it.
        """
        if isinstance(self.settings, OptimizerSettings):
            return
        from dynmo.runtime.optim.trial import is_elementwise

        for group in self.groups:
            if group.make is not None and not is_elementwise(group.make, group.given, group.device):
                raise ConfigError(
                    f"{key}: {name_of(group.make)} does not work element by element, but here each "
                    "parameter is divided; use AdamW, SGD or another one that does, or leave it out"
                )

    def _place(self, name: str, parameter: Tensor, device: torch.device) -> int:
        """Returns the number of a parameter's group, which is made if it is new."""
        meta = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
            requires_grad=parameter.requires_grad,
        )
        given = self._given(name, meta) if name else {}
        make = self.settings.make if isinstance(self.settings, TorchSettings) else None
        make = self._known(cast("Make | None", given.pop("optimizer", make)))
        if make is not None and isinstance(self.settings, OptimizerSettings):
            raise ConfigError(
                f"groups: {name} gets an optimizer of its own, but the others have dynmo's; give "
                "the pipeline a function for these too, such as torch.optim.AdamW"
            )
        alike = [i for i, g in enumerate(self.groups) if g.make is make and g.given == given]
        if not alike:
            alike = [len(self.groups)]
            self.groups.append(Group(given=given, make=make, device=device))
        group = self.groups[alike[0]]
        group.names.append(name)
        group.parameters.append(meta)
        return alike[0]

    def _known(self, make: Make | None) -> Make | None:
        """Returns a function that does the same and was given for an earlier parameter."""
        earlier = (group.make for group in self.groups if _parts(group.make) == _parts(make))
        return next(earlier, make)

    def _given(self, name: str, meta: nn.Parameter) -> dict[str, Any]:
        rule = self.settings.groups
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
        from dynmo.runtime.optim.trial import check_is_separable, make_optimizer

        names = set[str]()
        makes = list(dict.fromkeys(cast(Make, group.make) for group in self.groups))
        for make in makes:
            groups = [group for group in self.groups if group.make is make]
            tried = make_optimizer(make, [(group.given, [torch.zeros(2, 3)]) for group in groups])
            for group, made in zip(groups, tried.param_groups, strict=True):
                if tried.defaults:
                    _check_known(group, tried.defaults, name_of(make))
                group.options = {key: value for key, value in made.items() if key != "params"}
                for dims in group.dims:
                    _try_one(group, dims)
            check_is_separable(make, [(group.given, group.dims or [2]) for group in groups], device)
            if make is makes[0]:
                self.defaults = dict(tried.defaults)
            names.add(_class_name(type(tried)))
        return names


def _parts(make: object) -> object:
    return (make.func, make.args, make.keywords) if isinstance(make, partial) else make


def _class_name(kind: type[torch.optim.Optimizer]) -> str:
    """torch's optimizers have the name that a configuration file has."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return kind.__name__.lower() if name.startswith("torch.optim.") else name


def _check_known(group: Group, known: Collection[str], optimizer: str) -> None:
    unknown = next((key for key in group.given if key not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"groups: {group.names[0]} gets {unknown!r}, which {optimizer} does not know; it knows "
            f"{', '.join(known)}"
        )


def _try_one(group: Group, dims: int) -> None:
    """Finds the state of parameters with so many dimensions. An error names one of them."""
    try:
        group.forms(dims)
    except ConfigError as error:
        first = next(
            name for name, p in zip(group.names, group.parameters, strict=True) if p.dim() == dims
        )
        raise ConfigError(
            f"{error} (tried for {first}; groups can give parameters another optimizer)"
        ) from error.__cause__
