"""Checks the Kubernetes manager against a real API server, by hand.

It checks the manager's manifests too.

    python -m tests.elastic.managers.kubernetes_check --bin FOLDER

FOLDER has kube-apiserver, kube-controller-manager, kube-scheduler and kubectl, and etcd is in PATH.
Debian's source package `kubernetes` builds the four, and its package `etcd-server` has etcd. The
script starts them on 127.0.0.1, in a temporary folder. A stub takes the kubelet's place: it says of
each pod that it runs, and removes it when it is deleted. No container is started.

The server is Kubernetes 1.27 or newer.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from dynmo.elastic.manager import RankPlace
from dynmo.elastic.managers.kubernetes import KubernetesManager
from tests.cli.runs import free_port
from tests.elastic.managers.test_command import wait_for
from tests.processes import end_all, wait_until

MANIFESTS = Path(__file__).parents[3] / "examples" / "kubernetes"
NAMESPACE, JOB, NODE, GPUS = "training", "dynmo", "stub-node", 4
GPU = "nvidia.com/gpu"


def main() -> None:
    """Runs the check, and stops everything that it started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bin", type=Path, required=True, help="folder of the programs")
    programs = parser.parse_args().bin.resolve()
    with tempfile.TemporaryDirectory(prefix="dynmo-kubernetes-") as folder:
        cluster = Cluster(programs, Path(folder))
        try:
            cluster.start()
            check_sizes(cluster, start_jobs(cluster))
            check_errors(cluster)
        except BaseException:
            cluster.print_logs()
            raise
        finally:
            cluster.stop()
    print("all checks passed")


