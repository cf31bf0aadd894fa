"""A pool of rank processes that serves many tests.

Importing torch costs seconds a process. A job costs milliseconds. Each job runs a function of
`tests/jobs.py` (or `module:function`) on the first n ranks. The job has a world of its own (a
generation), and brings back what each rank returned. Waits in that world have the limit of the
job's config, `parallel.timeout`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from dynmo.elastic.launcher.environment import process_environment
from dynmo.elastic.managers.local import local_environment

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 20.0
"""Seconds of a wait between ranks, if the job has no config that says so."""
IMPORTS = 120.0
"""Seconds for the imports of a rank, before its first job."""


class JobFailed(Exception):
    """At least one rank raised. The message holds each rank's traceback."""


class PoolLost(JobFailed):
    """A rank died or did not answer. The next job gets new ranks."""


class Pool:
    """Rank processes that wait for jobs.

    Their stderr goes to the file `log`, or to that of this process if `log` is None.
    """

    def __init__(self, size: int, log: Path | None = None) -> None:
        self._size, self._log = size, log
        self._start()

    def _start(self) -> None:
        size, log = self._size, self._log
        self._folder = tempfile.TemporaryDirectory(prefix="dynmo-pool-")
        self._generation = 0
        self._ready = 0
        self._imported = {"tests.jobs": size}
        self._ranks: list[subprocess.Popen[str]] = []
        for rank in range(size):
            env = process_environment(rank, size, Path(self._folder.name), threads=1)
            env |= local_environment()
            env["PYTHONWARNINGS"] = "error"
            # Kernels for AMX take scratch memory that no account has: tests of memory hold on any
            # CPU.
            env["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
            command = [sys.executable, "-m", "tests.pool"]
            with contextlib.nullcontext() if log is None else log.open("a") as stderr:
                self._ranks.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        text=True,
                        env=env,
                        cwd=ROOT,
                    )
                )

    def run(self, function: str, ranks: int, timeout: float = 60.0, **arguments: Any) -> list[Any]:
        """Runs `function(world, **arguments)` on so many ranks.

        Args:
            function: Name of a function of `tests/jobs.py`, or `module:function`.
            ranks: Number of ranks.
            timeout: Seconds that each rank has to answer.
            **arguments: Arguments of the function, as JSON.

        Returns:
            The result of each rank, from JSON.
        """
        if not self._ranks:
            self._start()
        while self._ready < ranks:
            self._reply(self._ranks[self._ready], time.monotonic() + IMPORTS)
            self._ready += 1
        module, _, name = function.rpartition(":")
        job: dict[str, Any] = {"module": module or "tests.jobs", "name": name}
        if self._imported.get(job["module"], 0) < ranks:
            # A rank that still imports would keep the others waiting, within the job's limit.
            self._imported[job["module"]] = ranks
            self._ask({"module": job["module"]}, ranks, IMPORTS)
        self._generation += 1
        job |= {"size": ranks, "generation": self._generation, "arguments": arguments}
        replies = self._ask(job, ranks, timeout)
        errors = [
            f"rank {rank}:\n{reply['error']}"
            for rank, reply in enumerate(replies)
            if "error" in reply
        ]
        if errors:
            raise JobFailed("\n".join(errors))
        return [reply["result"] for reply in replies]

    def _ask(self, job: dict[str, Any], ranks: int, seconds: float) -> list[dict[str, Any]]:
        line = json.dumps(job) + "\n"
        for process in self._ranks[:ranks]:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died, which `_reply` says
                process.stdin.write(line)
                process.stdin.flush()
        return [self._reply(process, time.monotonic() + seconds) for process in self._ranks[:ranks]]

    def _reply(self, process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                for rank in self._ranks:
                    rank.send_signal(signal.SIGUSR1)
                time.sleep(1)  # each tells where its threads are
                self.close()
                raise PoolLost("a rank did not answer in time; the pool was ended")
        line = process.stdout.readline()
        if not line:
            status = process.wait()
            self.close()
            raise PoolLost(f"a rank of the pool died (status {status})")
        return json.loads(line)

    def close(self) -> None:
        for process in self._ranks:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._ranks = []
        self._folder.cleanup()


def _serve() -> None:
    gc.disable()  # imports make many objects and no garbage
    import torch

    import tests.jobs  # noqa: F401  # before the first job, in all ranks at once
    from dynmo.runtime.comm.meeting import Meeting
    from dynmo.runtime.comm.rendezvous import from_environment
    from dynmo.runtime.comm.store import open_store
    from dynmo.runtime.engine import profiler

    rendezvous = from_environment()
    assert rendezvous is not None
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    # Links need not be measured well here, and every job would wait for it.
    profiler.PAUSE = 0.0
    # Jobs are short. Graphs of several layers are to run in them, too.
    profiler.APART = 1
    # Jobs may print. The replies have the real stdout to themselves.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = open_store(rendezvous, timeout=30)
    gc.freeze()
    gc.enable()
    replies.write("{}\n")  # it is ready
    replies.flush()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            module = importlib.import_module(job["module"])
            if "name" not in job:
                replies.write("{}\n")
                replies.flush()
                continue
            function = getattr(module, job["name"])
            parallel = job["arguments"].get("config", {}).get("parallel", {})
            world = Meeting.join(
                store,
                rendezvous.rank,
                job["size"],
                timeout=parallel.get("timeout", TIMEOUT),
                generation=job["generation"],
            )
            try:
                reply = json.dumps({"result": function(world, **job["arguments"])})
            finally:
                world.close()
        except Exception:
            reply = json.dumps({"error": traceback.format_exc()})
        replies.write(f"{reply}\n")
        replies.flush()


if __name__ == "__main__":
    _serve()
