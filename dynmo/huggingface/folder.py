"""A folder while its files are written, and the files that it has.

    .FOLDER.partial/   beside a new FOLDER
    FOLDER/.partial/   in a FOLDER that exists

Files go into place when all are complete. Until then the files of FOLDER are as before.
"""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path

import torch

from dynmo.errors import InputError
from dynmo.models.huggingface.model import HuggingFaceModel

_PARTIAL = ".partial"
_GENERATION = "generation_config.json"
_INPUTS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
)


class PartialFolder:
    """The files of a folder that is not complete.

    Args:
        folder: The folder. Other files that it has stay there.

    Attributes:
        path: Where the files are until they are complete.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_new = folder, not folder.is_dir()
        self.path = (
            folder.with_name(f".{folder.name}{_PARTIAL}") if self._is_new else folder / _PARTIAL
        )

    def prepare(self) -> None:
        """Makes the folder. One rank calls it, before the others write."""
        if self._folder.exists() and not self._folder.is_dir():
            raise InputError(f"{self._folder} is a file; give a folder")
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    def complete(self, last: str, stale: re.Pattern[str]) -> None:
        """Puts the files into place.

        Args:
            last: Name of the file by which others find the folder's content.
            stale: Names of older files, which are removed.
        """
        if self._is_new:
            self.path.rename(self._folder)
            return
        made = [path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file()]
        for name in sorted(made, key=lambda each: (str(each) == last, each)):
            (self._folder / name).parent.mkdir(exist_ok=True)
            (self.path / name).replace(self._folder / name)
        for path in self._folder.iterdir():
            if stale.fullmatch(path.name) and Path(path.name) not in made:
                path.unlink()
        shutil.rmtree(self.path)


def write_companions(model: HuggingFaceModel, dtype: torch.dtype, folder: Path) -> None:
    """Writes the configs, and copies what else the model's source folder has.

    Args:
        dtype: Type of the weights in the files.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model.folder_class.model).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    copy_inputs(model, folder, _GENERATION)
    generation = getattr(model.structure.model, "generation_config", None)
    if generation is not None and not (folder / _GENERATION).exists():
        generation.save_pretrained(folder)


def copy_inputs(model: HuggingFaceModel, folder: Path, *others: str) -> None:
    """Copies the tokenizer of the model's source folder, its own code and other files."""
    source = model.folder
    if source is None:
        return
    own_code = ("*.py",) if getattr(model.config, "auto_map", None) else ()
    for path in (p for each in (*_INPUTS, *others, *own_code) for p in source.glob(each)):
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
