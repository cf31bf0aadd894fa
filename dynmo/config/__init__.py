"""The configuration file of a run: it joins the options of the rooms. Pure: no torch.

sections.py   Config: the sections, which are the rooms' options, and whether they fit together
reading.py    TOML and overrides -> Config, or one line that says what is wrong
"""

from dynmo.config.reading import load, parse, with_options, without_unused_keys
from dynmo.config.sections import Config

__all__ = ["Config", "load", "parse", "with_options", "without_unused_keys"]
