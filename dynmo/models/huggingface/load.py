"""Reads the weights of a rank's own layers from the files of a transformers model.

Files may have other names and shapes than the model: one tensor for each expert, say.
`transformers`' own conversions know them. They run once on shapes, so every rank finds all that is
wrong before the run starts. Then they run for the tensors of own layers.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from dynmo.errors import ConfigError, first_line, one_line
from dynmo.files import check_regular, parse_json, read_text
from dynmo.kernels.seeds import Purpose, mix
from dynmo.models.huggingface.names import COPY, base_name
from dynmo.models.huggingface.private import (
    Conversion,
    conversions_of,
    initialise,
    without_ignored,
)
from dynmo.models.huggingface.stubs import has_no_values

_logger = logging.getLogger(__name__)

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

_Sources = dict[str, tuple[Conversion, str]]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        bytes: Its size in the file.
    """

    file: Path
    shape: torch.Size
    dtype: torch.dtype
    bytes: int


class Reader(ExitStack):
    """Reads tensors. Files stay open until the end of the `with` statement."""

    def __init__(self) -> None:
        super().__init__()
        self._files = dict[Path, Any]()

    def keys(self, file: Path) -> list[str]:
        return self._opened(file).keys()

    def tensor(self, file: Path, key: str) -> Tensor:
        """Returns a tensor that is mapped from its file. Nothing is read before it is used."""
        opened = self._opened(file)
        with _errors(file):
            return opened.get_tensor(key)

    def _opened(self, file: Path) -> Any:
        if file not in self._files:
            with _errors(file):
                check_regular(file)
                self._files[file] = self.enter_context(safe_open(file, framework="pt"))
        return self._files[file]


def has_weights(folder: Path) -> bool:
    """Whether a folder has files of weights, or an index of them."""
    return any(file for pattern in ("*.safetensors*", "*.bin*") for file in folder.glob(pattern))


def stored_in(folder: Path, named: str | None = None) -> dict[str, Stored]:
    """Returns the tensors of a folder's files by their keys. Reads headers only.

    Args:
        folder: The folder of a model.
        named: Name of the file or of the index. None means the usual names.

    Raises:
        ConfigError: The folder has no such files, or one is missing or damaged.
    """
    name = named or next((each for each in (_WHOLE, _INDEX) if (folder / each).is_file()), None)
    if name is None:
        if pickled := next((each for each in _PICKLED if (folder / each).is_file()), None):
            raise ConfigError(
                f"{folder} has its weights in {pickled}, and loading a pickle runs code; save it "
                "as safetensors with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        raise ConfigError(
            f"{folder} has no {_WHOLE} and no {_INDEX}; give a folder with weights (download it "
            "first)"
        )
    if not _is_file_name(name):
        raise ConfigError(f"{folder}/config.json names weights outside of the folder: {name}")
    names = _listed(folder, name) if name.endswith(".json") else [name]
    return {key: stored for each in names for key, stored in header_of(folder / each)}


def _listed(folder: Path, index: str) -> list[str]:
    """Returns the names of the files in an index."""
    try:
        listed: Any = parse_json(read_text(folder / index))
        names = sorted({*listed["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{folder / index} is no index of weights; download it again") from None
    for name in names:
        if not _is_file_name(name):
            raise ConfigError(
                f"{folder / index} lists {one_line(str(name))[:40]}, which is no name of a file "
                "in that folder; download it again"
            )
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder / name} is missing, but {index} lists it; download it again"
            )
    return names


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or "\0" in name or len(name.encode()) > 255:
        return False
    return Path(name).name == name and name not in ("", "..")


def header_of(file: Path) -> Generator[tuple[str, Stored]]:
    """Yields the key of each tensor of a file, and the tensor's shape and size."""
    with Reader() as reader:
        for key in reader.keys(file):
            tensor = reader.tensor(file, key)
            yield key, Stored(file, tensor.shape, tensor.dtype, tensor.nbytes)


@contextmanager
def _errors(file: Path) -> Generator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or one_line(str(error))
        raise ConfigError(f"{file} cannot be read ({reason}); download it again") from None


