"""Small runs in which every two choices meet, drawn from a seed.

A run is a training, which decides the bits, and a place, which must not. Few trainings serve many
places, so few runs of one rank are references of all. `test_equality_drawn.py` runs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from itertools import combinations, product
from random import Random
from typing import Any

from torch import nn

from dynmo.runtime.comm.meeting import Meeting
from dynmo.schedule.catalogue import AUTO, SCHEDULES
from tests.equality import BALANCERS
from tests.fuzz.draws import fits
from tests.fuzz.jobs import train
from tests.jobs import SOURCE
from tests.models.odd_models import Counting, Normed, OwnNorm, Recurrent

Tables = dict[str, Any]
Choices = dict[str, Any]
Choice = tuple[str, Any]
Pair = tuple[Choice, Choice]

STEPS = 3
LAYERS = 10
MOST_RANKS = 4
ALONE = ("1f1b", "zb-auto", "v-half", AUTO)
CASES = 60
CANDIDATES = 16


def layers() -> list[nn.Module]:
    """A model of one's own with LSTMs, and buffers that forwards write to."""
    inner = [Recurrent(nn.LSTM), Normed(OwnNorm()), nn.Linear(8, 8), Recurrent(nn.GRU)]
    others = [Counting(False), nn.Linear(8, 8), Normed(nn.BatchNorm1d(8)), nn.Linear(8, 8)]
    return [nn.Embedding(256, 8), *inner, *others, nn.Linear(8, 256)]


FREEZING = {"freezing": {"schedule": [[1, 1], [2, 3]]}}
PRUNING = {
    "pruning": {"initial_sparsity": 0.5, "start": 1, "end": 2, "every": 1, "dense_below": 0.6}
}
EXITS: Tables = {
    "early_exit": {
        "confidence": "state",
        "threshold": 0.9993,
        "exits": [0, 2],
        "start": 1,
        "record_every": 1,
    }
}
DEPTHS = {"mixture_of_depths": {"capacity": 0.3, "threshold_from": 1, "record_every": 1}}
HASHES = {"sparse_attention": {"buckets": 4, "start": 1}}
EXPERTS = {"experts": {"record_every": 1, "place_every": 2, "least_gain": 0.0}}

GPT: Tables = {"blocks": 4, "hidden": 8, "heads": 2, "sequence": 8}
MOE: Tables = GPT | {"kind": "moe", "experts": 4, "top_k": 2, "bias_rate": 0.1, "moe_every": 2}
BIASED: Tables = MOE | {"routing": "bias"}
TIED = {"tied": True}
DROPOUT = {"dropout": 0.1}
OWN: Tables = {"kind": "python:tests.drawn:layers", "sequence": 4}


@dataclass(frozen=True)
class Training:
    """What decides the bits of a run.

    Attributes:
        features: Choices that must meet those of the place.
        groups: Accumulation groups.
    """

    features: Choices
    sections: Tables
    microbatches: int
    groups: int

    @property
    def layers(self) -> int:
        exits = self.sections["dynamism"].get("early_exit", {}).get("exits", ())
        return LAYERS + len(exits)

    def takes(self, replicas: int) -> bool:
        """True if so many replicas give the bits of one."""
        writes = self.sections["model"] == OWN and replicas > 1
        return not writes and fits(self.groups, replicas, self.microbatches)


def _training(
    model: Tables,
    *cases: Tables,
    precision: str = "float32",
    clip: str = "none",
    optimizer: str = "adamw",
    groups: int,
) -> Training:
    microbatches = 4 if groups == 4 else 6  # 4 suit interleaving on 4 ranks, 6 that on 3
    dynamism: Tables = {name: options for case in cases for name, options in case.items()}
    features: Choices = {
        "model": model.get("kind", "gpt").partition(":")[0],
        "precision": precision,
        "clip": clip,
        "optimizer": optimizer,
        "microbatches": microbatches,
        "tied": model.get("tied", False),
    }
    every = (FREEZING, PRUNING, EXITS, DEPTHS, HASHES, EXPERTS)
    features |= {name: name in dynamism for case in every for name in case}
    train: Tables = {
        "steps": STEPS,
        "global_batch": microbatches,
        "micro_batch": 1,
        "lr": 1e-2,
        "optimizer": optimizer,
        "precision": precision,
        "reduction_slots": groups,
        "max_grad_norm": 0.0 if clip == "none" else 0.5,
        "eval_every": 3,
        "eval_batches": 1,
    }
    if clip == "local":
        train["clip_scope"] = "local"
    if precision == "float16":
        train["loss_scale_window"] = 1
    sections: Tables = {
        "seed": 7,
        "data": {"source": SOURCE},
        "model": model,
        "train": train,
        "dynamism": {"cases": list(dynamism), **dynamism} if dynamism else {},
        "trace": {"steps": 0},
    }
    return Training(features, sections, microbatches, groups)


