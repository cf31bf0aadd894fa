"""Modules whose weights are no plain parameters: compressed, or in another shape.

    weight       values, in a shape of their own: they train, move and are saved as they are
    crow, col    buffers of the form: they move and are saved, too

What dynmo must know of such a module is in its class, `PackedWeight`. A module takes its form on
the rank that packs it. It takes the same form on every rank where its layer arrives or is loaded.
The name of the form's class tells which. Without a name, the form's buffers tell.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from dynmo.errors import RunError, place
from dynmo.kernels.deferral import plain_class

_FORMS: list[type[PackedWeight]] = []

# It imports the forms of dynmo's own cases. A process without a case may load what the case packed.
_OWN_FORMS = "dynmo.cases.forms"


class PackedWeight(nn.Module):
    """A module whose weights have another form than those of a plain one. Inherit from both.

    Parameters keep their names. `forward` reads a packed one by `values`, because `self.weight`
    raises RunError while the layer runs: other code of the layer would take it for a plain weight.

    Attributes:
        plain: The class of modules that may take this form. Its subclasses may not.
        form: Names of the buffers that give the form. They move and are saved. Forwards do not
            write to them. No digest and no `state_dict` has them, as these have dense weights.
        packed: Names of the packed parameters.

    Example:
        >>> class Halved(PackedWeight, nn.Linear):
        ...     plain, form = nn.Linear, ("rows",)
        ...     def packed_shape(self, name):
        ...         return len(self.rows), self.in_features
        ...     def pack(self, name, dense):
        ...         return dense[self.rows]
        ...     def unpack(self, name, values):
        ...         dense = values.new_zeros(self.out_features, self.in_features)
        ...         return dense.index_copy(0, self.rows, values)
        ...     def forward(self, input):
        ...         weight = self.unpack("weight", self.values("weight"))
        ...         return nn.functional.linear(input, weight, self.bias)
        >>> linear = nn.Linear(3, 4)
        >>> weight = linear.weight.detach()
        >>> halved = Halved.take_form(linear, {"rows": torch.tensor([0, 2])})
        >>> linear.weight = nn.Parameter(halved.pack("weight", weight))
        >>> linear.weight.shape
        torch.Size([2, 3])
    """

    plain: ClassVar[type[nn.Module]]
    form: ClassVar[tuple[str, ...]]
    packed: ClassVar[tuple[str, ...]] = ("weight",)
    # Who would read packed parameters now, for the error. None allows it.
    _guard: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "form" in vars(cls):
            for name in ("packed_shape", "pack", "unpack"):
                if getattr(cls, name) is getattr(PackedWeight, name):
                    raise TypeError(f"{cls.__name__} is a PackedWeight without {name}; write it")
            _FORMS.append(cls)

    def __getattr__(self, name: str) -> Any:
        if self._guard is not None and name in self.packed:
            raise RunError(
                f"{self._guard} by itself, whose {name} is packed ({type(self).__name__}); let it "
                "call the module, or leave out the case that packs it"
            )
        return super().__getattr__(name)

    def values(self, name: str) -> nn.Parameter:
        """Returns a packed parameter, for `forward`."""
        return cast(nn.Parameter, self._parameters[name])

    @abstractmethod
    def packed_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape that a packed parameter has in this form.

        Raises:
            ValueError: The form's buffers cannot be this module's.
        """
        ...

    @abstractmethod
    def pack(self, name: str, dense: Tensor) -> Tensor:
        """Packs a dense tensor: new values of a parameter, its master or a moment."""
        ...

    @abstractmethod
    def unpack(self, name: str, values: Tensor) -> Tensor:
        """Makes a packed parameter, its master or a moment dense. Works on the meta device, too."""
        ...

    @classmethod
    def take_form(cls, module: nn.Module, form: Mapping[str, Tensor]) -> Self:
        """Gives a plain module this form. Packed parameters whose shape changes lose their values.

        The class is replaced, not the module: names, hooks, place and other tensors stay.

        Args:
            module: A module of the plain class, also in another form.
            form: The form's buffers.

        Returns:
            The module.

        Raises:
            ValueError: The buffers cannot be this module's, which stays as it was.
        """
        missing = [name for name in cls.form if name not in form]
        if missing:
            raise ValueError(f"the form {cls.__name__} needs the buffers {', '.join(missing)}")
        plain, buffers, parameters = type(module), dict(module._buffers), dict(module._parameters)
        try:
            return cls._take(module, form)
        except BaseException as error:
            module.__class__ = plain
            module._buffers.clear()
            module._buffers.update(buffers)
            module._parameters.update(parameters)
            if isinstance(error, ValueError) or not isinstance(error, Exception):
                raise
            raise ValueError(
                f"{cls.__name__}.packed_shape raised {type(error).__name__}: {error}{place(error)}"
            ) from error

    @classmethod
    def _take(cls, module: nn.Module, form: Mapping[str, Tensor]) -> Self:
        for name in module.form if isinstance(module, PackedWeight) else ():
            del module._buffers[name]
        module.__class__ = cls
        taken = cast(Self, module)
        for name in cls.form:
            taken.register_buffer(name, form[name])
        for name in cls.packed:
            values = taken._parameters[name]
            if values is None:  # no bias
                continue
            shape = taken.packed_shape(name)
            if values.shape != shape:
                empty = torch.empty(shape, dtype=values.dtype, device="meta")
                taken._parameters[name] = nn.Parameter(empty, values.requires_grad)
        return taken


