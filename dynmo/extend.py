"""Names for authors of dynamic cases, of balancers, and of layers with weights of their own.

The cases of dynmo are built on these and on the names of `dynmo` alone. Each name is loaded when it
is first used. Option records need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynmo.errors import ConfigError as ConfigError
    from dynmo.jit import jit as jit
    from dynmo.kernels import tiled as tiled
    from dynmo.kernels.grouped_linear import GroupedLinear as GroupedLinear
    from dynmo.kernels.grouped_linear import exchange_rows as exchange_rows
    from dynmo.kernels.packed_weight import PackedWeight as PackedWeight
    from dynmo.kernels.seeds import case_seed as case_seed
    from dynmo.kernels.seeds import seed_forward as seed_forward
    from dynmo.kernels.split import SplitLinear as SplitLinear
    from dynmo.kernels.split import WeightTape as WeightTape
    from dynmo.kernels.split import add_loss as add_loss
    from dynmo.models import gpt as gpt
    from dynmo.models.group_placement import GroupPlacement as GroupPlacement
    from dynmo.models.huggingface import kinds as hugging_face  # noqa: F401
    from dynmo.options import Bytes as Bytes
    from dynmo.options import Count as Count
    from dynmo.options import Listed as Listed
    from dynmo.options import Whole as Whole
    from dynmo.pipeline.case import TokenShares as TokenShares
    from dynmo.pipeline.case import layers_that as layers_that
    from dynmo.pipeline.case_options import CaseOptions as CaseOptions
    from dynmo.pipeline.case_options import RunFacts as RunFacts
    from dynmo.pipeline.counts import CountingCase as CountingCase
    from dynmo.pipeline.counts import Counts as Counts
    from dynmo.plan.evaluate import evaluate as evaluate
    from dynmo.runtime.layer.stage import FrozenPrefix as FrozenPrefix

_HOMES = {
    "Bytes": "dynmo.options",
    "CaseOptions": "dynmo.pipeline.case_options",
    "ConfigError": "dynmo.errors",
    "Count": "dynmo.options",
    "CountingCase": "dynmo.pipeline.counts",
    "Counts": "dynmo.pipeline.counts",
    "FrozenPrefix": "dynmo.runtime.layer.stage",
    "GroupPlacement": "dynmo.models.group_placement",
    "GroupedLinear": "dynmo.kernels.grouped_linear",
    "Listed": "dynmo.options",
    "PackedWeight": "dynmo.kernels.packed_weight",
    "RunFacts": "dynmo.pipeline.case_options",
    "SplitLinear": "dynmo.kernels.split",
    "TokenShares": "dynmo.pipeline.case",
    "WeightTape": "dynmo.kernels.split",
    "Whole": "dynmo.options",
    "add_loss": "dynmo.kernels.split",
    "case_seed": "dynmo.kernels.seeds",
    "evaluate": "dynmo.plan.evaluate",
    "exchange_rows": "dynmo.kernels.grouped_linear",
    "gpt": "dynmo.models.gpt",
    "hugging_face": "dynmo.models.huggingface.kinds",
    "jit": "dynmo.jit",
    "layers_that": "dynmo.pipeline.case",
    "seed_forward": "dynmo.kernels.seeds",
    "tiled": "dynmo.kernels.tiled",
}
__all__: list[str]

if not TYPE_CHECKING:
    __all__ = [*_HOMES]

    def __getattr__(name: str) -> Any:
        """Loads a name when it is first used (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(
                f"module 'dynmo.extend' has no attribute {name!r}; its names are "
                f"{', '.join(__all__)}"
            )
        home = importlib.import_module(_HOMES[name])
        value = globals()[name] = getattr(home, name, home)  # some are modules
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
