"""dynmo: pipeline-parallel training of language models whose work changes while they train.

    import dynmo

    with dynmo.init() as world:
        model = dynmo.Sequential([embedding, *blocks, head], loss=loss)
        pipeline = dynmo.Pipeline(model, world, schedule="zb-auto", microbatches=8)
        for inputs, targets in loader:
            result = pipeline.step(inputs, targets)

The names below are the public ones. Each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynmo import huggingface as huggingface
    from dynmo.cases.early_exit import EarlyExit as EarlyExit
    from dynmo.cases.experts import Experts as Experts
    from dynmo.cases.freezing import Freezing as Freezing
    from dynmo.cases.mixture_of_depths import MixtureOfDepths as MixtureOfDepths
    from dynmo.cases.pruning import Pruning as Pruning
    from dynmo.cases.sparse_attention import SparseAttention as SparseAttention
    from dynmo.cost.layer_cost import Forecast as Forecast
    from dynmo.cost.layer_cost import LayerCost as LayerCost
    from dynmo.errors import DynmoError as DynmoError
    from dynmo.events import StepResult as StepResult
    from dynmo.kernels.deferral import register_split as register_split
    from dynmo.metrics import Csv as Csv
    from dynmo.metrics import TensorBoard as TensorBoard
    from dynmo.metrics import WandB as WandB
    from dynmo.models.loss import next_token_loss as next_token_loss
    from dynmo.models.model import Model as Model
    from dynmo.models.options import ModelOptions as ModelOptions
    from dynmo.models.registry import load_model as load_model
    from dynmo.models.sequential import Sequential as Sequential
    from dynmo.pipeline.case import Change as Change
    from dynmo.pipeline.case import Dynamism as Dynamism
    from dynmo.pipeline.case import Layers as Layers
    from dynmo.pipeline.case import Signals as Signals
    from dynmo.pipeline.dry_run import RunPlan as RunPlan
    from dynmo.pipeline.dry_run import dry_run as dry_run
    from dynmo.pipeline.loader import Loader as Loader
    from dynmo.pipeline.optimizer_options import SGD as SGD
    from dynmo.pipeline.optimizer_options import AdamW as AdamW
    from dynmo.pipeline.optimizer_options import LearningRate as LearningRate
    from dynmo.pipeline.options import Checkpoints as Checkpoints
    from dynmo.pipeline.options import Log as Log
    from dynmo.pipeline.options import Parallel as Parallel
    from dynmo.pipeline.options import PipelineOptions as PipelineOptions
    from dynmo.pipeline.options import Training as Training
    from dynmo.pipeline.pipeline import Pipeline as Pipeline
    from dynmo.pipeline.start import World as World
    from dynmo.pipeline.start import init as init
    from dynmo.plan.options import Balance as Balance
    from dynmo.plan.options import Elastic as Elastic
    from dynmo.plan.partition import Partition as Partition

__version__ = "0.1.0"

_HOMES = {
    "AdamW": "dynmo.pipeline.optimizer_options",
    "Balance": "dynmo.plan.options",
    "Change": "dynmo.pipeline.case",
    "Checkpoints": "dynmo.pipeline.options",
    "Csv": "dynmo.metrics",
    "Dynamism": "dynmo.pipeline.case",
    "DynmoError": "dynmo.errors",
    "EarlyExit": "dynmo.cases.early_exit",
    "Elastic": "dynmo.plan.options",
    "Experts": "dynmo.cases.experts",
    "Forecast": "dynmo.cost.layer_cost",
    "Freezing": "dynmo.cases.freezing",
    "LayerCost": "dynmo.cost.layer_cost",
    "Layers": "dynmo.pipeline.case",
    "LearningRate": "dynmo.pipeline.optimizer_options",
    "Loader": "dynmo.pipeline.loader",
    "Log": "dynmo.pipeline.options",
    "MixtureOfDepths": "dynmo.cases.mixture_of_depths",
    "Model": "dynmo.models.model",
    "ModelOptions": "dynmo.models.options",
    "Parallel": "dynmo.pipeline.options",
    "Partition": "dynmo.plan.partition",
    "Pipeline": "dynmo.pipeline.pipeline",
    "PipelineOptions": "dynmo.pipeline.options",
    "Pruning": "dynmo.cases.pruning",
    "RunPlan": "dynmo.pipeline.dry_run",
    "SGD": "dynmo.pipeline.optimizer_options",
    "Sequential": "dynmo.models.sequential",
    "Signals": "dynmo.pipeline.case",
    "SparseAttention": "dynmo.cases.sparse_attention",
    "StepResult": "dynmo.events",
    "TensorBoard": "dynmo.metrics",
    "Training": "dynmo.pipeline.options",
    "WandB": "dynmo.metrics",
    "World": "dynmo.pipeline.start",
    "dry_run": "dynmo.pipeline.dry_run",
    "init": "dynmo.pipeline.start",
    "load_model": "dynmo.models.registry",
    "next_token_loss": "dynmo.models.loss",
    "register_split": "dynmo.kernels.deferral",
}
__all__: list[str]

if not TYPE_CHECKING:
    __all__ = ["__version__", *_HOMES]

    def __getattr__(name: str) -> Any:
        """Loads a public name when it is first used (PEP 562)."""
        if name == "huggingface":
            value = importlib.import_module("dynmo.huggingface")
        elif name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        else:
            raise AttributeError(
                f"module 'dynmo' has no attribute {name!r}; its public names are "
                f"{', '.join(__all__)}"
            )
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted([*__all__, "huggingface"])
