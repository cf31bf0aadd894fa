"""The forms of packed weights that dynmo's cases make. Importing this module makes them known."""

from dynmo.cases.pruning.sparse_linear import MaskedLinear as MaskedLinear
from dynmo.cases.pruning.sparse_linear import SparseLinear as SparseLinear
