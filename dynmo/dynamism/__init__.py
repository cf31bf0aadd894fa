"""Dynamic cases: they change the model's work while it trains.

options.py            the options of each case, without torch
case.py               the protocol of a case, and the model as a case sees it
registry.py           makes the cases of a run
counts.py             tokens that layers count, summed over steps and ranks
prefix.py             freezing a prefix of the model, for all policies
freezing.py           freezing by a schedule or by AutoFreeze
egeria.py             freezing by Egeria
pruning.py, sparse_attention.py, early_exit.py, mixture_of_depths.py, experts.py
                      one case each
"""
