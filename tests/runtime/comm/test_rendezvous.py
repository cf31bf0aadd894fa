"""The rendezvous of a process, read from the environment of its launcher."""

from __future__ import annotations

import pytest

from dynmo.errors import ConfigError
from dynmo.runtime.comm.rendezvous import ALONE, first_host, from_environment

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
SLURM |= {"SLURM_JOB_ID": "60123", "SLURM_JOB_NODELIST": "gpu[07-09]"}


def seen(environ: dict[str, str]) -> dict[str, object]:
    fields = vars(from_environment(environ))
    return {key: value for key, value in fields.items() if value is not None and value is not False}


NUMBER = "the launcher must set it to a number"


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key not in names}


def test_a_process_without_a_launcher_is_alone() -> None:
    assert from_environment({}) is None
    # An interactive shell under Slurm, or a job of one task, is no world to join.
    assert from_environment({"SLURM_PROCID": "0"}) is None
    assert from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert from_environment({"MASTER_ADDR": "host", "MASTER_PORT": "1"}) is None
    assert (ALONE.rank, ALONE.size) == (0, 1)


def test_ranks_of_dynmo_launcher_meet_in_its_folder() -> None:
    own = {"RANK": "1", "WORLD_SIZE": "2", "DYNMO_RENDEZVOUS": "/some/folder"}
    assert seen(own) == {"rank": 1, "size": 2, "local_rank": 1, "folder": "/some/folder"}
    # An address from outside does not matter: these ranks were started here.
    assert seen(own | {"MASTER_ADDR": "host", "MASTER_PORT": "1"})["folder"] == "/some/folder"


def test_ranks_of_torchrun_meet_at_its_address() -> None:
    meeting = {"address": "host", "port": 29500}
    assert seen(TORCHRUN) == {"rank": 3, "size": 8, "local_rank": 1, **meeting}
    assert seen(without(TORCHRUN, "LOCAL_RANK"))["local_rank"] == 3
    assert seen(TORCHRUN | SLURM)["rank"] == 3, "torchrun under Slurm is torchrun"


def test_loopback_is_used_if_all_ranks_are_local() -> None:
    """Every rank must certainly be on this machine."""
    local = TORCHRUN | {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "8"}
    assert seen(local)["loopback"]
    literal = local | {"MASTER_ADDR": "127.0.0.1"}
    assert seen(literal)["loopback"]
    assert seen(without(literal, "LOCAL_WORLD_SIZE"))["loopback"]
    names = ("host", "127.example.org")
    for other in (*({"MASTER_ADDR": name} for name in names), {"LOCAL_WORLD_SIZE": "4"}):
        assert "loopback" not in seen(local | other)


def test_tasks_of_srun_meet_at_the_first_host() -> None:
    who = {"rank": 2, "size": 4, "local_rank": 0}
    assert seen(SLURM) == {**who, "address": "gpu07", "port": 20123}
    # A step may have fewer hosts than its job.
    assert seen(SLURM | {"SLURM_STEP_NODELIST": "gpu09"})["address"] == "gpu09"
    elsewhere = SLURM | {"MASTER_ADDR": "host", "MASTER_PORT": "7"}
    assert seen(elsewhere) == {**who, "address": "host", "port": 7}
    # Scripts often set WORLD_SIZE and leave the rank to Slurm.
    assert seen(SLURM | {"WORLD_SIZE": "4"})["rank"] == 2


@pytest.mark.parametrize(
    ("environ", "match"),
    [
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not"),
        (without(TORCHRUN, "MASTER_PORT"), f"MASTER_PORT is None; {NUMBER}"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        (TORCHRUN | {"RANK": ""}, "RANK is ''"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8: ranks count from 0"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"RANK": "0"}, f"WORLD_SIZE is None; {NUMBER}: start the ranks with torchrun"),
        ({"WORLD_SIZE": "2"}, f"RANK is None; {NUMBER}: start the ranks with torchrun"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is None"),
        (without(SLURM, "SLURM_JOB_ID"), "SLURM_JOB_ID is None"),
        (without(SLURM, "SLURM_JOB_NODELIST"), "Slurm gave no SLURM_JOB_NODELIST"),
        (SLURM | {"SLURM_NTASKS": "x"}, "SLURM_NTASKS is 'x'"),
        (SLURM | {"MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
    ],
)
def test_incomplete_variables_are_refused(environ: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        from_environment(environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a", "a"),
        ("a1,b2", "a1"),
        ("gpu[003-006,9],x1", "gpu003"),
        ("gpu[9,003-006]", "gpu9"),
        ("node-[1-2]-ib,other", "node-1-ib"),
        ("x1,gpu[1-2]", "x1"),
        ("rack[1-2]n[03-04]", "rack1n03"),
    ],
)
def test_the_first_host_of_a_list_is_read(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_rendezvous_file_takes_precedence_over_the_folder() -> None:
    """Ranks on several machines have a launch folder too, but cannot meet in it."""
    own = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "DYNMO_RENDEZVOUS": "/some/folder"}
    file = "/runs/a/rendezvous.json"
    who = {"rank": 1, "size": 2, "local_rank": 0}
    assert seen(own | {"DYNMO_RENDEZVOUS_FILE": file}) == {**who, "file": file}
