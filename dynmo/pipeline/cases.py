"""Makes the dynamic cases, shows them the model, and calls them in the order in which they act."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dynmo.cost.layer_cost import Forecast
from dynmo.errors import ConfigError, InputError, RunError, place
from dynmo.models.group_placement import GroupPlacement
from dynmo.models.identity import code_of
from dynmo.models.model import defined_in
from dynmo.options import find_own
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.case import (
    Change,
    Dynamism,
    RunFrozen,
    Signals,
    TokenShares,
    checked,
    checked_outputs,
    named,
)
from dynmo.pipeline.case_options import CaseOptions, RunFacts
from dynmo.runtime.comm.agreement import first_difference
from dynmo.runtime.comm.process_mesh import FirstReplica
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.waits import ranks_text
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.layer.joint_graph import Tensors
from dynmo.runtime.layer.stage import FrozenPrefix, PrefixRunner
from dynmo.runtime.state.spread_groups import SpreadGroups


class Cases:
    """The cases of a pipeline.

    Attributes:
        skipped: Number of F's of frozen layers that a case has skipped on this rank.
    """

    def __init__(self, cases: Sequence[Dynamism], engine: Engine) -> None:
        self.all, self._model = cases, engine.model
        # Layers that may take another time for each batch.
        self._varies = any(getattr(x, "varying_time", False) for x in engine.store.modules)
        self._context = CaseContext(engine)
        self._samples: Sequence[Hashable] | None = None
        self.skipped = 0
        self._run: tuple[Dynamism, RunFrozen] | None = None
        self._weak = weakref.proxy(self)
        for case in cases:
            case.check(engine.store.modules)

    def take_over(self, engine: Engine) -> None:
        """Begins to hear of changes, and to run frozen layers."""
        # Cases know the engine. If it held them, an unused pipeline would stay until a collection.
        engine.programs.frozen_prefix = partial(Cases._frozen_prefix, self._weak)
        engine.store.on_change = partial(Cases._changed, self._weak)

    @property
    def keep_kinds(self) -> bool:
        """True if layers of one kind and size take equally long until a change is announced."""
        return not self._varies and all(case.announces for case in self.all)

    def attach(self) -> None:
        for case in self.all:
            with named(case, "attach"):
                case.attach(self._context)

    def collect(self, step: int) -> Iterator[tuple[Dynamism, TokenShares]]:
        """Collects what layers have counted in the step before. For use before layers move."""
        for case in self.all:
            with named(case, "collect", step):
                shares = case.collect(step, self._context)
            if shares is not None:
                yield case, shares

    def act(self, step: int) -> Iterator[tuple[Dynamism, Change]]:
        for case in self.all:
            with named(case, "act", step):
                change = checked(case, case.act(step, self._context), self._model.layers)
            if change is not None:
                self._context.on_workload_change(change.layers)
                yield case, change

    def follow_rebuilt(self) -> None:
        """Has all ranks follow layers that cases have rebuilt without a `Change`. A barrier."""
        engine, count = self._context.engine, self._model.layers
        first = torch.tensor([-min(engine.store.rebuilt, default=count)])
        first = -int(engine.store.world.everyone.largest(first, "the cases to act"))
        engine.store.rebuilt.clear()
        if first < count:
            engine.store.on_change(range(first, count))
            engine.programs.relower()

    def observe(self, signals: Signals) -> None:
        for case in self.all:
            with named(case, "observe", signals.step):
                case.observe(signals)

    def dense(self) -> Iterator[AbstractContextManager[None]]:
        """Yields a context for each case that can be switched off for an evaluation."""
        for case in self.all:
            dense = case.dense(self._context)
            if dense is not None:
                yield dense

    def take_samples(self, samples: Iterable[Hashable] | None, microbatches: int) -> None:
        """Takes the samples of each microbatch that runs from now on.

        Raises:
            InputError: They are not one hashable value for each microbatch.
        """
        self._samples = None
        if samples is None:
            return
        try:
            taken = list(samples)
            hash(tuple(taken))
        except TypeError as error:
            raise InputError(
                f"samples: {error}; give a list with a number, a string or a tuple of them for "
                "each microbatch"
            ) from None
        if len(taken) != microbatches:
            raise InputError(
                f"samples has {len(taken)} entries, but the batch has {microbatches} "
                "microbatches; give one for each, on every rank"
            )
        self._samples = taken

    @contextmanager
    def dropping_samples(self) -> Generator[None]:
        try:
            yield
        finally:
            self._samples = None

    def _frozen_prefix(self, layers: Sequence[int]) -> PrefixRunner | None:
        self._run = None
        for case in self.all:
            with named(case, "frozen_prefix"):
                run = case.frozen_prefix(layers)
            if self._run is None and run is not None:
                self._run = case, run
        if self.all:
            self._compare()
        return None if self._run is None else partial(Cases._run_frozen, self._weak)

    def _compare(self) -> None:
        """Raises RunError on all ranks if not all have a function of the same case, or none."""
        place = len(self.all) if self._run is None else self.all.index(self._run[0])
        everyone = self._context.engine.store.world.everyone
        chosen = everyone.gather(torch.tensor(place), "who runs frozen layers").tolist()
        first = min(chosen)
        others = [rank for rank, place in enumerate(chosen) if place != first]
        if others:
            raise RunError(
                f"case {self.all[first].name!r}: frozen_prefix returned a function on "
                f"{everyone.describe_rank(chosen.index(first))} and None on "
                f"{everyone.name_ranks(others)}; return one on every rank, also on those without "
                "frozen layers, or None on all"
            )

    def _run_frozen(self, prefix: FrozenPrefix) -> Tensors:
        assert self._run is not None
        samples = None if self._samples is None else self._samples[prefix.microbatch]
        case, run = self._run
        with named(case, "the frozen prefix"):
            outputs = checked_outputs(case, run(prefix, samples))
        self.skipped += prefix.skipped
        return outputs

    def _changed(self, layers: Iterable[int]) -> None:
        changed = tuple(layers)
        if not changed:
            return
        for case in self.all:
            with named(case, "changed"):
                case.changed(changed)

    def forecasts(self, step: int) -> tuple[tuple[Forecast, ...], ...]:
        return tuple(tuple(case.forecast(step)) for case in self.all)


class CaseContext(Actions):
    """The model as a dynamic case sees it, and the actions that it may ask for."""

    @property
    def count(self) -> int:
        return self._store.model.layers

    @property
    def names(self) -> tuple[str, ...]:
        return self._store.model.names

    @property
    def frozen(self) -> frozenset[int]:
        return self._store.frozen.layers

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self._store.modules

    @property
    def own(self) -> list[int]:
        return sorted(self._store.layers)

    @property
    def collective(self) -> FirstReplica:
        return FirstReplica(self._store.world)

    def kept(self, layer: int) -> dict[str, Tensor]:
        return self._store.case_tensors[layer]

    def moments(self, layer: int) -> dict[str, Tensor]:
        self._pending.assert_final()
        return self._store.moments(layer)

    @property
    def spread(self) -> SpreadView | None:
        return SpreadView(self, self._store.spread) if self._store.spreads_groups else None


class SpreadView:
    """The groups of weights that replicas share, as a case sees them (`Layers.spread`)."""

    def __init__(self, actions: Actions, groups: SpreadGroups) -> None:
        self._actions, self.placements = actions, groups.placements
        self.place = groups.sharers.place

    def move(self, placements: Mapping[int, GroupPlacement]) -> int:
        return self._actions.place_groups(placements)


def agree_on_cases(world: RankGroup, cases: Sequence[Dynamism]) -> None:
    """Raises ConfigError on every rank if the ranks have other cases, or other code of a case."""
    names = [(case.name, type(case).__qualname__) for case in cases]
    parts = [*map(repr, names), *map(repr, code_of(defined_in(cases)).items())]
    difference = first_difference(world, parts, "the cases of all ranks to be compared")
    if difference is None:
        return
    index, others = difference
    mine = f" (on rank {world.everyone.rank}: {parts[index]})" if index < len(parts) else ""
    raise ConfigError(
        f"the dynamic cases are not the same on rank 0 and {ranks_text(others)}{mine}; start all "
        "ranks with the same cases from the same code"
    )


# -- the cases that a run names ---


def make_cases(cases: Sequence[CaseOptions | Dynamism], run: RunFacts) -> list[Dynamism]:
    """Makes the cases of a run: those with options in the order of their turns, then others."""
    named = {each.name: each for each in cases if isinstance(each, CaseOptions)}
    run = replace(run, cases=named)
    for problem in run.problems():
        raise ConfigError(problem)
    others = [each for each in cases if not isinstance(each, CaseOptions)]
    for each in others:
        _check(each, f"cases: {type(each).__name__}")
    in_turn = sorted(named.values(), key=lambda options: options.turn)
    ready = [*(_make(options, run) for options in in_turn), *others]
    names = [each.name for each in cases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:  # checkpoints keep a case's state by its name
        raise ConfigError(f"dynamism.cases: two are called {twice!r}; give yours another name")
    return ready


def _make(options: CaseOptions, run: RunFacts) -> Dynamism:
    # The class that names the case has it in its folder. A subclass of the user's need not.
    kind = next(each for each in type(options).__mro__ if "name" in vars(each))
    module = f"{kind.__module__.rpartition('.')[0]}.case".removeprefix(".")
    try:
        make = importlib.import_module(module).make
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cases: {kind.__name__} of {kind.__module__}: cannot import make of {module}: "
            f"{error}{place(error)}; write {module} with a function make(options, run)"
        ) from error
    return make(options, run)


def from_class(path: str) -> Dynamism:
    """Makes a case of the user's own class, `python:package.module:Class`."""
    case = find_own("dynamism.cases", path)()
    _check(case, f"dynamism.cases {path!r}")
    return case


def _check(case: object, where: str) -> None:
    """Raises ConfigError if an object is no case."""
    methods = [name for name, x in vars(Dynamism).items() if callable(x) and name[0] != "_"]
    missing = [name for name in methods if not callable(getattr(case, name, None))]
    flags = ("announces", "divides_parameters", "wants_samples")
    missing += [name for name in flags if not hasattr(case, name)]
    missing += [] if isinstance(getattr(case, "name", None), str) else ["name"]
    if missing:
        raise ConfigError(
            f"{where}: has no {missing[0]}; inherit from dynmo.Dynamism, give it a name and write "
            "act"
        )
