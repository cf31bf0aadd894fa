"""What surrounds a call of a user: checks, torch's modes, and names of arguments in messages.

A loop may have no_grad, inference_mode and autocast on around a call. Names of version 0.1 are read
with a warning until the next version.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from operator import attrgetter, index
from typing import Any, ParamSpec, TypeVar, cast

import torch

from dynmo.counterparts import check_names
from dynmo.errors import ConfigError, DynmoError
from dynmo.models.model import Model
from dynmo.pipeline.optimizer_options import SGD, AdamW, LearningRate, NamedOptimizer
from dynmo.pipeline.options import RECORDS, Checkpoints, StepScheduleOptions
from dynmo.runtime.comm.meeting import Meeting, meeting_of
from dynmo.runtime.comm.rank_group import RankGroup

P = ParamSpec("P")
T = TypeVar("T")

MOVED = {
    **{name: f"mesh.{name}" for name in ("shape", "replica", "ends", "microbatches", "partition")},
    **{name: f"mesh.{name}" for name in ("schedule", "modules", "identity")},
    **{name: f"measured.{name}" for name in ("loss", "decisions", "costs", "profile", "account")},
    **{name: f"cases.{name}" for name in ("token_shares", "wants_samples", "has_dense")},
    "forget_costs": "measured.forget",
    "save_trace": "measured.save_trace",
    "rebalance": "move",
    "buffers_digest": "digest(buffers=True)",
}
"""Members that `Pipeline` had in version 0.1, and where they are now."""

_OF_INIT = re.compile(r"\bparallel\.((?:work_)?timeout|threads|device|backend)\b")
_OF_PIPELINE = re.compile(
    rf"\b(?:train|parallel|pipeline(?=\.(?:{'|'.join(StepScheduleOptions.model_fields)})\b))\.([a-z]\w*)"
)
# Options that are in a record of `Pipeline`.
_IN_RECORDS = {key: kind.__name__ for kind in RECORDS.values() for key in kind.model_fields}
_OF_RECORD = re.compile(
    r"\b(?:dynamism\.(?=\w+\.))?(balance|elastic|(?<=dynamism\.)\w+)\.(?=[a-z])"
)
_VALUE = re.compile(r"(?<= = )(true|false)\b")
_KINDS: dict[str, tuple[Any, str]] = {
    "model": (Model, "wrap the list of its layers in dynmo.Sequential([...])"),
    "world": (Meeting, "give what dynmo.init() returns"),
    "optimizer": (
        AdamW | SGD | NamedOptimizer,
        "give dynmo.AdamW(lr=...), or a function such as functools.partial(torch.optim.SGD, "
        "lr=...)",
    ),
    "cases": (Sequence, "give a list of cases"),
    "checkpoint": (Checkpoints | None, "give dynmo.Checkpoints(folder=...)"),
    "learning_rate": (
        LearningRate | None,
        "give dynmo.LearningRate(warmup=..., decay=...), and the peak to the optimizer, such as "
        "dynmo.AdamW(lr=...)",
    ),
    **{name: (kind, f"give dynmo.{kind.__name__}(...)") for name, kind in RECORDS.items()},
}


def public(method: Callable[P, T]) -> Callable[P, T]:
    """Runs a method that users call as without `no_grad` and `inference_mode` around it.

    Keywords that it does not have are refused, with what to use instead. In a loop of one's own, an
    error names arguments in place of a file's keys. Autocast stays on. It keeps casts of weights
    until it ends, but a step changes the weights.
    """

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        check_names(method, kwargs)
        torch.clear_autocast_cache()
        given = [*args, *kwargs.values()]
        given += [getattr(each, "_world", None) for each in given[:1]]
        world = next((each for each in given if isinstance(each, RankGroup)), None)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return method(*args, **kwargs)
        except DynmoError as error:
            if world is not None and meeting_of(world).is_of_loop and error.args:
                error.args = (with_arguments(str(error)), *error.args[1:])
            raise
        finally:
            torch.clear_autocast_cache()

    return run


def check_kinds(given: Mapping[str, Any]) -> Meeting:
    """Raises ConfigError if an argument of `Pipeline` is another kind of thing."""
    optimizer = given["optimizer"]
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is {_kind_text(optimizer)}, which has parameters of its own; give a "
            f"function, such as functools.partial({type(optimizer).__name__}, lr=...), from which "
            "each rank makes the optimizers of its layers"
        )
    for name, (kind, advice) in _KINDS.items():
        value = given[name]
        if not isinstance(value, kind) and not (name == "optimizer" and callable(value)):
            if hasattr(value, "save_pretrained"):
                source = "dynmo.huggingface.from_pretrained(folder)"
                advice = f"give {source}, the folder that it comes from"
            raise ConfigError(f"{name} is {_kind_text(value)}; {advice}")
    return given["world"]


def _kind_text(given: object) -> str:
    of = given if isinstance(given, type) else type(given)
    name = f"{of.__module__}.{of.__qualname__}".removeprefix("builtins.")
    return f"the class {name}" if of is given else f"an object of {name}"


def whole_numbers(name: str, given: Iterable[Any]) -> tuple[int, ...]:
    """Raises ConfigError if an argument is no list of whole numbers."""
    try:
        return tuple(map(index, given))
    except TypeError:
        raise ConfigError(f"{name} = {given!r}; give a list of whole numbers") from None


def with_arguments(text: str) -> str:
    """Returns a message with `Pipeline`'s arguments, or the options of a record such as Elastic."""
    text = text.replace("train.global_batch", "microbatches").replace("dynamism.cases", "cases")
    text = text.replace("[elastic]", "elastic")
    text = _OF_PIPELINE.sub(_argument, _OF_INIT.sub(r"dynmo.init(\1=)", text))
    text = _OF_RECORD.sub(lambda found: f"{found[1].title().replace('_', '')}.", text)
    return _VALUE.sub(lambda found: found[1].capitalize(), text)


def _argument(found: re.Match[str]) -> str:
    key = found[1]
    return f"{_IN_RECORDS[key]}.{key}" if key in _IN_RECORDS else key


def former_member(pipeline: object, name: str) -> Any:
    if (place := MOVED.get(name)) is None:
        raise AttributeError(f"Pipeline has no {name}", name=name, obj=pipeline)
    _warn(f"Pipeline.{name}", f"Pipeline.{place}", 4)
    member, *given = place.split("(")
    found = attrgetter(member)(pipeline)
    return partial(found, buffers=True) if given else found


def former_read(init: Callable[P, T]) -> Callable[P, T]:
    """Puts arguments of `Pipeline` in the record that has them now."""

    @wraps(init)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        given = cast("dict[str, Any]", kwargs)
        for name, record in RECORDS.items():
            own = {key: given.pop(key) for key in record.model_fields if key in given}
            if own:
                kind = f"{name}=dynmo.{record.__name__}"
                _warn(f"Pipeline({next(iter(own))}=)", f"{kind}({next(iter(own))}=)", 4)
                before = given.get(name, record())
                if isinstance(before, record):  # the call below says what else it is
                    given[name] = record(**{**dict(before), **own})
        return init(*args, **kwargs)

    return call


def _warn(old: str, new: str, level: int) -> None:
    text = f"{old} is {new} now; the old form goes with the next version"
    warnings.warn(text, FutureWarning, stacklevel=level)
