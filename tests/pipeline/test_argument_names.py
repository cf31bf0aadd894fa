"""Messages to a loop of one's own name arguments, and those to a run its keys."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import dynmo
from dynmo.errors import DynmoError
from dynmo.pipeline.options import grouped
from dynmo.pipeline.user_calls import with_arguments
from tests.runtime.alone import alone


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("train.recompute = 'auto' needs", "Training.recompute = 'auto' needs"),
        ("parallel.slices = true: one process", "Parallel.slices = True: one process"),
        ("use pipeline.schedule, or call pipeline.load", "use schedule, or call pipeline.load"),
        ("pipeline.optimizer has the groups", "pipeline.optimizer has the groups"),
        ("raise parallel.setup_timeout", "raise dynmo.init(setup_timeout=)"),
        (
            "elastic.min_ranks = 3, no [elastic] reshape",
            "Elastic.min_ranks = 3, no elastic reshape",
        ),
        ("dynamism.mixture_of_depths.every = 3", "MixtureOfDepths.every = 3"),
        ("dynamism.cases: two; balance.initial", "cases: two; Balance.initial"),
    ],
)
def test_keys_become_arguments(text: str, wanted: str) -> None:
    assert with_arguments(text) == wanted


@pytest.mark.parametrize(
    ("options", "key", "argument"),
    [
        ({"recompute": [9]}, "train.recompute names layer 9", "Training.recompute names layer 9"),
        ({"chunks": 3}, "pipeline.chunks: ", "Parallel.chunks: "),
        ({"balance": dynmo.Balance(initial=[1])}, "balance.initial sums", "Balance.initial sums"),
        (
            {"recompute": "auto", "memory_limit": "1GiB"},
            "train.recompute = 'auto' needs",
            "Training.recompute = 'auto' needs",
        ),
    ],
)
def test_error_names_what_was_given(options: dict[str, Any], key: str, argument: str) -> None:
    def error(world: Any) -> str:
        model = dynmo.Sequential([nn.Linear(8, 8), nn.Linear(8, 8)])
        with pytest.raises(DynmoError) as caught:
            dynmo.Pipeline(model, world, microbatches=2, **grouped(options))
        return str(caught.value)

    with dynmo.init(device="cpu") as world:
        assert error(world).startswith(argument)
    assert error(alone()).startswith(key)
