"""benchmarks/gpu: refused without a device; on a small model on CPU every one of them runs to its end and its figures hang together."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import attention, slices, sparse, split

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
NAMES = sorted(path.stem for path in (ROOT / "benchmarks" / "gpu").glob("*.py") if path.stem not in ("__init__", "device"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_refused_without_a_device() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu.split", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "benchmarks.gpu: torch sees no CUDA device; run this on a machine that has one\n"


def test_the_package_names_them_all() -> None:
    text = importlib.import_module("benchmarks.gpu").__doc__ or ""
    assert sorted(line.split()[0] for line in text.splitlines()[2:]) == NAMES == ["attention", "slices", "sparse", "split"]


def test_split() -> None:
    found = split.stage(CPU, torch.float32, False, blocks=1, hidden=64, sequence=16, batch=1, microbatches=2, rounds=1)
    assert set(found["seconds"]) == {"plain", "fused", "split", "deferred"}
    assert found["tokens_per_second"]["plain"] == 32 / found["seconds"]["plain"]


def test_attention() -> None:
    rows = [attention.length(CPU, torch.float32, n, heads=2, size=16, batch=1, rounds=1) for n in (32, 128)]
    assert [set(row["kinds"]) for row in rows] == [{"hash, 16 buckets"}, {"hash, 16 buckets", "hash, 64 buckets"}]
    assert all(0 < kind["pairs"] < 1 for row in rows for kind in row["kinds"].values())
    fake = [{"sequence": n, "kinds": {"hash, 16 buckets": {"speedup": speedup}}} for n, speedup in ((1, 0.5), (2, 1.5), (4, 3.0))]
    assert attention.wins_from(fake) == {"hash, 16 buckets": 2, "hash, 64 buckets": None}


def test_the_share_of_pairs() -> None:
    x = torch.randn(1, 6, 1, 4, generator=torch.Generator().manual_seed(2))
    hashed = attention.Hashed(2, 32, 1)
    buckets = attention.hash_buckets(x, attention.draw_directions(1, 4, 2, 1))[0, :, 0].tolist()
    pairs = [buckets[i] == buckets[j] for i in range(6) for j in range(i)]
    assert attention.share_of_pairs(x, hashed) == pytest.approx(sum(pairs) / len(pairs))


def test_sparse() -> None:
    found = sparse.matrix(CPU, torch.float32, 32, 32, 16, 1)
    assert [point["sparsity"] for point in found["points"]] == list(sparse.SPARSITIES)
    assert 0 < found["crossover"] <= 1


def test_slices() -> None:
    shape = {"blocks": 2, "hidden": 64, "sequence": 16, "batch": 1, "microbatches": 4, "rounds": 1}
    found = slices.pipelines(CPU, torch.float32, (2, 3), **shape)
    assert [set(found[f"{n} slices"]) for n in (2, 3)] == [{"1f1b", "zb-h1", "zb_h1_gain", "sms"}] * 2
    # How much overlaps is a ratio of two timings: on a busy CPU it says nothing.
    assert all(found[f"{n} slices"][name]["overlap"] > 0 for n in (2, 3) for name in slices.SCHEDULES)
