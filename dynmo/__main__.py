"""`python -m dynmo` and the script `dynmo`."""

import sys
from typing import NoReturn

from dynmo.cli import main
from dynmo.elastic.launcher.environment import end_process
from dynmo.errors import Interrupted


def run() -> NoReturn:
    """Runs the command line, and ends the process with its status."""
    status = main()
    if "torch" in sys.modules or status == Interrupted.exit_status:  # threads may still plan
        end_process(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
