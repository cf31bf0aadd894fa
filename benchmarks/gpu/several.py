"""Ranks on several GPUs, over NCCL: `python -m benchmarks.gpu --several`.

Each part but `host` trains a small GPT on one rank and on several. All its runs must end with the
digest of one rank.

equality     1F1B, layers that move at every step under ZB-H1, and two replicas with ZeRO-1
v            the V schedules
regroup      `dynmo train`: half of the ranks leave and come back, parked and as new processes
recovery     `dynmo train` with `elastic.recover = "memory"`: a rank is killed or stopped
host         seconds of a step with kernels so small that their launches take longest, beside plain
             torch and torch's pipelining. `more` is what dynmo adds for each layer and microbatch.

python -m benchmarks.gpu.several PART [--json] [--dry]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import dropwhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import tomli_w
import torch

from benchmarks import host, output
from benchmarks.gpu.checks import NO_GPU
from benchmarks.gpu.device import Verdict, about_device, progress, seconds
from benchmarks.gpu.running import ROOT, descendants, kill_tree
from benchmarks.harness import alternate, medians, run_ranks
from dynmo.config import parse
from dynmo.elastic.launcher.environment import prepare_cuda
from dynmo.event_log import to_json
from dynmo.events import Event
from dynmo.runtime.comm.agreement import maxima
from dynmo.runtime.comm.meeting import Meeting
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer

STEPS, MOST = 24, 4
LIMIT = 60.0 if torch.cuda.is_available() else 200.0  # seconds of a run; two cores may be busy
FAULT_AT = 6  # steps done before the fault
CHANGES = ("rebalance", "repack", "grow", "recover")
TIMEOUT = 10.0  # seconds of `parallel.timeout`
HIDDEN, ROUNDS = 128, 20  # of the part `host`
OVER_TORCH = 1.25  # most seconds of a step over those of torch's pipelining
RANDOM_MOVES = {"balancer": "python:benchmarks.baselines.placements:random", "every": 1}


class Trial(NamedTuple):
    """One run on several ranks.

    Attributes:
        name: Names the run.
        options: Its sections besides those that all runs share.
        needs: Events that its log must have.
        fault: The signal that a rank gets.
        on: The rank that gets it, from the end if negative.
    """

    name: str
    options: Mapping[str, Mapping[str, Any]]
    needs: tuple[str, ...] = ()
    fault: signal.Signals | None = None
    on: int = 0


ALONE = Trial("one rank", {})


def with_schedule(name: str) -> Trial:
    return Trial(name, {"pipeline": {"schedule": name}})


def recovery(name: str, fault: signal.Signals, on: int) -> Trial:
    return Trial(name, {"elastic": {"recover": "memory"}}, ("recover",), fault, on)


def trials(part: str, ranks: int) -> list[Trial]:
    """Returns the runs of a part."""
    moves = {"balance": RANDOM_MOVES}
    shrinks = {"reshape_at": [[6, ranks // 2, 1], [12, ranks, 1]]}
    halves = {"pipeline": ranks // 2, "replicas": 2, "zero": 1}
    both = ("repack", "grow")
    return {
        "equality": [
            with_schedule("1f1b"),
            Trial("moves", moves | {"pipeline": {"schedule": "zb-h1"}}, ("rebalance",)),
            Trial("replicas", {"parallel": halves}),
        ],
        "v": [with_schedule(name) for name in ("zb-v", "v-half", "v-min")],
        "regroup": [
            Trial("parked", {"elastic": shrinks | {"park": True}}, both),
            Trial("new processes", {"elastic": shrinks}, both),
        ],
        "recovery": [
            recovery("last rank killed", signal.SIGKILL, -1),
            recovery("rank 0 killed", signal.SIGKILL, 0),
            recovery("last rank stopped", signal.SIGSTOP, -1),
        ],
    }[part]


# -- runs ------------------------------------------------------------------------------------------


def config_of(trial: Trial, ranks: int, device: str) -> dict[str, Any]:
    """Returns the configuration of a run."""
    size = {"hidden": 32, "sequence": 16} if device == "cpu" else {"hidden": 128, "sequence": 64}
    batches = {"global_batch": 16, "micro_batch": 2, "reduction_slots": 2}
    sections: dict[str, Mapping[str, Any]] = {
        "data": {"source": f"file:{ROOT / 'LICENSE'}"},
        "model": {"blocks": 4, "heads": 4, "dropout": 0.1} | size,
        "train": {"steps": STEPS, "deterministic": True} | batches,
        "parallel": {"pipeline": ranks, "device": device, "timeout": TIMEOUT},
        "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[3, 3]]}},
    }
    for key, section in trial.options.items():
        sections[key] = {**sections.get(key, {}), **section}
    return {"name": trial.name.replace(" ", "-"), **sections}


def figures_of(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a run's log."""
    seconds = [event["seconds"] for event in events if event["event"] == "step"]
    digests = [event["weights_digest"] for event in events if event["event"] == "end"]
    keys = ("event", "step", "seconds", "moved_bytes", "ranks_before", "ranks_after", "repeated")
    return {
        "digest": digests[-1] if digests else None,
        "step_seconds": median(seconds or [0.0]),
        "changes": [
            {key: event[key] for key in keys if key in event}
            for event in events
            if event["event"] in CHANGES
        ],
    }


