"""The file of `--plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dynmo.errors import InputError, not_installed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(path: Path) -> None:
    """Checks the file before the work begins."""
    from importlib.util import find_spec

    if path.suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"--plot {path}: the name must end in .svg, .png or .pdf")
    if not path.parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise InputError(f"--plot: {not_installed('matplotlib')}")


def save_plot(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputError(f"--plot {path} cannot be written: {error.strerror}") from None
