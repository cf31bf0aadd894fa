"""dynmo's exceptions.

    DynmoError
    ├── InputError(ValueError)     the input is wrong: exit status 2
    │   ├── ConfigError            a key or value of the configuration
    │   ├── ScheduleError          a schedule that cannot be made or does not hold together
    │   ├── PartitionError         a placement that cannot be made (too few layers, say)
    │   │   └── NoRoomError        its memory does not suffice
    │   └── CheckpointError        a checkpoint that is missing, damaged or of another model
    └── RunError(RuntimeError)     the run failed: exit status 1
        ├── WaitTimeout            a rank waited too long for others, which the message names
        ├── RankDied               a peer is gone
        ├── PeerFailed             a step failed on another rank, and the ranks can go on
        └── Interrupted            a signal ended the run before its ranks stopped: exit status 130

Every message is one line: what was wrong, where, and what to do.
"""

import shlex
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path


class DynmoError(Exception):
    """Base of everything dynmo raises on purpose."""

    exit_status = 1


class InputError(DynmoError, ValueError):
    """The user's input is wrong. Nothing was started or changed."""

    exit_status = 2


class ConfigError(InputError):
    """A key or value of the configuration is wrong or not served by this version."""


class ScheduleError(InputError):
    """A schedule cannot be made from the given numbers, or breaks a dependency."""


class PartitionError(InputError):
    """No placement of the layers satisfies the request."""


class NoRoomError(PartitionError):
    """No placement that was looked for fits the memory."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class RunError(DynmoError, RuntimeError):
    """The run started and then failed."""


class WaitTimeout(RunError):
    """A rank waited longer than the limit for others.

    Args:
        message: One line that says who waits for whom.
        ranks: The ranks that it waited for, if they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankDied(RunError):
    """A rank of the run is gone.

    Attributes:
        is_fault: Whether the others can go on. If not, an error ended it that they may have, too.
    """

    is_fault = True


class PeerFailed(RunError):
    """A step failed on another rank. No weight was changed, and the ranks can go on."""


class Interrupted(RunError):
    """The run was told to stop, and was ended rather than waited for."""

    exit_status = 130


def not_installed(package: str) -> str:
    """Says that an optional package is missing, by its name on PyPI, and how it is installed."""
    return f"{package} is not installed; install it with pip install {package}"


def how_to_install(*requirements: str) -> str:
    """Returns a command for requirements such as "peft>=0.21", quoted for a shell."""
    return f"pip install {' '.join(map(shlex.quote, requirements))}"


def one_line(text: str) -> str:
    """Returns a text as one line that a terminal can show, whatever file or process it quotes."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def notes(error: BaseException) -> str:
    """Returns `, in F of layer 3`, say, or an empty string."""
    return "".join(f", {one_line(note)}" for note in getattr(error, "__notes__", ()))


def place(error: BaseException, own: bool = False) -> str:
    """Name the user's line that an error came through.

    That is the innermost frame outside dynmo, torch, Python and installed packages. If there is
    none, it is the innermost frame outside dynmo and torch.

    Args:
        error: The exception that was raised.
        own: If there is neither, take dynmo's own line. Only developers of dynmo can use it.

    Returns:
        ` (model.py:12)`, or an empty string.
    """
    if isinstance(error, SyntaxError):  # its message names the line
        return ""
    # Only a program given with -c or typed in has no file. So has code that Python makes inside it,
    # such as the constructor of a dataclass.
    frames = [
        f
        for depth, f in enumerate(traceback.extract_tb(error.__traceback__))
        if not f.filename.startswith("<") or (depth == 0 and f.name == "<module>")
    ]
    files = [Path(f.filename) for f in frames]
    users = [f for f, file in zip(frames, files, strict=True) if not _is_installed(file)]
    others = [
        f
        for f, file in zip(frames, files, strict=True)
        if not {"torch", "importlib"} & set(file.parts)
    ]
    foreign = [f for f in others if not Path(f.filename).is_relative_to(_DYNMO)]
    blamed = users or foreign or (others if own else [])
    return f" ({Path(blamed[-1].filename).name}:{blamed[-1].lineno})" if blamed else ""


_DYNMO = Path(__file__).parent
_STDLIB = Path(sysconfig.get_path("stdlib"))


def _is_installed(file: Path) -> bool:
    """True if the file belongs to dynmo, to Python or to an installed package."""
    return (
        file.is_relative_to(_DYNMO)
        or file.is_relative_to(_STDLIB)
        or bool({"site-packages", "dist-packages"} & set(file.parts))
    )
