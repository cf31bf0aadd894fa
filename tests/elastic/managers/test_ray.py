"""Ranks under a real Ray cluster.

Other tasks use the released GPUs. New ranks join as actors.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.ray_cluster import RayCluster, ray_cluster, why_no_ray, without_warning
from tests.elastic.run_launcher import (
    LENDS_TWO,
    LOSES_TWO,
    PATHS,
    RECOVERS,
    STOPS_WHEN_ASKED,
    check_that_ranks_end_with,
    launcher_command,
    reports_of,
)
from tests.processes import gone, wait_until

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(why_no_ray() is not None, reason=str(why_no_ray())),
]

# Another program of the cluster: it needs two GPUs, and keeps them until it is told to end.
OTHER = """
import pathlib, time, ray
ray.init(log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=0, num_gpus=2)
def work():
    pathlib.Path("runs").touch()
    while not pathlib.Path("end").exists():
        time.sleep(0.05)

while ray.available_resources().get("GPU", 0) > 0:
    time.sleep(0.05)
waits = work.options(runtime_env={}).remote()
assert not pathlib.Path("runs").exists()
pathlib.Path("another-waits").touch()
ray.get(waits)
pathlib.Path("another-is-over").touch()
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    with ray_cluster(gpus=4) as cluster:
        yield cluster


def launch(ray: RayCluster, folder: Path, *scripts: str, join: str = "") -> subprocess.Popen[str]:
    """Starts a launcher whose ranks run these scripts."""
    return ray.start(launcher_command("ray", folder, *scripts, join=join), folder, PATHS)


def end(process: subprocess.Popen[str], seconds: float = 50) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, without_warning(err)


def test_another_task_uses_released_gpus(ray: RayCluster, tmp_path: Path) -> None:
    """Two of four ranks leave, and a pending task of another program gets their GPUs.

    Two ranks join as new actors when that task has ended.
    """
    process = launch(
        ray,
        tmp_path,
        *LENDS_TWO,
        join="""
(here / f"gpu-{process}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
say(f"joined-{process}")
heard("done")
""",
    )
    wait_until(lambda: (tmp_path / "up").exists())
    program = OTHER.replace('Path("', f'Path("{tmp_path}/')
    other = ray.start([sys.executable, "-c", program], tmp_path)
    wait_until(lambda: (tmp_path / "runs").exists())
    assert not (tmp_path / "done").exists()
    (tmp_path / "end").touch()
    assert end(other)[::2] == (0, "")
    assert end(process) == (0, "result\n", "")
    assert reports_of(tmp_path)[0] == "released 2: Ray removed 2 placement groups: 2 GPU free"
    assert sorted(line.partition(" runs")[0] for line in reports_of(tmp_path)[1:]) == [
        "started 1: process 4",
        "started 1: process 5",
    ]
    gpus = {(tmp_path / f"gpu-{number}").read_text() for number in (4, 5)}
    assert len(gpus) == 2
    assert (tmp_path / "rank-1.log").read_text() == ""
    wait_until(lambda: gone(tmp_path), 15)


def test_run_goes_on_without_a_dead_and_a_stopped_rank(ray: RayCluster, tmp_path: Path) -> None:
    process = ray.start(launcher_command("ray", tmp_path, *LOSES_TWO), tmp_path, RECOVERS)
    killed = "was ended by SIGKILL; out of memory?"
    assert end(process) == (0, f"{killed} and did not answer and was ended\n", "")
    assert reports_of(tmp_path) == ["released 1: Ray removed 1 placement group: 1 GPU free"] * 2
    wait_until(lambda: gone(tmp_path), 15)


def test_newcomer_without_a_gpu_waits_until_the_run_ends(ray: RayCluster, tmp_path: Path) -> None:
    """The cluster has one GPU too few."""
    wait = "until(lambda: signals, 'a signal')"
    process = launch(ray, tmp_path, "manager.start(4)\nreports(3)", join=wait)
    assert end(process) == (0, "", "")
    assert len(reports_of(tmp_path)) == 3
    wait_until(lambda: gone(tmp_path), 15)


def test_failed_rank_is_reported(ray: RayCluster, tmp_path: Path) -> None:
    body = "raise RunError('no luck')"
    process = launch(ray, tmp_path, "heard('never')", body)
    assert end(process) == (1, "", "RunError: no luck\n")
    wait_until(lambda: gone(tmp_path), 15)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["asked", "killed"])
def test_ranks_end_with_their_launcher(ray: RayCluster, tmp_path: Path, number: int) -> None:
    process = launch(ray, tmp_path, *[STOPS_WHEN_ASKED] * 2)
    status, err = check_that_ranks_end_with(process, tmp_path, number)
    if number == signal.SIGINT:
        assert (status, without_warning(err)) == (130, "")
