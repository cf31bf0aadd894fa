"""KubernetesManager against a local server that answers like the Kubernetes API.

`FakeKubernetes` models one job and its pods. It knows which keys of a job may change, and which
pods the Job controller deletes. `kubernetes_check.py` runs the manager against a real API server,
by hand.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dynmo.elastic.manager import Manager, RankPlace, Report
from dynmo.elastic.managers import kubernetes
from dynmo.elastic.managers.kubernetes import KubernetesManager
from dynmo.errors import ConfigError
from tests.cli.runs import free_port
from tests.elastic.managers.test_command import wait_for
from tests.processes import wait_until

pytestmark = pytest.mark.clusters

client: Any = pytest.importorskip("kubernetes.client")
yaml: Any = pytest.importorskip("yaml")

EXAMPLES = Path(__file__).parents[3] / "examples" / "kubernetes"


class FakeKubernetes:
    """Answers like the API server, the Job controller and the kubelet.

    It knows the job training/run.

    Attributes:
        minor: The server is version 1.`minor`.
        spec: The job's `spec`.
        free: Places for further pods. Others stay pending.
        failures: Status and message of the next answers to a request with a given method.
        patches: Bodies of the patches that were accepted.
        ends_after: Seconds between the deletion of a pod and its end.
    """

    def __init__(self, minor: int = 30, pods: int = 4) -> None:
        self.minor, self.free = minor, 100
        self.spec = {"parallelism": pods, "completions": pods, "completionMode": "Indexed"}
        self.failures: list[tuple[str, int, str]] = []
        self.patches: list[dict[str, Any]] = []
        self.ends_after = 0.05
        self._ends: dict[str, float] = {}
        self._made = 0
        self._pods: dict[str, int] = {}  # name -> index
        self._lock = threading.Lock()
        self._control()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with fake._lock:
                    status, content = fake._answer(self.command, self.path, body)
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PATCH = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def indexes(self) -> list[int]:
        """Indexes of the pods that are not ending."""
        with self._lock:
            return sorted(i for name, i in self._pods.items() if name not in self._ends)

    def pod(self, index: int) -> str:
        """Name of the pod of an index."""
        with self._lock:
            return next(n for n, i in self._pods.items() if i == index and n not in self._ends)

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        path = path.partition("?")[0].rstrip("/")
        for i, (failing, status, message) in enumerate(self.failures):
            if failing == method and path != "/version":
                del self.failures[i]
                return status, {"kind": "Status", "message": message}
        self._control()
        if path == "/version":
            return 200, dict.fromkeys(_VERSION, "") | {"major": "1", "minor": f"{self.minor}+"}
        if path == "/apis/batch/v1/namespaces/training/jobs/run":
            if method == "PATCH":
                patch = json.loads(body)["spec"]
                changed = self.spec | patch
                if changed["completions"] != self.spec["completions"] and (
                    self.spec["completionMode"] != "Indexed"
                    or changed["completions"] != changed["parallelism"]
                ):
                    return 422, {"message": 'Job "run" is invalid:\n field is immutable'}
                self.spec = changed
                self.patches.append(patch)
            return 200, self._job()
        return 404, {"message": f"{path} not found"}

    def _control(self) -> None:
        """Acts as the Job controller: deletes surplus pods and makes missing ones."""
        now = time.monotonic()
        for name in [name for name, end in self._ends.items() if end < now]:
            del self._ends[name], self._pods[name]
        active = {name: i for name, i in self._pods.items() if name not in self._ends}
        for name in [name for name, i in active.items() if i >= self.spec["completions"]]:
            self._ends[name] = now + self.ends_after
        for index in range(int(self.spec["completions"])):
            active = {name: i for name, i in self._pods.items() if name not in self._ends}
            if index not in active.values() and len(active) < int(self.spec["parallelism"]):
                self._pods[f"run-{index}-x{self._made}"] = index
                self._made += 1

    def _job(self) -> dict[str, Any]:
        active = len(self._pods) - len(self._ends)
        status: dict[str, Any] = {"active": active, "ready": min(active, 4 + self.free)}
        if self.minor >= 29:
            status["terminating"] = len(self._ends)
        spec = {**self.spec, "template": {"spec": {"containers": [{"name": "c"}]}}}
        return {"metadata": {"name": "run"}, "spec": spec, "status": status}


_VERSION = [
    "buildDate",
    "compiler",
    "gitCommit",
    "gitTreeState",
    "gitVersion",
    "goVersion",
    "platform",
]


@pytest.fixture
def fake(request: pytest.FixtureRequest) -> Iterator[FakeKubernetes]:
    server = FakeKubernetes(minor=getattr(request, "param", 30))
    yield server
    server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_INTERVAL", 0.02)
    monkeypatch.setenv("POD_NAMESPACE", "training")
    monkeypatch.setenv("JOB_NAME", "run")
    for variable in ("KUBERNETES_SERVICE_HOST", "KUBECONFIG"):
        monkeypatch.delenv(variable, raising=False)


Connect = Callable[..., KubernetesManager]


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Connects a manager to a server."""
    made: list[KubernetesManager] = []

    def call(url: str, timeout: float = 10.0) -> KubernetesManager:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(url, tmp_path)))
        made.append(KubernetesManager(timeout))
        return made[-1]

    yield call
    for manager in made:
        manager.close()


