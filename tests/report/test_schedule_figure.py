"""The picture of a schedule can be read."""

from __future__ import annotations

import pytest

from dynmo.cost.layer_cost import split_costs, uniform_costs
from dynmo.report.schedule_figure import timeline_figure
from dynmo.schedule.catalogue import full_schedule, stage_ranks_of
from dynmo.schedule.simulator import simulate
from tests.pictures import covered_by_legend, overlaps


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_schedule_is_drawn(name: str) -> None:
    costs = split_costs(uniform_costs(3, 1, 1, 1), stage_ranks_of(name, 3))
    figure = timeline_figure(simulate(full_schedule(name, 3, 5), costs))
    assert overlaps(figure) == []
    assert covered_by_legend(figure) == []
    ops = 3 * 5 * {"1f1b": 2, "zb-h1": 3, "zb-v": 6}[name]
    assert len(figure.axes[0].texts) == ops