# Two or three trainings have each feature: one alone would have to meet every choice of a place.
TRAININGS: dict[str, Training] = {
    "own": _training(OWN, FREEZING, PRUNING, clip="global", optimizer="radam", groups=3),
    "exits": _training(
        GPT | TIED, EXITS, PRUNING, FREEZING, optimizer="sgd", precision="float16", groups=4
    ),
    "depths": _training(GPT | TIED, DEPTHS, PRUNING, clip="local", optimizer="sgd", groups=4),
    "attention": _training(GPT | TIED, HASHES, FREEZING, clip="local", groups=4),
    "sparse": _training(
        GPT | DROPOUT,
        HASHES,
        PRUNING,
        clip="global",
        precision="bfloat16",
        optimizer="radam",
        groups=2,
    ),
    "experts": _training(BIASED, EXPERTS, EXITS, precision="bfloat16", groups=4),
    "chosen": _training(
        MOE | DROPOUT, EXPERTS, DEPTHS, FREEZING, precision="float16", clip="global", groups=4
    ),
}

PLACES: dict[str, Sequence[Any]] = {
    "pipeline": (1, 2, 3, 4),
    "replicas": (1, 2, 4),
    "schedule": (*SCHEDULES, AUTO),
    "balancer": tuple(BALANCERS),
    "cost": ("time", "parameters"),
    "zero": (0, 1),
    "expert": (1, 2),
    "validation": ("before", "after", "in-place"),
    "recompute": ("none", "all", "some", "auto"),
    "reshape": (False, True),
    "messages": ("direct", "staged", "slices"),
}
CHOICES: dict[str, Sequence[Any]] = {"training": tuple(TRAININGS)} | PLACES

OTHER_MESH = {(2, 1): (1, 2), (1, 2): (2, 1), (4, 1): (2, 2), (2, 2): (4, 1), (1, 4): (2, 2)}


def _interleaves(name: str, schedule: str, pipeline: int, replicas: int) -> bool:
    return (
        schedule != "interleaved-1f1b" or TRAININGS[name].microbatches // replicas % pipeline == 0
    )


def _reshapes(name: str, pipeline: int, replicas: int, reshape: bool, schedule: str) -> bool:
    other = OTHER_MESH.get((pipeline, replicas))
    if not reshape or other is None:
        return not reshape
    return TRAININGS[name].takes(other[1]) and _interleaves(name, schedule, *other)


def _rolls_back(name: str, validation: str) -> bool:
    """Arithmetic that undoes a step differs in the last bits, so none may be undone.

    radam's steps have no such arithmetic.
    """
    features = TRAININGS[name].features
    undone = features["clip"] == "global" or features["precision"] == "float16"
    return validation != "in-place" or not (undone or features["optimizer"] == "radam")


RULES: list[tuple[tuple[str, ...], Callable[..., bool]]] = [
    (("pipeline", "replicas"), lambda pipeline, replicas: pipeline * replicas <= MOST_RANKS),
    # A pipeline of one rank has nothing to overlap, so few schedules do.
    (("replicas", "schedule"), lambda replicas, name: replicas < 4 or name in ALONE),
    (("training", "replicas"), lambda name, replicas: TRAININGS[name].takes(replicas)),
    (("replicas", "zero"), lambda replicas, zero: replicas > zero),
    (("training", "expert"), lambda name, n: n == 1 or TRAININGS[name].features["experts"]),
    (("replicas", "expert"), lambda replicas, expert: replicas % expert == 0),
    (("training", "schedule", "pipeline", "replicas"), _interleaves),
    (("training", "validation"), _rolls_back),
    (("training", "pipeline", "replicas", "reshape", "schedule"), _reshapes),
    (("expert", "reshape"), lambda expert, reshape: expert == 1 or not reshape),
    (("pipeline", "messages"), lambda pipeline, way: pipeline > 1 or way != "slices"),
    (("schedule", "messages"), lambda name, way: way != "slices" or name != AUTO),
    (("validation", "messages"), lambda name, way: way != "slices" or name == "before"),
    (("reshape", "messages"), lambda reshape, way: way != "slices" or not reshape),
    (("expert", "messages"), lambda expert, way: way != "slices" or expert == 1),
]


def possible(chosen: Choices, last: str) -> bool:
    """True if no rule that `last` is in forbids what is chosen so far."""
    return all(
        holds(*(chosen[name] for name in names))
        for names, holds in RULES
        if last in names and chosen.keys() >= set(names)
    )


def _can_end(chosen: Choices, last: str) -> bool:
    """True if some case has these choices, of which all but `last` fit each other."""
    if not possible(chosen, last):
        return False
    name = next((name for name in CHOICES if name not in chosen), None)
    return name is None or any(_can_end(chosen | {name: x}, name) for x in CHOICES[name])


