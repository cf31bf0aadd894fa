"""The random test: many configurations, each held bit for bit against one rank.

    python -m tests.fuzz --cases 1000 --seed 1            # from the repository's root
    python -m tests.fuzz --seed 1 --only 37               # one of them again

A case draws model, schedule, mesh, balancer, dynamic cases, precision and much else
(`fuzz_draws.py`), and some are stopped and resumed elsewhere. Losses, norms, held-out losses, what
cases changed, weights and buffers must be those of the same training on one rank. A model of one's
own must also agree with a plain PyTorch loop. Every failure is printed with the TOML files that
replay it.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from dynmo.config import parse
from dynmo.config.values import CASES
from dynmo.errors import ConfigError
from dynmo.train.compile_ahead import prepare
from tests.fuzz_draws import Case, Tables, draw
from tests.pool import JobFailed, Pool, PoolLost

RANKS = 4
TIMEOUT = 120.0
MOST_REFUSED = 0.05
PLAIN_TOLERANCE = 1e-3
EQUAL, REFUSED, FAILED = "equal", "refused", "failed"
WARNING = re.compile(r"\[W\d|Warning\b")


@dataclass(frozen=True)
class CaseResult:
    """How a case ended: EQUAL, REFUSED or FAILED, and in one line why."""

    case: Case
    kind: str
    what: str = ""
    detail: str = ""


class Failure(Exception):
    """A case that failed: what, and what more there is to read."""

    def __init__(self, what: str, detail: str = "") -> None:
        super().__init__(what)
        self.what, self.detail = what, detail


class Refusal(Exception):
    """A case that dynmo refuses before its first step."""


@dataclass
class Observed:
    """The results of a run that must not depend on where it ran."""

    steps: dict[int, str] = field(default_factory=dict[int, str])
    evaluations: dict[int, str] = field(default_factory=dict[int, str])
    changes: dict[tuple[int, str], str] = field(default_factory=dict[tuple[int, str], str])
    skipped: dict[int, str] = field(default_factory=dict[int, str])
    end: dict[str, str] = field(default_factory=dict[str, str])

    def read(self, events: Sequence[Tables]) -> None:
        """Adds the events of a run.

        Floats are compared as text, so that NaN equals itself.
        """
        for event in events:
            step = event["step"]
            if event["event"] == "step":
                values = {
                    key: event[key] for key in ("loss", "gradient_norm", "learning_rate", "frozen")
                }
                _add(self.steps, step, values)
            elif event["event"] == "eval":
                _add(self.evaluations, step, [event["loss"], event.get("dense_loss")])
            elif event["event"] == "change" and event["case"] in CASES and event["case"] != "moe":
                _add(self.changes, (step, event["case"]), [event["layers"], event["what"]])
            elif event["event"] == "skipped":
                _add(self.skipped, step, [event["loss_scale"], event["next_scale"]])
            elif event["event"] == "end":
                keys = ("loss", "weights_digest", "buffers_digest")
                self.end = {key: repr(event.get(key)) for key in keys}


def _add(seen: dict[Any, str], key: Any, value: object) -> None:
    text = repr(value)
    if seen.setdefault(key, text) != text:
        raise Failure(f"wrong bits: {key} was {seen[key]} before the resume and {text} after it")


def difference(ours: Observed, theirs: Observed) -> str | None:
    """The first difference between a run and its reference, in words, or None."""
    for name in ("steps", "skipped", "evaluations", "changes", "end"):
        a, b = getattr(ours, name), getattr(theirs, name)
        for key in sorted(a.keys() | b.keys(), key=str):
            if a.get(key) != b.get(key):
                return f"wrong bits: {name} at {key}: {a.get(key)}, on one rank {b.get(key)}"
    return None


def _make_pool(log: Path) -> Pool:
    return Pool(RANKS, log)


class Runner:
    """Runs cases one after another on a pool of ranks.

    Replaces a pool that hangs or dies.
    """

    def __init__(self, make_pool: Callable[[Path], Pool] = _make_pool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dynmo-fuzz-")
        self._log = Path(self._folder.name, "stderr")
        self._make_pool = make_pool
        self._pool: Pool | None = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._folder.cleanup()

    def run(self, case: Case) -> CaseResult:
        """Trains a case on its ranks and on one, and compares."""
        self._log.write_text("")
        try:
            try:
                parse(case.config)
                parse(case.resumed or case.config)
            except ConfigError as error:
                raise Refusal(str(error)) from None
            expected = self.reference(case)
            ours = self._under_test(case)
            unlike = difference(ours, expected)
            if unlike:
                raise Failure(unlike)
            warning = next(
                (line for line in self._log.read_text().splitlines() if WARNING.search(line)), None
            )
            if warning:
                raise Failure(f"warning: {warning}")
        except Refusal as refusal:
            return CaseResult(case, REFUSED, str(refusal))
        except Failure as failure:
            return CaseResult(case, FAILED, failure.what, failure.detail)
        except PoolLost as lost:
            if self._pool is not None:
                self._pool.close()
            self._pool = None
            return CaseResult(case, FAILED, f"hang or crash: {lost}", self._log.read_text()[-4000:])
        except JobFailed as error:
            return CaseResult(case, FAILED, "crash outside of the run", str(error))
        return CaseResult(case, EQUAL)

    def reference(self, case: Case) -> Observed:
        """The results of the case on one rank.

        Raises Failure if a plain PyTorch loop disagrees.
        """
        expected = Observed()
        expected.read(self._train(case.reference))
        if case.plain:
            (plain,) = self._job("tests.fuzz_jobs:train_plainly", 1, config=case.reference)
            for (step, text), loss in zip(sorted(expected.steps.items()), plain, strict=True):
                ours = float(re.findall(r"'loss': ([^,]+)", text)[0])
                if abs(ours - loss) > PLAIN_TOLERANCE * abs(loss):
                    raise Failure(
                        f"wrong numbers: loss at step {step} is {ours}, in a plain loop {loss}"
                    )
        return expected

    def _under_test(self, case: Case) -> Observed:
        ours = Observed()
        if case.resumed is None:
            ours.read(self._train(case.config))
            return ours
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            ours.read(self._train(case.config, folder=folder))
            ours.read(self._train(case.resumed, folder=folder, resume=True))
        return ours

    def _train(self, config: Tables, **arguments: Any) -> list[Tables]:
        """Returns the events of a run.

        Raises Refusal or Failure where it did not end well.
        """
        ranks = parse(config).ranks
        results = self._job("tests.fuzz_jobs:train", ranks, config=config, **arguments)
        errors = [(rank, result) for rank, result in enumerate(results) if "error" in result]
        crash = next(((rank, result) for rank, result in errors if result["status"] is None), None)
        if crash is not None:
            rank, result = crash
            raise Failure(f"{result['error']} on rank {rank} of {ranks}", result["text"])
        if errors:
            # A rank that finds its input wrong leaves. The others may only say that it has gone.
            rank, result = max(errors, key=lambda pair: pair[1]["status"])
            text = result["text"]
            if result["status"] != 2:
                raise Failure(f"the run failed on rank {rank} of {ranks}: {text}")
            if any(event["event"] == "step" for event in results[0]["events"]):
                raise Failure(f"refused in mid-run: {text}")
            if "\n" in text:
                raise Failure("refused in more than one line", text)
            raise Refusal(text)
        for key in ("weights_digest", "buffers_digest"):
            if len({result.get(key) for result in results if not result["left"]}) > 1:
                raise Failure(f"wrong bits: the ranks differ in {key}")
        return results[0]["events"]

    def _job(self, function: str, ranks: int, **arguments: Any) -> list[Any]:
        if self._pool is None:
            self._pool = self._make_pool(self._log)
        return self._pool.run(function, ranks, timeout=TIMEOUT, **arguments)


def replay(outcome: CaseResult, folder: Path) -> str:
    """Writes the TOML files of a case and says how to run them.

    Args:
        outcome: Outcome of the case.
        folder: Folder of the files.

    Returns:
        The commands, and each file's text.
    """
    case = outcome.case
    name = f"fuzz-{case.number}"
    files = {name: case.config}
    commands = [f"dynmo train {folder / name}.toml --overwrite"]
    if case.resumed is not None:
        files[f"{name}-resumed"] = {**case.resumed, "name": name}
        commands.append(f"dynmo train {folder / name}-resumed.toml --resume")
    files[f"{name}-reference"] = {"name": f"{name}-reference", **case.reference}
    commands.append(f"dynmo train {folder / name}-reference.toml --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    for stem, tables in files.items():
        (folder / f"{stem}.toml").write_text(tomli_w.dumps(tables))
    texts = [f"# {folder / stem}.toml\n{tomli_w.dumps(tables)}" for stem, tables in files.items()]
    return "\n".join([*(f"    {command}" for command in commands), *texts])


def run_all(
    cases: Sequence[Case],
    jobs: int,
    tell: Callable[[CaseResult], None],
    runner: Callable[[], Runner] = Runner,
) -> list[CaseResult]:
    """Run cases on several pools side by side.

    Args:
        cases: Cases to run.
        jobs: Number of pools.
        tell: Called with each outcome as it comes.
        runner: Makes a runner of cases on a pool.

    Returns:
        The outcomes, in the order in which they came.
    """
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    outcomes: queue.SimpleQueue[CaseResult | BaseException] = queue.SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        own = runner()
        try:
            while not stopped.is_set():
                outcomes.put(own.run(waiting.get_nowait()))
        except queue.Empty:
            pass
        except BaseException as error:
            outcomes.put(error)
        finally:
            own.close()

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(cases)))]
    for thread in threads:
        thread.start()
    seen: list[CaseResult] = []
    try:
        while len(seen) < len(cases):
            outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            seen.append(outcome)
            tell(outcome)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    return seen


def summary(outcomes: Sequence[CaseResult], seconds: float) -> str:
    """Counts, and refusals by reason. Numbers in a reason do not tell two apart."""
    counts = Counter(outcome.kind for outcome in outcomes)
    shares = [f"{counts[kind]} {kind}" for kind in (EQUAL, REFUSED, FAILED)]
    lines = [f"{len(outcomes)} cases in {seconds:.0f} s: {', '.join(shares)}"]
    reasons = Counter(re.sub(r"\d+", "N", o.what) for o in outcomes if o.kind == REFUSED)
    lines += [f"  refused {count} times: {reason}" for reason, count in reasons.most_common()]
    if counts[REFUSED] > MOST_REFUSED * len(outcomes):
        lines.append(f"more than {MOST_REFUSED:.0%} were refused")
    return "\n".join(lines)


def passed(outcomes: Sequence[CaseResult]) -> bool:
    """True if no case failed and few enough were refused."""
    refused = sum(outcome.kind == REFUSED for outcome in outcomes)
    failed = any(outcome.kind == FAILED for outcome in outcomes)
    return not failed and (refused <= MOST_REFUSED * len(outcomes) or len(outcomes) < 20)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns the exit status: 1 if a case failed or too many were refused.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--cases", type=int, default=1000, help="how many cases")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--elastic",
        type=float,
        default=0.35,
        help="share of the cases whose mesh or number of ranks changes",
    )
    parser.add_argument("--only", type=int, help="run this case only")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="pools of ranks side by side"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs", "fuzz"), help="for the TOML files of failures"
    )
    parser.add_argument("--show", action="store_true", help="print the TOML files and run nothing")
    options = parser.parse_args(arguments)
    numbers = (
        range(options.first, options.first + options.cases)
        if options.only is None
        else [options.only]
    )
    cases = [draw(options.seed, number, options.elastic) for number in numbers]
    folder = options.folder / f"seed-{options.seed}"
    if options.show:
        for case in cases:
            print(replay(CaseResult(case, EQUAL), folder))
        return 0
    prepare()  # else every rank would compile at once, within a case's time limit
    start = last = time.monotonic()
    counts: Counter[str] = Counter()

    def tell(outcome: CaseResult) -> None:
        nonlocal last
        counts[outcome.kind] += 1
        if outcome.kind == FAILED:
            repeat = (
                f"python -m tests.fuzz --seed {options.seed} --elastic {options.elastic} --only "
                f"{outcome.case.number}"
            )
            print(f"\ncase {outcome.case.number}: {outcome.what}\n{outcome.detail}\n    {repeat}")
            print(replay(outcome, folder), flush=True)
        now, done = time.monotonic(), sum(counts.values())
        if now - last > 5 or done == len(cases):
            last = now
            left = (now - start) / done * (len(cases) - done)
            told = (
                f"{done} of {len(cases)} cases, {counts[FAILED]} failed, {counts[REFUSED]} refused"
            )
            print(f"{told}, {left:.0f} s left", file=sys.stderr, flush=True)

    outcomes = run_all(cases, options.jobs, tell)
    print(summary(outcomes, time.monotonic() - start))
    return 0 if passed(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
