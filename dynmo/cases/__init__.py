"""Dynamic cases: they change the model's work while it trains. Each is a folder.

A case is built on the names of `dynmo` and `dynmo.extend` alone, as one of the user's own.
"""

from __future__ import annotations

from dynmo.cases.early_exit.options import EarlyExit
from dynmo.cases.experts.options import Experts
from dynmo.cases.freezing.options import Freezing
from dynmo.cases.mixture_of_depths.options import MixtureOfDepths
from dynmo.cases.pruning.options import Pruning
from dynmo.cases.sparse_attention.options import SparseAttention
from dynmo.pipeline.case_options import CaseOptions

# The options of each case, by its section of [dynamism].
CASES: dict[str, type[CaseOptions]] = {
    options.name: options
    for options in (Pruning, SparseAttention, EarlyExit, MixtureOfDepths, Experts, Freezing)
}
