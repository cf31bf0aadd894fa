"""The parts of `make gpu` and of `--several`, the most valuable first.

Imports the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

PYTEST = ("pytest", "-rs", "-W", "default", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Part:
    """One part: a command that runs in a process of its own.

    Attributes:
        name: Names the result file and the log.
        expected: What the part must show, for a person.
        limit: Seconds after which the part is ended.
        command: Arguments of `python -m`. `{out}` stands for the folder of the results.
        dry: The `command` of a dry run: the same on CPU with tiny sizes.
        needs: Optional packages without which the part cannot run on a GPU.
    """

    name: str
    expected: str
    limit: float
    command: tuple[str, ...]
    dry: tuple[str, ...]
    needs: tuple[str, ...] = ()


def benchmark(
    name: str,
    expected: str,
    limit: float,
    *options: str,
    module: str = "",
    needs: tuple[str, ...] = (),
) -> Part:
    """Makes a part of a module of this package."""
    command = (f"benchmarks.gpu.{module or name}", "--json", *options)
    return Part(name, expected, limit, command, (*command, "--dry"), needs)


PREPARE = ("dynmo.train.compile_ahead",)
TESTS = (*PYTEST, "--timeout", "60")
DRY_TESTS = (*TESTS, "--gpu-device", "cpu")
ALONE = ("tests/gpu", "--ignore", "tests/gpu/test_ranks.py")
RANKS = ("tests/gpu/test_ranks.py", *(("-n", "6") if find_spec("xdist") else ()))

# About 1.4 times what a part takes on an H100. All parts together end within `--seconds`.
PARTS: tuple[Part, ...] = (
    Part(
        "prepare", "the loops of the planner compile, or were compiled before", 90, PREPARE, PREPARE
    ),
    Part(
        "equality",
        "one GPU, its slices and NCCL with one rank train what the CPU trains",
        80,
        (*TESTS, *ALONE),
        (*DRY_TESTS, *ALONE, "-k", "agree or kept or zb-v or bfloat16"),
    ),
    Part(
        "ranks",
        "processes that share the GPU over gloo have one rank's weights, to the last bit",
        130,
        (*TESTS, *RANKS, "-k", "not compiled"),
        (*DRY_TESTS, *RANKS, "-k", "zb-v or replicas"),
    ),
    benchmark("split", "split backward over fused, eager bfloat16: at most 1.02", 50),
    benchmark(
        "slices",
        "zb-h1, zb-auto or zb-v gains over 1f1b, and torch's orders and runtime do not beat it",
        60,
        needs=("cuda.core",),
    ),
    benchmark("sparse", "pruned linears win from some sparsity below 1", 45),
    benchmark("attention", "hash attention wins from some length", 60, needs=("triton",)),
    benchmark(
        "cases",
        "balanced at least as fast as even, losses finite",
        95,
        needs=("cuda.core", "triton"),
    ),
    benchmark(
        "memory", "peak of each rank 0.9 to 1.1 of the account, same weights after a move", 50
    ),
    benchmark(
        "profile",
        "dynmo plan reads what dynmo profile measured",
        45,
        "--out",
        "{out}/profile-costs.json",
        needs=("cuda.core",),
    ),
    benchmark(
        "compiled",
        "torch.compile: split backward over fused at most 1.02",
        60,
        "--precisions",
        "0",
        "--compiled",
        "1",
        module="split",
        needs=("triton",),
    ),
)


def of_several(name: str, expected: str, limit: float) -> Part:
    """Makes a part of `benchmarks.gpu.several`."""
    command = ("benchmarks.gpu.several", name, "--json")
    return Part(name, expected, limit, command, (*command, "--dry"))


SEVERAL: tuple[Part, ...] = (
    PARTS[0],
    of_several(
        "equality", "pipelines, moving layers and replicas over NCCL have one rank's digest", 100
    ),
    of_several("recovery", "a rank is killed or stopped: the others go on to the same digest", 150),
    of_several("regroup", "ranks leave and come back, and the run has one rank's digest", 100),
    of_several("v", "zb-v, v-half and v-min have one rank's digest", 80),
    of_several("host", "a step takes at most 1.25 times as long as torch's pipelining", 60),
)
