"""`dynmo.Pipeline`: batches, learning rates, freezing, saving and refused input."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dynmo
from dynmo.config import parse
from dynmo.errors import CheckpointError, ConfigError, InputError, PartitionError, RunError
from dynmo.pipeline.case import TokenShares
from dynmo.pipeline.options import grouped
from dynmo.pipeline.user_calls import MOVED
from dynmo.train.setup import model_of
from tests.cases.kept import cases_of
from tests.pipeline import jobs
from tests.pipeline.jobs import batch, layers, lengths, odd_layers
from tests.pool import Pool

JOBS = "tests.pipeline.jobs:"
make = partial(jobs.make, schedule="1f1b")


def train(pipeline: dynmo.Pipeline, steps: int) -> list[float]:
    return [pipeline.step(*batch(step)).loss for step in range(pipeline.steps, steps)]


def test_reprs_are_one_short_line(world: dynmo.World) -> None:
    pipeline = make(world)
    counts = f"{pipeline.mesh.microbatches} microbatches"
    layers = f"{pipeline.mesh.partition.layers} layers"
    assert repr(pipeline) == f"Pipeline({layers} on 1 rank, 1f1b, {counts}, step 0)"
    assert repr(pipeline.mesh.schedule) == f"Schedule(1f1b, 1 rank, {counts})"
    assert repr(world) == "World(rank 0 of 1, cpu)"
    sampler = pipeline.sampler(range(10), 4)
    assert repr(sampler) == "ReplicaSampler(10 samples, 4 a step, shuffled, epoch 0)"


def test_losses_match_a_plain_torch_loop(world: dynmo.World) -> None:
    """The plain loop uses clipping and a learning-rate scheduler."""
    own = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    sgd = dynmo.SGD(lr=0.1, momentum=0.9, weight_decay=0.0)
    pipeline = make(world, optimizer=sgd, max_grad_norm=0.5)
    ours = torch.optim.lr_scheduler.ExponentialLR(pipeline.optimizer, 0.5)
    for step in range(6):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(own(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(own.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        result = pipeline.step(inputs, targets)
        ours.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert pipeline.steps == 6
    assert pipeline.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_the_given_modules_are_trained(world: dynmo.World) -> None:
    modules = layers()
    before = modules[0].get_parameter("weight").detach().clone()
    pipeline = make(world, modules)
    pipeline.step(*batch(0))
    assert pipeline.mesh.modules[0] is modules[0]
    assert not torch.equal(modules[0].get_parameter("weight"), before)


def test_factories_give_the_same_layers_for_a_seed(world: dynmo.World) -> None:
    def digest(seed: int) -> str:
        factories = [lambda: nn.Linear(4, 8), lambda: nn.Linear(8, 3)]
        model = dynmo.Sequential(factories, loss=nn.functional.mse_loss, seed=seed)
        return dynmo.Pipeline(model, world, microbatches=2).digest()

    assert digest(0) == digest(0) != digest(1)


def test_evaluation_is_the_mean_loss_and_changes_no_weight(world: dynmo.World) -> None:
    pipeline = make(world)
    before = pipeline.digest()
    inputs, targets = batch(0)
    expected = nn.functional.mse_loss(nn.Sequential(*layers())(inputs), targets).item()
    assert pipeline.evaluate(inputs, targets) == pytest.approx(expected, rel=1e-6)
    assert pipeline.digest() == before


@pytest.mark.parametrize("options", [{}, {"optimizer": dynmo.SGD()}, {"precision": "bfloat16"}])
def test_loaded_run_ends_like_an_uninterrupted_run(
    world: dynmo.World, tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = make(world, **options)
    train(whole, 8)
    first = make(world, **options)
    train(first, 4)
    first.freeze([0])
    first.unfreeze([0])
    first.optimizer.param_groups[0]["lr"] *= 1.0
    assert first.save(tmp_path).name == "step-000004"
    second = make(world, **options)
    assert second.load(tmp_path) == 4
    train(second, 8)
    assert second.digest() == whole.digest()


def test_a_scheduler_that_holds_infinity_goes_on(world: dynmo.World, tmp_path: Path) -> None:
    first = make(world)
    rate = torch.optim.lr_scheduler.ReduceLROnPlateau(first.optimizer)
    first.save(tmp_path, extra={"rate": rate.state_dict()})
    second = make(world)
    second.load(tmp_path)
    assert second.extra["rate"] == rate.state_dict()
    assert rate.best == math.inf


def test_frozen_layers_and_the_learning_rate_are_saved(world: dynmo.World, tmp_path: Path) -> None:
    first = make(world)
    train(first, 2)
    first.freeze([0])
    first.optimizer.param_groups[0]["lr"] = 0.5
    first.save(tmp_path)
    second = make(world)
    second.load(tmp_path)
    assert second.optimizer.param_groups[0]["lr"] == 0.5
    before = second.mesh.modules[0].get_parameter("weight").clone()
    second.step(*batch(2))
    assert torch.equal(second.mesh.modules[0].get_parameter("weight"), before)


def test_names_of_the_version_before_are_read_with_a_warning(world: dynmo.World) -> None:
    pipeline: Any = make(world, balance="none")
    for name, place in MOVED.items():
        with pytest.warns(FutureWarning, match=re.escape(f"Pipeline.{place} now")):
            old = getattr(pipeline, name)
        new = attrgetter(place.split("(")[0])(pipeline)
        assert old == new or callable(old) or math.isnan(old)
    with pytest.warns(FutureWarning, match="buffers_digest"):
        assert pipeline.buffers_digest() == pipeline.digest(buffers=True)
    result: Any = pipeline.step(*batch(0))
    for old, new in (("norm", "gradient_norm"), ("rate", "learning_rate")):
        with pytest.warns(FutureWarning, match=new):
            assert getattr(result, old) == getattr(result, new)
    with pytest.warns(FutureWarning, match="gradient_norm"):
        assert math.isnan(replace(result, gradient_norm=None).norm)
    with pytest.raises(AttributeError, match="Pipeline has no placement"):
        _ = pipeline.placement
    with pytest.warns(FutureWarning, match="no tuple"):
        loss, outputs = pipeline.evaluate(*batch(0), outputs=True)
    found = pipeline.evaluate(*batch(0), outputs=True)
    assert loss == found == found.loss
    given: Any = {"max_grad_norm": 0.5, "clip_scope": "local"}
    model = dynmo.Sequential(layers())
    with pytest.warns(FutureWarning, match=r"\(max_grad_norm=\) is training=dynmo\.Training\(max"):
        former = dynmo.Pipeline(model, world, microbatches=2, schedule="1f1b", **given)
    assert (former.options.max_grad_norm, former.options.clip_scope) == (0.5, "local")
    assert torch.equal(outputs, found.outputs)
    wrong: Any = {"zero": 1, "parallel": 2}
    with (
        pytest.warns(FutureWarning, match="parallel"),
        pytest.raises(ConfigError, match=r"parallel is an object of int; give dynmo\.Par"),
    ):
        dynmo.Pipeline(model, world, microbatches=2, **wrong)


def test_views_that_a_loop_keeps_are_up_to_date(world: dynmo.World, tmp_path: Path) -> None:
    pipeline = make(world, balance="none")
    measured = pipeline.measured
    assert math.isnan(measured.loss)
    first = pipeline.step(*batch(0)).loss
    assert measured.loss == first
    pipeline.save(tmp_path)
    assert measured.loss == first != pipeline.step(*batch(1)).loss == measured.loss
    pipeline.load(tmp_path)
    assert measured.loss == first
    assert measured.loss != pipeline.step(*batch(1)).loss == measured.loss


@pytest.mark.parametrize(
    ("member", "given", "reason"),
    [
        ("move", {"partition": "a"}, "partition = 'a'; give a list of whole numbers"),
        ("move", {"partition": 3}, "partition = 3; give a list"),
        ("freeze", {"layers": 1}, "layers = 1; give a list"),
        ("unfreeze", {"layers": [0.5]}, r"layers = \[0.5\]; give a list"),
        ("evaluate", {"metrics": 3}, "metrics = 3; give a function"),
        ("step", {"metrics": 3}, "Pipeline.step has no metrics; its arguments are inputs, "),
    ],
)
def test_wrong_values_of_a_call_are_named(
    world: dynmo.World, member: str, given: dict[str, Any], reason: str
) -> None:
    with pytest.raises((ConfigError, InputError), match=reason):
        getattr(make(world), member)(**given)


def test_a_schedule_without_a_placement_is_no_decision(world: dynmo.World) -> None:
    pipeline = make(world)
    with pytest.raises(ConfigError, match="schedule"):
        pipeline.move(schedule="zb-auto")


def test_a_dropped_pipeline_frees_its_weights_at_once(world: dynmo.World) -> None:
    """No cycle of references keeps them until a collection of garbage."""
    pipeline = make(world, cases=[dynmo.Freezing()], elastic=dynmo.Elastic(), trace=1)
    pipeline.step(*batch(0))
    pipeline.evaluate(*batch(0))
    pipeline.close()
    store = pipeline._engine.store
    parts = [*store.layers.values(), *store.optimizers.values(), pipeline, store]
    kept = [weakref.ref(part) for part in parts]
    gc.disable()
    del pipeline, store, parts
    assert not any(each() for each in kept)


def test_a_failed_step_loses_no_result_of_the_step_before(world: dynmo.World) -> None:
    """Post-validation has ended, and a call has waited for the last step without a barrier."""
    training = dynmo.Training(post_validation=True, max_grad_norm=1e-6, stop_after=1)
    pipeline = make(world, balance="none", training=training)
    inputs, targets = batch(0)
    results = [each for _ in range(6) for each in pipeline.advance(inputs, targets)]
    pipeline.digest()
    with pytest.raises(RunError, match="step 6: loss nan"):
        pipeline.advance(inputs * math.nan, targets, adapt=False)
    results += pipeline.advance(inputs, targets, adapt=False)
    assert [each.step for each in results] == [*range(7)]


def test_manual_rebalance_on_one_rank_moves_no_layer(world: dynmo.World) -> None:
    pipeline = make(world, balance="none")
    with pytest.raises(RunError, match="move was called without"):
        pipeline.move()
    train(pipeline, 3)
    assert not pipeline.move()  # one rank
    assert all(cost.seconds > 0 for cost in pipeline.measured.costs())
    assert pipeline.mesh.schedule.microbatches == 4
    pipeline.move([4])
    assert pipeline.mesh.partition == dynmo.Partition((4,))


@pytest.mark.parametrize(
    ("inputs", "given"),
    [
        (torch.zeros(6, 4), r"shape \[6, 4\]"),
        (torch.zeros(0, 4), r"shape \[0, 4\]"),
        (torch.tensor(1.0), r"shape \[\]"),
        ([1.0], "list"),
        (None, "None, .*rank 0"),
    ],
)
def test_batch_that_cannot_be_split_is_refused(world: dynmo.World, inputs: Any, given: str) -> None:
    with pytest.raises(InputError, match=f"inputs is .*{given}"):
        make(world).step(inputs, torch.zeros(8, 3))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"balance": "always"}, 'balancer = "always"'),
        ({"precision": "float8"}, 'dynmo.Pipeline: precision = "float8"'),
        ({"schedule": "zb"}, 'schedule = "zb"'),
        ({"replicas": 2}, "2 replicas"),
    ],
)
def test_wrong_options_are_refused(world: dynmo.World, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        make(world, **options)


def test_result_is_a_short_line_and_knows_a_wish_to_stop(world: dynmo.World) -> None:
    pipeline = make(world)
    result = pipeline.step(*batch(0))
    short = r"StepResult\(step=0, loss=\d\.\d+, gradient_norm=\d\.\d+, idle_ratio=0\.\d+\)"
    assert re.fullmatch(short, str(result))
    assert not result.stop
    assert pipeline.step(*batch(1), stop=True).stop


def test_further_groups_and_options_of_the_optimizer_are_refused(world: dynmo.World) -> None:
    pipeline = make(world)
    before, optimizer = pipeline.digest(), pipeline.optimizer
    with pytest.raises(ConfigError, match="takes no other"):
        optimizer.add_param_group({"params": [torch.zeros(1)], "lr": 0.1})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["momentum"] = 0.0
    says = r"pipeline.optimizer: 'momentum' .* knows betas, eps, lr"
    with pytest.raises(ConfigError, match=says):
        pipeline.step(*batch(0))
    assert pipeline.digest() == before


def test_invalid_layer_lists_are_refused() -> None:
    for wrong in ([], [nn.Linear(1, 1), lambda: nn.Linear(1, 1)], [1]):
        with pytest.raises(ConfigError, match="Sequential"):
            dynmo.Sequential(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"4 layers, but 1 names"):
        dynmo.Sequential(layers(), names=["a"])


def test_foreign_checkpoints_are_refused(world: dynmo.World, tmp_path: Path) -> None:
    pipeline = make(world)
    with pytest.raises(CheckpointError):
        pipeline.load(tmp_path)
    train(pipeline, 1)
    pipeline.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"'adamw', .*'sgd'"):
        make(world, optimizer=dynmo.SGD()).load(tmp_path)
    with pytest.raises(CheckpointError, match=r"4 layers, this one has 3"):
        make(world, layers()[:3]).load(tmp_path)


def test_all_layers_cannot_freeze(world: dynmo.World) -> None:
    with pytest.raises(PartitionError, match="would leave nothing to train"):
        make(world).freeze(range(4))


# -- several ranks -----------------------------------------------------------------------------


def test_ranks_without_data_pass_none(pool: Pool) -> None:
    """Three ranks train the same as one rank. The middle rank has no data."""
    (alone,) = pool.run(JOBS + "train", 1)
    rows = pool.run(JOBS + "train", 3)
    assert [row.pop("layers") for row in rows] == [[0, 1], [2], [3]]
    del alone["layers"]
    assert rows == [alone] * 3


def test_each_replica_passes_its_own_share_of_the_batch(pool: Pool) -> None:
    """Replicas add gradients in two groups: they agree with one rank only closely."""
    (alone,) = pool.run(JOBS + "train", 1)
    rows = pool.run(JOBS + "train", 4, replicas=2)
    assert len({row["weights"] for row in rows}) == 1
    for row in rows:
        assert row["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert row["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)


def test_modules_with_different_weights_per_rank_are_refused(pool: Pool) -> None:
    for message in pool.run(JOBS + "seeded_otherwise", 2):
        assert "torch.manual_seed" in message


@pytest.mark.parametrize(
    ("by", "replicas", "named"),
    [
        ("rank", 1, "ranks 0, 1, 2, 3 passed different inputs and targets;"),
        ("targets", 1, "ranks 0, 1, 2, 3 passed different targets;"),
        ("middle", 1, "ranks 0, 1, 2, 3 passed different inputs and targets;"),
        ("rank", 2, "ranks 0, 2 of replica 0 passed different inputs and targets;"),
    ],
)
def test_ranks_of_a_replica_with_different_batches_are_refused(
    pool: Pool, by: str, replicas: int, named: str
) -> None:
    """A step changes no weight then, and the loop can go on with one batch."""
    rows = pool.run(JOBS + "sharded", 4, by=by, replicas=replicas)
    for row in rows:
        begins = [error.partition(named)[0] for error in row["errors"]]
        assert begins == ["step 1: ", "the evaluation: "]
        assert row["digests"][0] == row["digests"][1]
        assert row["loss"] == rows[0]["loss"]


def test_replicas_may_pass_different_batches(pool: Pool) -> None:
    for row in pool.run(JOBS + "sharded", 4, by="replica", replicas=2):
        assert row["errors"] == []
        assert row["digests"][0] != row["digests"][1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizer": "adamw"}, "optimizer is an object of str; give dynmo.AdamW"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "functools.partial.SGD, lr=...."),
        ({"model": nn.Sequential(*layers())}, r"wrap the list of its layers in dynmo.Sequential"),
        (
            {"model": SimpleNamespace(save_pretrained=None)},
            r"from_pretrained\(folder\)",
        ),
        ({"learning_rate": 1e-3}, r"give dynmo.LearningRate\(.*, and the peak to the optimizer"),
        ({"world": None}, r"world is an object of NoneType; give what dynmo.init\(\) returns"),
        ({"balance": dynmo.Balance(initial=(2, 2))}, r"Balance.initial has 2 entries, .* = 1"),
    ],
)
def test_arguments_of_another_kind_are_refused(
    world: dynmo.World, changes: dict[str, Any], reason: str
) -> None:
    model = dynmo.Sequential(layers(), loss=nn.functional.mse_loss)
    given: dict[str, Any] = {"model": model, "world": world, "microbatches": 2}
    with pytest.raises(ConfigError, match=reason) as refused:
        dynmo.Pipeline(**grouped(given | changes))
    assert "\n" not in str(refused.value)


def test_odd_layers_and_lengths_train_as_in_torch_on_any_ranks(pool: Pool) -> None:
    """Layers of no width, the older weight norm, and steps of other lengths."""
    own = nn.Sequential(*odd_layers())
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    for step in [*range(6)] * 2:
        ids, targets = lengths(step)
        optimizer.zero_grad()
        loss = dynmo.next_token_loss(own(ids), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    (alone,) = pool.run(JOBS + "train_odd_layers", 1)
    assert alone["losses"] == pytest.approx(losses, rel=1e-5)
    assert pool.run(JOBS + "train_odd_layers", 2) == [alone] * 2


def test_first_placement_of_the_balance_is_used(pool: Pool) -> None:
    assert pool.run(JOBS + "first_placement", 2) == [[3, 1]] * 2


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {}), (2, {}), (2, {"post_validation": True}), (2, {"replicas": 2})]
)
def test_batch_without_a_counted_target_is_refused(
    pool: Pool, ranks: int, options: dict[str, Any]
) -> None:
    rows = pool.run(JOBS + "uncounted", ranks, **options)
    assert rows == [rows[0]] * ranks
    *told, unchanged = rows[0]
    assert all("no target of the whole batch is counted" in x for x in told)
    assert told[0].startswith("step 0: ")
    assert unchanged


class Counts(dynmo.Dynamism):
    """Notes the order of its calls, and says before step 1 that a layer has changed."""

    name = "counts"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def collect(self, step: int, layers: dynmo.Layers) -> TokenShares | None:
        self.calls.append(f"collect {step}")
        return TokenShares((0,), {"seen": [float(step)]}) if step else None

    def act(self, step: int, layers: dynmo.Layers) -> dynmo.Change | None:
        self.calls.append(f"act {step}")
        return dynmo.Change((1,), "changed") if step == 1 else None

    def observe(self, signals: Any) -> None:
        self.calls.append(f"observe {signals.step}")

    def state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]

    @contextmanager
    def dense(self, layers: dynmo.Layers) -> Iterator[None]:
        self.calls.append("dense")
        yield
        self.calls.append("sparse")


def test_cases_act_are_saved_and_are_switched_off_for_an_evaluation(
    world: dynmo.World, tmp_path: Path
) -> None:
    case, later = Counts(), Counts()
    pipeline = make(world, cases=[case])
    train(pipeline, 2)
    calls = [f"{call} {step}" for step in range(2) for call in ("collect", "act", "observe")]
    assert case.calls == calls
    assert pipeline.cases.token_shares["counts"].shares == {"seen": [1.0]}
    pipeline.save(tmp_path)
    make(world, cases=[later]).load(tmp_path)
    assert later.calls == calls
    assert pipeline.evaluate(*batch(0), dense=True) == pipeline.evaluate(*batch(0))
    assert case.calls[6:] == ["dense", "sparse"]


def test_experts_are_counted(world: dynmo.World) -> None:
    """The load of the experts is known in a loop of one's own too."""
    config = parse(
        {
            "model": {"kind": "moe", "blocks": 1, "hidden": 8, "heads": 2, "sequence": 8},
            "dynamism": {"cases": ["experts"], "experts": {"record_every": 1}},
        }
    )
    model = model_of(config)
    cases = cases_of(config, model.layers)
    pipeline = dynmo.Pipeline(model, world, microbatches=2, cases=cases)
    ids = torch.randint(config.model.vocab, (4, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        pipeline.step(ids, ids)
    (hottest,) = pipeline.cases.token_shares["experts"].shares["hottest expert"]
    assert hottest > 0


def test_mesh_of_a_loop_changes_and_the_loop_is_told(pool: Pool) -> None:
    (alone,) = pool.run(JOBS + "reshaped", 1)
    rows = pool.run(JOBS + "reshaped", 2)
    for row in rows:
        assert row["shapes"] == [[2, 1]] * 2 + [[1, 2]] * 3
        assert (row["losses"], row["digest"]) == (alone["losses"], alone["digest"])
        changes = [name for name in row["events"] if name in ("reshape", "change")]
        assert changes == ["reshape", "change"]
    assert alone["events"] == ["step"] * 3 + ["change"] + ["step"] * 2


def test_checkpoint_is_loaded_while_a_step_is_not_final(world: dynmo.World, tmp_path: Path) -> None:
    pipeline = make(world, post_validation=True)
    pipeline.advance(*batch(0))
    pipeline.save(tmp_path)
    wanted = pipeline.step(*batch(1)).loss
    pipeline.advance(*batch(2))
    assert pipeline.load(tmp_path) == 1
    results = pipeline.advance(*batch(1)) + pipeline.drain()
    assert [(result.step, result.loss) for result in results] == [(1, wanted)]


def test_layers_recompute_without_a_memory_limit(world: dynmo.World) -> None:
    assert make(world, recompute="all")._engine.store.layout.recomputed == {0, 1, 2, 3}


def test_learning_rate_follows_the_steps(world: dynmo.World) -> None:
    rule = dynmo.LearningRate(warmup=2, decay="linear", min_lr_ratio=0.0)
    pipeline = make(world, optimizer=dynmo.AdamW(lr=0.1), learning_rate=rule, steps=5)
    rates = [pipeline.step(*batch(step)).learning_rate for step in range(5)]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05, 0.0])
    with pytest.raises(ConfigError, match="steps"):
        make(world, learning_rate=rule)


def test_pruning_without_a_known_end_names_what_is_missing(world: dynmo.World) -> None:
    with pytest.raises(ConfigError, match="give start and end"):
        make(world, cases=[dynmo.Pruning()])
    assert make(world, cases=[dynmo.Pruning()], steps=20).steps == 0
