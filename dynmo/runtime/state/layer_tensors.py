"""The tensors of one layer with their manifest, as it moves and as it is saved.

A checkpoint leaves out frozen weights that the model's own folder has. A layer says so with the
attribute `base_folder`. The checkpoint has the folder and a hash of each weight instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from torch import Tensor, nn

from dynmo.errors import CheckpointError
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.kernels.packed_weight import forms_of, take_forms, unknown_form
from dynmo.runtime.layer.census import Scalars, evaluating_parts


class BaseWeights(BaseModel):
    """The weights of one layer that are in another folder.

    Attributes:
        folder: The folder of the model.
        hashes: SHA-256 of the bytes of each weight, by name.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    folder: str
    hashes: dict[str, str]


class TensorRecord(BaseModel):
    """Description of a tensor of the section parameter, buffer, gradient or optimizer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    section: str
    name: str
    dtype: str
    shape: list[NonNegativeInt]
    requires_grad: bool = False

    @property
    def stays_in_step(self) -> bool:
        """Whether F, B and W leave it as it is: a weight or a moment."""
        is_moment = self.section == "optimizer" and ":" not in self.name
        return is_moment or self.section == "parameter"


class Manifest(BaseModel):
    """List of the tensors of one layer, in the order in which the source sends them."""

    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")
    layer: int
    tensors: list[TensorRecord]
    evaluating: list[str] = []
    hooks: list[str] = []
    scalars: Scalars = {}
    base: BaseWeights | None = None
    forms: dict[str, str] = {}

    @property
    def flags(self) -> dict[str, bool]:
        """requires_grad of each parameter."""
        return {r.name: r.requires_grad for r in self.tensors if r.section == "parameter"}


Contents = dict[tuple[str, str], Tensor]


def contents(module: nn.Module, optimizer_state: dict[str, Tensor]) -> Contents:
    """Returns every tensor of a layer, by (section, name)."""
    out: Contents = {("parameter", name): p for name, p in module.named_parameters()}
    out |= {("buffer", name): b for name, b in module.named_buffers()}
    out |= {
        ("gradient", name): p.grad for name, p in module.named_parameters() if p.grad is not None
    }
    out |= {("optimizer", name): t for name, t in optimizer_state.items()}
    return out


def describe(layer: int, module: nn.Module, tensors: Contents) -> Manifest:
    flags = {name: p.requires_grad for name, p in module.named_parameters()}
    records = [
        TensorRecord(
            section=section,
            name=name,
            dtype=str(t.dtype).removeprefix("torch."),
            shape=list(t.shape),
            requires_grad=section == "parameter" and flags[name],
        )
        for (section, name), t in tensors.items()
    ]
    beside = {"evaluating": evaluating_parts(module), "forms": forms_of(module)}
    return Manifest(layer=layer, tensors=records, **beside)


def fill(
    module: nn.Module,
    tensors: Contents,
    flags: dict[str, bool],
    forms: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Puts tensors into a module. Returns the optimizer's.

    A module with memory keeps its own tensors, with other values, so that references to them stay
    right. Shapes may differ: parts with packed weights take the form that they have at the source.
    """
    buffers = {name: t for (section, name), t in tensors.items() if section == "buffer"}
    take_forms(module, buffers, forms)
    for name in [n for n, _ in module.named_parameters()]:
        owner, key = _owner(module, name)
        value = tensors["parameter", name]
        parameter = owner._parameters[key]
        if not _copied(value, parameter):
            parameter = nn.Parameter(value, flags[name])
        assert parameter is not None
        parameter.requires_grad_(flags[name])
        gradient = tensors.get(("gradient", name))
        if gradient is not None:
            parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
        if parameter is not owner._parameters[key]:
            setattr(owner, key, parameter)
    # A checkpoint leaves out buffers that the module makes for itself. A forward made the buffers
    # that the checkpoint has and this module lacks.
    for section, name in tensors:
        if section == "buffer":
            owner, key = _owner(module, name)
            if not _copied(tensors[section, name], owner._buffers.get(key)):
                owner._buffers[key] = tensors[section, name]
    return {name: t for (section, name), t in tensors.items() if section == "optimizer"}


