"""Attacks on a run by a process of this machine that does not know the run's token.

    python -m tests.runtime.comm.attacks KIND TRIES

`gloo` takes a rank's place at each port on which a rank waits for others, and answers with zeros.
`store` writes to the store of ranks that torchrun has started. With `-elastic` a rank leaves, and
another one joins, meanwhile. The digest of each run is compared with that of an undisturbed one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from dynmo.runtime.comm.meeting import Meeting
from tests.cli.runs import free_port
from tests.jobs import train
from tests.pool import Pool
from tests.processes import end_all, start

CONFIG = """name = "x"
[model]
blocks = 2
hidden = 32
heads = 2
sequence = 32
[train]
steps = 60
global_batch = 8
micro_batch = 2
[parallel]
pipeline = 2
timeout = 60
[checkpoint]
every = 0
"""
SMALL = {
    "model": {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 16},
    "train": {"steps": 2, "global_batch": 4, "micro_batch": 1},
    "parallel": {"pipeline": 2},
}
ELASTIC = "[elastic]\nreshape_at = [[15, 1, 1], [30, 2, 1]]\n"
KINDS = ("gloo", "gloo-elastic", "store", "store-elastic")


def attack(kind: str, folder: Path, disturb: bool = True) -> dict[str, Any]:
    """Runs a training, and the attack on it. Returns what became of both."""
    way, _, elastic = kind.partition("-")
    text = CONFIG + (ELASTIC if elastic else "")
    if way == "store":  # the stranger has time to write
        text = text.replace("steps = 60", "steps = 600").replace("[15, 1, 1]", "[300, 1, 1]")
        text = text.replace("[30, 2, 1]", "[400, 2, 1]")
    (folder / "x.toml").write_text(text)
    run = _locally(folder) if way == "gloo" else _as_torchrun(folder, bool(elastic))
    with run as (processes, target):
        command = [sys.executable, "-m", "tests.runtime.comm.stranger", way, target]
        stranger = start(command if disturb else ["true"], folder, _path())
        out, said = processes[0].communicate(timeout=240)
        for process in processes[1:]:
            process.wait(60)
        processes.append(stranger)
        done, wrong = stranger.communicate(timeout=60)
    assert not wrong, wrong
    return {
        "status": [process.returncode for process in processes[:-1]],
        "digest": json.loads(out)["weights_digest"] if out else None,
        "stranger": json.loads(done) if done else {},
        "lines": [line for line in said.splitlines() if "run's token" in line],
    }


def _path() -> dict[str, str]:
    # A warning for each connection that is left open would fill the pipe.
    quiet = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {"PYTHONPATH": str(Path(__file__).parents[3]), **quiet}


def _train(folder: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dynmo", "train", "x.toml", *arguments]
    process = start(command, folder, {**_path(), **env})
    # A rank that fills its memory must not fill that of the machine.
    resource.prlimit(process.pid, resource.RLIMIT_AS, (16 << 30, 16 << 30))
    return process


@contextlib.contextmanager
def _locally(folder: Path) -> Iterator[tuple[list[subprocess.Popen[str]], str]]:
    processes = [_train(folder, "--json")]
    try:
        yield processes, str(processes[0].pid)
    finally:
        end_all(processes)


@contextlib.contextmanager
def _as_torchrun(folder: Path, elastic: bool) -> Iterator[tuple[list[subprocess.Popen[str]], str]]:
    port = free_port()
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        _train(folder, "--json", RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in (0, 1)
    ]
    try:
        place = folder / "runs" / "x" / "rendezvous.json"
        while elastic and not place.exists() and processes[0].poll() is None:
            time.sleep(0.05)
        if elastic:
            processes.append(_train(folder, "--join"))
        yield processes, port
    finally:
        end_all(processes)


# -- ranks that meet again and again ---------------------------------------------------------------


def meet_often(world: Meeting, times: int) -> tuple[list[str], int]:
    """Trains in one generation after another. Returns the digests, and how often ranks met anew."""
    digests, lines = list[str](), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("dynmo.runtime.comm")  # all ranks meet anew, or a group of them
    logger.addHandler(handler)
    real = dist.init_process_group
    for number in range(times):

        def late(late: bool = number % 2 == world.rank, **given: Any) -> None:
            if late and "/try/0/" in given["store"]._prefix:  # the stranger has time then
                time.sleep(0.05)
            real("gloo", **given)

        with mock.patch.object(dist, "init_process_group", lambda _, **given: late(**given)):
            world.renew(world.rank, world.size, world.generation + 1, 30)
        digests.append(train(world, SMALL)["digest"])
    logger.removeHandler(handler)
    return digests, sum("anew" in line or "meet again" in line for line in lines)


def regroup(times: int, ranks: int = 2) -> dict[str, Any]:
    """Lets a stranger attack ranks of a pool that meet anew `times` times."""
    job, pool = "tests.runtime.comm.attacks:meet_often", Pool(ranks)
    with tempfile.TemporaryDirectory() as folder:
        try:
            (wanted,), _ = pool.run(job, ranks, times=1)[0]
            command = [sys.executable, "-m", "tests.runtime.comm.stranger", "gloo"]
            stranger = start([*command, str(os.getpid())], Path(folder), _path())  # not other tests
            time.sleep(1)
            found = pool.run(job, ranks, timeout=20.0 * times, times=times)
        finally:
            pool.close()
        stranger.terminate()
        done, _ = stranger.communicate(timeout=30)
    return {
        "same": sum(digest == wanted for digest in found[0][0]),
        "met anew": found[0][1],
        "stranger": json.loads(done),
    }


def main(arguments: Sequence[str]) -> None:
    kind, tries = arguments[0], int(arguments[1])
    if kind == "regroup":
        print(json.dumps(regroup(tries)))
        return
    with tempfile.TemporaryDirectory() as folder:
        wanted = attack(kind, Path(folder), disturb=False)["digest"]
    same = 0
    for number in range(tries):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            found = attack(kind, Path(folder))
        same += found["digest"] == wanted
        print(number, f"{time.monotonic() - began:.1f} s", same, json.dumps(found), flush=True)
    print(f"{kind}: {same} of {tries} runs have the digest of the undisturbed run")


if __name__ == "__main__":
    main(sys.argv[1:])
