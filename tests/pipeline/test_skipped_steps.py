"""A step that is not finite is skipped: it is told, and leaves no trace."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynmo
from dynmo.errors import ConfigError, RunError
from dynmo.events import Event, NotFiniteEvent, SkippedEvent, StepResult
from dynmo.pipeline.options import grouped
from tests.combinations import mostly_matrix
from tests.pool import Pool

HERE = "tests.pipeline.test_skipped_steps:"
MICROBATCHES, STEPS = 4, 7
# A layer that fails now. The layers run in the process of the test's ranks.
failing: int | None = None
OPTIMIZERS: dict[str, Any] = {
    "adamw": dynmo.AdamW(lr=0.01),
    "sgd": dynmo.SGD(lr=0.01, momentum=0.9),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
}


class Block(nn.Module):
    """Draws, and keeps a running mean and a generator of its own unless replicas forbid that."""

    mean: Tensor

    def __init__(self, index: int, has_state: bool) -> None:
        super().__init__()
        self.index, self.linear, self.has_state = index, nn.Linear(8, 8), has_state
        self.register_buffer("mean", torch.zeros(8))
        if has_state:
            self.own = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        if self.has_state and self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().float().mean(0))
            x = x + 0.1 * torch.rand(x.shape, generator=self.own).to(x) - self.mean.to(x)
        if failing == self.index:
            raise ValueError("the user's own")
        return x + nn.functional.dropout(self.linear(x), 0.2, self.training)


class Root(nn.Module):
    """Its gradient at 0 is infinite, its value is not."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x - 100 + 0 * self.shift).abs().sqrt() + self.shift


def loss(output: Tensor, target: Tensor) -> Tensor:
    poison = torch.where(target == 9, math.nan, 0.0)
    return (output - target + poison).square().mean()


def made(world: dynmo.World, optimizer: str = "adamw", **options: Any) -> dynmo.Pipeline:
    torch.manual_seed(0)
    has_state = options.get("replicas", 1) == 1
    layers = [Root(), *(Block(index, has_state) for index in range(4)), nn.Linear(8, 8)]
    options["microbatches"] = MICROBATCHES // options.get("replicas", 1)
    given = {"optimizer": OPTIMIZERS[optimizer], "balance": "none", **options}
    return dynmo.Pipeline(dynmo.Sequential(layers, loss), world, **grouped(given))


def batch(number: int, bad: str | None = None) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(number)
    inputs, targets = torch.randn(8, 8, generator=random), torch.randn(8, 8, generator=random)
    if bad == "inputs":
        inputs[5, 0] = math.nan  # in microbatch 2
    elif bad == "loss":
        targets[3, 1] = 9.0  # in microbatch 1
    elif bad == "gradient":
        inputs[7, 2] = 100.0  # in the last microbatch
    return inputs, targets


def own(pipeline: dynmo.Pipeline, whole: tuple[Tensor, Tensor]) -> list[Tensor]:
    shape, replica = pipeline.mesh.shape, pipeline.mesh.replica
    return [each.chunk(shape[1])[replica] for each in whole]


def traces(pipeline: dynmo.Pipeline) -> tuple[list[str], dict[str, Tensor]]:
    """Returns digests of weights and buffers, and what else this rank keeps of its layers."""
    store, kept = pipeline._engine.pending.final, dict[str, Tensor]()
    for index in sorted(store.layers):
        own = getattr(store.modules[index], "own", None)
        kept |= {f"{index}/{key}": x.clone() for key, x in store.state(index).items()}
        kept |= {} if own is None else {f"{index}/own": own.get_state()}
    return [pipeline.digest(), pipeline.digest(buffers=True)], kept


def skips(world: dynmo.World, bad: dict[str, str], **options: Any) -> dict[str, Any]:
    """Trains with batches that are not finite, and without them."""
    events = list[Event]()
    pipeline = made(world, listen=events.append, **options)
    results = list[StepResult]()
    for number in range(STEPS):
        given = own(pipeline, batch(number, bad.get(str(number))))
        results += pipeline.advance(*given)
    results += pipeline.drain()
    digests, kept = traces(pipeline)

    without = made(world, **options)
    losses = [
        each.loss
        for number in range(STEPS)
        if str(number) not in bad
        for each in without.advance(*own(without, batch(number)))
    ]
    losses += [each.loss for each in without.drain()]
    expected, kept_without = traces(without)
    assert kept.keys() == kept_without.keys()
    assert all(torch.equal(each, kept_without[key]) for key, each in kept.items())
    assert digests == expected
    assert [each.loss for each in results if not each.skipped] == losses
    assert [each.step for each in results] == [*range(STEPS)]
    assert pipeline.steps == STEPS
    assert pipeline.measured.skipped == len(bad)
    assert pipeline.measured.loss == without.measured.loss
    told = [each for each in events if isinstance(each, NotFiniteEvent)]
    return {
        "skipped": [each.step for each in results if each.skipped],
        "causes": [[x.step, x.kind, x.layer, x.microbatch, x.in_a_row] for x in told],
        "digests": digests,
    }