class Cluster:
    """A control plane with one node of four GPUs, and a stub instead of its kubelet."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._ports = {name: free_port() for name in ("etcd", "peer", "api")}
        self._stop = threading.Event()
        self._kubelet = threading.Thread(target=self._run_kubelet)
        self.client: Any = importlib.import_module("kubernetes.client")
        self.admin = folder / "admin.yaml"

    def start(self) -> None:
        """Starts etcd, the API server, the Job controller, the scheduler and the stub."""
        keys = self._folder / "keys"
        keys.mkdir()
        _run("openssl", "genrsa", "-out", str(keys / "accounts.key"), "2048")
        (keys / "tokens.csv").write_text("admin-token,admin,1,system:masters\n")
        url, peer = (f"http://127.0.0.1:{self._ports[name]}" for name in ("etcd", "peer"))
        own = [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        own += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        own += [f"--data-dir={self._folder / 'etcd'}", f"--initial-cluster=default={peer}"]
        self._launch("etcd", "etcd", *own)
        self.start_api()
        config = importlib.import_module("kubernetes.config")
        api = config.new_client_from_config(str(self.admin))
        self.core: Any = self.client.CoreV1Api(api)
        self.batch: Any = self.client.BatchV1Api(api)
        version = self.client.VersionApi(api).get_code()
        client = importlib.import_module("kubernetes").__version__
        print(f"API server {version.git_version}, client {client}")
        common = [f"--kubeconfig={self.admin}", "--leader-elect=false", "--secure-port=0"]
        self._launch(
            "controller-manager",
            str(self._programs / "kube-controller-manager"),
            *common,
            "--controllers=job,garbagecollector,persistentvolume-binder,serviceaccount,serviceaccount-token",
            f"--service-account-private-key-file={keys / 'accounts.key'}",
            f"--root-ca-file={keys / 'apiserver.crt'}",
        )
        self._launch("scheduler", str(self._programs / "kube-scheduler"), *common)
        self._add_node()
        self._kubelet.start()

    def start_api(self) -> None:
        """Starts the API server, and waits until it is ready."""
        keys = self._folder / "keys"
        self._launch(
            "apiserver",
            str(self._programs / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{self._ports['etcd']}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={self._ports['api']}",
            f"--cert-dir={keys}",
            f"--token-auth-file={keys / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={keys / 'accounts.key'}",
            f"--service-account-signing-key-file={keys / 'accounts.key'}",
        )
        command = [str(self._programs / "kubectl"), f"--kubeconfig={self.admin}"]
        command += ["get", "--raw", "/readyz"]
        wait_until((keys / "apiserver.crt").exists, 60)
        self.write_kubeconfig(self.admin, "admin-token")
        wait_until(lambda: subprocess.run(command, capture_output=True).stdout == b"ok", 60)

    def stop_api(self) -> None:
        """Stops the API server."""
        end_all([self._processes.pop("apiserver")])

    def stop(self) -> None:
        """Stops everything, last started first."""
        self._stop.set()
        if self._kubelet.ident is not None:
            self._kubelet.join()
        end_all([*reversed(self._processes.values())])

    def print_logs(self) -> None:
        """Prints the end of each program's log."""
        for log in sorted(self._folder.glob("*.log")):
            print(f"--- {log.name}", *log.read_text().splitlines()[-15:], sep="\n")

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Runs kubectl as administrator, in the namespace of the run."""
        kubectl = [str(self._programs / "kubectl"), f"--kubeconfig={self.admin}"]
        return _run(*kubectl, "--namespace", NAMESPACE, *arguments, stdin=stdin)

    def write_kubeconfig(self, path: Path, token: str, trusts: bool = True) -> None:
        """Writes a file to connect with."""
        cluster = {"server": f"https://127.0.0.1:{self._ports['api']}"}
        if trusts:
            cluster["certificate-authority"] = str(self._folder / "keys" / "apiserver.crt")
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(content))

    def account_token(self) -> str:
        """Returns a token of the service account of rbac.yaml."""
        spec = {"audiences": ["https://kubernetes.default.svc"], "expirationSeconds": 3600}
        request = self.core.create_namespaced_service_account_token(
            "dynmo", NAMESPACE, {"spec": spec}
        )
        return str(request.status.token)

    def enter_pod(self) -> None:
        """Gives this process what a pod of job.yaml has: its variables and its token."""
        token = self._folder / "token"
        token.write_text(self.account_token())
        pod: Any = importlib.import_module("kubernetes.config.incluster_config")
        pod.SERVICE_TOKEN_FILENAME = str(token)
        pod.SERVICE_CERT_FILENAME = str(self._folder / "keys" / "apiserver.crt")
        os.environ.update(
            KUBERNETES_SERVICE_HOST="127.0.0.1",
            KUBERNETES_SERVICE_PORT=str(self._ports["api"]),
            JOB_NAME=JOB,
            POD_NAMESPACE=NAMESPACE,
        )

    def pods(self, job: str, phase: str) -> list[str]:
        """Names of a job's pods in a phase. Pods that are being deleted do not count."""
        pods = self.core.list_namespaced_pod(NAMESPACE, label_selector=f"job-name={job}").items
        return sorted(
            pod.metadata.name
            for pod in pods
            if pod.status.phase == phase and pod.metadata.deletion_timestamp is None
        )

    def _add_node(self) -> None:
        resources = {"cpu": "8", "memory": "32Gi", "pods": "20", GPU: str(GPUS)}
        self.core.create_node({"metadata": {"name": NODE}})
        ready = {"type": "Ready", "status": "True", "reason": "Stub"}
        status = {"capacity": resources, "allocatable": resources, "conditions": [ready]}
        self.core.patch_node_status(NODE, {"status": status})
        self.core.patch_node(NODE, {"spec": {"taints": []}})  # "not ready" is set on creation
        volume = {"capacity": {"storage": "100Gi"}, "accessModes": ["ReadWriteMany"]}
        volume["hostPath"] = {"path": str(self._folder)}
        self.core.create_persistent_volume({"metadata": {"name": "runs"}, "spec": volume})

    def _run_kubelet(self) -> None:
        """The stub of the kubelet.

        Pods on the node run at once, and end half a second after their deletion.
        """
        ending: dict[str, float] = {}
        ready = {"type": "Ready", "status": "True"}
        while not self._stop.wait(0.1):
            try:
                pods = self.core.list_pod_for_all_namespaces(
                    field_selector=f"spec.nodeName={NODE}"
                ).items
                for pod in pods:
                    name, namespace = pod.metadata.name, pod.metadata.namespace
                    if pod.metadata.deletion_timestamp is not None:
                        if time.monotonic() > ending.setdefault(name, time.monotonic() + 0.5):
                            self.core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
                    elif pod.status.phase == "Pending":
                        status = {"phase": "Running", "conditions": [ready]}
                        self.core.patch_namespaced_pod_status(name, namespace, {"status": status})
            except Exception:  # the API server is away, or a pod went in between
                continue

    def _launch(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                text=True,
                start_new_session=True,
            )


