"""The parts of `make gpu`, the most valuable first. Imports the standard library only."""

from __future__ import annotations

from dataclasses import dataclass

PYTEST = ("pytest", "-rs", "-W", "default", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Part:
    """One part: a command that runs in a process of its own.

    Attributes:
        name: Names the result file and the log.
        expected: What the part must show, for a person.
        limit: Seconds after which the part is ended.
        command: What follows `python -m`. `{out}` stands for the folder of the results.
        dry: What `command` becomes in a dry run: the same on CPU with tiny sizes.
        needs: Optional packages without which the part cannot run on a GPU.
    """

    name: str
    expected: str
    limit: float
    command: tuple[str, ...]
    dry: tuple[str, ...]
    needs: tuple[str, ...] = ()


def benchmark(name: str, expected: str, limit: float, *options: str, needs: tuple[str, ...] = ()) -> Part:
    """A part that is a module of this package, which has small sizes for `--dry` itself."""
    command = (f"benchmarks.gpu.{name}", "--json", *options)
    return Part(name, expected, limit, command, (*command, "--dry"), needs)


DRY_TESTS = (*PYTEST, "--gpu-device", "cpu", "--timeout", "60")

# The limits add up to less than 9 minutes, with some seconds for each process to start and end.
PARTS: tuple[Part, ...] = (
    Part(
        "equality",
        "one GPU, its slices and NCCL with one rank train what the CPU trains",
        75,
        (*PYTEST, "--timeout", "60", "tests/gpu", "--ignore", "tests/gpu/test_ranks.py"),
        (*DRY_TESTS, "tests/gpu", "--ignore", "tests/gpu/test_ranks.py", "-k", "agree or kept or zb-v or bfloat16"),
    ),
    Part(
        "ranks",
        "processes that share the GPU over gloo have one rank's weights, to the last bit",
        105,
        (*PYTEST, "--timeout", "60", "tests/gpu/test_ranks.py", "-k", "not compiled"),
        (*DRY_TESTS, "tests/gpu/test_ranks.py", "-k", "zb-v or replicas"),
    ),
    benchmark("split", "split backward over fused, eager bfloat16: at most 1.02", 70),
    benchmark("slices", "zb-h1, zb-auto, zb-v over 1f1b, beside torch's orders and runtime", 65, needs=("cuda.core",)),
    benchmark("sparse", "pruned linears win from some sparsity below 1", 40),
    benchmark("attention", "hash attention wins from some length", 30, needs=("triton",)),
    benchmark("cases", "balanced at least as fast as static, losses finite", 80, needs=("cuda.core", "triton")),
    benchmark("memory", "peak of each rank 0.9 to 1.1 of the account, same weights after a move", 35),
    benchmark("profile", "dynmo plan reads what dynmo profile measured", 25, "--out", "{out}/profile-costs.json", needs=("cuda.core",)),
)
