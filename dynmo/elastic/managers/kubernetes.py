"""Gives ranks back to Kubernetes, and asks it for others.

A run is an elastic Indexed Job.

    release(left, stay)   patch job: parallelism = completions = len(stay)
                          the Job controller deletes the pods with the highest indexes
    request(2)            patch job: parallelism = completions = parallelism + 2
                          new pods run `dynmo train CONFIG --join`

Each pod is one rank, and rank 0 is index 0. A released rank is parked: its process waits until its
pod is deleted. If it ended by itself, the controller would count its index as done.

Kubernetes changes `completions` since 1.27. An older server lets only `parallelism` change and
chooses the pods itself. On such a server the manager first deletes the pods of the released ranks.
The controller then has nothing to delete, or deletes their replacements, which are the youngest.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dynmo.elastic.managers.command import ThreadedManager
from dynmo.elastic.member import Member
from dynmo.errors import ConfigError, RunError, not_installed

# Seconds for one answer of the API server, and between two looks at the job.
_ANSWER = 10.0
_INTERVAL = 0.5

_T = TypeVar("_T")


class KubernetesManager(ThreadedManager):
    """Changes the number of pods of the run's own Job."""

    name = "kubernetes"
    can_request = True

    def __init__(
        self, namespace: str = "", job: str = "", timeout: float = 120.0, kubeconfig: str = ""
    ) -> None:
        super().__init__("dynmo-kubernetes-manager")
        self._namespace = namespace or os.environ.get("POD_NAMESPACE", "")
        self._job = job or os.environ.get("JOB_NAME", "")
        self._timeout = timeout
        self._kubeconfig = kubeconfig

    def check(self) -> None:
        """Checks for the client, the job's name and the credentials. Calls no server."""
        _client()
        for value, variable in ((self._namespace, "POD_NAMESPACE"), (self._job, "JOB_NAME")):
            if not value:
                raise ConfigError(
                    f'elastic.releaser = "kubernetes" needs {variable}: set it in the '
                    "pod as in examples/kubernetes/job.yaml"
                )
        _configuration(self._kubeconfig)

    def release(self, left: Sequence[Member], stay: Sequence[Member]) -> None:
        gone, staying = tuple(left), tuple(stay)
        self._submit("released", len(gone), lambda: self._shrink(gone, staying))

    def request(self, count: int) -> None:
        self._submit("started", count, lambda: self._grow(count))

    def _shrink(self, left: Sequence[Member], stay: Sequence[Member]) -> str:
        count = len(stay)
        for member in stay:
            if _index(member, self._job) >= count:
                raise RunError(
                    f"job {self._name} cannot give pods back: {member.host} would go, but its rank "
                    f"{member.rank} stays; the ranks that stay must be the lowest pods"
                )
        with self._connection(f"parallelism = completions = {count}") as api:
            deadline = time.monotonic() + self._timeout
            # A pod that ends only after the next growth would count for its old index.
            if self._is_elastic(api, deadline):
                self._patch(api, deadline, parallelism=count, completions=count)
                self._wait(api, deadline, lambda p: p.active <= count and not p.terminating)
            else:
                self._persist(lambda: api.delete_pods(left), deadline)
                self._patch(api, deadline, parallelism=count)
                self._wait(api, deadline, lambda p: p.active <= count and not api.find_pods(left))
        return f"job {self._name} gave {len(left)} of {count + len(left)} pods back"

    def _grow(self, more: int) -> str:
        with self._connection(f"parallelism = completions = now + {more}") as api:
            deadline = time.monotonic() + self._timeout
            job = self._persist(api.read_job, deadline)
            count = int(job.spec.parallelism) + more
            if self._is_elastic(api, deadline):
                self._patch(api, deadline, parallelism=count, completions=count)
            elif count > (job.spec.completions or count):
                raise RunError(
                    f"job {self._name} can have at most {job.spec.completions} pods; Kubernetes "
                    "can raise spec.completions from 1.27 on"
                )
            else:
                self._patch(api, deadline, parallelism=count)
            self._wait(api, deadline, lambda pods: pods.ready >= count, gives_way=True)
        return f"job {self._name} has {count} pods, {more} of them new"

    @property
    def _name(self) -> str:
        return f"{self._namespace}/{self._job}"

    @contextlib.contextmanager
    def _connection(self, wanted: str) -> Generator[_JobApi, None, None]:
        """Connects anew each time, because tokens expire and idle connections break."""
        configuration = _configuration(self._kubeconfig)
        with _client().ApiClient(configuration) as client:
            yield _JobApi(client, self._namespace, self._job, wanted)

    def _is_elastic(self, api: _JobApi, deadline: float) -> bool:
        return self._persist(api.is_elastic, deadline)

    def _patch(self, api: _JobApi, deadline: float, **spec: int) -> None:
        self._persist(lambda: api.patch_job(spec), deadline)

    def _persist(self, call: Callable[[], _T], deadline: float) -> _T:
        """Repeats a call while the API server is out of reach or busy."""
        while True:
            try:
                return call()
            except _Transient as error:
                if time.monotonic() >= deadline:
                    raise RunError(str(error)) from None
                self._pause()

    def _wait(
        self,
        api: _JobApi,
        deadline: float,
        is_done: Callable[[_PodCount], bool],
        gives_way: bool = False,
    ) -> None:
        """Waits until the job has the wanted pods."""
        while True:
            try:
                pods = api.count_pods()
                if is_done(pods):
                    return
                state = str(pods)
            except _Transient as error:
                state = str(error)
            if gives_way and self._has_more:
                raise RunError(
                    f"job {self._name} is patched, but {state}; a newer change goes first"
                )
            if time.monotonic() >= deadline:
                raise RunError(
                    f"job {self._name} is patched, but {state} after {self._timeout:g} s; see "
                    f"kubectl -n {self._namespace} describe pods -l job-name={self._job}"
                )
            self._pause()

    def _pause(self) -> None:
        if self._stopping.wait(_INTERVAL):
            raise RunError(f"job {self._name}: the run ended before its pods had changed")