class Weights:
    """The weights of a model in the files of a folder. `weights_of` makes it.

    Args:
        folder: The folder.
        model: The model on the meta device.
        stored: The tensors in the files, by key.
        sources: For each tensor of the model that is in files, the conversion that makes it and
            its name there.
        seed: Seed of tensors that are not in files.

    Attributes:
        stored: The tensors in the files, by key.
        names: Of each key in the files that the model uses, the name in the model.
        beside: The tensors in the files that the model does not use, by key.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        stored: Mapping[str, Stored],
        sources: _Sources,
        seed: int,
    ) -> None:
        self._folder, self._model, self._seed = folder, model, seed
        self.stored, self._sources = stored, sources
        self.names = {key: made.first for made, _ in sources.values() for key in made.keys}
        self.beside = {key: each for key, each in stored.items() if key not in self.names}

    def fill(self, index: int, layer: nn.Module) -> None:
        """Sets the values of a layer on the CPU. Fake tensors have none."""
        if has_no_values():
            return
        own = {name: x for name, x in _state(layer).items() if name in self._sources}
        torch.manual_seed(mix(self._seed, Purpose.INITIAL, index))
        initialise(self._model, layer, keep=own.values())
        with Reader() as reader:
            for conversion, names in self._conversions(own).items():
                self._read(reader, conversion, {name: own[name] for name in names})

    @torch.no_grad()
    def _read(self, reader: Reader, conversion: Conversion, into: Mapping[str, Tensor]) -> None:
        made = conversion.convert(
            self._model, lambda key: reader.tensor(self.stored[key].file, key)
        )
        for name, tensor in into.items():
            tensor.copy_(made[self._sources[name][1]])

    def repeat(self, path: str, blocks: Sequence[int]) -> None:
        """Lets blocks of the model be others of the files.

        Args:
            path: Path of the list of blocks.
            blocks: The block in the files of each block of the model.
        """
        known, prefix = self._sources, f"{path}."
        self._sources = {name: each for name, each in known.items() if not name.startswith(prefix)}
        for name, each in known.items():
            block, _, rest = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix):
                for index, of in enumerate(blocks):
                    if of == int(block):
                        self._sources[f"{prefix}{index}.{rest}"] = each

    def bytes_of(self, layer: nn.Module) -> int:
        """Returns the bytes in files that a layer is made of."""
        keys = {key for each in self._conversions(_state(layer)) for key in each.keys}
        return sum(self.stored[key].bytes for key in keys)

    def read_beside(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors of `beside` as the folder has them now: an export may have moved them.

        Raises:
            ConfigError: The folder has one no longer.
        """
        stored = _stored_in(self._folder, self._model)
        with Reader() as reader:
            for key in keys:
                now, was = stored.get(key), self.beside[key]
                if now is None or (now.shape, now.dtype) != (was.shape, was.dtype):
                    raise ConfigError(
                        f"{self._folder} no longer has {key}, which belongs to the model's files; "
                        "put its files back"
                    )
                yield key, reader.tensor(now.file, key)

    def _conversions(self, names: Iterable[str]) -> dict[Conversion, list[str]]:
        found = defaultdict[Conversion, list[str]](list)
        for name in names:
            if name in self._sources:
                found[self._sources[name][0]].append(name)
        return found


def weights_of(folder: Path, model: PreTrainedModel, seed: int = 0) -> Weights:
    """Finds the weights of a model in a folder. Reads headers only.

    A weight that the config ties is not tied if the files have two values of it, as in
    transformers.

    Args:
        folder: A folder with safetensors.
        model: The model on the meta device.
        seed: Seed of tensors that are not in files.

    Raises:
        ConfigError: A file is missing or damaged, or the weights do not fit the model.
    """
    stored = _stored_in(folder, model)
    conversions, unused = conversions_of(model, stored)
    sources = _checked(folder, model, stored, conversions)
    _tie(model, stored, sources)
    missing, unexpected = without_ignored(
        model,
        (name for name, _ in model.named_parameters() if name not in sources),
        unused.values(),
    )
    if missing:
        raise ConfigError(
            f"{folder} lacks {_some(missing)}; its config.json is of another model, or files are "
            "missing"
        )
    if unused and os.environ.get("RANK", "0") == "0":
        _logger.log(
            logging.WARNING if unexpected else logging.INFO,
            f"{folder} has weights that {type(model).__name__} does not use; they do not train, "
            f"and an export has them unchanged: {_some(unused)}",
        )
    return Weights(folder, model, stored, sources, seed)


def _stored_in(folder: Path, model: PreTrainedModel) -> dict[str, Stored]:
    return stored_in(folder, getattr(model.config, "transformers_weights", None))


def _checked(
    folder: Path,
    model: PreTrainedModel,
    stored: Mapping[str, Stored],
    conversions: Iterable[Conversion],
) -> _Sources:
    """Returns the source of each tensor of the model, after a conversion of shapes alone."""
    wanted, sources = model.state_dict(), _Sources()
    for conversion in conversions:
        try:
            made = conversion.convert(
                model, lambda key: torch.empty(stored[key].shape, device="meta")
            )
        except Exception as error:
            raise ConfigError(
                f"{folder}: {conversion.first} cannot be made of {_some(conversion.keys)} "
                f"({first_line(error)}); its config.json is of another model, or files "
                "are missing"
            ) from error
        for name in made.keys() & wanted.keys():
            if made[name].shape != wanted[name].shape:
                file = stored[conversion.keys[0]].file
                raise ConfigError(
                    f"{file}: {name} has shape {list(made[name].shape)}, and by config.json it "
                    f"has {list(wanted[name].shape)}; the config does not fit these weights"
                )
            sources[name] = conversion, name
    return sources


def _tie(model: PreTrainedModel, stored: Mapping[str, Stored], sources: _Sources) -> None:
    """Gives weights that share a value the same source."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    users = defaultdict[str, list[str]](list)
    for user, owner in tied.items():
        users[owner].append(user)
    for owner, names in users.items():
        there = next((name for name in (owner, *names) if name in sources), None)
        if there is None:
            continue
        for name in (owner, *names):
            if name not in sources:
                sources[name] = sources[there]
            elif not _equal(model, stored, sources[there], sources[name]):
                del tied[name]
                _untie(model, name)


def _untie(model: PreTrainedModel, name: str) -> None:
    path, _, key = name.rpartition(".")
    shared = model.get_parameter(name)
    setattr(
        model.get_submodule(path), key, nn.Parameter(shared.detach().clone(), shared.requires_grad)
    )


def _equal(
    model: PreTrainedModel,
    stored: Mapping[str, Stored],
    one: tuple[Conversion, str],
    other: tuple[Conversion, str],
) -> bool:
    if one == other:
        return True
    with Reader() as reader:
        values = [
            conversion.convert(model, lambda key: reader.tensor(stored[key].file, key))[name]
            for conversion, name in (one, other)
        ]
        return torch.equal(*values)


def _state(layer: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and those buffers that are saved, by their names without adapters."""
    state = layer.state_dict(keep_vars=True)
    own = {name: x for name, x in state.items() if isinstance(x, Tensor) and COPY not in name}
    return {base_name(name): x for name, x in own.items()}


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
