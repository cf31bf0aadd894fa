"""Starts ranks through Ray, with an actor and a placement group per rank.

    launcher ── actor of rank 0 (1 GPU) ── process of rank 0
             ├─ actor of rank 1 (1 GPU) ── process of rank 1
             └─ actor of a newcomer, pending until Ray has resources for it

The actor ends with its process. The bundle is then free for others. A placement group has one
bundle, because a bundle cannot be given back out of a larger group.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dynmo.elastic.manager import RankCommand, RankProcess
from dynmo.errors import ConfigError, not_installed

# Seconds between two looks for new output of rank 0.
_TAIL = 0.1


class RankActor:
    """Runs the process of one rank, on whatever machine Ray puts it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self, command: Sequence[str], env: Mapping[str, str], folder: str, out: str, err: str
    ) -> int:
        env = {**env, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env.pop("CUDA_VISIBLE_DEVICES", None)
        if devices := os.environ.get("CUDA_VISIBLE_DEVICES"):
            env["CUDA_VISIBLE_DEVICES"] = devices
        # `enter_rank` lets the process die with this one.
        env["DYNMO_LAUNCHER"] = str(os.getpid())
        none = subprocess.DEVNULL
        with Path(out).open("ab") as stdout, Path(err).open("ab") as stderr:
            self._process = subprocess.Popen(
                command, stdin=none, stdout=stdout, stderr=stderr, env=env, cwd=folder
            )
        return self._process.wait()

    def signal(self, number: int) -> None:
        if self._process is not None:  # the rank has entered the run, so there is one
            self._process.send_signal(number)


class RayProcess:
    """A rank in its actor, which has one unit of a resource ("GPU" or "CPU")."""

    def __init__(self, ray: Any, rank: RankCommand, resource: str) -> None:
        self._ray, self._entered = ray, rank.entered
        self._code: int | None = None
        self._reason = ""
        self._killed: int | None = None
        self._group = ray.util.placement_group([{resource: 1}])
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group)
        options = {"num_cpus": 0, "num_gpus": 0, f"num_{resource.lower()}s": 1}
        # `signal` must come through while `run` waits.
        options |= {"max_concurrency": 2, "scheduling_strategy": strategy}
        self._actor = ray.remote(RankActor).options(**options).remote()
        streams = {"out": sys.stdout.buffer, "err": sys.stderr.buffer} if rank.log is None else {}
        outputs = {rank.entered.with_name(f"output-0.{at}"): file for at, file in streams.items()}
        files = [str(path.absolute()) for path in outputs or [rank.log] * 2 if path is not None]
        self._status = self._actor.run.remote(
            list(rank.command), dict(rank.environment), str(Path.cwd()), *files
        )
        self._watcher = threading.Thread(target=self._watch, args=(outputs,), daemon=True)
        self._watcher.start()

    def _watch(self, outputs: Mapping[Path, IO[bytes]]) -> None:
        """Passes on the output of rank 0, waits for the end, and frees the resources."""
        ended, places = False, dict.fromkeys(outputs, 0)
        while not ended:
            ready, _ = self._ray.wait([self._status], timeout=_TAIL if outputs else None)
            ended = bool(ready)
            for path, file in outputs.items():
                with contextlib.suppress(FileNotFoundError), path.open("rb") as source:
                    source.seek(places[path])
                    file.write(source.read())
                    file.flush()
                    places[path] = source.tell()
        try:
            code = self._ray.get(self._status)
        except self._ray.exceptions.RayError as error:
            code = 1 if self._killed is None else self._killed
            # The first line has the error, and the others have the process and the place.
            self._reason = "" if self._killed else f"Ray: {str(error).splitlines()[0]}"
        self._free()
        self._code = code

    def _free(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.util.remove_placement_group(self._group)

    def reason(self) -> str:
        return self._reason

    def poll(self) -> int | None:
        return self._code

    def send_signal(self, sig: int, /) -> None:
        if self._entered.exists():
            self._actor.signal.remote(sig)
        else:  # a pending actor would get the signal only much later
            self._end(-sig)

    def kill(self) -> None:
        self._end(-signal.SIGKILL)

    def _end(self, code: int) -> None:
        self._killed = self._killed or code
        self._free()

    def wait(self) -> None:
        self._watcher.join(10.0)


class RayStarter:
    """Starts ranks in the Ray cluster of RAY_ADDRESS, or of this machine."""

    def __init__(self) -> None:
        """Raises ConfigError if Ray is not installed, or there is no cluster."""
        try:
            self._ray: Any = importlib.import_module("ray")
            for name in ("placement_group", "scheduling_strategies"):
                importlib.import_module(f"ray.util.{name}")
        except ImportError:
            raise ConfigError(f"--launcher ray: {not_installed('ray')}") from None
        address = os.environ.get("RAY_ADDRESS") or "auto"
        try:
            host, _, port = address.rpartition(":")
            if host and port.isdigit() and "/" not in host:
                # It says at once that no server listens. Ray would retry for a minute.
                socket.create_connection((host.strip("[]"), int(port)), 10).close()
            # The output of ranks goes to the logs of the run.
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            said = str(error).strip().split("\n")[0].removesuffix(".")
            advice = "start one with ray start --head, or set RAY_ADDRESS"
            what = f"--launcher ray: no Ray cluster answers at {address}: {said}"
            raise ConfigError(f"{what}; {advice}") from None
        self._kind = "GPU" if self._ray.cluster_resources().get("GPU", 0) >= 1 else "CPU"

    def start(self, rank: RankCommand) -> RankProcess:
        return RayProcess(self._ray, rank, self._kind)

    def ranks_left(self, size: int) -> int:
        return min(size, int(self._ray.cluster_resources().get(self._kind, 0)))

    def give_back(self, processes: Sequence[RankProcess]) -> str:
        # The thread of each process has removed its actor and its placement group.
        count = len(processes)
        return f"Ray removed {count} placement group{'s' * (count > 1)}: {count} {self._kind} free"
