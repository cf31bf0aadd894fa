"""Same numbers: one digest for every number of ranks, schedule and balancer.

The runs use freezing, clipping and dropout. A plain PyTorch loop, which shares only the modules
with dynmo, agrees closely.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from dynmo.config import parse
from dynmo.data.batches import Batches
from dynmo.data.corpus import open_corpus
from dynmo.schedule.catalogue import SCHEDULES
from dynmo.schedule.generators import GENERATORS
from dynmo.train.setup import model_of
from tests.combinations import mostly_matrix
from tests.equality import BALANCERS, STEPS, config, deeper, fields_of, pruned
from tests.jobs import SOURCE
from tests.pool import Pool


@cache
def _reference(pool: Pool, freezing: bool, clipping: bool) -> dict[str, Any]:
    """One rank, an ordinary backward, nothing moves."""
    return pool.run("train", 1, config=config(1, "1f1b", BALANCERS["none"], freezing, clipping))[0]


def _combinations() -> list[Any]:
    """Every balancer with and without freezing and clipping, on all ranks and schedules.

    The everyday suite has three of the modes for each pair of a number of ranks and a schedule. So
    every mode meets every number of ranks and every schedule. `pytest -m matrix` runs the rest.
    """
    names = {
        (False, False): "plain",
        (False, True): "clip",
        (True, False): "freeze",
        (True, True): "freeze-clip",
    }
    modes = list(product(BALANCERS, names))
    cases: list[Any] = []
    for i, (ranks, (j, schedule)) in enumerate(product((2, 3, 4), enumerate(GENERATORS))):
        for k, (balancer, both) in enumerate(modes):
            everyday = (k - 3 * i - j) % len(modes) in (0, 5, 10)
            marks = () if everyday else pytest.mark.matrix
            cases.append(
                pytest.param(
                    ranks,
                    schedule,
                    balancer,
                    *both,
                    id=f"{ranks}-{schedule}-{balancer}-{names[both]}",
                    marks=marks,
                )
            )
    return cases


@pytest.mark.parametrize(("ranks", "schedule", "balancer", "freezing", "clipping"), _combinations())
def test_digest_is_equal_on_any_ranks_and_schedule(
    pool: Pool, ranks: int, schedule: str, balancer: str, freezing: bool, clipping: bool
) -> None:
    expected = _reference(pool, freezing, clipping)
    results = pool.run(
        "train", ranks, config=config(ranks, schedule, BALANCERS[balancer], freezing, clipping)
    )
    assert results[0]["losses"] == expected["losses"]
    assert {r["digest"] for r in results} == {expected["digest"]}
    if balancer == "random":
        placements = results[0]["layers"]
        assert all(a != b for a, b in pairwise(placements)), "the layers did not move at every step"


def test_staged_messages_leave_the_digest_unchanged(pool: Pool) -> None:
    """The run sends every kind of message through host memory.

    The kinds are activations, gradients, moved layers, reduced gradients and optimizer shares.
    """
    base = config(1, "zb-h1", BALANCERS["random"], freezing=True, clipping=True)
    base["train"] |= {"global_batch": 12, "reduction_slots": 2}
    alone = pool.run("train", 1, config=base)[0]
    mesh = base | {"parallel": base["parallel"] | {"pipeline": 2, "replicas": 2, "zero": 1}}
    results = pool.run("train_staged", 4, config=mesh)
    assert results[0]["losses"] == alone["losses"]
    assert {r["digest"] for r in results} == {alone["digest"]}


@pytest.mark.parametrize(("freezing", "clipping"), [(False, False), (True, True)])
@pytest.mark.parametrize("schedule", GENERATORS)
def test_one_rank_has_the_same_digest_with_any_schedule(
    pool: Pool, schedule: str, freezing: bool, clipping: bool
) -> None:
    """The balancer has no effect, because one rank cannot move layers."""
    results = pool.run(
        "train", 1, config=config(1, schedule, BALANCERS["exact"], freezing, clipping)
    )
    assert results[0] == _reference(pool, freezing, clipping)


@cache
def _deeper_reference(pool: Pool, freezing: bool) -> dict[str, Any]:
    return pool.run("train", 1, config=deeper(1, "1f1b", BALANCERS["none"], freezing))[0]


@pytest.mark.parametrize(
    ("ranks", "balancer", "freezing"),
    mostly_matrix(
        [(1, "exact", True), (2, "random", True), (3, "exact", False), (4, "random", True)],
        everyday=[(4, "random", True)],
    ),
)
@pytest.mark.parametrize(
    "schedule",
    mostly_matrix(
        [name for name in SCHEDULES if name not in GENERATORS],
        everyday=["interleaved-1f1b", "v-auto"],
    ),
)
def test_several_stages_per_rank_have_the_same_digest(
    pool: Pool, ranks: int, schedule: str, balancer: str, freezing: bool
) -> None:
    """Several stages per rank, in looped and V-shaped placements.

    Schedules are rebuilt from measured costs while layers move and freeze.
    """
    expected = _deeper_reference(pool, freezing)
    results = pool.run(
        "train", ranks, config=deeper(ranks, schedule, BALANCERS[balancer], freezing)
    )
    assert results[0]["losses"] == expected["losses"]
    assert {r["digest"] for r in results} == {expected["digest"]}
    if balancer == "random" and ranks > 1:
        placements = results[0]["layers"]
        assert all(a != b for a, b in pairwise(placements)), "the layers did not move at every step"


@pytest.mark.parametrize(
    ("schedule", "ranks", "afterwards"),
    mostly_matrix(
        [("zb-h1", 4, False), ("zb-v", 2, False), ("zb-h2", 3, True)],
        everyday=[("zb-h2", 3, True)],
    ),
)
def test_early_partial_w_leaves_the_digest_unchanged(
    pool: Pool, schedule: str, ranks: int, afterwards: bool
) -> None:
    """The arrival of messages decides which partial W runs early.

    The results do not depend on this order.
    """
    wanted = deeper(ranks, schedule, BALANCERS["random"], True)
    wanted["pipeline"] |= {"w_granularity": "linear", "post_validation": afterwards}
    results = pool.run("train", ranks, config=wanted)
    assert results[0]["losses"] == _deeper_reference(pool, True)["losses"]
    assert {r["digest"] for r in results} == {_deeper_reference(pool, True)["digest"]}


@pytest.mark.parametrize("schedule", ["zb-h1", "v-auto"])
def test_pipeline_on_slices_has_the_same_digest(pool: Pool, schedule: str) -> None:
    """A pipeline on slices runs in one process, here without a GPU.

    Layers move between the slices at every step, and some freeze.
    """
    wanted = deeper(3, schedule, BALANCERS["random"], freezing=True)
    wanted["parallel"] |= {"slices": True, "device": "cpu"}
    (result,) = pool.run("train", 1, config=wanted)
    assert (result["losses"], result["digest"]) == (
        _deeper_reference(pool, True)["losses"],
        _deeper_reference(pool, True)["digest"],
    )
    assert all(a != b for a, b in pairwise(result["layers"])), (
        "the layers did not move at every step"
    )


def test_replicas_on_slices_have_the_same_digest(pool: Pool) -> None:
    """Two processes each run a pipeline of two slices, with tied weights."""
    one = deeper(1, "1f1b", BALANCERS["none"], True)
    two = deeper(2, "zb-h1", BALANCERS["random"], True)
    one["train"]["reduction_slots"] = 2
    two["parallel"] |= {"slices": True, "device": "cpu", "replicas": 2}
    one["model"]["tied"] = two["model"]["tied"] = True
    expected = pool.run("train", 1, config=one)[0]
    results = pool.run("train", 2, config=two)
    assert results[0]["losses"] == expected["losses"]
    assert {r["digest"] for r in results} == {expected["digest"]}


@cache
def _tied_reference(pool: Pool) -> dict[str, Any]:
    wanted = deeper(1, "1f1b", BALANCERS["none"], freezing=True)
    wanted["model"]["tied"] = True
    return pool.run("train", 1, config=wanted)[0]


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    mostly_matrix(product((2, 3), SCHEDULES), everyday=[(2, "zb-v"), (3, "zb-auto")]),
)
def test_tied_embeddings_have_the_same_digest(pool: Pool, ranks: int, schedule: str) -> None:
    """The tied weight is on one rank (V shapes) or on two ranks.

    Its gradient is the sum of the head's and the embedding's. It freezes at the third step.
    """
    wanted = deeper(ranks, schedule, BALANCERS["random"], freezing=True)
    wanted["model"]["tied"] = True
    results = pool.run("train", ranks, config=wanted)
    assert results[0]["losses"] == _tied_reference(pool)["losses"]
    assert {r["digest"] for r in results} == {_tied_reference(pool)["digest"]}
    assert _tied_reference(pool)["digest"] != _deeper_reference(pool, True)["digest"], (
        "tied is not untied"
    )


@pytest.mark.matrix
def test_compiled_layers_have_the_same_digest_on_any_ranks(pool: Pool) -> None:
    """torch.compile rounds differently from eager mode, but equally on any rank."""
    results: dict[tuple[int, bool], dict[str, Any]] = {}
    for ranks, compiles in ((1, False), (1, True), (2, True)):
        wanted = config(ranks, "zb-h1", BALANCERS["random"], False, False)
        wanted["model"] = {"kind": "python:tests.models.user_model:halves", "sequence": 16}
        wanted["train"] |= {"compile": compiles, "steps": 3}
        wanted["parallel"]["timeout"] = 200.0  # the first step waits for the compiler
        results[ranks, compiles] = pool.run("train", ranks, config=wanted, timeout=400.0)[0]
    assert results[1, True]["digest"] == results[2, True]["digest"] != results[1, False]["digest"]
    assert results[1, True]["losses"] == pytest.approx(results[1, False]["losses"], rel=1e-4)


def test_options_change_the_digest(pool: Pool) -> None:
    """Freezing, clipping, dropout and the seed each change the digest."""
    digests = [
        _reference(pool, freezing, clipping)["digest"]
        for freezing, clipping in product((False, True), repeat=2)
    ]
    undropped = pool.run(
        "train", 1, config=config(1, "1f1b", BALANCERS["none"], False, False, dropout=0.0)
    )[0]["digest"]
    reseeded = pool.run(
        "train", 1, config=config(1, "1f1b", BALANCERS["none"], False, False) | {"seed": 8}
    )[0]["digest"]
    assert len({*digests, undropped, reseeded}) == 6


@cache
def _pruned_reference(pool: Pool) -> dict[str, Any]:
    return pool.run("train", 1, config=pruned(1, "1f1b", BALANCERS["none"]))[0]


@pytest.mark.parametrize(
    ("ranks", "schedule", "balancer"),
    mostly_matrix(
        product((1, 2, 3), ("1f1b", "zb-h1"), ("exact", "random")),
        everyday=[(1, "zb-h1", "exact"), (2, "1f1b", "random"), (3, "zb-h1", "random")],
    ),
)
def test_pruned_run_has_the_same_digest_on_any_ranks(
    pool: Pool, ranks: int, schedule: str, balancer: str
) -> None:
    """Pruning keeps the largest weights of all layers, on any placement.

    Layers move in sparse form, with their moments.
    """
    expected = _pruned_reference(pool)
    results = pool.run("train", ranks, config=pruned(ranks, schedule, BALANCERS[balancer]))
    assert results[0]["losses"] == expected["losses"]
    assert {r["digest"] for r in results} == {expected["digest"]}
    if balancer == "random" and ranks > 1:
        assert all(a != b for a, b in pairwise(results[0]["layers"])), (
            "the layers did not move at every step"
        )


@pytest.mark.parametrize(
    ("stop", "before", "after"),
    mostly_matrix(
        (
            (stop, *run)
            for stop in (2, 3, 5)
            for run in (((2, "zb-h1"), (3, "1f1b")), ((3, "zb-h1"), (1, "1f1b")))
        ),
        everyday=[(3, (2, "zb-h1"), (3, "1f1b"))],
    ),
)
def test_pruned_run_resumes_on_other_ranks(
    pool: Pool, tmp_path: Path, stop: int, before: tuple[int, str], after: tuple[int, str]
) -> None:
    """The run stops between two prunes and resumes on other ranks.

    The pipeline schedule changes too.
    """
    expected = _pruned_reference(pool)
    tmp_path.joinpath("run").mkdir()
    for (ranks, schedule), resume in ((before, False), (after, True)):
        wanted = pruned(ranks, schedule, BALANCERS["random"]) | {"checkpoint": {"every": 100}}
        folder = str(tmp_path / "run")
        ended = pool.run(
            "train_in",
            ranks,
            config=wanted,
            folder=folder,
            resume=resume,
            stop_after=None if resume else stop - 1,
        )[0]
        assert ended["interrupted"] is not resume
    assert ended["weights_digest"] == expected["digest"]
    assert ended["loss"] == expected["loss"]


def test_prune_that_drops_no_weight_leaves_the_digest_equal(pool: Pool) -> None:
    """The first of three prunes drops all weights, and the later ones drop none.

    The last of four ranks holds the head only, which is never pruned.
    """
    once = {
        "cases": ["pruning"],
        "pruning": {
            "initial_sparsity": 0.7,
            "final_sparsity": 0.7,
            "start": 1,
            "end": 3,
            "every": 1,
        },
    }
    alone, spread = (
        config(ranks, "1f1b", BALANCERS["none"], False, True) | {"dynamism": once}
        for ranks in (1, 4)
    )
    expected, results = pool.run("train", 1, config=alone)[0], pool.run("train", 4, config=spread)
    assert results[0]["losses"] == expected["losses"]
    assert {r["digest"] for r in results} == {expected["digest"]}


@pytest.mark.matrix
def test_extreme_pruning_has_the_same_digest_on_any_ranks(pool: Pool) -> None:
    """Some matrices become empty. They still move and train."""
    extreme = {"initial_sparsity": 0.999, "final_sparsity": 0.9999, "dense_below": 0.0}
    digests = [
        pool.run("train", ranks, config=pruned(ranks, "zb-h1", BALANCERS["random"], **options))[0][
            "digest"
        ]
        for ranks, options in (
            (1, extreme),
            (3, extreme),
            (1, {"criterion": "local"}),
            (3, {"criterion": "local"}),
        )
    ]
    assert digests[0] == digests[1]
    assert digests[2] == digests[3]
    assert len({digests[0], digests[2], _pruned_reference(pool)["digest"]}) == 3


def cached(
    ranks: int, schedule: str, data: Path, cache_bytes: int, **sections: dict[str, Any]
) -> dict[str, Any]:
    """Seventeen steps in epochs of two, of the same batches in another order.

    Layers freeze, and move every third step. All layers thaw for steps 3, 8 and 13. Every five
    steps another layer is left out, frozen or not. Evaluations are of the same sequences each time.
    """
    wanted = config(
        ranks,
        schedule,
        {**BALANCERS["random"], "every": 3} if ranks > 1 else BALANCERS["none"],
        True,
        True,
        dropout=0.0,
    )
    wanted["train"] |= {"steps": 17, "eval_every": 2, "eval_batches": 2}
    wanted["data"] = {"source": f"file:{data}", "shuffle": "batches"}
    cases = [
        "freezing",
        "python:tests.dynamism.thawing:Thawing",
        "python:tests.dynamism.own_case:LayerDrop",
    ]
    wanted["dynamism"] = {
        "cases": cases,
        "freezing": {"schedule": [[2, 1], [4, 4]], "cache_bytes": cache_bytes},
    }
    return {
        key: value | sections.get(key, {}) if isinstance(value, dict) else value
        for key, value in (wanted | {"elastic": {}}).items()
    }


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 windows of 16 bytes to train on and one held out.

    An epoch is two batches of eight or ten.
    """
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(bytes(range(256)) + bytes(range(0, 256, 2)) + b"ab")
    return path


