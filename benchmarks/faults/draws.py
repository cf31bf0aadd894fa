"""The runs, and the faults that a seed draws for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.faults.inject import RECOVERY, Fault, is_known

Tables = dict[str, Any]

STEPS = 40
SAVES_EVERY = 8
TIMEOUT = 5
"""Seconds of `parallel.timeout`. A silent rank is noticed by then."""
WORK_TIMEOUT = 20
"""Seconds of `parallel.work_timeout`, by which a wait in the set-up ends."""

_RANDOM = {"balancer": "python:benchmarks.baselines.placements:random", "every": 4}
_FREEZING = {"cases": ["freezing"], "freezing": {"schedule": [[6, 1], [20, 2]]}}
_EXPERTS = {"experts": {"record_every": 2, "place_every": 6, "least_gain": 0.0}}
_MOE: Tables = {"kind": "moe", "experts": 4, "top_k": 2, "routing": "bias", "bias_rate": 0.1}

_EACH_STEP = ("F", "B", "message", "optimizer step")
_ANY = ("rendezvous", "load", "evaluation", "snapshot", "write", "rename", "end")
_BALANCED = ("profile", "decision", "before a move", "in a move", "after a move")
_BY_ONE = ("rename", "release")
"""Phases of rank 0 alone."""


@dataclass(frozen=True)
class Run:
    """A run that faults hit.

    Attributes:
        mesh: Ranks of a pipeline, and replicas.
        sections: What differs from the other runs.
        phases: Phases beyond those that all runs have.
    """

    mesh: tuple[int, int]
    sections: Tables
    phases: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.mesh[0] * self.mesh[1]

    @property
    def all_phases(self) -> list[str]:
        return [x for x in (*_EACH_STEP, *_ANY, "copies", *self.phases) if is_known(x)]

    def config(self, *, alone: bool = False) -> Tables:
        """Returns the config, or that of one rank, where nothing but the training is the same."""
        sections: Tables = {
            "name": "run",
            "model": {"blocks": 2, "hidden": 16, "heads": 2, "sequence": 8},
            "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 1, "eval_every": 20}
            | {"reduction_slots": 4, "eval_batches": 2},
            "parallel": {"timeout": TIMEOUT, "work_timeout": WORK_TIMEOUT},
            "balance": {"balancer": "none"},
            "checkpoint": {"every": SAVES_EVERY},
            "elastic": {"recover": "memory"},
            "launch": {"restarts": 2},
            "trace": {"steps": 0},
        }
        own = self.sections | {"parallel": {"pipeline": self.mesh[0], "replicas": self.mesh[1]}}
        own["parallel"] |= self.sections.get("parallel", {})
        if alone:
            own = {key: own[key] for key in ("model", "train", "dynamism") if key in own}
            sections["elastic"], sections["launch"] = {}, {}
        for name, section in own.items():
            is_other = name == "model" and section.get("kind") == "emulated"
            sections[name] = section if is_other else sections.get(name, {}) | section
        return sections


RUNS: dict[str, Run] = {
    "1f1b": Run((3, 1), {"pipeline": {"schedule": "1f1b"}}, ("reduction",)),
    "moves": Run(
        (3, 1),
        {"pipeline": {"schedule": "zb-h1"}, "balance": _RANDOM, "dynamism": _FREEZING}
        | {"elastic": {"recover_every": 2}},
        ("W", "reduction", *_BALANCED),
    ),
    "moves ahead": Run(
        (3, 1),
        {"pipeline": {"schedule": "1f1b"}, "balance": _RANDOM | {"move_ahead": True}},
        ("reduction", *_BALANCED),
    ),
    "chunks": Run(
        (2, 1),
        {"pipeline": {"schedule": "zb-v"}, "model": {"tied": True}},
        ("W", "reduction"),
    ),
    "replicas": Run(
        (2, 2),
        {"pipeline": {"schedule": "zb-h1"}, "parallel": {"zero": 1}},
        ("W", "reduction"),
    ),
    "experts": Run(
        (2, 2),
        {"model": _MOE, "parallel": {"expert": 2}, "elastic": {"recover_every": 3}}
        | {"dynamism": {"cases": ["experts"], **_EXPERTS}, "pipeline": {"schedule": "1f1b"}},
        ("reduction",),
    ),
    "post-validation": Run(
        (4, 1),
        {"pipeline": {"schedule": "zb-h1", "post_validation": True}, "balance": _RANDOM}
        | {"elastic": {"recover_every": 2}, "train": {"max_grad_norm": 2.1}},
        ("W", "verdict", *_BALANCED),
    ),
    "regrouping": Run(
        (3, 1),
        {"pipeline": {"schedule": "zb-h1"}, "elastic": {"reshape_at": [[10, 2, 1], [16, 3, 1]]}},
        ("W", "reduction", "in a move", "regroup", "release"),
    ),
    "emulated": Run(
        (3, 1),
        {"model": {"kind": "emulated", "layers": 6, "f": 0.002, "b": 0.002, "w": 0.002}}
        | {"pipeline": {"schedule": "zb-h1"}},
        ("W", "reduction"),
    ),
}


@dataclass(frozen=True)
class Draw:
    """One run with its faults.

    Attributes:
        number: Number of the draw within its seed.
        run: Name of the run.
        faults: What strikes. The second of two strikes while the run recovers from the first.
    """

    number: int
    run: str
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return f"{self.number}: {self.run}: {', then '.join(map(str, self.faults))}"

    @property
    def kind(self) -> str:
        first = self.faults[0]
        if len(self.faults) > 1:
            return f"{first.kind} twice"
        lasts = " for a while" if first.kind == "stop" and first.seconds else ""
        return first.kind + lasts

    @property
    def phase(self) -> str:
        *_, last = self.faults
        return last.phase or "a time"

    @property
    def needs_network(self) -> bool:
        return "network" in self.faults[0].kind

    @property
    def needs_disk(self) -> bool:
        return self.faults[0].kind == "full disk"


KINDS = {
    "kill": 46,
    "kill twice": 6,
    "stop": 9,
    "stop for a while": 9,
    "term": 5,
    "cut network": 4,
    "slow network": 3,
    "full disk": 4,
    "slow disk": 3,
    "flipped bit": 5,
    "NaN": 6,
}
"""Kinds of faults, and how often of 100."""

_WRITES = ("snapshot", "write", "rename")


def draw(
    seed: int, number: int, length: Callable[[str], float], without: Sequence[str] = ()
) -> Draw:
    """Draws a run and its faults.

    Args:
        seed: Seed of all draws.
        number: Number of the draw.
        length: Returns the seconds of a run without faults.
        without: Kinds of faults that this machine cannot make.
    """
    random = Random(f"faults {seed} {number}")
    kinds = {kind: share for kind, share in KINDS.items() if kind not in without}
    (kind,) = random.choices(list(kinds), list(kinds.values()))
    name = random.choice([x for x in RUNS if x != "emulated" or kind != "NaN"])
    run = RUNS[name]
    if kind == "NaN":
        # The first stage hands no gradients on.
        phase, rank = random.choice([("F", _rank(random, run)), ("B", run.ranks - 1)])
        first = Fault("NaN", phase, rank, random.randrange(1, STEPS - 2))
        return Draw(number, name, (first,))
    seconds = _seconds(random, kind)
    is_timed = random.random() < 0.5
    plain = "stop" if kind == "stop for a while" else "kill" if kind == "kill twice" else kind
    first = _at_time(random, plain, run, seconds, length(name))
    if not is_timed:
        first = _at_phase(random, plain, run, seconds)
    if kind != "kill twice":
        return Draw(number, name, (first,))
    one, other = random.sample(range(run.ranks), 2)
    if is_timed:
        first = replace(first, rank=one)
        # Another process is hit while the others may recover.
        when = first.time + round(random.uniform(0.02, 1.5), 2)
        return Draw(number, name, (first, Fault("kill", rank=other, time=when)))
    # Ranks have other numbers by then.
    at = random.choice(RECOVERY)
    second = Fault("kill", at, random.randrange(run.ranks - 1), first.step)
    first = Fault("kill", "F", one, first.step, first.call)
    return Draw(number, name, (first, second))


def _rank(random: Random, run: Run, ranks: int | None = None) -> int:
    return random.randrange(ranks or run.ranks)


def _seconds(random: Random, kind: str) -> float:
    """Returns how long a fault lasts. 0 means for ever."""
    if kind == "stop for a while":
        return random.choice([0.3, 1.0, 2.0, TIMEOUT + 3.0, TIMEOUT + 6.0])
    if kind in ("cut network", "full disk"):
        return random.choice([0.0, 0.0, 0.5, 2.0, TIMEOUT + 4.0])
    if kind in ("slow disk", "slow network"):
        return random.choice([1.0, 3.0])
    return 0.0


def _at_time(
    random: Random, kind: str, run: Run, seconds: float, length: float, time: float | None = None
) -> Fault:
    when = round(random.uniform(0.1, length), 2) if time is None else time
    rank = None if kind == "term" and random.random() < 0.5 else _rank(random, run)
    return Fault(kind, rank=rank, seconds=seconds, time=when)


def _at_phase(random: Random, kind: str, run: Run, seconds: float) -> Fault:
    disk = kind in ("full disk", "slow disk")
    phase = random.choice(_WRITES if disk else run.all_phases)
    rank: int | None = _rank(random, run)
    if phase in _BY_ONE:
        rank = None
    step = 0 if phase in ("rendezvous", "load") else random.randrange(STEPS - SAVES_EVERY)
    calls = 4 if phase in _EACH_STEP else 1
    if phase == "end":
        step = STEPS - 1
    return Fault(kind, phase, rank, step, random.randint(1, calls), seconds)
