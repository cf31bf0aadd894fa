"""A folder while its files are written.

    .FOLDER.partial/   beside a new FOLDER
    FOLDER/.partial/   in a FOLDER that exists

Files go into place when all are complete. Until then the files of FOLDER are as before.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from dynmo.errors import InputError

_PARTIAL = ".partial"


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
