"""Loggers and their formats, and calls whose failure must not matter.

Lines are text on a terminal and for single commands, and one JSON object per line for daemons. They go to standard
error, because standard output has the result of a command.

A failing observer (a metric, a log line or a notification) must not turn a durable message into an error. Therefore
observers are called through :func:`harmless`, which reports their errors in a line on standard error: the log itself
may be the cause.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, Literal, ParamSpec, TextIO

from tms_core.errors import TmsError, shortened
from tms_core.logs.printable import complete, printable

P = ParamSpec("P")
LogFormat = Literal["auto", "text", "json"]

#: Loggers of ours; what libraries say is of interest from warnings on.
LOGGERS = ("janitor", "tms_core")
#: The audit log's, whose lines are JSON wherever they go (``tms_core.logs.audit``).
AUDIT = "tms.audit"
#: How long one line of a kind stands for all others, in seconds.
_SELDOM_SECONDS = 60.0


def harmless(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call something whose failure must not matter to the caller."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 whatever it is, the message it is about was handled
        with suppress(OSError, ValueError, AttributeError):  # standard error may be closed, or not be there
            sys.stderr.write(f"a metric, a log line or a notification failed: {error!r}\n")


class HarmlessLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose handlers and filters may fail."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log it, if that can be done."""
        # The line is the caller's, not this module's.
        harmless(super().log, level, msg, *args, **{"stacklevel": 3, **kwargs})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return a line unchanged."""
        return msg, kwargs


def get_logger(name: str) -> HarmlessLogger:
    """Return the logger of a module that handles messages."""
    return HarmlessLogger(logging.getLogger(name))


class SeldomLogger:
    """Logs what clients can bring about as often as they like: of all lines with one text, one a minute.

    Args:
        logger: where to.
    """

    def __init__(self, logger: HarmlessLogger) -> None:
        self._logger = logger
        #: Before when, by the running clock, a text is not logged again; these are the program's own, so they are few.
        self._again_at: dict[str, float] = {}

    def log(self, level: int, text: str, *args: object) -> None:
        """Log it, unless a line with this text, whatever its arguments, was logged within the last minute."""
        now = time.monotonic()
        if now >= self._again_at.get(text, 0.0):
            self._again_at[text] = now + _SELDOM_SECONDS
            self._logger.log(level, text, *args)


class JsonFormatter(logging.Formatter):
    """One JSON object a record: ``time`` (UTC), ``level``, ``logger``, ``message`` and the record's ``fields``.

    ``code`` is there for an error of the tree, ``error`` for any exception.
    """

    def __init__(self, arguments: str) -> None:
        super().__init__()
        self._arguments = arguments

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shortened(complete(record.getMessage(), self._arguments)),
            **{
                name: shortened(value) if isinstance(value, str) else value
                for name, value in getattr(record, "fields", {}).items()
            },
        }
        if code := _code(record):
            entry["code"] = code
        if record.exc_info:
            entry["error"] = shortened(self.formatException(record.exc_info))
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    """A sentence behind its level, and behind its time (UTC) too if it is to be."""

    def __init__(self, arguments: str, *, timed: bool) -> None:
        super().__init__("%(levelname)s %(message)s")
        self._arguments = arguments
        self._timed = timed

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 the name is logging's
        """Return a record as one line, with control characters escaped; only a traceback has several lines."""
        text, code = printable(super().formatMessage(record)), _code(record)
        # Not at the end, where a command is that a reader copies.
        return text.replace(" ", f" [{code}] ", 1) if code else text

    def format(self, record: logging.LogRecord) -> str:
        lines = shortened(complete(super().format(record), self._arguments)).split("\n")
        text = "\n".join(map(printable, lines))
        return f"{_moment(record)} {text}" if self._timed else text


def _code(record: logging.LogRecord) -> str:
    """Return the code of the error that a record is about, or an empty string."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    errors = (*arguments, record.exc_info[1] if record.exc_info else None)
    return next((error.code for error in errors if isinstance(error, TmsError)), "")


def _moment(record: logging.LogRecord) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{moment}.{int(record.msecs):03d}Z"


def configure(kind: LogFormat, stream: TextIO, arguments: str = "", *, daemon: bool = False) -> None:
    """Send all logs to one stream.

    Args:
        kind: ``auto`` is JSON for a daemon outside a terminal, and else text; outside a terminal text has the time.
        arguments: the options that commands named in the logs get (:func:`~tms_core.logs.printable.complete`).
        daemon: whether the process works until it is stopped.
    """
    as_text = kind == "text" or (kind == "auto" and (stream.isatty() or not daemon))
    handler = logging.StreamHandler(stream)
    text = TextFormatter(arguments, timed=not stream.isatty())
    handler.setFormatter(text if as_text else JsonFormatter(arguments))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    audit, lines = logging.getLogger(AUDIT), logging.StreamHandler(stream)
    lines.setFormatter(JsonFormatter(arguments))
    audit.handlers[:], audit.propagate = [lines], False
    audit.setLevel(logging.INFO)