class _Transient(Exception):
    """The API server did not answer, or asks to try again. The message is a report's line."""


@dataclass(frozen=True)
class _PodCount:
    """The number of pods of a job. Active ones are pending or running."""

    active: int
    ready: int
    terminating: int

    def __str__(self) -> str:
        return f"{self.active} pods are active, {self.ready} ready, {self.terminating} ending"


class _JobApi:
    """The calls that a manager makes. Every error becomes one line that says what to do."""

    def __init__(self, client: Any, namespace: str, job: str, wanted: str) -> None:
        self._client, self._namespace, self._job = client, namespace, job
        self._wanted = wanted
        self._batch = _client().BatchV1Api(client)
        self._core = _client().CoreV1Api(client)
        self._version = _client().VersionApi(client)

    def is_elastic(self) -> bool:
        """Returns True if the server can change `completions` of an Indexed Job (1.27 on)."""
        with self._explained():
            version = self._version.get_code(_request_timeout=_ANSWER)
        major, minor = (
            int(re.sub(r"\D.*", "", number) or 0) for number in (version.major, version.minor)
        )
        return (major, minor) >= (1, 27)

    def read_job(self) -> Any:
        with self._explained():
            return self._batch.read_namespaced_job(
                self._job, self._namespace, _request_timeout=_ANSWER
            )

    def count_pods(self) -> _PodCount:
        """Reads the number of pods of the job.

        Servers before 1.24 do not count ready pods. Servers before 1.29 do not count ending pods.
        """
        status = self.read_job().status
        active = status.active or 0
        ready = active if status.ready is None else status.ready
        return _PodCount(active, ready, status.terminating or 0)

    def patch_job(self, spec: dict[str, int]) -> None:
        with self._explained():
            self._batch.patch_namespaced_job(
                self._job, self._namespace, {"spec": spec}, _request_timeout=_ANSWER
            )

    def find_pods(self, members: Sequence[Member]) -> list[str]:
        """Returns the names of the members' remaining pods, ending ones included."""
        names = {m.node for m in members} | {_short_host(m) for m in members}
        with self._explained():
            pods = self._core.list_namespaced_pod(
                self._namespace, label_selector=f"job-name={self._job}", _request_timeout=_ANSWER
            ).items
        return [
            pod.metadata.name
            for pod in pods
            if pod.metadata.name in names or pod.spec.hostname in names
        ]

    def delete_pods(self, members: Sequence[Member]) -> None:
        for name in self.find_pods(members):
            with self._explained():
                try:
                    self._core.delete_namespaced_pod(
                        name, self._namespace, _request_timeout=_ANSWER
                    )
                except _client().ApiException as error:
                    if error.status != 404:  # 404: the pod is gone already
                        raise

    @contextlib.contextmanager
    def _explained(self) -> Generator[None, None, None]:
        """Turns an error of the client into RunError or _Transient, one line each."""
        errors = importlib.import_module("urllib3.exceptions")
        try:
            yield
        except _client().ApiException as error:
            raise self._explain(error) from None
        except (errors.HTTPError, OSError) as error:
            raise _Transient(
                f"the API server at {self._client.configuration.host} does not answer "
                f"({_reason(error)}); {self._by_hand()}"
            ) from None

    def _explain(self, error: Any) -> Exception:
        status, said = int(error.status or 0), _message(error)
        name = f"{self._namespace}/{self._job}"
        if status == 0:
            return RunError(f"no TLS connection to the API server ({said}); see the kubeconfig")
        if status == 401:
            return RunError(f"the API server rejects the credentials ({said}); renew them")
        if status == 403:
            return RunError(
                f"the API server forbids it ({said}); let the pod's service account do it as in "
                "examples/kubernetes/rbac.yaml"
            )
        if status == 404:
            return RunError(
                f"there is no job {name} ({said}); set JOB_NAME and POD_NAMESPACE as in "
                "examples/kubernetes/job.yaml"
            )
        if status == 422:
            return RunError(
                f"job {name} cannot change so ({said}); it needs completionMode: Indexed and "
                "parallelism = completions"
            )
        line = f"the API server answers {status} ({said}); {self._by_hand()}"
        return _Transient(line) if status in (409, 429) or status >= 500 else RunError(line)

    def _by_hand(self) -> str:
        return f"kubectl -n {self._namespace} edit job {self._job} can set {self._wanted} by hand"


