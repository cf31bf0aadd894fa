"""The base class of all options, and the types of single values.

Each room of the package has the options that it uses. A user makes them in Python, and a section
of the configuration file is one of them. The message of a check says what was wrong and what to
write instead.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, wraps
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    Self,
    TypeAlias,
    cast,
    dataclass_transform,
    get_args,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from dynmo.counterparts import counterpart
from dynmo.errors import ConfigError, InputError, one_line, place

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
    from pydantic_core import ErrorDetails
else:
    ModelMetaclass = type(BaseModel)

# Largest count. A slip of the keyboard should not become an endless loop.
LARGEST = 2**31 - 1
# More steps than this are left in a run without a known end.
ENDLESS = LARGEST // 2
_BYTE_SIZE = TypeAdapter(ByteSize)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class _OneLine(ModelMetaclass):
    if not TYPE_CHECKING:  # type checkers look at the options instead

        def __call__(cls, *args: Any, **options: Any) -> Any:
            if args:
                raise ConfigError(f"dynmo.{cls.__name__} takes its options by name, like lr=1e-3")
            try:
                return super().__call__(*args, **options)
            except ValidationError as error:
                problem = problems_of(error, options)[0]
                name = vars(cls).get("of", cls.__name__)
                raise ConfigError(one_line(f"dynmo.{name}: {problem.text}")) from None


class Options(BaseModel, metaclass=_OneLine):
    """Frozen. Unknown keys, strings for numbers, and infinities are errors.

    The string under each key is its description in docs/reference/configuration.md. `of` names what
    takes the options, if that is not the class itself.

    Raises:
        ConfigError: A key or a value is wrong.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Yields what is wrong with values that are right each by itself."""
        yield from ()


_SAY = {
    "tuple_type": 'must be a list, like [1, 2] or ["freezing"]',
    "missing": "missing",
    "model_type": "must be a section of keys",
    "too_long": "the list is too long",
    "extra_forbidden": "there is no such option",
}


class WrongValue(NamedTuple):
    """A wrong value.

    Attributes:
        place: Its keys and indices, outermost first.
        is_unknown: Whether there is no such key.
        text: Key, value, and what is wrong.
    """

    place: tuple[str | int, ...]
    is_unknown: bool
    text: str


def problems_of(error: ValidationError, data: object) -> list[WrongValue]:
    """Says what pydantic found wrong in `data`, in the words of a TOML file."""
    found: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for each in error.errors(include_url=False):
        found.setdefault(_place(each, data), []).append(each)
    # Each alternative of a union reports an error. The one that went deepest into the value counts.
    outer = {place[:depth] for place in found for depth in range(len(place))}
    return [
        WrongValue(place, each[0]["type"] == "extra_forbidden", _explain(place, each))
        for place, each in found.items()
        if place not in outer
    ]


def _place(problem: ErrorDetails, data: Any) -> tuple[str | int, ...]:
    """Returns where in `data` a problem is, without pydantic's names of a union's alternatives."""
    place: list[str | int] = []
    for part in problem["loc"]:
        with suppress(LookupError, TypeError):
            data = data[part]
            place.append(part)
    return (*place, problem["loc"][-1]) if problem["type"] == "missing" else tuple(place)


def _explain(place: tuple[str | int, ...], alternatives: list[ErrorDetails]) -> str:
    if any(x["type"].startswith(("greater_than", "less_than")) for x in alternatives):
        # The number is of the right type, so that other types are not meant.
        alternatives = [x for x in alternatives if not x["type"].endswith("_type")]
    first, *others = dict.fromkeys(map(_what, alternatives))
    if alternatives[0]["type"] == "value_error" and isinstance(alternatives[0]["input"], dict):
        return first  # a record whose keys do not fit together: the message names them
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    problem = alternatives[0]
    if problem["type"] == "extra_forbidden":
        advice = counterpart(str(place[-1]), python=True)
        first = first if advice is None else f"{first}; {advice}"
    shown = "" if problem["type"] == "missing" else f" = {_short(problem['input'])}"
    more = "".join(f" or {other.removeprefix('must be ')}" for other in others)
    return f"{key.lstrip('.')}{shown}: {first}{more}"


def _what(problem: ErrorDetails) -> str:
    if problem["type"] == "value_error":
        return str(problem.get("ctx", {})["error"])
    given = problem["input"]
    if problem["type"] == "int_type" and isinstance(given, float) and 0 < given < 1:
        return "must be a whole number, not a share"  # such as transformers' warmup_ratio
    return _SAY.get(problem["type"]) or problem["msg"].replace("Input should be", "must be")


def _short(value: object) -> str:
    try:
        text = value_text(value)
    except RecursionError:  # lists in lists, too deep
        text = "[[..."
    return text if len(text) <= 60 else text[:57] + "..."


def parse_bytes(text: str) -> int:
    """Read a size such as "40GiB", "1.5 GB" or "4096".

    Args:
        text: A number and a unit. KiB to TiB are powers of 1024, KB to TB powers of 1000.
            No unit means bytes. Case does not matter.

    Returns:
        The size in bytes.

    Raises:
        ValueError: The text is not a size.
    """
    try:
        # ByteSize ignores what follows the first size in a text.
        if not re.fullmatch(r"\s*\d{1,15}(\.\d{1,15})?\s*[A-Za-z]*\s*", text, re.ASCII):
            raise ValueError
        return int(_BYTE_SIZE.validate_python(text.strip()))
    except ValueError:
        raise ValueError(
            "not a size; write bytes, or a number and one of KiB, MiB, GiB, TiB, KB, MB, GB, TB, "
            'like "40GiB"'
        ) from None


def value_text(value: object) -> str:
    """Writes a value in one line of TOML, as error messages quote it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(value_text(item) for item in cast(Sequence[object], value))}]"
    if isinstance(value, dict):
        return f"""{{{
            ", ".join(
                f"{key} = {value_text(item)}"
                for key, item in cast(dict[str, object], value).items()
            )
        }}}"""
    return str(value)


