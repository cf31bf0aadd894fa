"""Shows dynmo's log records as lines on stderr."""

from __future__ import annotations

import logging
import sys

from dynmo.errors import one_line


class _StderrHandler(logging.Handler):
    """Prints to the stderr of the moment, which a progress line may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print("dynmo:", one_line(record.getMessage()), file=sys.stderr)


def show_notices() -> None:
    """Prints warnings of dynmo's loggers as lines `dynmo: ...` on stderr.

    A second call changes nothing.
    """
    logger = logging.getLogger("dynmo")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
