"""Loggers and their formats, and calls whose failures are ignored.

Lines are text on a terminal and for single commands, and JSON objects for daemons. They are written to standard error,
because standard output has the result of a command.

A failing observer (a metric, a log line or a notification) must not turn a durable message into an error. Therefore
callers use :func:`harmless`, which reports an observer's error on standard error, because the log may be its cause.
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

#: The project's loggers, which log from INFO on; libraries log from WARNING on.
LOGGERS = ("janitor", "tms_core")
#: The logger of the audit log, whose lines are always JSON (``tms_core.logs.audit``).
AUDIT = "tms.audit"
#: The shortest interval between lines with the same text, in seconds.
_REPEAT_SECONDS = 60.0


def harmless(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function, and report a failure on standard error only."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 an observer may fail in any way, after the message was handled
        with suppress(OSError, ValueError, AttributeError):  # standard error may be closed or None
            sys.stderr.write(f"a metric, a log line or a notification failed: {error!r}\n")


class HarmlessLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that ignores failures of its handlers and filters."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message; report a failure on standard error."""
        # The stack level makes the record name the caller's line, not this module's.
        harmless(super().log, level, msg, *args, **{"stacklevel": 3, **kwargs})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return a message unchanged."""
        return msg, kwargs


def get_logger(name: str) -> HarmlessLogger:
    """Return the logger of a module that handles messages."""
    return HarmlessLogger(logging.getLogger(name))


class RateLimitedLogger:
    """A logger of events that clients can cause at any rate: one line a minute for each text.

    Args:
        logger: the underlying logger.
    """

    def __init__(self, logger: HarmlessLogger) -> None:
        self._logger = logger
        #: The earliest next time of each text, by the monotonic clock. Texts are constants, so they are few.
        self._next_time: dict[str, float] = {}

    def log(self, level: int, text: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log a line, unless a line with this text and any arguments was logged within the last minute.

        Args:
            exc_info: the error whose traceback follows the line.
        """
        now = time.monotonic()
        if now >= self._next_time.get(text, 0.0):
            self._next_time[text] = now + _REPEAT_SECONDS
            self._logger.log(level, text, *args, exc_info=exc_info)


class JsonFormatter(logging.Formatter):
    """A formatter of JSON objects: ``time`` (UTC), ``level``, ``logger``, ``message`` and the record's ``fields``.

    A record of an error in the tree also has ``code``, a record of an exception ``error``.
    """

    def __init__(self, arguments: str) -> None:
        super().__init__()
        self._arguments = arguments

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _format_time(record),
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
    """A formatter of text lines: level and message, after the time (UTC) if ``timed``."""

    def __init__(self, arguments: str, *, timed: bool) -> None:
        super().__init__("%(levelname)s %(message)s")
        self._arguments = arguments
        self._timed = timed

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 the name is logging's
        """Return a record as one line, with control characters escaped; only a traceback has several lines."""
        text, code = printable(super().formatMessage(record)), _code(record)
        # Put the code after the level: the line may end with a command that an operator copies.
        return text.replace(" ", f" [{code}] ", 1) if code else text

    def format(self, record: logging.LogRecord) -> str:
        lines = shortened(complete(super().format(record), self._arguments)).split("\n")
        text = "\n".join(map(printable, lines))
        return f"{_format_time(record)} {text}" if self._timed else text


def _code(record: logging.LogRecord) -> str:
    """Return the code of a record's error, or an empty string."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    errors = (*arguments, record.exc_info[1] if record.exc_info else None)
    return next((error.code for error in errors if isinstance(error, TmsError)), "")


def _format_time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def configure(kind: LogFormat, stream: TextIO, arguments: str = "", *, daemon: bool = False) -> None:
    """Send all logs to one stream.

    Args:
        kind: ``auto`` is JSON for a daemon without a terminal, else text; without a terminal, text has the time.
        arguments: options to add to commands in messages (:func:`~tms_core.logs.printable.complete`).
        daemon: whether the process runs until it is stopped.
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
