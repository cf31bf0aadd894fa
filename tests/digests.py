"""Prints loss and weights digest of fixed configurations.

Run it before and after a change of structure.

    python -m tests.digests > before.json       # at the old commit
    python -m tests.digests --compare before.json

Or run many small drawn cases, which a file has with their digests:

    python -m tests.fuzz --cases 200 --write runs/drawn.jsonl     # at the old commit
    python -m tests.digests --runs runs/drawn.jsonl

tests/fixtures has both files of an earlier commit. Digests depend on the processor and on the torch
version, so both runs belong on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.equality import RANDOM_MOVES

ROOT = Path(__file__).resolve().parents[1]
GPT: dict[str, Any] = {"blocks": 3, "hidden": 32, "heads": 4, "sequence": 16, "dropout": 0.1}
OWN: dict[str, Any] = {"kind": "python:tests.models.odd_models:spectral", "sequence": 8}
FREEZING: dict[str, Any] = {"cases": ["freezing"], "freezing": {"schedule": [[3, 3]]}}
PRUNING: dict[str, Any] = {
    "cases": ["pruning"],
    "pruning": {"start": 2, "end": 6, "every": 2, "dense_below": 0.0},
}
ATTENTION: dict[str, Any] = {"cases": ["sparse_attention"], "sparse_attention": {"buckets": 4}}
EXACT: dict[str, Any] = {"balancer": "exact", "every": 2}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": {"schedule": "1f1b"}},
    "zb-h1": {"pipeline": {"schedule": "zb-h1"}},
    "zb-h2-exact": {"pipeline": {"schedule": "zb-h2"}, "balance": EXACT},
    "zb-auto-diffusion": {
        "pipeline": {"schedule": "zb-auto"},
        "balance": {"balancer": "diffusion", "every": 2},
    },
    "zb-v": {"pipeline": {"schedule": "zb-v"}},
    "v-min-exact": {"pipeline": {"schedule": "v-min"}, "balance": EXACT},
    "interleaved": {"pipeline": {"schedule": "interleaved-1f1b"}},
    "replicas": {"parallel": {"pipeline": 1, "replicas": 2, "zero": 1}},
    "freezing": {"dynamism": FREEZING},
    "pruning": {"dynamism": PRUNING},
    "sparse-attention": {"dynamism": ATTENTION},
    "post-validation": {"pipeline": {"post_validation": True}, "train": {"max_grad_norm": 0.5}},
    "bfloat16": {"train": {"precision": "bfloat16", "recompute": "all"}},
    "reshape": {"elastic": {"reshape_at": [[3, 1, 2]]}, "train": {"reduction_slots": 2}},
    "own-model": {"model": OWN, "train": {"micro_batch": 2}},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--compare", type=Path, help="a file that an earlier call has printed")
    parser.add_argument("--runs", type=Path, help="a file that `tests.fuzz --write` has written")
    options = parser.parse_args()
    if options.runs is not None:
        return compare_runs(options.runs)
    earlier = options.compare
    digests = {name: run(name, sections) for name, sections in CONFIGURATIONS.items()}
    print(json.dumps(digests, indent=1))
    if earlier is None:
        return 0
    expected = json.loads(earlier.read_text())
    different = sorted(name for name in expected if digests.get(name) != expected[name])
    print(f"{len(expected)} compared, changed: {', '.join(different) or 'none'}", file=sys.stderr)
    return bool(different)


def compare_runs(file: Path) -> int:
    """Runs every case of a file. Returns 1 if one has other digests, or if there is none."""
    from tests.fuzz.outcome import EQUAL, CaseResult
    from tests.fuzz.recorded import read_cases
    from tests.fuzz.runner import run_all

    cases = read_cases(file)

    def tell(outcome: CaseResult) -> None:
        if outcome.kind != EQUAL:
            print(f"{file}:{outcome.case.number}: {outcome.what}\n{outcome.detail}", flush=True)

    outcomes = run_all(cases, os.cpu_count() or 1, tell)
    changed = sum(outcome.kind != EQUAL for outcome in outcomes)
    print(f"{len(cases)} compared, {changed} changed", file=sys.stderr)
    return int(changed > 0 or not cases)


def run(name: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Trains one configuration on two local ranks.

    Args:
        name: Name of the run.
        sections: Sections of the configuration, added to the defaults.

    Returns:
        Its loss and weights digest.
    """
    from dynmo.config import parse

    # The digests stay when defaults change.
    adamw = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    sizes = {"steps": 8, "global_batch": 8, "micro_batch": 1, "eval_every": 4}
    defaults: dict[str, dict[str, Any]] = {
        "model": sections.get("model", GPT),
        "data": {"source": f"file:{ROOT / 'LICENSE'}"},
        "train": sizes | adamw,
        "parallel": {"pipeline": 2, "timeout": 60.0},
        "balance": {"balancer": RANDOM_MOVES, "every": 1},
    }
    merged = {key: defaults.get(key, {}) | sections.get(key, {}) for key in defaults | sections}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text(parse({"name": name, "seed": 3} | merged).to_toml())
        command = [sys.executable, "-m", "dynmo", "train", str(config), "--json"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    end = json.loads(done.stdout)
    return {"loss": end["loss"], "weights_digest": end["weights_digest"]}


if __name__ == "__main__":
    sys.exit(main())