def _run(*command: str, stdin: str = "") -> str:
    """Runs a command that must end well. Its errors go to the terminal."""
    return subprocess.run(
        command, input=stdin, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def start_jobs(cluster: Cluster) -> list[str]:
    """Starts the run and another job that waits for a GPU. Returns the pods of the run."""
    cluster.core.create_namespace({"metadata": {"name": NAMESPACE}})
    wait_until(lambda: bool(cluster.core.list_namespaced_service_account(NAMESPACE).items))
    # kubectl checks each key of examples/kubernetes against the server's schema.
    files = ("rbac.yaml", "volume.yaml", "job.yaml")
    apply(cluster, [document for file in files for document in documents(file)])
    running = wait_for_pods(cluster, JOB, "Running", 4)
    # A job of one pod that needs a GPU.
    container = {"name": "c", "image": "none", "resources": {"limits": {GPU: "1"}}}
    pod = {"restartPolicy": "Never", "containers": [container]}
    other = {"metadata": {"name": "other"}, "spec": {"template": {"spec": pod}}}
    apply(cluster, [{"apiVersion": "batch/v1", "kind": "Job", **other}])
    wait_for_pods(cluster, "other", "Pending", 1)
    print("4 pods run, and a pod of another job waits for a GPU")
    return running


def check_sizes(cluster: Cluster, running: list[str]) -> None:
    """Shrinks the job, grows it, and shrinks it again."""
    cluster.enter_pod()
    # Names of Indexed pods sort by index: dynmo-0-x, dynmo-1-x
    stay, left = running[:2], running[2:]
    gone, staying = places(left, 2), places(stay, 0)
    manager = KubernetesManager(timeout=30)
    manager.check()
    began = time.monotonic()
    manager.give_back(gone, staying)
    wait_for_pods(cluster, "other", "Running", 1)
    print(f"the waiting pod ran {time.monotonic() - began:.2f} s after give_back()")
    expect(manager, "released", "gave 2 of 4 pods back")
    assert wait_for_pods(cluster, JOB, "Running", 2) == stay
    print("the pods that stay are the same as before")

    manager.start(2)
    wait_for_pods(cluster, JOB, "Pending", 1)
    cluster.kubectl("delete", "job", "other")
    expect(manager, "started", "2 of them new")
    now = wait_for_pods(cluster, JOB, "Running", 4)
    assert set(stay) <= set(now)

    check_absence(cluster, manager, places(sorted(set(now) - set(stay)), 2), staying)
    manager.close()


def check_absence(
    cluster: Cluster, manager: KubernetesManager, gone: list[RankPlace], staying: list[RankPlace]
) -> None:
    """Shrinks the job while the API server is away."""
    cluster.stop_api()
    paused, pause = threading.Event(), KubernetesManager._pause

    def pause_and_tell(self: KubernetesManager) -> None:
        paused.set()
        pause(self)

    with mock.patch.object(KubernetesManager, "_pause", pause_and_tell):
        manager.give_back(gone, staying)
        assert paused.wait(40), "the manager finds no server, and tries again"
        assert not manager.watch()
    cluster.start_api()
    print("the API server was away for a while during the release")
    expect(manager, "released", "gave 2 of 4 pods back")
    assert wait_for_pods(cluster, JOB, "Running", 2) == [each.node for each in staying]


def check_errors(cluster: Cluster) -> None:
    """Provokes each error. The API server is stopped at the end."""
    expect_failure("another", None, "forbids it")
    expect_failure("another", cluster.admin, "there is no job training/another")
    wrong = cluster.admin.with_name("wrong.yaml")
    cluster.write_kubeconfig(wrong, "no-such-token")
    expect_failure(JOB, wrong, "rejects the credentials")
    cluster.write_kubeconfig(wrong, "admin-token", trusts=False)
    expect_failure(JOB, wrong, "no TLS connection")
    cluster.stop_api()
    expect_failure(JOB, None, "does not answer")


def apply(cluster: Cluster, content: Sequence[Any]) -> None:
    text = yaml.safe_dump_all(content)
    print(cluster.kubectl("apply", "--validate=true", "-f", "-", stdin=text), end="")


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def places(pods: Sequence[str], first: int) -> list[RankPlace]:
    return [RankPlace(first + i, f"host-{pod}", 1, pod) for i, pod in enumerate(pods)]


def expect(manager: KubernetesManager, kind: str, says: str) -> None:
    """Waits for one report, prints it and compares it."""
    (report,) = wait_for(manager)
    print(f"{report.kind} after {report.seconds:.2f} s: {report.what}")
    assert report.kind == kind
    assert says in report.what


def expect_failure(job: str, kubeconfig: Path | None, says: str) -> None:
    """A request fails.

    Without a kubeconfig, it is made with the pod's service account.
    """
    names = {"POD_NAMESPACE": NAMESPACE, "JOB_NAME": job, "KUBECONFIG": str(kubeconfig or "")}
    with mock.patch.dict(os.environ, names):
        manager = KubernetesManager(2)
        manager.start(1)
        expect(manager, "failed", says)
        manager.close()


def wait_for_pods(cluster: Cluster, job: str, phase: str, count: int) -> list[str]:
    wait_until(lambda: len(cluster.pods(job, phase)) == count, 40)
    return cluster.pods(job, phase)


if __name__ == "__main__":
    sys.exit(main())
