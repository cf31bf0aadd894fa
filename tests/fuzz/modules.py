"""Random modules: each trains in plain torch, and with dynmo on one rank and on two.

python -m tests.fuzz --modules --cases 2000 --seed 1

Two ranks have the bits of one. Both have plain torch's numbers within the last digits of sums in
another order. Or one line refuses the module.
"""

from __future__ import annotations

import copy
import itertools
import linecache
import re
import sys
import tempfile
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynmo.errors import DynmoError
from dynmo.runtime.comm.meeting import Meeting
from tests.fuzz.grammar import NEW, Tables, draw, source_of
from tests.fuzz.outcome import EQUAL, FAILED, REFUSED
from tests.fuzz.trained import Pipelined, Plain, run_plan
from tests.pool import JobFailed, Pool, PoolLost
from tests.runtime.alone import alone

RANKS = 2
EVENTS = ("step", "evaluate", "move", "save", "load", "resume", "freeze", "unfreeze", "change")
VOID = "void"
"""Plain torch cannot train it either."""
TOLERANCE = 1e-5
FILE = "drawn_modules"
_LIMITS = {"parallel": {"timeout": 40.0}}

# Refusals that are fair to a user of plain torch, and why.
FAIR: dict[str, str] = {
    r"the parameter .* has a hook, which would not move": "W adds gradients without autograd",
    r"share the buffer \w+": "torch's pipelining cannot either",
    r"one parameter under two names": "one module can keep it",
    r"share the parameter [\w.]+; .* say dynmo\.Sequential": "the line to write is in the message",
    r"the loss reads |the loss \(\w+\) has the parameter": "no optimizer of a rank would have it",
    r"\) reads the \w+ .* of layer \d": "the other layer may be on another rank",
    r"its forward writes to its attribute": "a state_dict has no attributes either",
    r"writes to its input \d in place, which shares memory": "a write cannot reach other ranks",
    r"returned a (NoneType|dict)": "messages have tensors, as those of torch's pipelining",
    r"was not there when the pipeline was made": "plain torch's optimizer has it neither",
    r"which would keep old values|which would part": "the message says what to write",
    r"got other parameters after the pipeline was made": "checkpoints would have other names",
}


@dataclass(frozen=True)
class Outcome:
    """How a case ended, and in one line why."""

    case: Tables
    kind: str
    what: str = ""
    detail: str = ""


def _names_of(case: Tables) -> dict[str, Any]:
    """Runs the program of a case. Returns what it defines."""
    source = source_of(case)
    module = types.ModuleType(FILE)
    sys.modules[FILE] = module
    linecache.cache[f"{FILE}.py"] = len(source), None, source.splitlines(True), f"{FILE}.py"
    exec(compile(source, f"{FILE}.py", "exec"), vars(module))
    return vars(module)


def ended(case: Tables, make: Callable[[dict[str, Any]], Plain | Pipelined]) -> dict[str, Any]:
    done = list[Any]()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            result = run_plan(make(_names_of(case)), case, done.append)
        except DynmoError as error:
            # A refusal comes before the first step, at a move, or after a change.
            late = any(e[0] == "step" for e in done) and not any(e[0] == "change" for e in done)
            late = late and case["plan"][len(done)][0] != "move"
            return {"error": str(error), "status": error.exit_status, "late": late}
        except Exception as error:
            name = type(error).__name__
            return {"error": f"{name}: {error}", "status": None, "detail": traceback.format_exc()}
    return result | {"warnings": [str(each.message) for each in told]}


def train(world: Meeting, case: Tables, folder: str, config: Tables) -> dict[str, Any]:
    """The job of two ranks. The first trains alone before."""
    del config  # the pool reads it
    told: dict[str, Any] = {}
    if world.rank == 0:
        own = Path(folder, "alone")
        told["alone"] = ended(case, lambda names: Pipelined(names, case, alone(), own))
    shared = Path(folder, "ranks")
    told["ranks"] = ended(case, lambda names: Pipelined(names, case, world, shared))
    return told


def draw_valid(seed: int, number: int) -> Tables:
    """Draws a case that plain torch trains."""
    cases = (draw(seed, number, attempt) for attempt in itertools.count())
    return next(case for case in cases if "error" not in train_plainly(case))