def kubeconfig(url: str, folder: Path) -> Path:
    content = {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(content))
    return path


def places(*indexes: int) -> list[RankPlace]:
    return [RankPlace(i, f"run-{i}", 1) for i in indexes]


def one(manager: Manager, kind: str, ranks: int, *words: str) -> Report:
    """The one report of the manager, which has this kind, number of ranks and these words."""
    (report,) = wait_for(manager)
    assert (report.kind, report.ranks) == (kind, ranks), report
    assert all(word in report.what for word in words), report
    return report


def release_last(manager: Manager) -> None:
    manager.give_back(places(3), places(0, 1, 2))


def wait_for_patch(fake: FakeKubernetes, parallelism: int) -> None:
    wait_until(lambda: fake.spec["parallelism"] == parallelism)


def test_release_and_request_scale_the_job(fake: FakeKubernetes, connect: Connect) -> None:
    manager = connect(fake.url)
    manager.check()
    assert manager.can_start
    before = [fake.pod(0), fake.pod(1)]
    manager.give_back(places(2, 3), places(0, 1))
    report = one(manager, "released", 2)
    assert report.what == "job training/run gave 2 of 4 pods back"
    assert report.seconds >= fake.ends_after  # waits until the pods are gone
    assert fake.indexes == [0, 1]
    manager.start(3)
    assert one(manager, "started", 3).what == "job training/run has 5 pods, 3 of them new"
    assert fake.indexes == [0, 1, 2, 3, 4]
    assert before == [fake.pod(0), fake.pod(1)]
    assert fake.patches == [{"parallelism": n, "completions": n} for n in (2, 5)]


@pytest.mark.parametrize("fake", [26], indirect=True)
def test_a_server_before_1_27_is_refused(fake: FakeKubernetes, connect: Connect) -> None:
    manager = connect(fake.url)
    for ranks, change in enumerate((release_last, lambda manager: manager.start(1))):
        change(manager)
        one(manager, "failed", ranks, "its server is Kubernetes 1.26+, and", "needs 1.27 or newer")
    assert fake.patches == []


def test_a_rank_on_a_high_pod_keeps_all_pods(fake: FakeKubernetes, connect: Connect) -> None:
    manager = connect(fake.url)
    manager.give_back(places(1, 2), places(0, 3))
    one(manager, "failed", 0, "run-3", "rank 3")
    manager.start(1)
    one(manager, "started", 1, "1 pods that it could not give back")
    assert fake.patches == []
    manager.start(2)
    one(manager, "started", 2, "has 5 pods, 1 of them new")


@pytest.mark.parametrize(
    ("method", "status", "word"),
    [
        ("GET", 401, "credentials"),
        ("GET", 403, "rbac.yaml"),
        ("PATCH", 403, "forbids"),
        ("GET", 404, "JOB_NAME"),
        ("PATCH", 422, "completionMode: Indexed"),
        ("PATCH", 400, "400"),
    ],
)
def test_server_error_gives_a_one_line_error(
    fake: FakeKubernetes, connect: Connect, method: str, status: int, word: str
) -> None:
    fake.failures = [(method, status, "why\n")]
    manager = connect(fake.url)
    manager.start(2)
    one(manager, "failed", 2, word, "(why)")
    assert fake.spec["parallelism"] == 4


@pytest.mark.parametrize("status", [409, 429, 500, 503])
def test_busy_server_is_retried(fake: FakeKubernetes, connect: Connect, status: int) -> None:
    fake.failures = [("PATCH", status, "later")] * 2 + [("GET", status, "later")] * 2
    manager = connect(fake.url)
    manager.start(1)
    one(manager, "started", 1)
    assert fake.failures == []
    fake.failures = [("PATCH", status, "later")] * 1000
    hurried = connect(fake.url, timeout=0.1)
    release_last(hurried)
    one(hurried, "failed", 0, f"{status} (later)")


def test_job_without_indexes_fails_with_the_server_message(
    fake: FakeKubernetes, connect: Connect
) -> None:
    fake.spec["completionMode"] = "NonIndexed"
    manager = connect(fake.url)
    release_last(manager)
    one(manager, "failed", 0, "field is immutable")  # the server's own words
    assert fake.indexes == [0, 1, 2, 3]