def written(pattern: str, form: str) -> AfterValidator:
    """Returns a check that the whole of a string matches `pattern`.

    Args:
        pattern: A regular expression.
        form: How to write the string, for the error message.
    """

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.DOTALL):
            raise ValueError(f"must be {form}")
        return value

    return AfterValidator(check)


# The way to a function or class of the user's own.
OWN = r"python:[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"


@cache
def find_own(key: str, value: str) -> Callable[..., Any]:
    """Imports the function that `python:package.module:NAME` names.

    An exception of the user's code becomes a ConfigError that names `key` and `value`. Errors of
    dynmo stay as they are.

    Raises:
        ConfigError: There is no such module, or nothing to call with this name in it.
    """
    where = f"{key} {value!r}"
    module_name, _, name = value.removeprefix("python:").partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        moved = (error.name or "").startswith("dynmo.")
        remedy = (
            "what users need is in dynmo and dynmo.extend, such as dynmo.Partition"
            if moved
            else "run from its folder or install it"
        )
        raise ConfigError(f"{where}: cannot import {module_name}: {error}; {remedy}") from error
    except (Exception, SystemExit) as error:  # anything that the user's code raises
        raise ConfigError(
            f"{where}: importing {module_name} raised {type(error).__name__}: {error}{place(error)}"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        file = getattr(module, "__file__", None)
        raise ConfigError(f"{where}: {module_name} has no function {name} ({file})")

    @wraps(found)
    def call(*arguments: Any) -> Any:
        try:
            return found(*arguments)
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # anything that the user's code raises
            raise ConfigError(
                f"{where}: raised {type(error).__name__}: {error}{place(error)}"
            ) from error

    return call


def _check_memory(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


def _check_limits(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(map(_check_memory, cast(Sequence[object], value)))
    return _check_memory(value)


def check_ascending(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Checks that the first numbers of the entries, which are steps, ascend."""
    for (step, *_), (next_step, *_) in itertools.pairwise(value):
        if next_step <= step:
            raise ValueError(f"step {next_step} after step {step}: steps must ascend")
    return value


def section_in(annotation: object) -> type[Options] | None:
    """Returns the record that a field holds, or may hold. None if it holds a value."""
    choices = (annotation, *get_args(annotation))
    return next((x for x in choices if isinstance(x, type) and issubclass(x, Options)), None)


Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST)]
Whole: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
# A longer wait overflows the system's type. More threads take long to start and gain nothing.
Timeout: TypeAlias = Annotated[float, Field(gt=0, le=1e9)]
Threads: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
BelowOne: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Seed: TypeAlias = Annotated[int, Field(ge=0, le=2**63 - 1)]
# TOML has lists only, and strict pydantic takes no list for a tuple. Tuples (frozen, hashable) are
# therefore lax. Their items are not.
Lax = Field(strict=False)
# Type checkers see what a user may give: any sequence, and a size such as "2GiB".
if TYPE_CHECKING:
    Listed = Sequence
    Bytes: TypeAlias = int | str
else:

    class Listed:
        def __class_getitem__(cls, item: Any) -> Any:
            return Annotated[tuple[item, ...], Lax]

    Bytes = Annotated[int, Field(ge=0), BeforeValidator(_check_memory)]
MemoryLimit: TypeAlias = Annotated[
    Annotated[int, Field(ge=1)] | Annotated[tuple[Annotated[int, Field(ge=1)], ...], Lax] | None,
    BeforeValidator(_check_limits),
]