def train_plainly(case: Tables) -> dict[str, Any]:
    return ended(case, lambda names: Plain(names, case))


def run_case(pool: Pool, case: Tables) -> Outcome:
    """Trains a case in all three ways, and compares."""
    plain = train_plainly(case)
    if "error" in plain:
        return Outcome(case, VOID, plain["error"].splitlines()[0])
    with tempfile.TemporaryDirectory(prefix="dynmo-fuzz-") as folder:
        try:
            first, second = pool.run(
                "tests.fuzz.modules:train", RANKS, case=case, folder=folder, config=_LIMITS
            )
        except PoolLost as lost:
            return Outcome(case, FAILED, f"hang or crash: {lost}")
        except JobFailed as failed:
            return Outcome(case, FAILED, "crash outside of the run", str(failed))
    runs = {
        "one rank": first["alone"],
        "rank 0 of 2": first["ranks"],
        "rank 1 of 2": second["ranks"],
    }
    wrong = {where: run for where, run in runs.items() if "error" in run}
    for where, run in wrong.items():
        if run["status"] is None:
            return Outcome(case, FAILED, f"{where}: {run['error'].splitlines()[0]}", run["detail"])
    if wrong:
        # The rank at fault says why. The other may only say that it is gone.
        where, run = max(wrong.items(), key=lambda pair: pair[1]["status"])
        text = run["error"]
        if run["status"] != 2 or "\n" in text or run["late"]:
            how = "late: " if run["late"] else f"status {run['status']}: "
            return Outcome(case, FAILED, f"{where}: {how}{text}")
        if not any(re.search(reason, text) for reason in FAIR):
            return Outcome(case, FAILED, f"unfair refusal: {text}")
        return Outcome(case, REFUSED, text)
    unlike = (
        _different(runs["rank 0 of 2"], runs["rank 1 of 2"], 0.0)
        or _different(runs["one rank"], plain, TOLERANCE)
        or _different(runs["rank 0 of 2"], runs["one rank"], 0.0)
    )
    return Outcome(case, FAILED, unlike) if unlike else Outcome(case, EQUAL)


def _different(ours: Tables, theirs: Tables, tolerance: float) -> str | None:
    """Says in what two runs differ by more than `tolerance` of a tensor's largest value."""
    who = "one rank and plain torch" if tolerance else "two ranks and one, or each other"
    keys = ours["state"].keys() ^ theirs["state"].keys()
    if keys:
        return f"{who} have other tensors: {sorted(keys)}"
    pairs = {"loss": (ours["losses"], theirs["losses"])}
    pairs |= {name: (x, theirs["state"][name]) for name, x in ours["state"].items()}
    for name, (a, b) in pairs.items():
        if len(a) != len(b):
            return f"{who} differ in the size of {name}: {len(a)}, {len(b)}"
        most = max(map(abs, b), default=0.0)
        for x, y in zip(a, b, strict=True):
            if not (x == y or abs(x - y) <= tolerance * most):
                return f"{who} differ in {name}: {x!r}, {y!r}"
    return None


def smaller(case: Tables) -> Iterator[Tables]:
    """Yields the case without one of its parts."""
    for at, event in enumerate(case["plan"]):
        if event != ["step"] or case["plan"].count(["step"]) > 1:
            yield _without(case, ["plan"], at)
    for index, layer in enumerate(case["layers"]):
        for section in ("body", "init", "class"):
            for at, line in enumerate(layer[section]):
                if line != NEW:
                    yield _without(case, ["layers", index, section], at)
        if layer["returns"] != "x":
            changed = copy.deepcopy(case)
            changed["layers"][index]["returns"] = "x"
            yield changed
    simple = {"schedule": "1f1b", "microbatches": 1, "recompute": "none"}
    simple |= {"post_validation": False, "max_grad_norm": 0.0}
    for name, value in simple.items():
        if case["options"][name] != value:
            yield case | {"options": case["options"] | {name: value}}
    for name, value in {"inputs": "tensor", "loss": "loss = F.mse_loss"}.items():
        if case[name] != value:
            yield case | {name: value}


