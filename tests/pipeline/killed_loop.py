"""One rank of a loop that `test_killed.py` kills: `python -m tests.pipeline.killed_loop ...`.

It writes the numbers of its samples before each step, and goes on from the newest checkpoint. It
kills itself if a number of steps to begin, and of events after them, is given.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import dynmo
from tests.pipeline.loading import make, numbers


def kill_after(events: int) -> None:
    """Kills this process at a later event that Python audits, such as the opening of a file."""

    def count(*_: object) -> None:
        nonlocal events
        events -= 1
        if events == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def main(
    model: str, source: str, folder: Path, steps: int, journal: Path, begun: int, events: int
) -> None:
    with dynmo.init(device="cpu", threads=1) as world:
        pipeline, loader = make(world, model, source, 6, True, replicas=world.size)
        if folder.is_dir() and list(folder.glob("step-*/manifest.json")):
            pipeline.load(folder)
            loader.load_state_dict(pipeline.extra["data"])
        with journal.open("w") as file:
            for batch in loader:
                row = {"step": pipeline.steps, "numbers": numbers(batch)}
                file.write(json.dumps(row) + "\n")
                file.flush()
                begun -= 1
                if begun == 0:
                    kill_after(events)
                pipeline.step(batch)
                if pipeline.steps % 3 == 0:
                    pipeline.save(folder, extra={"data": loader.state_dict()})
                if pipeline.steps == steps:
                    break
        loader.close()
        pipeline.close()


if __name__ == "__main__":
    _, model, source, folder, steps, journal, *kill = sys.argv
    begun, events = map(int, kill or (0, 0))
    journal += f"-{os.environ['RANK']}"
    main(model, source, Path(folder), int(steps), Path(journal), begun, events)
