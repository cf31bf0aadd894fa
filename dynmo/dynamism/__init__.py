"""Dynamic cases: they change the model's work while it trains.

case.py               the protocol of a case, and the model as a case sees it
registry.py           the cases that a config names
counts.py             tokens that layers count, summed over steps and ranks
prefix.py             freezing a prefix of the model, for all policies
freezing.py           freezing by a schedule or by AutoFreeze
egeria.py             freezing by Egeria
pruning.py, sparse_attention.py, early_exit.py, mixture_of_depths.py, moe.py
                      one case each
"""

from dynmo.dynamism.case import Change, Collective, Dynamism, Forecast, Layers, Signals, TokenShares
from dynmo.dynamism.registry import make_cases

__all__ = [
    "Change",
    "Collective",
    "Dynamism",
    "Forecast",
    "Layers",
    "Signals",
    "TokenShares",
    "make_cases",
]
