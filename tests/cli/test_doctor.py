"""`dynmo doctor` names faults of a machine, and says what to do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dynmo.cases.pruning import crossover
from dynmo.cases.pruning.crossover import known_crossover
from dynmo.doctor.network import check_network
from tests.cli.runs import Run, assert_refused, end, free_port
from tests.pool import Pool
from tests.processes import start

CONFIG = """
[model]
kind = "emulated"
layers = 2
sequence = 16
[train]
global_batch = 4
micro_batch = 2
[checkpoint]
keep = 1
"""
Findings = dict[str, tuple[str, str, str]]
Look = Callable[..., Findings]


def by_check(findings: list[dict[str, Any]]) -> Findings:
    return {each["check"]: (each["state"], each["seen"], each["remedy"]) for each in findings}


@pytest.fixture
def look(dynmo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Runs the command as the only rank of another launcher. Returns what it finds, by check."""
    monkeypatch.chdir(tmp_path)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    monkeypatch.setattr("dynmo.doctor.ranks._SECONDS", 0.01)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "text").write_bytes(bytes(200))

    def call(*arguments: object) -> Findings:
        done = dynmo("doctor", *arguments, "--json")
        record = json.loads(done.out)
        found = by_check(record["findings"])
        states = {state for state, _, _ in found.values()}
        assert done.err == ""
        assert done.status == ("problem" in states)
        assert record["state"] in states
        return found

    return call


def test_a_sound_machine_has_no_problem(look: Look) -> None:
    found = look()
    assert not [each for each in found.values() if each[0] == "problem"]
    for name in ("torch", "numba", "Python"):
        assert name in found["packages"][1]
    assert found["interface"][:2] == ("ok", "lo (127.0.0.1) listens and connects")
    assert {"extra hf", "devices", "backends", "kernels", "speed of ranks"} <= found.keys()
    assert found["clocks"][0] == "ok"


def test_needs_of_a_run_fit(look: Look) -> None:
    found = look("run.toml")
    assert found["host memory"][0] == found["disk"][0] == "ok"
    assert "2 checkpoints of" in found["disk"][1]


