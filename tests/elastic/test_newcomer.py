"""The message to a joining rank."""

import json
import math

import pytest

from dynmo.cost.layer_cost import LayerCost
from dynmo.elastic.newcomer import NewcomerState, state_from
from dynmo.errors import RunError

COSTS = (LayerCost(0.1 + 0.2, 1 / 3, 5e-324, parameters=7),)
STATE = NewcomerState(
    rank=2,
    generation=1,
    step=5,
    shape=(3, 1),
    layers=(2, 2, 2),
    shape_before=(2, 1),
    layers_before=(3, 3),
    state={"loss": math.nan, "frozen": [0]},
    costs=COSTS,
    reference=1 / 3,
    microbatches=2,
    groups=((1, ((0,), (0, 1))),),
)


def test_state_keeps_floats_exactly():
    read = state_from(STATE.to_text())
    assert read.costs == COSTS
    assert math.isnan(read.state["loss"])
    assert read.model_copy(update={"state": {}}) == STATE.model_copy(update={"state": {}})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({**json.loads(STATE.to_text()), "more": 1})]
)
def test_unreadable_state_is_refused(text):
    with pytest.raises(RunError, match="a state that cannot be read"):
        state_from(text)
