"""Same numbers: one digest for every number of ranks, schedule and balancer.

Each test is a case with a name. `test_equality_drawn.py` draws the combinations. A plain PyTorch
loop shares only the modules with dynmo.
"""

from __future__ import annotations

import math
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
from dynmo.train.setup import model_of
from tests.combinations import mostly_matrix
from tests.equality import (
    BALANCERS,
    STEPS,
    config,
    decay_groups,
    deeper,
    fields_of,
    pruned,
    resumed,
    run,
    same,
    same_events,
    with_sections,
)
from tests.jobs import SOURCE
from tests.pool import Pool
from tests.schedule.samples import BY_HAND


@cache
def _reference(pool: Pool, freezing: bool, clipping: bool, **options: Any) -> dict[str, Any]:
    """One rank, an ordinary backward, nothing moves."""
    return run(pool, config(1, "1f1b", BALANCERS["none"], freezing, clipping, **options))[0]


@pytest.mark.parametrize(
    ("ranks", "schedule", "balancer", "freezing", "clipping"),
    mostly_matrix(
        product((2, 3, 4), BY_HAND, BALANCERS, (False, True), (False, True)),
        everyday=[(3, "zb-h1", "diffusion", False, False), (4, "zb-h2", "random", True, True)],
    ),
)
def test_digest_is_equal_on_any_ranks_and_schedule(
    pool: Pool, ranks: int, schedule: str, balancer: str, freezing: bool, clipping: bool
) -> None:
    results = run(pool, config(ranks, schedule, BALANCERS[balancer], freezing, clipping))
    same(results, _reference(pool, freezing, clipping), moving=balancer == "random")


@pytest.mark.parametrize(
    ("ranks", "schedule", "post_validation"),
    mostly_matrix(product((2, 3, 4), BY_HAND, (False, True)), everyday=[(4, "zb-h2", False)]),
)
def test_layers_that_move_while_steps_run_keep_the_digest(
    pool: Pool, ranks: int, schedule: str, post_validation: bool
) -> None:
    """Without a barrier they move between steps."""
    wanted = config(ranks, schedule, BALANCERS["random"] | {"move_ahead": True}, True, True)
    wanted["pipeline"]["post_validation"] = post_validation
    results = run(pool, wanted)
    same(results, _reference(pool, True, True))
    layers = results[0]["layers"]
    if post_validation:
        assert all(a != b for a, b in pairwise(layers))
    else:  # a step runs on a placement before the next decision
        assert layers[1::2] == layers[0::2][: len(layers[1::2])]
        assert all(a != b for a, b in pairwise(layers[0::2]))


@cache
def _deeper_reference(pool: Pool, freezing: bool, tied: bool = False) -> dict[str, Any]:
    wanted = deeper(1, "1f1b", BALANCERS["none"], freezing)
    return run(pool, _tied(wanted) if tied else wanted)[0]


def _tied(wanted: dict[str, Any]) -> dict[str, Any]:
    """With tied weights and two accumulation groups."""
    wanted["model"]["tied"] = True
    wanted["train"]["reduction_slots"] = 2
    return wanted


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    mostly_matrix(
        product([name for name in SCHEDULES if name not in BY_HAND], (1, 2, 3, 4)),
        everyday=[("v-auto", 4)],
    ),
)
def test_several_stages_per_rank_have_the_same_digest(
    pool: Pool, schedule: str, ranks: int
) -> None:
    """Schedules are rebuilt from measured costs while layers move and freeze."""
    moving = ranks in (2, 4)
    wanted = deeper(ranks, schedule, BALANCERS["random" if moving else "exact"], ranks != 3)
    same(run(pool, wanted), _deeper_reference(pool, ranks != 3), moving=moving)


def test_replicas_on_slices_have_the_same_digest(pool: Pool) -> None:
    """Two processes each run a pipeline of two slices, with tied weights."""
    sliced = _tied(deeper(2, "zb-h1", BALANCERS["random"], freezing=True))
    sliced["parallel"] |= {"slices": True, "device": "cpu", "replicas": 2}
    same(run(pool, sliced), _deeper_reference(pool, True, tied=True))


