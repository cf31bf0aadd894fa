"""A launcher as a process: runs `rank_program.py` as the ranks.

Usage: `python -m tests.cluster.run_launcher local|slurm|ray SIZE FOLDER`. It says how the run ended
as the command line does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from dynmo.errors import DynmoError
from dynmo.launch.starter import Starter
from dynmo.launch.supervisor import spawn


def starter(name: str, size: int, folder: Path) -> Starter | None:
    options = json.loads(os.environ.get("JOB_OPTIONS", "[]"))
    if name == "slurm":
        from dynmo.launch.slurm import SlurmStarter

        return SlurmStarter(size, folder / ".launch", options)
    if name == "ray":
        from dynmo.launch.ray_actors import RayStarter

        return RayStarter()
    return None


def main(name: str, size: int, folder: Path) -> int:
    program = Path(__file__).with_name("rank_program.py")
    command = [sys.executable, str(program), str(folder)]
    shared = None if name == "local" else folder / ".launch"
    try:
        return spawn(command, size, 1, folder, starter(name, size, folder), shared)
    except DynmoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