def test_too_little_memory_is_named(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynmo.doctor.resources.spare_memory", lambda: 100 << 20)
    state, seen, remedy = look("run.toml")["host memory"]
    assert state == "problem"
    assert seen.startswith("100 MiB free, 2")
    assert "dry-run" in remedy


def test_limit_of_memory_is_named(look: Look, tmp_path: Path) -> None:
    with (tmp_path / "run.toml").open("a") as file:
        file.write("[pipeline]\nmemory_limit = 1\n")
    state, seen, _ = look("run.toml")["memory of the run"]
    assert state == "problem"
    assert "over pipeline.memory_limit = 1" in seen


def test_full_disk_is_named(look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    found = look("run.toml")
    for check, remedy in (("disk", "checkpoint.keep"), ("temporary folder", "TMPDIR")):
        assert found[check][0] == "problem"
        assert found[check][1].startswith("0 MiB free")
        assert remedy in found[check][2] or check == "disk"


def test_missing_extra_is_a_problem_only_if_used(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if name == "wandb":
            raise PackageNotFoundError(name)
        return "1.0" if name == "datasets" else version(name)

    monkeypatch.setattr("dynmo.doctor.packages.version", installed)
    found = look("run.toml")
    what = "wandb is not installed (for metrics.to = tensorboard or wandb)"
    assert found["extra metrics"] == ("warning", what, "pip install 'wandb>=0.17'")
    assert "datasets is 1.0, and dynmo requires >=4" in found["extra data"][1]
    with (tmp_path / "run.toml").open("a") as file:
        file.write('[metrics]\nto = ["wandb"]\n')
    assert look("run.toml")["extra metrics"][:2] == ("problem", what)


def test_model_that_is_not_there_is_named(look: Look, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nkind = "python:absent:model"\n')
    state, seen, _ = look("run.toml")["config"]
    assert state == "problem"
    assert "absent" in seen


def test_torch_that_does_not_load_is_named(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        raise OSError(f"lib{name}.so: cannot open shared object file")

    monkeypatch.setattr("dynmo.doctor.packages.import_module", load)
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    found = look()
    assert {*found} >= {"packages", "extra hf"}
    assert "devices" not in found
    assert found["packages"][0] == "problem"
    assert "cannot be loaded: libtorch.so: cannot open" in found["packages"][1]


def test_absent_interface_is_named(
    dynmo: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0")
    monkeypatch.setattr("dynmo.cli.doctor._measure_here", lambda *_: [])
    done = dynmo("doctor", "--json")
    assert done.err == ""
    found = by_check(json.loads(done.out)["findings"])
    state, seen, remedy = found["interface between machines"]
    assert (done.status, state) == (1, "problem")
    assert seen == "GLOO_SOCKET_IFNAME = absent0: there is no interface absent0"
    assert remedy.startswith("unset it, or set it to one of lo")
    assert found["interface of local ranks"][0] == "ok"


def test_blocked_interface_is_named(
    dynmo: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No rank is started where connections get no answer. Nobody would wait for them well."""

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        assert timeout < 10
        raise TimeoutError("timed out")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "create_connection", connect)
    done = dynmo("doctor")
    assert done.status == 1
    assert "a connection at 127.0.0.1 (lo) fails: timed out" in done.out
    assert "not measured: mend the problems first" in done.out
    assert "problems: 1" in done.out or "problems: 2" in done.out


def test_interface_that_is_down_is_named(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {name: each._replace(isup=False) for name, each in psutil.net_if_stats().items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    assert look()["interface"] == ("problem", "lo is down", "ip link set lo up")


def test_used_port_is_named(dynmo: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dynmo.cli.doctor._measure_here", lambda *_: [])
    with socket.create_server(("", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        found = by_check(json.loads(dynmo("doctor", "--json").out)["findings"])
    assert found["port"][0] == "warning"
    assert "--master-port" in found["port"][2]


@pytest.mark.parametrize("port", ["auto", "99999"])
def test_port_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    found = [*check_network(None)][-1]
    assert (found.state, found.seen) == ("warning", f"MASTER_PORT = {port} is no port")


def test_rank_that_fails_is_a_problem(
    dynmo: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    line = [sys.executable, "-c", "exit(3)"]
    monkeypatch.setattr("dynmo.cli.doctor.rank_command", lambda *_: line)
    done = dynmo("doctor", "--ranks", 2, "--json")
    state, seen, _ = by_check(json.loads(done.out)["findings"])["ranks"]
    assert (done.status, state) == (1, "problem")
    assert "status 3" in seen


def test_crossovers_of_this_machine_are_known(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "measure_crossover", lambda *_: 0.75)
    known_crossover(torch.nn.Linear(7, 9), tokens=3)
    assert "float32, 9x7, 3 tokens: from 75%" in look()["kernels"][1]


def test_absent_device_is_named(look: Look, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with (tmp_path / "run.toml").open("a") as file:
        file.write('[parallel]\ndevice = "cuda"\n')
    found = look("run.toml")
    assert found["devices"][0] == "problem"
    assert "torch sees no CUDA device" in found["devices"][2]
    assert found["ranks"][0] == "problem"


def test_gpus_are_looked_at(dynmo: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two GPUs, one is full. Four ranks are too many for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dynmo.cli.doctor._measure_here", lambda *_: [])
    fakes: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda device: "a card",
        "mem_get_info": lambda device: (device << 40, 1 << 40),
        "set_device": lambda device: None,
        "nccl.version": lambda: (2, 27),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    text = CONFIG + "[parallel]\npipeline = 2\n"
    (tmp_path / "text").write_bytes(bytes(2000))
    (tmp_path / "run.toml").write_text(text)
    done = dynmo("doctor", "run.toml", "--json")
    found = by_check(json.loads(done.out)["findings"])
    assert found["memory of GPU 0"][0] == "problem"
    assert found["memory of GPU 1"][0] == "ok"
    assert found["backends"][1] == "gloo, nccl 2.27"
    assert found["devices"][1].endswith("cores, a card, a card")
    done = dynmo("doctor", "run.toml", "--ranks", 4, "--json")
    found = by_check(json.loads(done.out)["findings"])
    assert "local rank 3 has no CUDA device" in found["devices"][2]


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["absent.toml"], "absent.toml"),
        (["--ranks", 0], "--ranks 0: must be"),
        (["--ranks", 100000], "ranks start on this machine"),
    ],
)
def test_wrong_input_is_refused(dynmo: Run, arguments: list[object], mentions: str) -> None:
    assert_refused(dynmo("doctor", *arguments), mentions)


# -- ranks of the pool -----------------------------------------------------------------------------


def measured(pool: Pool, fault: str, ranks: int) -> Findings:
    first, *others = pool.run("tests.cli.doctor_jobs:measured", ranks, fault=fault)
    assert all(each == first for each in others)
    return by_check(first)


def test_slow_rank_is_named(pool: Pool) -> None:
    found = measured(pool, "delayed", 3)
    state, seen, _ = found["speed of ranks"]
    assert state == "warning"
    assert seen.startswith("rank 2 (")
    assert "as long for a product" in seen
    assert found["links"][0] in ("ok", "warning")  # this machine may be busy


def test_clock_that_is_wrong_is_named(pool: Pool) -> None:
    state, seen, remedy = measured(pool, "ahead", 2)["clocks"]
    assert state == "warning"
    assert "is +100.0 s off that of" in seen
    assert "NTP" in remedy


def test_each_machine_is_looked_at(pool: Pool, tmp_path: Path) -> None:
    job = "tests.cli.doctor_jobs:on_two_machines"
    first, second = pool.run(job, 2, folder=str(tmp_path), port=free_port())
    assert (first[0], first[2]) == (1, "")
    assert second == [0, "", ""]
    findings = json.loads(first[1])["findings"]
    disks = [each["seen"] for each in findings if each["check"] == "disk"]
    assert [each.partition(" free")[0] for each in disks] == [
        "host-0: 1,024.0 GiB",
        "host-1: 1 MiB",
    ]
    assert [each["check"] for each in findings].count("packages") == 1
    assert {"links", "clocks", "speed of ranks"} <= {each["check"] for each in findings}


# -- for real --------------------------------------------------------------------------------------


def as_process(folder: Path, *words: str, before: tuple[str, ...] = ()) -> tuple[int, Findings]:
    line = [*before, sys.executable, "-m", "dynmo", "doctor", "--json", *words]
    done = end(start(line, folder), 120)
    return done.status, by_check(json.loads(done.out)["findings"])


@pytest.mark.matrix
def test_local_ranks_measure(tmp_path: Path) -> None:
    status, found = as_process(tmp_path, "--ranks", "3")
    assert status == 0
    assert {"speed of ranks", "links", "clocks"} <= found.keys()


@pytest.mark.matrix
def test_machine_without_a_network_is_told_so(tmp_path: Path) -> None:
    apart = ("unshare", "--net")
    if shutil.which(apart[0]) is None or subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("needs a network namespace")
    status, found = as_process(tmp_path, before=apart)
    assert status == 1
    assert found["interface of local ranks"] == ("problem", "lo is down", "ip link set lo up")
    assert found["ranks"][1] == "not measured: mend the problems first"


@pytest.mark.matrix
def test_full_file_system_is_named(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "none", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        status, found = as_process(small, "--ranks", "1")
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert status == 1
    assert found["disk"][0] == "problem"


@pytest.mark.matrix
def test_model_that_is_too_large_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(2000))
    large = CONFIG.replace("layers = 2", "layers = 100\nbytes = 2147483647")
    (tmp_path / "run.toml").write_text(large)
    status, found = as_process(tmp_path, "run.toml", "--ranks", "1")
    assert status == 1
    assert found["host memory"][0] == "problem"


@pytest.mark.matrix
def test_rank_on_a_crowded_core_is_named(pool: Pool) -> None:
    state, seen, remedy = measured(pool, "crowded", 2)["speed of ranks"]
    assert state == "warning"
    assert "rank 1 (" in seen
    assert "had its core for" in seen
    assert "share its core" in remedy