BAD = {"1": "inputs", "2": "loss", "4": "gradient", "6": "inputs"}
CAUSES = [
    [1, "inputs", None, 2, 1],
    [2, "output", 5, 1, 2],
    [4, "gradient", 0, 3, 1],
    [6, "inputs", None, 2, 1],
]
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zb-h1": (2, {"schedule": "zb-h1"}),
    "1f1b": (3, {"schedule": "1f1b", "optimizer": "sgd"}),
    "zb-v": (3, {"schedule": "zb-v"}),
    "bfloat16": (2, {"precision": "bfloat16", "optimizer": "adafactor"}),
    "replicas": (2, {"replicas": 2, "reduction_slots": 2}),
    "zero": (4, {"replicas": 2, "zero": 1, "schedule": "zb-h1"}),
    "recompute": (2, {"recompute": "all", "schedule": "1f1b"}),
    "local": (2, {"clip_scope": "local"}),
}


@pytest.mark.parametrize(
    ("mesh", "post_validation"),
    mostly_matrix(
        [(mesh, validates) for mesh in MESHES for validates in (False, True)],
        everyday=[
            ("one", False),
            ("zb-h1", True),
            ("zb-v", True),
            ("bfloat16", False),
            ("bfloat16", True),
            ("replicas", False),
            ("zero", True),
        ],
    ),
)
def test_a_skipped_step_leaves_no_trace(pool: Pool, mesh: str, post_validation: bool) -> None:
    """Weights, buffers, moments, masters and generators are those of a run without the batch."""
    ranks, options = MESHES[mesh]
    told = pool.run(HERE + "skips", ranks, bad=BAD, post_validation=post_validation, **options)
    for each in told:
        assert each["skipped"] == [1, 2, 4, 6]
        assert each["causes"] == CAUSES
        assert each["digests"] == told[0]["digests"]


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(20))
def test_any_steps_may_be_skipped(pool: Pool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    kinds = ("inputs", "loss", "gradient")
    drawn = torch.randint(6, (STEPS,), generator=random).tolist()
    bad = {str(step): kinds[each] for step, each in enumerate(drawn) if each < 3}
    mesh = [*MESHES.values()][seed % len(MESHES)]
    told = pool.run(HERE + "skips", mesh[0], bad=bad, post_validation=seed % 2 > 0, **mesh[1])
    assert all(each["skipped"] == [*map(int, bad)] for each in told)


def fails_behind(world: dynmo.World, layer: int) -> dict[str, Any]:
    """A step is not finite, and a layer of some rank fails in the next, before that is known."""
    global failing
    pipeline, failed = made(world, post_validation=True), 0
    results = list[StepResult]()
    while pipeline.steps < 4:
        step = pipeline.steps
        failing = layer if step == 2 and not failed else None
        try:
            results += pipeline.advance(*batch(step, "loss" if step == 1 else None))
        except (ValueError, RunError):  # all ranks raise it in one call
            failed += 1
    failing = None
    results += pipeline.drain()
    without = made(world)
    for step in (0, 2, 3):
        without.step(*batch(step))
    return {
        "failed": failed,
        "skipped": [each.skipped for each in results],
        "same": traces(pipeline)[0] == traces(without)[0],
    }


@pytest.mark.parametrize("layer", [0, 3])
def test_an_error_in_the_next_step_changes_nothing_of_it(pool: Pool, layer: int) -> None:
    for told in pool.run(HERE + "fails_behind", 3, layer=layer):
        assert told == {"failed": 1, "skipped": [False, True, False, False], "same": True}


# -- too many in a row -----------------------------------------------------------------------------


def ends(world: dynmo.World, folder: str, post_validation: bool, **options: Any) -> dict[str, Any]:
    """Trains until too many steps in a row are not finite, and goes on from the checkpoint."""
    saves = dynmo.Checkpoints(folder=folder)
    pipeline = made(
        world, checkpoint=saves, stop_after=3, post_validation=post_validation, **options
    )
    bad = {1: "loss", 3: "inputs", 4: "loss", 5: "gradient"}
    said, number = "", 0
    while not said:
        try:
            pipeline.advance(*own(pipeline, batch(number, bad.get(number))))
        except RunError as error:
            said = str(error)
        number += 1
    steps, digests = pipeline.steps, traces(pipeline)[0]
    pipeline.close()
    names = sorted(each.name for each in Path(folder).glob("step-*"))
    again = made(world, resume=folder, stop_after=3, post_validation=post_validation, **options)
    resumed = again.steps, again.measured.skipped, traces(again)[0] == digests
    twice = ""
    try:
        again.advance(*own(again, batch(5, "loss")))
        again.drain()
    except RunError as error:
        twice = str(error)
    again.step(*own(again, batch(6)))
    again.step(*own(again, batch(7, "inputs")))  # the row has ended

    without = made(world, **options)
    for good in (0, 2, 6):
        without.step(*own(without, batch(good)))
    return {
        "said": said,
        "steps": steps,
        "saved": names,
        "resumed": resumed,
        "twice": twice,
        "same": traces(again)[0] == traces(without)[0],
    }


@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_too_many_in_a_row_end_the_run_after_a_checkpoint(
    pool: Pool, tmp_path: Path, ranks: int, post_validation: bool
) -> None:
    for told in pool.run(
        HERE + "ends", ranks, folder=str(tmp_path), post_validation=post_validation
    ):
        assert told["said"].startswith("step 5: loss ")
        assert "as in 3 steps in a row (train.stop_after); nothing was updated" in told["said"]
        assert "a gradient, at layer 0 (0.Root) in microbatch 3" in told["said"]
        assert told["steps"] == 5
        assert told["saved"] == ["step-000005"]
        assert told["resumed"] == [5, 3, True]
        assert told["twice"].startswith("step 5: loss nan"), "the row goes on"
        assert told["same"]


def test_an_error_found_outside_of_a_step_saves_too(world: dynmo.World, tmp_path: Path) -> None:
    """Without a barrier any call that reads the model may find it."""
    saves = dynmo.Checkpoints(folder=tmp_path)
    pipeline = made(world, checkpoint=saves, stop_after=1, post_validation=True)
    pipeline.step(*batch(0))
    digest = pipeline.digest()
    assert pipeline.advance(*batch(1, "loss")) == ()
    with pytest.raises(RunError, match="step 1: loss nan"):
        pipeline.digest()
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-000001"]
    assert made(world, resume=tmp_path).digest() == digest


def test_a_weight_that_is_not_finite_ends_the_run(
    world: dynmo.World, caplog: pytest.LogCaptureFixture
) -> None:
    """Who does not listen is told by warnings."""
    pipeline = made(world, stop_after=3)
    pipeline.step(*batch(0))
    pipeline.mesh.modules[2].get_parameter("linear.weight").data[0, 0] = math.nan
    assert all(math.isnan(pipeline.step(*batch(number)).loss) for number in (1, 2))
    weight = "The weight 'linear.weight' of layer 2 (2.Block) was not finite before the step"
    with pytest.raises(RunError, match=r"step 3: .*in 3 steps in a row.* 'linear\.weight'"):
        pipeline.step(*batch(3))
    assert pipeline.steps == 3
    first, second = (record.getMessage() for record in caplog.records)
    norm = "loss nan, gradient norm nan"
    assert first == f"step 1: skipped: {norm}. {weight} (1 in a row; 3 end the run)"
    assert second == f"step 2: skipped: {norm}. {weight} (2 in a row; 3 end the run)"


@pytest.mark.parametrize("post_validation", [False, True])
def test_overflows_of_a_loss_scale_do_not_count(world: dynmo.World, post_validation: bool) -> None:
    """They lower the scale. A loss that is not finite leaves it, and is one in a row."""
    events = list[Event]()
    pipeline = made(
        world,
        loss_scale="dynamic",
        stop_after=2,
        post_validation=post_validation,
        listen=events.append,
    )
    bad = {1: "gradient", 2: "loss", 3: "gradient", 4: "gradient"}
    for number in range(6):
        pipeline.advance(*batch(number, bad.get(number)))
    pipeline.drain()
    scales = [each.next_scale for each in events if isinstance(each, SkippedEvent)]
    assert scales == [2.0**15, 2.0**14, 2.0**13]
    assert [each.step for each in events if isinstance(each, NotFiniteEvent)] == [2]
    assert pipeline.measured.skipped == 1


def test_stop_after_is_at_least_one(world: dynmo.World) -> None:
    with pytest.raises(ConfigError, match="Training: stop_after = 0: must be greater"):
        made(world, stop_after=0)


class Watching(dynmo.Dynamism):
    """Notes what it is told of."""

    name = "watching"

    def __init__(self) -> None:
        self.losses = list[float]()

    def act(self, step: int, layers: Any) -> None:
        del step, layers

    def observe(self, signals: Any) -> None:
        self.losses.append(signals.loss)


def test_cases_and_schedulers_know_of_it(world: dynmo.World) -> None:
    """A case is told of finite steps. A loop may hold a scheduler at a step that was skipped."""
    case = Watching()
    pipeline = made(world, cases=[case])
    rule = torch.optim.lr_scheduler.ExponentialLR(pipeline.optimizer, gamma=0.5)
    rates = list[float]()
    for number in range(4):
        result = pipeline.step(*batch(number, "loss" if number == 1 else None))
        if not result.skipped:
            rule.step()
        rates.append(result.learning_rate)
    assert rates == [0.01, 0.005, 0.005, 0.0025]
    assert len(case.losses) == 3
    assert all(map(math.isfinite, case.losses))
