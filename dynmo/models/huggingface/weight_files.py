"""The safetensors of a folder: which file has a tensor, and how large it is."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dynmo.cost.input_file import short
from dynmo.errors import ConfigError, one_line
from dynmo.files import check_regular, parse_json, read_text

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


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


def stored_in(folder: Path, named: str | None = None) -> dict[str, Stored]:
    """Returns the tensors of a folder's files by their keys. Reads headers only.

    Args:
        folder: The folder of a model.
        named: Name of the file or of the index. None means the usual names.

    Raises:
        ConfigError: The folder has no such files, or one is missing or damaged.
    """
    return {
        key: stored
        for file in _files(folder, named or _usual(folder))
        for key, stored in header_of(file)
    }


def _usual(folder: Path) -> str:
    for name in (_WHOLE, _INDEX):
        if (folder / name).is_file():
            return name
    pickled = next((name for name in _PICKLED if (folder / name).is_file()), None)
    if pickled is not None:
        raise ConfigError(
            f"{folder} has its weights in {pickled}, and loading a pickle runs code; save it as "
            "safetensors with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise ConfigError(
        f"{folder} has no {_WHOLE} and no {_INDEX}; give a folder with weights (download it first)"
    )


def _files(folder: Path, name: str) -> list[Path]:
    if not _is_file_name(name):
        raise ConfigError(f"{folder}/config.json names weights outside of the folder: {name}")
    if not name.endswith(".json"):
        return [folder / name]
    try:
        listed: Any = parse_json(read_text(folder / name))
        names = sorted({*listed["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{folder / name} is no index of weights; download it again") from None
    wrong = next((each for each in names if not _is_file_name(each)), None)
    if wrong is not None:
        raise ConfigError(
            f"{folder / name} lists {short(wrong)}, which is no name of a file in that folder; "
            "download it again"
        )
    missing = next((each for each in names if not (folder / each).is_file()), None)
    if missing is not None:
        raise ConfigError(f"{folder / missing} is missing, but {name} lists it; download it again")
    return [folder / each for each in names]


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
