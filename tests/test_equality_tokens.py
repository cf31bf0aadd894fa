"""Same numbers while tokens exit early, skip blocks or choose experts.

`test_equality_drawn.py` draws more meshes, schedules and cases.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from dynmo.cases.early_exit.layers import ExitHead
from dynmo.config import parse
from dynmo.data.batches import Batches
from dynmo.data.corpus import open_corpus
from dynmo.train.setup import model_of
from tests.combinations import mostly_matrix
from tests.equality import (
    BALANCERS,
    STEPS,
    config,
    decay_groups,
    deeper,
    fields_of,
    resumed,
    run,
    with_sections,
)
from tests.jobs import SOURCE
from tests.pool import Pool

RECORD = {"record_every": 2}
EXITS = {"early_exit": {"threshold": 0.001, "exits": [0, 2], "start": 2} | RECORD}
DEPTHS = {"mixture_of_depths": {"capacity": 0.3, "threshold_from": 4} | RECORD}
BCE = {"capacity": 0.5, "predictor": "bce", "predictor_weight": 1.0}


def _exits(**options: Any) -> dict[str, Any]:
    return {"early_exit": EXITS["early_exit"] | options}


# Some tokens of an untrained model are over these thresholds, and some are not.
CASES: dict[str, dict[str, Any]] = {
    "softmax": EXITS,
    "state": _exits(confidence="state", threshold=0.995, start=1),
    "classifier": _exits(confidence="classifier", threshold=0.5, exits=[1]),
    "mlp": DEPTHS,
    "bce": {"mixture_of_depths": BCE | RECORD},
    "experts": {"experts": RECORD},
    "experts and exits": {"experts": {}} | EXITS,
    "experts and depths": {"experts": {}} | DEPTHS,
}
EXPERTS = {"kind": "moe", "experts": 4, "top_k": 2, "shared_experts": 1, "moe_every": 2}
EXPERTS |= {"bias_rate": 0.1}


def wanted(case: str, ranks: int, schedule: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """Layers move at each step if there are ranks to move between."""
    base = deeper(ranks, schedule, BALANCERS["random" if ranks > 1 else "none"], freezing=False)
    base["dynamism"] = {"cases": list(CASES[case]), **CASES[case]}
    if "experts" in CASES[case]:
        base["model"] |= EXPERTS | {"routing": "bias" if case == "experts" else "aux-loss"}
    base["train"] |= {"eval_every": 3, "eval_batches": 2, "max_grad_norm": 0.5, "global_batch": 8}
    return with_sections(base, sections)


def told(pool: Pool, configuration: dict[str, Any]) -> dict[str, Any]:
    """The results that must not depend on where the run was."""
    events = run(pool, configuration, "events")[0]
    return {
        "steps": fields_of(events, "step", "step", "loss", "gradient_norm"),
        "evaluations": fields_of(events, "eval", "loss", "dense_loss"),
        "changes": fields_of(events, "change", "step", "case", "layers"),
        "shares": fields_of(events, "tokens", "step", "layers", "shares"),
        "end": fields_of(events, "end", "loss", "weights_digest", "buffers_digest"),
    }


@cache
def reference(pool: Pool, case: str, groups: int = 1) -> dict[str, Any]:
    """One rank, an ordinary backward, nothing moves."""
    return told(pool, wanted(case, 1, "1f1b", train={"reduction_slots": groups}))


RUNS: dict[str, tuple[int, str, dict[str, dict[str, Any]]]] = {
    "zb-h1": (2, "zb-h1", {}),
    "V shape and recompute": (3, "zb-v", {"train": {"recompute": "all"}}),
    "post-validation": (4, "zb-h2", {"pipeline": {"post_validation": True}}),
    "zb-auto": (2, "zb-auto", {}),
}


@pytest.mark.parametrize(
    ("case", "place"),
    mostly_matrix(product(CASES, RUNS), everyday=[("softmax", "V shape and recompute")]),
)
def test_token_cases_have_the_same_numbers_on_any_ranks(pool: Pool, case: str, place: str) -> None:
    ranks, schedule, sections = RUNS[place]
    assert told(pool, wanted(case, ranks, schedule, **sections)) == reference(pool, case)


ZERO = {"parallel": {"zero": 1}}
# Pipeline, data and expert.
SPREAD: dict[str, tuple[tuple[int, int, int], str, dict[str, dict[str, Any]]]] = {
    "one stage": ((1, 2, 2), "zb-h1", {}),
    "two groups": ((1, 4, 2), "zb-h1", {}),
    "two groups, ZeRO-1": ((1, 4, 2), "zb-h1", ZERO),
    "two stages": ((2, 2, 2), "zb-h1", {}),
    "ZeRO-1, V shape, recompute": ((2, 2, 2), "zb-v", ZERO | {"train": {"recompute": "all"}}),
    "post-validation": ((2, 2, 2), "zb-h2", {"pipeline": {"post_validation": True}}),
}


def sharded(case: str, place: str, least_gain: float) -> dict[str, Any]:
    (pipeline, data, expert), schedule, sections = SPREAD[place]
    mesh = {"pipeline": pipeline, "replicas": data, "expert": expert}
    spread = wanted(case, pipeline, schedule, parallel=mesh, train={"reduction_slots": data})
    moves = {"place_every": 2, "least_gain": least_gain, "redundant": data // 2}
    spread["dynamism"]["experts"] = RECORD | moves
    return with_sections(spread, sections)


def test_experts_stay_if_a_move_gains_too_little(pool: Pool) -> None:
    spread = sharded("experts", "one stage", least_gain=0.99)
    spread["train"]["steps"] = 3
    assert not [change for change in told(pool, spread)["changes"] if change[1] == "experts"]


@pytest.mark.parametrize(
    ("case", "place"),
    mostly_matrix(
        product([case for case in CASES if "experts" in CASES[case]], SPREAD),
        everyday=[("experts and exits", "one stage")],  # it has a loss of its own
    ),
)
def test_sharded_experts_have_the_numbers_of_one_process(pool: Pool, case: str, place: str) -> None:
    """Experts are sharded over the replicas, and they move."""
    moved = told(pool, sharded(case, place, least_gain=0.0))
    assert any(name == "experts" for _, name, _ in moved["changes"]), "experts move"
    moved["changes"] = [change for change in moved["changes"] if change[1] != "experts"]
    expected = reference(pool, case, groups=SPREAD[place][0][1])
    assert {**moved, "shares": None} == {**expected, "shares": None}


@pytest.mark.parametrize("case", mostly_matrix(["softmax", "mlp", "experts"], ["softmax"]))
def test_run_with_token_cases_resumes_on_other_ranks(pool: Pool, tmp_path: Path, case: str) -> None:
    parts = (wanted(case, ranks, schedule) for ranks, schedule in ((2, "zb-h1"), (3, "1f1b")))
    ended = resumed(pool, tmp_path, *parts, stop_after=4)[0]
    ((loss, weights, _),) = reference(pool, case)["end"]
    assert (ended["loss"], ended["weights_digest"]) == (loss, weights)


def test_early_exit_losses_match_a_plain_torch_loop(pool: Pool) -> None:
    """The loop uses torch's AdamW and backward on the same modules.

    Losses agree within a relative error of 1e-6.
    """
    configuration = config(1, "1f1b", BALANCERS["none"], False, False, dropout=0.0)
    case = {"early_exit": {"threshold": 0.001, "exits": [0], "start": 0}}
    configuration["dynamism"] = {"cases": ["early_exit"], **case}
    configuration["train"] |= {"warmup": 0, "decay": "constant"}
    losses = run(pool, configuration)[0]["losses"]
    model = model_of(parse(configuration))
    layers = torch.nn.ModuleList(model.build(range(model.layers)))
    for layer in layers:
        if isinstance(layer, ExitHead):
            layer.exits = True
    optimizer = torch.optim.AdamW(decay_groups(layers, 0.1), lr=1e-2, betas=(0.9, 0.95))
    batches, expected = Batches(open_corpus(SOURCE), 16, 10, 2, 7), list[float]()
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(*batches.train(step), strict=True):
            tensors = (model.first_inputs(x, y),)
            for layer in layers:
                out = layer(*tensors)
                tensors = out if isinstance(out, tuple) else (out,)
            loss = model.loss(tensors[0], y) / 5
            loss.backward()
            total += loss.item()
        optimizer.step()
        expected.append(total)
    assert losses == pytest.approx(expected, rel=1e-6)