def test_missing_server_gives_a_one_line_error(connect: Connect) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    manager = connect(url, timeout=0.1)
    release_last(manager)
    one(manager, "failed", 0, url, "kubectl -n training edit job run")


def test_pending_pods_stay_requested(fake: FakeKubernetes, connect: Connect) -> None:
    """A later release does not wait for pending pods."""
    fake.free = 1
    manager = connect(fake.url, timeout=0.2)
    manager.start(2)
    one(manager, "failed", 2, "6 pods are active, 5 ready, 0 ending after 0.2 s")
    assert fake.spec["parallelism"] == 6

    patient = connect(fake.url, timeout=60)
    patient.start(1)
    wait_for_patch(fake, parallelism=7)
    release_last(patient)
    given_up, released = wait_for(patient, 2)
    assert given_up.kind == "failed"
    assert "newer" in given_up.what
    assert released.kind == "released"
    assert fake.indexes == [0, 1, 2]


def test_close_does_not_wait_for_pods(fake: FakeKubernetes, connect: Connect) -> None:
    fake.ends_after = 60
    manager = connect(fake.url, timeout=60)
    release_last(manager)
    wait_for_patch(fake, parallelism=3)
    manager.close(0)
    one(manager, "failed", 0, "the run ended")


def test_check_names_the_missing_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_NAMESPACE")
    monkeypatch.delenv("JOB_NAME")
    with pytest.raises(ConfigError, match="needs POD_NAMESPACE: set it in the pod as in examples"):
        KubernetesManager().check()
    monkeypatch.setenv("POD_NAMESPACE", "training")
    with pytest.raises(ConfigError, match="needs JOB_NAME"):
        KubernetesManager().check()
    monkeypatch.setenv("JOB_NAME", "run")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"no credentials for Kubernetes .*: give the pod a"):
        KubernetesManager().check()
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig("http://127.0.0.1:1", tmp_path)))
    KubernetesManager().check()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    with pytest.raises(ConfigError, match="no credentials for Kubernetes"):
        KubernetesManager().check()


def test_check_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(ConfigError, match="pip install kubernetes") as caught:
        KubernetesManager().check()
    assert "\n" not in str(caught.value)
    manager = KubernetesManager()
    manager.start(1)
    one(manager, "failed", 1, "pip install")
    manager.close()


MANIFESTS = ("Job", "PersistentVolumeClaim", "Role", "RoleBinding", "Service", "ServiceAccount")


def example(kind: str) -> Any:
    """The object of a kind in examples/kubernetes."""
    files = sorted(EXAMPLES.glob("*.yaml"))
    objects = [o for file in files for o in yaml.safe_load_all(file.read_text())]
    assert {o["kind"] for o in objects} == set(MANIFESTS)
    (manifest,) = (o for o in objects if o["kind"] == kind)
    return manifest


@pytest.mark.parametrize("kind", MANIFESTS)
def test_example_manifests_have_only_api_keys(kind: str) -> None:
    assert unknown_keys(example(kind), f"V1{kind}", kind) == []


def unknown_keys(value: Any, type_name: str, at: str) -> list[str]:
    """Keys that the client's models do not have."""
    if type_name.startswith("list["):
        return [u for item in value for u in unknown_keys(item, type_name[5:-1], at)]
    model: Any = getattr(client, type_name, None)
    if not hasattr(model, "attribute_map"):
        return []
    types = {key: model.openapi_types[name] for name, key in model.attribute_map.items()}
    unknown = [f"{at}.{key}" for key in value if key not in types]
    for key in value.keys() & types.keys():
        unknown += unknown_keys(value[key], types[key], f"{at}.{key}")
    return unknown


def test_example_manifests_are_consistent() -> None:
    job, service, role = example("Job"), example("Service"), example("Role")
    name, spec, pod = job["metadata"]["name"], job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert str(spec["completions"]) == str(spec["parallelism"]) == env["WORLD_SIZE"]
    assert env["JOB_NAME"] == name
    verbs = {"resources": ["jobs"], "resourceNames": [name], "verbs": ["get", "patch"]}
    assert role["rules"] == [{"apiGroups": ["batch"], **verbs}]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert env["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    account = example("ServiceAccount")["metadata"]["name"]
    assert pod["serviceAccountName"] == account
    assert example("RoleBinding")["subjects"][0]["name"] == account
    (volume,) = (v["persistentVolumeClaim"] for v in pod["volumes"] if v["name"] == "runs")
    assert volume["claimName"] == example("PersistentVolumeClaim")["metadata"]["name"]
