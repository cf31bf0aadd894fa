"""Jobs of ranks whose emulated layers take their seconds exactly, in a time of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any
from unittest import mock

from dynmo.config import parse
from dynmo.cost.layer_cost import Forecast, LayerCost, LinkCost
from dynmo.cost.readings import WINDOW
from dynmo.errors import NoRoomError, RunError
from dynmo.event_log import to_json
from dynmo.events import Event
from dynmo.pipeline import steps
from dynmo.pipeline.case import Change, Dynamism, Layers
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.batch_check import StepBatch, StepSettings
from dynmo.runtime.engine.step_reduction import StepRecord
from dynmo.runtime.state import migration
from dynmo.schedule.op import Schedule
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer
from tests.runtime.fake_time import emulated_time


class Run:
    """A training without a folder. A step takes as long as its busiest rank, and a move no time."""

    def __init__(self, world: Meeting, config: dict[str, Any]) -> None:
        loaded = parse(config)
        self._told: list[Event] = []
        self.trainer = Trainer(loaded, world, model_of(loaded), None, listen=self._told.append)
        self.pipeline = self.trainer.pipeline
        self.engine = self.pipeline._engine
        self.rebalancer = self.pipeline._changes.rebalancer
        self.engine.schedule_maker.links = {(0, 1): LinkCost(1e-4, 1e9)}

    def events(self, before: Callable[[int], object] = lambda step: None) -> list[dict[str, Any]]:
        """Returns what is told until the end. `before` is called before each step's ops."""
        train = self.engine.train
        with (
            emulated_time() as time,
            mock.patch.object(steps, "time", time),
            mock.patch.object(migration, "time", time),
        ):

            def timed(batch: StepBatch, settings: StepSettings) -> tuple[StepRecord, ...]:
                before(settings.step)
                start = time.now
                records = train(batch, settings)
                time.until(start + max(seconds for each in records for seconds in each.busy))
                return records

            self.engine.train = timed
            self.trainer.run()
        return [to_json(event) for event in self._told]

    def steps_seem_equal(self) -> None:
        observe = self.rebalancer.observe
        self.rebalancer.observe = lambda step, seconds, busy: observe(step, 0.1, busy)


def events(world: Meeting, config: dict[str, Any], fits: bool = True) -> list[dict[str, Any]]:
    """A whole run. No move finds room if `fits` is false."""
    run = Run(world, config)
    if not fits:

        def refuse(partition: Partition, schedule: str | None = None) -> migration.Migration:
            raise NoRoomError(f"{partition.counts} does not fit")

        run.rebalancer._actions.move = refuse
    return run.events()


def switching(world: Meeting, config: dict[str, Any]) -> list[dict[str, Any]]:
    """A run whose layers 1 and 2 recompute once layers have moved."""
    run = Run(world, config)

    def recompute(partition: Partition, schedule: Schedule, replicas: int) -> frozenset[int]:
        return frozenset({1, 2} if partition.counts != (3, 5) else ())

    run.engine.layouts = replace(run.engine.layouts, recompute=recompute)
    return run.events()


def misled(world: Meeting, config: dict[str, Any]) -> list[dict[str, Any]]:
    """A run of even layers.

    Every other decision takes the first rank's for slower than they are, the rest the second's.
    Every step counts as equally long.
    """
    run = Run(world, config)
    known, slow = run.engine.costs, cycle([range(4), range(4, 8)])

    def costs() -> tuple[LayerCost, ...]:
        layers = next(slow)
        return tuple(
            replace(cost, f=2.5 * cost.f) if i in layers else cost for i, cost in enumerate(known())
        )

    run.engine.costs = costs
    run.steps_seem_equal()
    return run.events()


class Hopeful(Dynamism):
    """A case whose forecast on rank 1 says that the layers which are slow now will be fast."""

    name = "hopeful"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def act(self, step: int, layers: Layers) -> Change | None:
        return None

    def forecast(self, step: int) -> Sequence[Forecast]:
        return [Forecast(step + 2, tuple(range(6)), f=0.01, b=0.01, w=0.01)] if self._rank else []


def forecasting(world: Meeting, config: dict[str, Any]) -> str:
    """A run in which rank 1's case forecasts something else than rank 0's. Returns its error."""
    run = Run(world, config)
    run.pipeline._parts.cases.append(Hopeful(world.rank))
    try:
        run.events()
    except RunError as error:
        return str(error)
    return "done"


class Told(Dynamism):
    """Says before one step that every layer's work has changed."""

    name = "told"

    def __init__(self, step: int) -> None:
        self._step = step

    def act(self, step: int, layers: Layers) -> Change | None:
        return Change(tuple(range(layers.count)), "other work") if step == self._step else None


@mock.patch("dynmo.runtime.engine.profiler.APART", WINDOW)
def slowed(
    world: Meeting, config: dict[str, Any], first: int, last: int, told: bool
) -> list[dict[str, Any]]:
    """A run whose layer 5 takes three times as long in W in the steps `first` to `last`.

    Every step counts as equally long. If `told` is true, a case announces the first of those steps.
    """
    run = Run(world, config)
    if told:
        run.pipeline._parts.cases.append(Told(first))
    run.steps_seem_equal()
    usual = config["model"]["w"]

    def slow(step: int) -> None:
        if 5 in run.pipeline.mesh.modules:
            layer: Any = run.pipeline.mesh.modules[5]
            layer.w = 3 * usual if first <= step <= last else usual

    return run.events(slow)