@pytest.mark.parametrize(
    ("ranks", "schedule"), mostly_matrix(product((2, 3), SCHEDULES), everyday=[(3, "zb-auto")])
)
def test_tied_embeddings_have_the_same_digest(pool: Pool, ranks: int, schedule: str) -> None:
    """The tied weight is on one rank (V shapes) or on two ranks.

    Its gradient is the sum of the head's and the embedding's. It freezes at the third step.
    """
    expected = _deeper_reference(pool, True, tied=True)
    same(run(pool, _tied(deeper(ranks, schedule, BALANCERS["random"], freezing=True))), expected)
    first = _deeper_reference(pool, True)["losses"][0]
    assert expected["losses"][0] != pytest.approx(first, rel=1e-5), "tied is not untied"


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
    results = [_reference(pool, *both) for both in product((False, True), repeat=2)]
    results += [_reference(pool, False, False, **{name: 0}) for name in ("dropout", "seed")]
    assert len({result["digest"] for result in results}) == 6


@cache
def _pruned_reference(pool: Pool) -> dict[str, Any]:
    return run(pool, pruned(1, "1f1b", BALANCERS["none"]))[0]


@pytest.mark.parametrize(
    ("stop", "before", "after"),
    mostly_matrix(
        product((2, 3, 5), [(2, "zb-h1"), (3, "zb-h1")], [(3, "1f1b"), (1, "1f1b")]),
        everyday=[(3, (2, "zb-h1"), (3, "1f1b"))],
    ),
)
def test_pruned_run_resumes_on_other_ranks(
    pool: Pool, tmp_path: Path, stop: int, before: tuple[int, str], after: tuple[int, str]
) -> None:
    """The run stops between two prunes and resumes on other ranks, with another schedule.

    Pruning keeps the largest weights of all layers, which move in sparse form.
    """
    parts = (pruned(ranks, schedule, BALANCERS["random"]) for ranks, schedule in (before, after))
    ended = resumed(pool, tmp_path, *parts, stop_after=stop - 1)[0]
    expected = _pruned_reference(pool)
    assert (ended["weights_digest"], ended["loss"]) == (expected["digest"], expected["loss"])


def test_prune_that_drops_no_weight_leaves_the_digest_equal(pool: Pool) -> None:
    """The first of three prunes drops all weights, and the later ones drop none.

    The last of four ranks holds the head only, which is never pruned.
    """
    options = {"initial_sparsity": 0.7, "final_sparsity": 0.7, "start": 1, "end": 3, "every": 1}
    case = {"dynamism": {"cases": ["pruning"], "pruning": options}}
    alone, spread = (
        run(pool, config(ranks, "1f1b", BALANCERS["none"], False, True) | case) for ranks in (1, 4)
    )
    same(spread, alone[0])


@pytest.mark.matrix
def test_extreme_pruning_has_the_same_digest_on_any_ranks(pool: Pool) -> None:
    """Some matrices become empty. They still move and train."""
    extreme = {"initial_sparsity": 0.999, "final_sparsity": 0.9999, "dense_below": 0.0}
    digests = {_pruned_reference(pool)["digest"]}
    for options in (extreme, {"criterion": "local"}):
        alone, spread = (
            run(pool, pruned(ranks, "zb-h1", BALANCERS["random"], **options)) for ranks in (1, 3)
        )
        same(spread, alone[0])
        digests.add(alone[0]["digest"])
    assert len(digests) == 3


def cached(
    ranks: int, schedule: str, data: Path, cache_bytes: int, **sections: dict[str, Any]
) -> dict[str, Any]:
    """Seventeen steps in epochs of two, of the same batches in another order.

    Layers freeze, and move every third step. All layers thaw for steps 3, 8 and 13. Every five
    steps another layer is left out, frozen or not.
    """
    balance = {**BALANCERS["random"], "every": 3} if ranks > 1 else BALANCERS["none"]
    wanted = config(ranks, schedule, balance, True, True, dropout=0.0)
    wanted["train"] |= {"steps": 17, "eval_every": 2, "eval_batches": 2}
    wanted["data"] = {"source": f"file:{data}", "shuffle": "batches"}
    own = ["thawing:Thawing", "own_case:LayerDrop"]
    freezing = {"schedule": [[2, 1], [4, 4]], "cache_bytes": cache_bytes}
    cases = ["freezing", *(f"python:tests.cases.{case}" for case in own)]
    wanted["dynamism"] = {"cases": cases, "freezing": freezing}
    return with_sections(wanted, sections)


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
    return run(pool, cached(1, "1f1b", data, 0, train=train), "events")[0]


