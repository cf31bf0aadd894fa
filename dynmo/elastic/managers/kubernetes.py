"""Gives ranks back to Kubernetes, and asks it for others.

A run is an elastic Indexed Job.

    give_back(left, stay)   patch job: parallelism = completions = len(stay)
                            the Job controller deletes the pods with the highest indexes
    start(2)                patch job: parallelism = completions = parallelism + 2
                            new pods run `dynmo train CONFIG --join`

Each pod is one rank, and rank 0 is index 0. A rank that has left is parked: its process waits until
its pod is deleted. If it ended by itself, the controller would count its index as done. The
controller makes another pod in the place of one that failed, up to `backoffLimit`.

Kubernetes changes `completions` since 1.27, so an older server is refused.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from dynmo.elastic.manager import RankPlace
from dynmo.elastic.managers.threaded import ThreadedManager, shorten
from dynmo.errors import ConfigError, RunError, not_installed

# Seconds for one answer of the API server, and between two looks at the job.
_ANSWER = 10.0
_INTERVAL = 0.5
# It can change the number of completions of a job.
_OLDEST = (1, 27)
# What a status of the API server means. 0: no TLS connection. -1: no answer.
_ADVICE = {
    -1: "the API server at {host} does not answer ({said}); {by_hand}",
    0: "no TLS connection to the API server ({said}); see the kubeconfig",
    401: "the API server rejects the credentials ({said}); renew them",
    403: "the API server forbids it ({said}); apply examples/kubernetes/rbac.yaml",
    404: "there is no job {name} ({said}); correct JOB_NAME and POD_NAMESPACE",
    422: "job {name} cannot change so ({said}); it needs completionMode: Indexed as in job.yaml",
}
_OTHER = "the API server answers {status} ({said}); {by_hand}"


class KubernetesManager(ThreadedManager):
    """Changes the number of pods of the run's own Job."""

    name = "kubernetes"
    can_start = True

    def __init__(self, timeout: float = 120.0) -> None:
        super().__init__()
        self._timeout = timeout
        self._namespace = os.environ.get("POD_NAMESPACE", "")
        self._job = os.environ.get("JOB_NAME", "")
        self._name = f"{self._namespace}/{self._job}"
        self._kept = 0  # pods of ranks that have left, or that replace those of dead ranks

    def check(self) -> None:
        """Checks for the client, the job's name and the credentials. Calls no server."""
        client = _client()
        for variable in ("POD_NAMESPACE", "JOB_NAME"):
            if not os.environ.get(variable):
                raise ConfigError(
                    f'elastic.releaser = "kubernetes" needs {variable}: set it in the '
                    "pod as in examples/kubernetes/job.yaml"
                )
        _credentials(client)

    def start(self, count: int) -> None:
        self.submit("started", count, lambda: self._grow(count))

    def give_back(self, left: Sequence[RankPlace], stay: Sequence[RankPlace]) -> None:
        self.submit("released", len(left), lambda: self._shrink(left, stay))

    def _grow(self, more: int) -> str:
        kept = min(more, self._kept)
        more, self._kept = more - kept, self._kept - kept
        if not more:
            return f"job {self._name} has {kept} pods that it could not give back"
        self._connect()
        count = int(self._read_job().spec.parallelism) + more
        self._patch(count)
        self._wait(count)
        return f"job {self._name} has {count} pods, {more} of them new"

    def _shrink(self, left: Sequence[RankPlace], stay: Sequence[RankPlace]) -> str:
        count = len(stay)
        for place in stay:
            pod, _, index = place.host.partition(".")[0].rpartition("-")
            if pod == self._job and index.isdecimal() and int(index) >= count:
                self._kept += len(left)
                raise RunError(
                    f"job {self._name} cannot give pods back: {place.host} would go, but its rank "
                    f"{place.rank} stays; the ranks that stay must be the lowest pods"
                )
        self._connect()
        self._patch(count)
        self._kept = 0
        # A pod that ends only after the next growth would count for its old index.
        self._wait(count, ends=True)
        return f"job {self._name} gave {len(left)} of {count + len(left)} pods back"

    def _connect(self) -> None:
        """Connects for one change, since tokens expire and connections break."""
        client = _client()
        self._deadline = time.monotonic() + self._timeout
        connection = client.ApiClient(_credentials(client))
        self._batch = client.BatchV1Api(connection)
        version = self._ask(client.VersionApi(connection).get_code)
        numbers = (re.sub(r"\D.*", "", each) for each in (version.major, version.minor))
        if tuple(int(number or 0) for number in numbers) < _OLDEST:
            raise RunError(
                f"job {self._name} cannot change: its server is Kubernetes {version.major}."
                f'{version.minor}, and elastic.releaser = "kubernetes" needs 1.27 or newer'
            )

    def _ask(self, call: Any, *arguments: Any, **named: Any) -> Any:
        """Calls the API server, again and again while it is out of reach or busy.

        Raises:
            RunError: The call failed. One line says what to do.
        """
        unreachable = importlib.import_module("urllib3.exceptions").HTTPError
        while True:
            try:
                return call(*arguments, _request_timeout=_ANSWER, **named)
            except _client().ApiException as error:
                status, said = int(error.status or 0), _message(error)
            except (unreachable, OSError) as error:
                status, said = -1, shorten(error)
            busy = status in (-1, 409, 429) or status >= 500
            if not busy or time.monotonic() >= self._deadline:
                known = {"status": status, "said": said, "name": self._name}
                known["host"] = call.__self__.api_client.configuration.host
                known["by_hand"] = (
                    f"kubectl -n {self._namespace} edit job {self._job} works by hand"
                )
                raise RunError(_ADVICE.get(status, _OTHER).format(**known))
            self._pause()

    def _read_job(self) -> Any:
        return self._ask(self._batch.read_namespaced_job, self._job, self._namespace)

    def _patch(self, count: int) -> None:
        body = {"spec": {"parallelism": count, "completions": count}}
        self._ask(self._batch.patch_namespaced_job, self._job, self._namespace, body)

    def _wait(self, count: int, ends: bool = False) -> None:
        """Waits until the job has so many pods, and until others have ended if `ends`."""
        while True:
            status = self._read_job().status
            # Servers before 1.29 do not count ending pods.
            active, ready, ending = status.active or 0, status.ready or 0, status.terminating or 0
            is_done = active <= count and not ending if ends else ready >= count
            if is_done:
                return
            is_late = time.monotonic() >= self._deadline
            if is_late or (not ends and self._has_more):
                see = f"kubectl -n {self._namespace} describe pods -l job-name={self._job}"
                late = f" after {self._timeout:g} s; see {see}"
                why = late if is_late else "; a newer change goes first"
                state = f"{active} pods are active, {ready} ready, {ending} ending"
                raise RunError(f"job {self._name} is patched, but {state}{why}")
            self._pause()

    def _pause(self) -> None:
        if self._stopping.wait(_INTERVAL):
            raise RunError(f"job {self._name}: the run ended before its pods had changed")


def _client() -> Any:
    try:
        return importlib.import_module("kubernetes.client")
    except ImportError as error:
        raise ConfigError(
            f'elastic.releaser = "kubernetes": {not_installed("kubernetes")} ({error})'
        ) from None


def _credentials(client: Any) -> Any:
    """Reads the pod's service account, or the user's file."""
    configuration = client.Configuration()
    # The manager repeats calls itself. The client would print a line for each repetition.
    configuration.retries = False
    config = importlib.import_module("kubernetes.config")
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            file = os.environ.get("KUBECONFIG") or None
            config.load_kube_config(file, client_configuration=configuration)
    except (config.ConfigException, OSError) as error:
        raise ConfigError(
            f"no credentials for Kubernetes ({shorten(error)}): give the pod a service account, "
            "or set KUBECONFIG"
        ) from None
    return configuration


def _message(error: Any) -> str:
    """Returns the field `message` of the API server's answer, or the status line."""
    with contextlib.suppress(TypeError, ValueError, LookupError):
        return shorten(json.loads(error.body)["message"])
    return shorten(error.reason)
