"""The configuration of a run: one frozen model, read from TOML and `--set section.key=value`. Pure: no torch.

values.py    what one value may be
sections.py  the sections, and Config: every key with its default
checks.py    what must hold between keys
reading.py   TOML and overrides -> Config, or one line that says what was wrong
writing.py   Config -> TOML
"""

from dynmo.config.checks import shapes, slots_fit
from dynmo.config.reading import load, parse, with_options, without_unused_keys
from dynmo.config.sections import BALANCERS, Balance, Config, Model, Train
from dynmo.config.values import parse_bytes
from dynmo.config.writing import to_toml

__all__ = [
    "BALANCERS",
    "Balance",
    "Config",
    "Model",
    "Train",
    "load",
    "parse",
    "parse_bytes",
    "shapes",
    "slots_fit",
    "to_toml",
    "with_options",
    "without_unused_keys",
]