TWO_GROUPS = {"train": {"global_batch": 8, "reduction_slots": 2}}
RESHAPED = {"elastic": {"reshape_at": [[7, 1, 2], [12, 2, 1]]}}


@pytest.mark.parametrize(
    ("ranks", "schedule", "limit", "sections"),
    mostly_matrix(
        [
            (1, "1f1b", 1 << 20, {}),
            (2, "zb-h2", 1 << 20, {"pipeline": {"post_validation": True}}),
            (3, "zb-h1", 1 << 20, {}),
            (3, "zb-h1", 10_000, {}),
            (2, "interleaved-1f1b", 1 << 20, TWO_GROUPS),
            (2, "zb-h1", 1 << 20, TWO_GROUPS | RESHAPED),
        ],
        everyday=[(3, "zb-h1", 10_000, {}), (2, "zb-h1", 1 << 20, TWO_GROUPS | RESHAPED)],
    ),
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
    events = run(pool, cached(ranks, schedule, small_file, limit, **sections), "events")[0]
    same_events(
        events,
        expected,
        step=("step", "loss", "gradient_norm", "frozen"),
        change=("step", "case", "layers"),
        eval=("step", "loss"),
        end=("loss", "weights_digest"),
    )
    ((spared,),) = fields_of(events, "end", "spared_forwards")
    assert spared > 0
    assert fields_of(expected, "end", "spared_forwards") == [(0,)]


def test_autofreeze_freezes_the_same_layers_on_any_ranks(pool: Pool) -> None:
    options = {"policy": "autofreeze", "every": 1}
    case = {"dynamism": {"cases": ["freezing"], "freezing": options}}
    # With this seed several layers settle early enough to freeze within the few steps.
    alone, spread = (
        run(pool, config(ranks, "zb-h1", BALANCERS["random"], False, True, seed=8) | case)
        for ranks in (1, 3)
    )
    assert alone[0]["frozen"][-1] > alone[0]["frozen"][0] == 0, "nothing froze"
    assert spread[0]["frozen"] == alone[0]["frozen"]
    same(spread, alone[0])


@pytest.mark.parametrize(
    ("freezing", "clipping"),
    mostly_matrix(product((False, True), repeat=2), everyday=[(True, True)]),
)
def test_losses_and_weights_match_a_plain_torch_loop(
    pool: Pool, freezing: bool, clipping: bool
) -> None:
    """The loop uses torch's AdamW, clipping and backward on the same modules.

    Weights have the same bits. With clipping they agree within a relative error of 1e-6.
    """
    wanted = config(3, "zb-h2", BALANCERS["random"], freezing, clipping, dropout=0.0)
    got = run(pool, wanted, "train_and_weights")
    losses, weights = _plain_loop(wanted, freezing, clipping)
    assert got[0]["losses"] == pytest.approx(losses, rel=1e-6)
    ours = {int(k): v for part in got for k, v in part["weights"].items()}
    for index, expected in enumerate(weights):
        actual = torch.tensor(ours[index], dtype=torch.float64)
        norm = torch.linalg.vector_norm
        most = 1e-6 if clipping else 0.0
        assert float(norm(actual - expected) / norm(expected)) <= most, f"layer {index}"


def _plain_loop(
    wanted: dict[str, Any], freezing: bool, clipping: bool
) -> tuple[list[float], list[torch.Tensor]]:
    parsed = parse(wanted)
    layers = torch.nn.ModuleList(model_of(parsed).build(range(6)))
    batches = Batches(open_corpus(SOURCE), 16, 10, 2, 7)
    adamw = torch.optim.AdamW(decay_groups(layers, 0.1), lr=0.0, betas=(0.9, 0.95), fused=True)
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
    """Two steps of warm-up, then a cosine to a tenth at the last step."""
    if step < 2:
        return 1e-2 * (step + 1) / 2
    return 1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 3))))
