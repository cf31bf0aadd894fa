"""The checks of `make gpu` before its first part.

Imports the standard library only, because torch itself may be missing.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

TORCH = (2, 10)
NO_GPU = "torch sees no CUDA device; run this on a machine that has one"

# The module that is imported, by the package's name in pip.
PACKAGES: Mapping[str, str] = {
    "torch": "torch",
    "numpy": "numpy",
    "numba": "numba",
    "pydantic": "pydantic",
    "filelock": "filelock",
    "rich": "rich",
    "safetensors": "safetensors",
    "tomli-w": "tomli_w",
    "typer": "typer",
    "pytest": "pytest",
    "pytest-timeout": "pytest_timeout",
    "hypothesis": "hypothesis",
}

# This program runs in a process of its own. This process loads no torch, and keeps no context on
# the device.
_PROBE = """
import json, torch
about = {"torch": torch.__version__, "cuda": torch.version.cuda}
about["available"] = torch.cuda.is_available()
if about["available"]:
    gpu = torch.cuda.get_device_properties(0)
    about |= {"gpu": gpu.name, "memory": gpu.total_memory, "sms": gpu.multi_processor_count}
    about |= {"gpus": torch.cuda.device_count(), "capability": f"{gpu.major}.{gpu.minor}"}
    about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(about))
"""


class Unfit(Exception):
    """This machine cannot run the parts. The message is one line."""


def installed(module: str) -> bool:
    """Says whether the module can be imported, by its files alone."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def missing() -> list[str]:
    """Returns the packages that are needed and not installed, by pip's names."""
    return [name for name, module in PACKAGES.items() if not installed(module)]


def check_packages() -> None:
    """Checks that all needed packages are installed."""
    names = missing()
    if names:
        raise Unfit(
            f"missing packages: {', '.join(names)}; docs/gpu.md says how to bring them along"
        )
    version = importlib.metadata.version("torch")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < TORCH:
        raise Unfit(f"torch {version} is too old; {'.'.join(map(str, TORCH))} or newer is needed")


def probe(least: int, commit: str | None = None) -> dict[str, Any]:
    """Describes this machine's torch and GPU. Raises Unfit if it has fewer GPUs than `least`."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unfit(f"torch cannot be used here: {reason}")
    about: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if least and not about["available"]:
        raise Unfit(f"{NO_GPU}, or make gpu DRY=1 for a dry run on CPU")
    if least > about.get("gpus", 0):
        raise Unfit(f"torch sees one GPU; --several needs {least}, or DRY=1 for a dry run on CPU")
    driver = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if commit is None:
        commit = output_of(["git", "rev-parse", "HEAD"])
        modified = output_of(["git", "status", "--porcelain", "--untracked-files=no"])
        commit = commit and commit + (" with changes" if modified else "")
    return about | {
        "driver": driver.splitlines()[0] if driver else None,
        "topology": output_of(["nvidia-smi", "topo", "-m"]),
        "python": sys.version.split()[0],
        "commit": commit,
    }


def output_of(command: Sequence[str]) -> str | None:
    """Returns what a command prints. None if it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
