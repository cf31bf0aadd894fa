"""Arguments of Python in place of a file's keys, in messages to a loop of one's own."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from dynmo.errors import DynmoError
from dynmo.pipeline.options import RECORDS, ScheduleOptions
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.comm.world import World

_OF_INIT = re.compile(r"\bparallel\.((?:setup_)?timeout|threads|device|backend)\b")
_OF_PIPELINE = re.compile(
    rf"\b(?:train|parallel|pipeline(?=\.(?:{'|'.join(ScheduleOptions.model_fields)})\b))\.([a-z]\w*)"
)
# Options that are in a record of `Pipeline`.
_IN_RECORDS = {key: kind.__name__ for kind in RECORDS.values() for key in kind.model_fields}
_OF_RECORD = re.compile(
    r"\b(?:dynamism\.(?=\w+\.))?(balance|elastic|(?<=dynamism\.)\w+)\.(?=[a-z])"
)
_VALUE = re.compile(r"(?<= = )(true|false)\b")


@contextmanager
def arguments_named(world: World | None) -> Generator[None]:
    """Changes the message of an error if `dynmo.init` has made the world."""
    try:
        yield
    except DynmoError as error:
        if world is not None and meeting_of(world).is_of_loop and error.args:
            error.args = (with_arguments(str(error)), *error.args[1:])
        raise


def with_arguments(text: str) -> str:
    """Returns a message with `Pipeline`'s arguments, or the options of a record such as Elastic."""
    text = text.replace("train.global_batch", "microbatches").replace("dynamism.cases", "cases")
    text = text.replace("[elastic]", "elastic")
    text = _OF_PIPELINE.sub(_argument, _OF_INIT.sub(r"dynmo.init(\1=)", text))
    text = _OF_RECORD.sub(lambda found: f"{_class_name(found[1])}.", text)
    return _VALUE.sub(lambda found: found[1].capitalize(), text)


def _argument(found: re.Match[str]) -> str:
    key = found[1]
    return f"{_IN_RECORDS[key]}.{key}" if key in _IN_RECORDS else key


def _class_name(section: str) -> str:
    return "".join(word.capitalize() for word in section.split("_"))
