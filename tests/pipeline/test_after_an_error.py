"""After an error the loop goes on as if the failed step had never been tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynmo
from dynmo.pipeline.options import grouped
from tests.pool import Pool

HERE = "tests.pipeline.test_after_an_error:"
HOWS = ("one", "all", "backward", "loss", "targets", "rows", "nan", "evaluate")
# What fails now. The layers run in the process of the test's ranks.
broken = ""


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return args[0].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if broken == "backward":
            raise ValueError("the user's own")
        return grad_outputs[0]


class Block(nn.Module):
    """Writes to a buffer before it fails."""

    def __init__(self, index: int, writes: bool) -> None:
        super().__init__()
        self.index, self.writes, self.linear = index, writes, nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.writes and self.training:
            self.count += 1
        if broken == "exit" and self.index == 2:
            raise SystemExit(7)
        if broken == "all" or (broken in ("one", "evaluate") and self.index == 2):
            raise ValueError("the user's own")
        return x + nn.functional.dropout(self.linear(_Backward.apply(x)), 0.2, self.training)


def loss(out: Tensor, target: Tensor) -> Tensor:
    if broken == "loss":
        raise ValueError("the user's own")
    return nn.functional.mse_loss(out, target) * (float("nan") if broken == "nan" else 1.0)


def made(world: dynmo.World, options: dict[str, Any]) -> tuple[Any, Any]:
    """A pipeline, and a function that makes another over the same layers."""
    torch.manual_seed(0)
    layers = [Block(index, "replicas" not in options) for index in range(4)]

    def make(**more: Any) -> Any:
        model = dynmo.Sequential(layers, loss)
        given = {"microbatches": 4, "balance": "none", "stop_after": 1, **options, **more}
        return dynmo.Pipeline(model, world, **grouped(given))

    return make(), make


def batch(pipeline: Any, number: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(number)
    inputs = torch.randn(16, 8, generator=random).chunk(pipeline.mesh.shape[1])[
        pipeline.mesh.replica
    ]
    return inputs[:rows], torch.zeros_like(inputs)[:rows]


def goes_on(
    world: dynmo.World, options: dict[str, Any], hows: list[str], folder: str
) -> dict[str, Any]:
    global broken
    pipeline, make = made(world, options)
    losses, errors = [pipeline.step(*batch(pipeline, 0)).loss], list[str]()
    pipeline.save(folder)
    for number, how in enumerate(HOWS, 1):
        if how in hows:
            broken = how
            inputs, targets = batch(pipeline, number, 7 if how == "rows" else 16)
            call = pipeline.evaluate if how == "evaluate" else pipeline.step
            try:
                call(inputs, None if how == "targets" else targets)
            except Exception as error:
                errors.append(f"{how}: {type(error).__name__}")
            broken = ""
        match number % 4:
            case 1:
                pipeline.load(folder)
            case 2:
                losses.append(pipeline.evaluate(*batch(pipeline, 9)))
            case 3:
                pipeline = make(resume=folder)
            case _:
                pass
        losses.append(pipeline.step(*batch(pipeline, number)).loss)
    digests = pipeline.digest(), pipeline.digest(buffers=True)
    return {"errors": errors, "told": [losses, pipeline.steps, digests]}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.matrix),
        pytest.param(2, {}, marks=pytest.mark.matrix),
        pytest.param(3, {"schedule": "zb-h1", "reduction_slots": 2}, marks=pytest.mark.matrix),
        pytest.param(3, {"post_validation": True}, marks=pytest.mark.matrix),
        (4, {"microbatches": 2, "replicas": 2, "zero": 1}),
    ],
)
def test_any_call_works_after_any_error(
    pool: Pool, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    def run(hows: tuple[str, ...]) -> list[Any]:
        folder = str(tmp_path / f"{len(hows)}")
        return pool.run(HERE + "goes_on", ranks, options=options, hows=hows, folder=folder)

    right, told = run(())[0]["told"], run(HOWS)
    for each in told:
        assert each["told"] == right
        assert [error.partition(":")[0] for error in each["errors"]] == list(HOWS)
    assert len({error for each in told for error in each["errors"] if "ValueError" in error}) == 5


class Failing(dynmo.Dynamism):
    """A case that fails on one rank, and freezes a layer."""

    name = "failing"

    def __init__(self, world: dynmo.World) -> None:
        self.rank, self.last = world.rank, world.rank == world.size - 1

    def act(self, step: int, layers: Any) -> Any:
        self.fail("act")
        layers.collective.sum(torch.ones(1), "something of the case")
        if step < 3 or 0 in layers.frozen:
            return None
        layers.freeze([0])
        return dynmo.Change((0,), "froze the first")

    def collect(self, step: int, layers: Any) -> None:
        self.fail("collect")

    def observe(self, signals: Any) -> None:
        self.fail("observe")

    def state(self) -> dict[str, Any]:
        self.fail("state")
        return {}

    def fail(self, how: str) -> None:
        if broken == how and self.last:
            raise ValueError("the user's own")


def with_a_case(
    world: dynmo.World, options: dict[str, Any], hows: list[str], folder: str
) -> dict[str, Any]:
    global broken
    case = Failing(world)
    pipeline, _ = made(world, {"cases": [case], **options})
    errors, losses = list[str](), list[float]()
    for number, broken in enumerate(hows):
        where = "/proc/none" if broken == "folder" and case.last else folder
        try:
            if broken in ("state", "folder"):
                pipeline.save(where)
            else:
                pipeline.step(*batch(pipeline, number))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        broken = ""
        if pipeline.steps == number:
            losses.append(pipeline.step(*batch(pipeline, number)).loss)
    pipeline.save(folder)
    return {"errors": errors, "told": [pipeline.steps, pipeline.digest()]}


@pytest.mark.parametrize("options", [{}, {"post_validation": True}])
def test_error_of_a_case_or_of_a_save_is_raised_on_all_ranks(
    pool: Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    def run(ranks: int, hows: list[str]) -> list[Any]:
        folder = str(tmp_path / f"{ranks}")
        job = HERE + "with_a_case"
        return pool.run(job, ranks, options=options, hows=hows, folder=folder)

    hows = ["act", "state", "collect", "folder", "act", "observe"]
    (right,) = run(1, [""] * len(hows))
    peer, own = run(2, hows)
    assert peer["told"] == own["told"] == right["told"]
    assert len(peer["errors"]) == len(hows) - 1
    assert len(own["errors"]) == len(hows)
    told = "PeerFailed: rank 1: ValueError: the user's own"
    assert [error[: len(told)] for error in peer["errors"] if "/" not in error] == [told] * 4
    assert "in act of case 'failing' at step 0" in peer["errors"][0]


def notes_of(world: dynmo.World, how: str) -> str:
    """What the ranks are told of an error."""
    global broken
    pipeline, _ = made(world, {})
    broken = how
    try:
        pipeline.step(*batch(pipeline, 0))
    except Exception as error:
        return f"{error}, {', '.join(getattr(error, '__notes__', ()))}"
    finally:
        broken = ""
    return ""


@pytest.mark.parametrize(("how", "where"), [("one", "in F of layer 2"), ("loss", "in the loss")])
def test_every_rank_is_told_where_it_was(pool: Pool, how: str, where: str) -> None:
    mine, told = sorted(pool.run(HERE + "notes_of", 2, how=how), key=len)
    assert mine == f"the user's own, {where}"
    assert told.startswith("rank 1: ValueError: the user's own (test_after_an_error.py:")
    assert where in told


def test_layer_that_ends_its_process_is_named(world: dynmo.World) -> None:
    global broken
    pipeline, _ = made(world, {})
    broken = "exit"
    with pytest.raises(dynmo.DynmoError, match=r"rank 0: .* status 7 .*in F of layer 2"):
        pipeline.step(*batch(pipeline, 0))
    broken = ""
    assert pipeline.step(*batch(pipeline, 0)).step == 0


def advances(world: dynmo.World, options: dict[str, Any], how: str) -> dict[str, Any]:
    """Without a barrier. Step 2 fails, and each batch is that of `pipeline.steps`."""
    global broken
    pipeline, _ = made(world, {"post_validation": True, **options})
    losses, calls, failed = dict[int, float](), list[Any](), False
    while pipeline.steps < 4:
        step = pipeline.steps
        broken = "" if failed or step != 2 else how
        try:
            results = pipeline.advance(*batch(pipeline, step))
            if pipeline.steps == 4:
                results += pipeline.drain()
            losses |= {result.step: result.loss for result in results}
        except Exception:
            failed = True
        calls.append((step, pipeline.steps))
    broken = ""
    return {"calls": calls, "told": [losses, pipeline.digest(), pipeline.digest(buffers=True)]}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {"rollback": "in-place"}),
        (4, {"microbatches": 2, "replicas": 2, "zero": 1}),
    ],
)
def test_ranks_that_have_ended_a_failed_step_take_it_back(
    pool: Pool, ranks: int, options: dict[str, Any]
) -> None:
    def run(how: str) -> list[Any]:
        return pool.run(HERE + "advances", ranks, options=options, how=how)

    right = run("")[0]
    for how in ("one", "backward", "nan"):
        told = run(how)
        assert all(each["told"] == right["told"] for each in told)
        # All ranks raise the error in the next call.
        assert all(
            each["calls"] == [[0, 1], [1, 2], [2, 3], [3, 2], [2, 3], [3, 4]] for each in told
        )


def ends(world: dynmo.World) -> str:
    """The optimizer of one rank fails, so that the others have made the step."""
    global broken

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if world.rank == 1 and broken == "optimizer":
                raise ValueError("the user's own")
            return super().step(closure)

    pipeline, _ = made(world, {"optimizer": lambda groups: Fails(groups, lr=0.1)})
    texts = list[str]()
    broken = "optimizer"
    for _ in range(3):  # rank 0 finds out in the second
        try:
            pipeline.step(*batch(pipeline, 0))
        except Exception as error:
            texts.append(str(error))
    broken = ""
    return texts[-1]


def test_ranks_do_not_go_on_after_an_error_in_the_optimizer(pool: Pool) -> None:
    for text in pool.run(HERE + "ends", 2):
        assert text.startswith("the ranks cannot go on after an error (rank 1: ValueError: the u")