def make_contiguous(module: nn.Module) -> None:
    """Makes parameters and buffers contiguous, like gradients and moments."""
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.layout == torch.strided and not buffer.is_contiguous():
                part._buffers[name] = buffer.contiguous()
        if isinstance(part, GroupedLinear):
            part.flatten_parameters()


def _copied(value: Tensor, into: Tensor | None) -> bool:
    """Copies a value into a tensor of the same form. Returns False if that cannot be done."""
    if into is None or into.is_meta or into.is_inference() or into.layout != torch.strided:
        return False
    if (into.shape, into.dtype, into.device) != (value.shape, value.dtype, value.device):
        return False
    into.data.copy_(value)
    return True


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key


# -- frozen weights that a checkpoint leaves out ---------------------------------------------------


def base_of(module: nn.Module) -> BaseWeights | None:
    """Describes the frozen weights of a layer that its folder has. None if there is no folder."""
    folder: str | None = getattr(module, "base_folder", None)
    if folder is None:
        return None
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    return BaseWeights(folder=folder, hashes={name: _hash(p) for name, p in frozen.items()})


def from_base(what: str, module: nn.Module, base: BaseWeights | None) -> Mapping[str, Tensor]:
    """Returns the weights that a checkpoint left out, as the module has them.

    Args:
        what: The layer, for messages.
        module: The layer, made from its folder.
        base: What the checkpoint says of them.

    Raises:
        CheckpointError: The module has other weights.
    """
    found = dict[str, Tensor]()
    if base is None:
        return found
    parameters = dict(module.named_parameters())
    for name, digest in base.hashes.items():
        if name not in parameters or _hash(parameters[name]) != digest:
            raise CheckpointError(
                f"{what}: {name} is not the weight that the checkpoint was trained with; it left "
                f"out the frozen weights of {base.folder}, so resume with that folder as it was"
            )
        found[name] = parameters[name].detach()
    return found


def _hash(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


# -- a saved layer fits the model ------------------------------------------------------------------


def fit(
    index: int,
    name: str,
    module: nn.Module,
    tensors: Contents,
    forms: Mapping[str, str] | None = None,
) -> Contents:
    """Gives a layer's module the form that it has in a checkpoint.

    Args:
        forms: Forms of its packed weights. Earlier versions of dynmo saved none.

    Returns:
        The tensors that the module shall take. A buffer that the module makes for itself (not
        `persistent`) is among them only if it has the same shape.

    Raises:
        CheckpointError: The layer has another shape or dtype, or its form is not known here.
    """
    layer = f"layer {index} ({name})"
    if (form := unknown_form(forms or {})) is not None:
        raise CheckpointError(
            f"{layer} has weights that are packed as {form}, which is not imported here; name its "
            "case in dynamism.cases, or import it before the checkpoint is read"
        )
    then = {key: t for (section, key), t in tensors.items() if section == "buffer"}
    try:
        take_forms(module, then, forms)
    except ValueError as error:
        raise CheckpointError(f"{layer}: {error}; resume with the run's own config") from None
    parts, buffers = dict(module.named_modules()), dict(module.named_buffers())
    remade = {
        f"{path}.{key}".lstrip(".")
        for path, part in parts.items()
        for key in part._non_persistent_buffers_set
    }
    here = {key: _form(p) for key, p in module.named_parameters()}
    here |= {f"buffer {key}": "present" for key in buffers if key not in remade}
    saved = {key: _form(t) for (section, key), t in tensors.items() if section == "parameter"}
    # A forward may make a buffer, but no module for it.
    saved |= {
        f"buffer {key}": "present"
        for section, key in tensors
        if section == "buffer"
        and key not in remade
        and (key in buffers or key.rpartition(".")[0] not in parts)
    }
    for key in sorted({*here, *saved}):
        if here.get(key) != saved.get(key):
            raise CheckpointError(
                f"{layer}: {key} is {saved.get(key, 'missing')} in the checkpoint, "
                f"{here.get(key, 'missing')} in the config's model; resume with the config (model "
                "and train.precision) that the run was started with"
            )
    made_here = {key: buffer for key, buffer in buffers.items() if key in remade}
    return {
        (section, key): tensor
        for (section, key), tensor in tensors.items()
        if section != "buffer" or made_here.get(key, tensor).shape == tensor.shape
    }


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of {list(tensor.shape)}"