def _without(case: Tables, path: Sequence[Any], at: int) -> Tables:
    changed = copy.deepcopy(case)
    place: Any = changed
    for key in path:
        place = place[key]
    del place[at]
    return changed


def shrink(outcome: Outcome, run: Callable[[Tables], Outcome]) -> Outcome:
    """Returns the smallest case that fails alike."""
    wanted = _kind_of(outcome)
    while True:
        for case in smaller(outcome.case):
            found = run(case)
            if found.kind == FAILED and _kind_of(found) == wanted:
                outcome = found
                break
        else:
            return outcome


def _kind_of(outcome: Outcome) -> str:
    """What went wrong, without numbers and names of tensors."""
    what = re.sub(r"differ in .*", "differ", outcome.what)
    return re.sub(r"[\d.]+|\[.*?\]|\(.*?\)", "N", what)


def script_of(case: Tables) -> str:
    """Returns a program that repeats a case on the ranks of torchrun, or on one."""
    trained = Path(__file__).with_name("trained.py").read_text().split('"""', 2)[2]
    shown = {key: case[key] for key in ("seed", "inputs", "tied", "options", "plan")}
    lines = [
        f"CASE = {shown!r}",
        'if __name__ == "__main__":',
        "    plain = run_plan(Plain(globals(), CASE), CASE, lambda event: None)",
        "    with dynmo.init(device='cpu') as world, tempfile.TemporaryDirectory() as folder:",
        "        own = Pipelined(globals(), CASE, world, Path(folder))",
        "        ours = run_plan(own, CASE, lambda event: None)",
        "        if world.rank == 0:",
        "            print('plain torch', plain['losses'])",
        "            print(world.size, 'ranks', ours['losses'])",
        "            for name, a in ours['state'].items():",
        "                b = plain['state'].get(name, [])",
        "                print(name, max((abs(x - y) for x, y in zip(a, b)), default='missing'))",
    ]
    future = "from __future__ import annotations\n"
    parts = [f"{future}import tempfile", source_of(case), trained.replace(future, ""), *lines]
    return "\n".join([*parts, ""])


class Runner:
    """Runs cases on ranks that live on."""

    def __init__(self, folder: Path) -> None:
        self._pool = Pool(RANKS, folder / "stderr")

    def run(self, case: Tables) -> Outcome:
        return run_case(self._pool, case)

    def close(self) -> None:
        self._pool.close()


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Counts, refusals by reason, and cases that plain torch does not train by its error."""
    counts = Counter(outcome.kind for outcome in outcomes)
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in (EQUAL, REFUSED, FAILED, VOID))
    lines = [f"{len(outcomes)} modules in {seconds:.0f} s: {kinds}"]
    for kind in (REFUSED, VOID):
        reasons = Counter(re.sub(r"\d+", "N", o.what)[:150] for o in outcomes if o.kind == kind)
        lines += [f"  {kind} {count} times: {reason}" for reason, count in reasons.most_common()]
    failed = [outcome for outcome in outcomes if outcome.kind == FAILED]
    for what, count in Counter(map(_kind_of, failed)).most_common():
        lines.append(f"  failed {count} times: {what[:150]}")
    return "\n".join(lines)


def run_modules(options: Any) -> int:
    """`python -m tests.fuzz --modules`. Returns 1 if a case failed."""
    import time

    start, outcomes = time.monotonic(), list[Outcome]()
    numbers = range(options.first, options.first + options.cases)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder))
        for number in numbers if options.only is None else [options.only]:
            outcome = runner.run(draw_valid(options.seed, number))
            outcomes.append(outcome)
            if outcome.kind == FAILED:
                print(f"case {number}: {outcome.what}", flush=True)
                if options.write is not None or options.only is not None:
                    outcome = shrink(outcome, runner.run)
                    print(f"    smallest: {outcome.what}\n{outcome.detail}", flush=True)
                    place = options.write or options.folder
                    place.mkdir(parents=True, exist_ok=True)
                    file = place / f"module-{options.seed}-{number}.py"
                    file.write_text(f"# {outcome.what}\n{script_of(outcome.case)}")
                    print(f"    {file}", flush=True)
        runner.close()
    print(summary(outcomes, time.monotonic() - start))
    return int(any(outcome.kind == FAILED for outcome in outcomes))