def _index(member: Member, job: str) -> int:
    """Returns the index in an Indexed Job of a member's host JOB-INDEX. -1 for others."""
    name, _, index = _short_host(member).rpartition("-")
    return int(index) if name == job and index.isdecimal() else -1


def _short_host(member: Member) -> str:
    return member.host.partition(".")[0]


def _client() -> Any:
    try:
        return importlib.import_module("kubernetes.client")
    except ImportError as error:
        raise ConfigError(
            f'elastic.releaser = "kubernetes": {not_installed("kubernetes")} ({error})'
        ) from None


def _configuration(kubeconfig: str) -> Any:
    """Reads the given file, the pod's service account, or the user's file."""
    configuration = _client().Configuration()
    # The manager repeats calls itself. The client would print a line for each repetition.
    configuration.retries = False
    config = importlib.import_module("kubernetes.config")
    try:
        if not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(
                config_file=kubeconfig or os.environ.get("KUBECONFIG") or None,
                client_configuration=configuration,
            )
    except (config.ConfigException, OSError) as error:
        raise ConfigError(
            f"no credentials for Kubernetes ({_reason(error)}): give the pod a service account, "
            "or set KUBECONFIG"
        ) from None
    return configuration


def _message(error: Any) -> str:
    """Returns the field `message` of the API server's answer, or the status line."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        return _reason(json.loads(body)["message"])
    return _reason(error.reason)


def _reason(error: object) -> str:
    """Returns an error in one line of at most 200 characters."""
    line = " ".join(str(error).split())
    return line if len(line) <= 200 else line[:197] + "..."