def gives_form(module: nn.Module, name: str) -> bool:
    """Returns whether a module's own buffer gives the form of packed parameters."""
    return isinstance(module, PackedWeight) and name in module.form


def unpacked(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Returns a module's own parameter, its master or a moment in dense form."""
    if isinstance(module, PackedWeight) and name in module.packed:
        return module.unpack(name, tensor)
    return tensor


def dense_parameters(
    module: nn.Module, masters: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Lists every parameter or its master by name, packed ones in dense form."""
    for key, parameter in module.named_parameters():
        path, _, name = key.rpartition(".")
        tensor = (masters or {}).get(key, parameter.detach())
        yield key, unpacked(module.get_submodule(path), name, tensor)


def forms_of(module: nn.Module) -> dict[str, str]:
    """Returns the forms of a layer's parts, path -> `module:class`. dynmo's may change modules."""
    forms = dict[str, str]()
    for path, part in module.named_modules():
        if isinstance(part, PackedWeight) and part.form:
            kind = next(kind for kind in type(part).__mro__ if "form" in vars(kind))
            forms[path] = f"{_module_of(kind)}:{kind.__qualname__}"
    return forms


def unknown_form(forms: Mapping[str, str]) -> str | None:
    """Returns the name of a form whose class nothing has imported, or None.

    Never imports by a name: it may come from a file.
    """
    return next((x for x in forms.values() if _last(partial(_has_name, name=x)) is None), None)


def _last(fits: Callable[[type[PackedWeight]], bool]) -> type[PackedWeight] | None:
    """Returns the last form that was made of those that fit."""
    found = next(filter(fits, reversed(_FORMS)), None)
    if found is None:
        import_module(_OWN_FORMS)
        found = next(filter(fits, reversed(_FORMS)), None)
    return found


def _module_of(kind: type) -> str:
    return "dynmo" if kind.__module__.startswith("dynmo.") else kind.__module__


def _has_name(kind: type, name: str) -> bool:
    module, _, qualname = name.partition(":")
    # A script is another module for those that import it.
    modules = {module, _module_of(kind)}
    return kind.__qualname__ == qualname and (len(modules) == 1 or "__main__" in modules)


def take_forms(
    module: nn.Module, buffers: Mapping[str, Tensor], forms: Mapping[str, str] | None = None
) -> None:
    """Gives the parts of a layer the forms of a layer with these buffers. Values are not set.

    Args:
        forms: Known forms by path (`forms_of`). A form of any other part is that of its buffers.

    Raises:
        ValueError: A packed weight cannot be this layer's.
    """
    for path, part in list(module.named_modules()):
        prefix = f"{path}." if path else ""
        given = {
            key.removeprefix(prefix): t for key, t in buffers.items() if key.startswith(prefix)
        }
        kind = _form_of(part, given, (forms or {}).get(path))
        if kind is not None:
            try:
                kind.take_form(part, given)
            except ValueError as error:
                raise ValueError(f"{prefix}{error}") from None
        elif isinstance(part, PackedWeight) and part.form:
            raise ValueError(
                f"{prefix}{part.packed[0]} is packed here ({type(part).__name__}) and not there; "
                "packed weights do not become plain ones"
            )


def _form_of(
    module: nn.Module, buffers: Mapping[str, Tensor], name: str | None
) -> type[PackedWeight] | None:
    """Returns the form whose buffers are all that the plain module lacks.

    If several have no name to tell, the form that the module has counts, or the last class that was
    made, so a copy of a case finds its own classes.
    """
    packed = isinstance(module, PackedWeight)
    plain = module.plain if packed else plain_class(type(module))
    usual = module._buffers.keys() - {*(module.form if packed else ())}
    form = {name for name in buffers if "." not in name} - usual
    if packed and form == {*module.form} and not name:
        return type(module)

    def fits(kind: type[PackedWeight]) -> bool:
        is_named = not name or _has_name(kind, name)
        return kind.plain is plain and form == {*kind.form} and is_named

    return _last(fits) if form else None


def guarded(index: int, module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run` so that a layer can use packed weights only through their modules.

    torch's fused evaluation of `nn.TransformerEncoderLayer` reads the weights of its linears
    itself. Therefore it is switched off in F of such a layer.
    """
    parts = [(path, x) for path, x in module.named_modules() if isinstance(x, PackedWeight)]
    if not parts:
        return run

    def run_guarded(*inputs: Tensor) -> Any:
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        for path, part in parts:
            part._guard = f"layer {index} uses the weight of {path or 'itself'!r}"
        try:
            return run(*inputs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for _, part in parts:
                part._guard = None

    return run_guarded
