"""The configuration of a run: one frozen model. Pure: no torch.

It is read from TOML and `--set section.key=value`.

    values.py             the types of single values
    section.py            the base class of all sections
    sections.py           Config and the sections about ranks and balancing: keys and defaults
    sections_training.py  [model], [data] and [train]
    sections_dynamism.py  [dynamism] and its cases
    shapes.py             the meshes that a run's ranks can form
    checks.py             checks of values that must fit together
    checks_dynamism.py    the same for [dynamism]
    reading.py            TOML and overrides -> Config, or one line that says what is wrong
"""

from dynmo.config.reading import load, parse, with_options, without_unused_keys
from dynmo.config.sections import BALANCERS, Balance, Config
from dynmo.config.sections_training import ModelSection, TrainSection
from dynmo.config.shapes import accumulation_problem, mesh_shapes
from dynmo.config.values import parse_bytes

__all__ = [
    "BALANCERS",
    "Balance",
    "Config",
    "ModelSection",
    "TrainSection",
    "accumulation_problem",
    "load",
    "mesh_shapes",
    "parse",
    "parse_bytes",
    "with_options",
    "without_unused_keys",
]