def train_each(world: Meeting, configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs several trainings on the same ranks."""
    found: list[dict[str, Any]] = []
    for config in map(parse, configs):
        events = list[dict[str, Any]]()
        listen = partial(_keep, events)
        Trainer(config, world, model_of(config), None, listen=listen).run()
        progress(f"rank {world.rank} of {world.size}: {config.name}")
        found.append(figures_of(events))
    return found


def _keep(events: list[dict[str, Any]], event: Event) -> None:
    events.append(to_json(event))


def start(folder: Path, trial: Trial, ranks: int, device: str) -> subprocess.Popen[Any]:
    """Starts `dynmo train` in a folder."""
    folder.mkdir()
    (folder / "run.toml").write_text(tomli_w.dumps(config_of(trial, ranks, device)))
    command = [sys.executable, "-m", "dynmo", "train", "run.toml"]
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdin=none, stdout=pipe, stderr=pipe, text=True)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a run's log."""
    for log in folder.glob("runs/*/events.jsonl"):
        lines = log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def process_of(launcher: int, rank: int) -> int:
    """Returns the process of a rank, as it was started."""
    for pid in descendants(launcher):
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return pid
    raise RuntimeError(f"rank {rank} is no process of the launcher")


def strike(process: subprocess.Popen[Any], folder: Path, fault: signal.Signals, rank: int) -> float:
    """Sends a signal to a rank once the run has done some steps. Returns the time."""
    end = time.monotonic() + LIMIT
    while sum(event["event"] == "step" for event in read_events(folder)) < FAULT_AT:
        if process.poll() is not None or time.monotonic() > end:
            return time.time()  # the run says itself why
        time.sleep(0.01)
    os.kill(process_of(process.pid, rank), fault)
    return time.time()


def end(process: subprocess.Popen[Any], folder: Path) -> dict[str, Any]:
    """Waits for the end of a run. Returns its status, its last words and its figures."""
    try:
        _, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        kill_tree(process)
        errors = f"{process.communicate()[1]}\nkilled after {LIMIT:.0f} s"
    sys.stderr.write(errors)
    said = errors.splitlines()[-1] if process.returncode and errors else ""
    return {"status": process.returncode, "said": said} | figures_of(read_events(folder))


def train_trial(trial: Trial, folder: Path, ranks: int, device: str) -> dict[str, Any]:
    """Runs `dynmo train` on several ranks."""
    process, at = start(folder, trial, ranks, device), 0.0
    if trial.fault is not None:
        at = strike(process, folder, trial.fault, trial.on % ranks)
    figures = end(process, folder)
    if trial.fault is not None:
        after = dropwhile(lambda event: event["event"] != "recover", read_events(folder))
        steps = [event["time"] for event in after if event["event"] == "step"]
        figures["standstill"] = steps[0] - at if steps else None
    progress(f"{trial.name}: status {figures['status']}")
    return figures


def train(part: str, ranks: int, device: str) -> dict[str, Any]:
    """Runs a part, and the same on one rank."""
    tried = trials(part, ranks)
    if part not in LAUNCHED:
        function = "benchmarks.gpu.several:train_each"
        configs = [config_of(trial, ranks, device) for trial in tried]
        alone = run_ranks(function, 1, device, configs=[config_of(ALONE, 1, device)])
        found = run_ranks(function, ranks, device, configs=configs)
        runs = {trial.name: row for trial, row in zip(tried, found, strict=True)}
        return {"alone": alone[0], "runs": runs}
    with tempfile.TemporaryDirectory(prefix="dynmo-several-") as name:
        folder = Path(name)
        process = start(folder / "alone", ALONE, 1, device)
        runs = {
            trial.name: train_trial(trial, folder / str(number), ranks, device)
            for number, trial in enumerate(tried)
        }
        return {"alone": end(process, folder / "alone"), "runs": runs}


def trouble(row: Mapping[str, Any], wanted: str | None, needs: Sequence[str] = ()) -> str:
    """Returns what is wrong with a run. Empty: nothing."""
    if row.get("status"):
        return f"status {row['status']}: {row['said']}"
    if row["digest"] is None or row["digest"] != wanted:
        return f"digest {row['digest']} instead of {wanted}"
    missing = set(needs) - {change["event"] for change in row["changes"]}
    return f"no event {', '.join(sorted(missing))}" if missing else ""


def describe(row: Mapping[str, Any]) -> str:
    """Returns the figures of a run that ended well, in a few words."""
    told = [f"step {1e3 * row['step_seconds']:.0f} ms"]
    for name in CHANGES:
        paused = [change["seconds"] for change in row["changes"] if change["event"] == name]
        told += [f"{len(paused)} {name} in {1e3 * median(paused):.0f} ms"] if paused else []
    if row.get("standstill") is not None:
        told.append(f"{row['standstill']:.1f} s from the fault to the next step")
    return ", ".join(told)


def assess(part: str, result: Mapping[str, Any]) -> Verdict:
    """Requires that each run ends with the digest of one rank, and does what it is for."""
    wanted = result["alone"]["digest"]
    told = {"one rank": trouble(result["alone"], wanted)}
    for trial in trials(part, 2):
        told[trial.name] = trouble(result["runs"][trial.name], wanted, trial.needs)
    met = not any(told.values())
    told |= {name: told[name] or describe(row) for name, row in result["runs"].items()}
    return Verdict(met, "; ".join(f"{name}: {text}" for name, text in told.items() if text))


# -- host time -------------------------------------------------------------------------------------


def steps_of(world: Meeting, rounds: int) -> dict[str, float]:
    """Returns the seconds of a step of each side: on each rank, the slowest rank's."""
    device = world.device
    given = host.batch(HIDDEN, device)
    sides = {"torch 1f1b": host.peer(HIDDEN, device)}
    if world.size == 1:
        sides["plain torch"] = host.loop(HIDDEN, True, device)
    for name in host.SCHEDULES:
        sides[f"dynmo {name}"] = partial(host.own(world, host.whole(HIDDEN), name).step, *given)
    timed = {name: partial(seconds, device, side) for name, side in sides.items()}
    found = medians(alternate(timed, rounds, warmup=4))
    return dict(zip(found, maxima(world, list(found.values())), strict=True))


def time_host(ranks: int, device: str, rounds: int) -> dict[str, Any]:
    """Times steps on one rank and on several."""
    function = "benchmarks.gpu.several:steps_of"
    rows = {str(n): run_ranks(function, n, device, rounds=rounds) for n in (1, ranks)}
    more = rows["1"]["dynmo 1f1b"] - rows["1"]["plain torch"]
    return {
        "seconds": rows,
        "more": more / host.BLOCKS / host.MICROBATCHES,
        "over_torch": {n: row["dynmo 1f1b"] / row["torch 1f1b"] for n, row in rows.items()},
    }


def assess_host(result: Mapping[str, Any]) -> Verdict:
    """Requires that steps on several ranks take about as long as torch's pipelining."""
    told = ", ".join(f"{n} ranks x{ratio:.2f}" for n, ratio in result["over_torch"].items())
    most = max(result["over_torch"].values())
    more = f"{1e6 * result['more']:+.0f} us a layer and microbatch beside plain torch"
    return Verdict(most <= OVER_TORCH, f"{more}; over torch's pipelining: {told}")


# -- command line ----------------------------------------------------------------------------------

LAUNCHED = ("regroup", "recovery")
PARTS = ("equality", "v", *LAUNCHED, "host")


def main() -> int:
    """Runs one part. Only figures of time do not count in a dry run."""
    parser = output.parser_of(__doc__ or "")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--dry", action="store_true", help="two ranks on CPU")
    options: argparse.Namespace = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not options.dry and gpus < 2:
        print(f"benchmarks.gpu: {NO_GPU if not gpus else 'one GPU is here'}", file=sys.stderr)
        return 2
    ranks, device = (2, "cpu") if options.dry else (min(MOST, gpus) // 2 * 2, "cuda")
    if device == "cuda":
        prepare_cuda(ranks)
    if options.part == "host":
        result = time_host(ranks, device, 1 if options.dry else ROUNDS)
        met, came = assess_host(result)
        met = met or options.dry
    else:
        result = train(options.part, ranks, device)
        met, came = assess(options.part, result)
    about = {
        "ranks": ranks,
        "machine": output.machine(),
        "device": about_device(torch.device(device)),
    }
    output.report(result | about | {"met": met, "came": came}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
