"""The end of a rank's process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_end_process_flushes_and_runs_exit_functions() -> None:
    code = (
        "import atexit\n"
        "from dynmo.elastic.launcher.environment import end_process\n"
        "atexit.register(print, 'last')\n"
        "print('first')\n"
        "end_process(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "first\nlast\n", "")
