"""Makes a typer command from a function of one record of options.

The record is a frozen dataclass. Each field is an option or an argument of the command line, and
typer's help text is the field's documentation. A command can therefore hand all of its options to
the functions that it is made of.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def command(function: Callable[[Options], None]) -> Callable[..., None]:
    """Makes a function of a record callable with the record's fields as keyword arguments.

    typer reads the signature and the annotations of the returned function. They have one parameter
    for each field of the record, in order. A field without a default is required.

    Example:
        >>> @dataclass(frozen=True)
        ... class GreetOptions:
        ...     name: Annotated[str, typer.Argument(help="Who is greeted.")]
        ...     loud: Annotated[bool, typer.Option("--loud", help="In capitals.")] = False
        >>> @command
        ... def greet(options: GreetOptions) -> None:
        ...     print(options.name.upper() if options.loud else options.name)
        >>> app.command("greet")(greet)
    """
    [argument] = inspect.signature(function).parameters
    record: Any = get_type_hints(function)[argument]
    annotations = get_type_hints(record, include_extras=True)

    @functools.wraps(function)
    def call(**values: Any) -> None:
        function(record(**values))

    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=annotations[field.name],
        )
        for field in fields(record)
    ]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    signature = inspect.Signature(parameters)
    call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return call