@cache
def _uncached_reference(pool: Pool, data: Path, global_batch: int) -> list[dict[str, Any]]:
    train = {"global_batch": global_batch, "reduction_slots": 2 - global_batch // 10}
    return pool.run("events", 1, config=cached(1, "1f1b", data, 0, train=train))[0]


@pytest.mark.parametrize(
    ("ranks", "schedule", "limit", "sections"),
    [
        (1, "1f1b", 1 << 20, {}),
        (2, "zb-h2", 1 << 20, {"pipeline": {"post_validation": True}}),
        (3, "zb-h1", 1 << 20, {}),
        (3, "zb-h1", 10_000, {}),
        (2, "interleaved-1f1b", 1 << 20, {"train": {"global_batch": 8, "reduction_slots": 2}}),
        (
            2,
            "zb-h1",
            1 << 20,
            {
                "train": {"global_batch": 8, "reduction_slots": 2},
                "elastic": {"reshape_at": [[7, 1, 2], [12, 2, 1]]},
            },
        ),
    ],
    ids=["alone", "post-validation", "moves", "limit", "chunks", "reshape"],
)
def test_cached_frozen_outputs_leave_the_digest_unchanged(
    pool: Pool,
    small_file: Path,
    ranks: int,
    schedule: str,
    limit: int,
    sections: dict[str, dict[str, Any]],
) -> None:
    expected = _uncached_reference(pool, small_file, 8 if "train" in sections else 10)
    events = pool.run(
        "events", ranks, config=cached(ranks, schedule, small_file, limit, **sections)
    )[0]
    for kind, keys in (
        ("step", ("step", "loss", "gradient_norm", "frozen")),
        ("change", ("step", "case", "layers")),
        ("eval", ("step", "loss")),
        ("end", ("loss", "weights_digest")),
    ):
        assert fields_of(events, kind, *keys) == fields_of(expected, kind, *keys)
    ((spared, held),) = fields_of(events, "end", "spared_forwards", "cached_bytes")
    assert spared > 0
    assert 0 < held <= ranks * limit
    assert fields_of(expected, "end", "spared_forwards", "cached_bytes") == [(0, 0)]


def test_autofreeze_freezes_the_same_layers_on_any_ranks(pool: Pool) -> None:
    results: list[dict[str, Any]] = []
    for ranks in (1, 3):
        # With this seed several layers settle early enough to freeze within the few steps.
        wanted = config(ranks, "zb-h1", BALANCERS["random"], False, True) | {"seed": 8}
        wanted["dynamism"] = {
            "cases": ["freezing"],
            "freezing": {"policy": "autofreeze", "every": 1},
        }
        results.append(pool.run("train", ranks, config=wanted)[0])
    assert results[0]["frozen"][-1] > results[0]["frozen"][0] == 0, "nothing froze"
    assert results[0]["frozen"] == results[1]["frozen"]
    assert results[0]["digest"] == results[1]["digest"]


@pytest.mark.parametrize(("freezing", "clipping"), list(product((False, True), repeat=2)))
def test_losses_and_weights_match_a_plain_torch_loop(
    pool: Pool, freezing: bool, clipping: bool
) -> None:
    """The loop uses torch's AdamW, clipping and backward on the same modules.

    Losses and weights agree within a relative error of 1e-6.
    """
    wanted = config(3, "zb-h2", BALANCERS["random"], freezing, clipping, dropout=0.0)
    got = pool.run("train_and_weights", 3, config=wanted)
    losses, weights = _plain_loop(wanted, freezing, clipping)
    assert got[0]["losses"] == pytest.approx(losses, rel=1e-6)
    ours = {int(k): v for part in got for k, v in part["weights"].items()}
    for index, expected in enumerate(weights):
        actual = torch.tensor(ours[index], dtype=torch.float64)
        difference = torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(
            expected
        )
        assert float(difference) < 1e-6, f"layer {index}"


def _plain_loop(
    wanted: dict[str, Any], freezing: bool, clipping: bool
) -> tuple[list[float], list[torch.Tensor]]:
    parsed = parse(wanted)
    layers = torch.nn.ModuleList(model_of(parsed).build(range(6)))
    batches = Batches(open_corpus(SOURCE), 16, 10, 2, 7)
    decayed = [p for p in layers.parameters() if p.dim() >= 2]
    others = [p for p in layers.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    losses: list[float] = []
    for step in range(STEPS):
        if freezing:
            for layer in list(layers)[: 3 if step >= 4 else 1 if step >= 2 else 0]:
                layer.requires_grad_(False)
        inputs, targets = batches.train(step)
        adamw.zero_grad()
        total = 0.0
        for x, y in zip(inputs, targets, strict=True):
            for layer in layers:
                x = layer(x)
            loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), y.flatten()) / len(inputs)
            loss.backward()
            total += loss.item()
        if clipping:
            torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = _rate(step)
        adamw.step()
        losses.append(total)
    return losses, [
        torch.cat([p.detach().double().flatten() for p in layer.parameters()]) for layer in layers
    ]


def _rate(step: int) -> float:
    """Two steps of warm-up, then a cosine to a tenth at the last step.

    The rates are written out, not taken from the trainer.
    """
    if step < 2:
        return 1e-2 * (step + 1) / 2
    return 1e-2 * (
        0.1
        + 0.9
        * 0.5
        * (
            1
            + float(
                torch.cos(torch.tensor(torch.pi * (step - 2) / (STEPS - 3), dtype=torch.float64))
            )
        )
    )