@dataclass(frozen=True)
class Drawn:
    """One drawn case.

    Attributes:
        chosen: Choice of each dimension of `CHOICES`.
    """

    chosen: Choices

    @property
    def training(self) -> str:
        return self.chosen["training"]

    @property
    def ranks(self) -> int:
        """Processes. All slices of a pipeline are in one."""
        pipeline = 1 if self.chosen["messages"] == "slices" else self.chosen["pipeline"]
        return pipeline * self.chosen["replicas"]

    @property
    def pairs(self) -> set[Pair]:
        """Its pairs of choices, with those of the training's features."""
        return _all_pairs(each for item in self.chosen.items() for each in _choices_of(*item))

    @property
    def config(self) -> Tables:
        chosen, training = self.chosen, TRAININGS[self.training]
        recompute = chosen["recompute"]
        parallel: Tables = {name: chosen[name] for name in ("pipeline", "replicas", "zero")}
        pipeline: Tables = {"schedule": chosen["schedule"]}
        elastic: Tables = {}
        if chosen["expert"] > 1:
            parallel["expert"] = chosen["expert"]
        if chosen["messages"] == "slices":
            parallel |= {"slices": True, "device": "cpu"}
        if chosen["validation"] != "before":
            pipeline["post_validation"] = True
        if chosen["validation"] == "in-place":
            pipeline["rollback"] = "in-place"
        if chosen["reshape"]:
            other = OTHER_MESH[chosen["pipeline"], chosen["replicas"]]
            elastic["reshape_at"] = [[1, *other]]
        return training.sections | {
            "train": training.sections["train"]
            | {"recompute": [1, 4, 7] if recompute == "some" else recompute},
            "parallel": parallel,
            "pipeline": pipeline,
            "balance": BALANCERS[chosen["balancer"]] | {"cost": chosen["cost"], "every": 1},
            "elastic": elastic,
        }


def reference(training: str) -> Tables:
    """The configuration of a training on one rank, where nothing moves."""
    return TRAININGS[training].sections | {
        "pipeline": {"schedule": "1f1b"},
        "balance": {"balancer": "none"},
    }


def _choices_of(name: str, choice: Any) -> list[Choice]:
    """A choice, or in a training's stead its features."""
    return list(TRAININGS[choice].features.items()) if name == "training" else [(name, choice)]


def _pairs(some: Iterable[Choice], others: Iterable[Choice]) -> set[Pair]:
    return {(a, b) if a[0] < b[0] else (b, a) for a, b in product(some, others)}


def _all_pairs(choices: Iterable[Choice]) -> set[Pair]:
    return set(combinations(sorted(choices, key=lambda choice: choice[0]), 2))


@cache
def valid_pairs() -> frozenset[Pair]:
    """All pairs of choices that a case can have."""
    found = set[Pair]()
    for training in TRAININGS.values():
        found |= _all_pairs(training.features.items())
    for a, b in combinations(CHOICES, 2):
        for x, y in product(CHOICES[a], CHOICES[b]):
            if _can_end({a: x, b: y}, b):
                found |= _pairs(_choices_of(a, x), _choices_of(b, y))
    return frozenset(found)


def draw(seed: int, count: int = CASES) -> list[Drawn]:
    """Draws cases in which every valid pair of choices occurs.

    Raises:
        ValueError: So few cases cannot have all pairs, or no draw found them.
    """
    for attempt in range(20):
        random, missing = Random(f"{seed} {attempt}"), set(valid_pairs())
        cases: list[Drawn] = []
        while len(cases) < count:
            some = [_candidate(random, missing) for _ in range(CANDIDATES)]
            best = max(some, key=lambda case: (len(case.pairs & missing), -case.ranks))
            missing -= best.pairs
            cases.append(best)
        if not missing:
            return cases
    raise ValueError(f"{count} cases do not have all pairs of choices; draw more")


def _candidate(random: Random, missing: set[Pair]) -> Drawn:
    """Greedy: starts at a missing pair, and takes the choices that add most missing pairs."""
    chosen: Choices = {}
    so_far: list[Choice] = []
    names = list(CHOICES)
    random.shuffle(names)
    if missing:
        first = {name for name, _ in random.choice(sorted(missing, key=repr))}
        names.sort(
            key=lambda name: name not in first and not (name == "training" and first - set(PLACES))
        )
    for name in names:
        choices = list(CHOICES[name])
        random.shuffle(choices)
        choices.sort(key=lambda x: -len(_pairs(_choices_of(name, x), so_far) & missing))
        chosen[name] = next(x for x in choices if _can_end(chosen | {name: x}, name))
        so_far += _choices_of(name, chosen[name])
    return Drawn(chosen)


def todays_seed() -> int:
    """The date, such as 20260131, or DYNMO_SEED."""
    return int(os.environ.get("DYNMO_SEED") or date.today().strftime("%Y%m%d"))


def train_each(world: Meeting, configs: list[Tables], staged: list[bool]) -> list[Tables]:
    """A job of the pool: several runs in one world."""
    results: list[Tables] = []
    for config, through_host in zip(configs, staged, strict=True):
        world.staged = through_host
        results.append(train(world, config))
        if "error" in results[-1]:  # the other ranks wait, and the world must end
            raise RuntimeError(f"{results[-1]['error']}: {results[-1]['text']}")
    return results
