"""Runs the cases of the random test on pools of ranks."""

from __future__ import annotations

import queue
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dynmo.config import parse
from dynmo.errors import ConfigError
from tests.fuzz.draws import Case, Tables
from tests.fuzz.outcome import (
    EQUAL,
    FAILED,
    REFUSED,
    CaseResult,
    Failure,
    Observed,
    Refusal,
    difference,
)
from tests.pool import JobFailed, Pool, PoolLost

RANKS = 4
TIMEOUT = 120.0
PLAIN_TOLERANCE = 1e-3
WARNING = re.compile(r"\[W\d|Warning\b")


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
        """Trains a case on its ranks, and compares with one rank or with what is recorded."""
        self._log.write_text("")
        try:
            try:
                parse(case.config)
                parse(case.resumed or case.config)
            except ConfigError as error:
                raise Refusal(str(error)) from None
            expected = Observed(end=case.recorded) if case.recorded else self.reference(case)
            ours = self._under_test(case)
            unlike = difference(Observed(end=ours.digests()) if case.recorded else ours, expected)
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
        return CaseResult(case, EQUAL, end=ours.digests())

    def reference(self, case: Case) -> Observed:
        """The results of the case on one rank.

        Raises Failure if a plain PyTorch loop disagrees.
        """
        expected = Observed()
        expected.read(self._train(case.reference))
        if case.plain:
            (plain,) = self._job("tests.fuzz.jobs:train_plainly", 1, config=case.reference)
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
        results = self._job("tests.fuzz.jobs:train_on_machines", ranks, config=config, **arguments)
        # Each process has those of the time in which it was rank 0.
        events = sorted((e for each in results for e in each["events"]), key=lambda e: e["time"])
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
            if any(event["event"] == "step" for event in events):
                raise Failure(f"refused in mid-run: {text}")
            if "\n" in text:
                raise Failure("refused in more than one line", text)
            raise Refusal(text)
        for key in ("weights_digest", "buffers_digest"):
            if len({result.get(key) for result in results if not result["left"]}) > 1:
                raise Failure(f"wrong bits: the ranks differ in {key}")
        return events

    def _job(self, function: str, ranks: int, **arguments: Any) -> list[Any]:
        if self._pool is None:
            self._pool = self._make_pool(self._log)
        return self._pool.run(function, ranks, timeout=TIMEOUT, **arguments)


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
