"""Logs: sentences for a person at a terminal, one JSON object a line for everything else.

They go to standard error, because standard output belongs to what a command was asked for.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Literal, TextIO

from tms_core.logs.printable import complete

LogFormat = Literal["auto", "text", "json"]

#: Loggers of ours; what libraries say is of interest from warnings on.
OURS = ("janitor", "tms_core")


class JsonFormatter(logging.Formatter):
    """One JSON object: ``time`` (UTC), ``level``, ``logger``, ``message``, the record's ``fields``, ``error``."""

    def __init__(self, arguments: str) -> None:
        super().__init__()
        self._arguments = arguments

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": complete(record.getMessage(), self._arguments),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    """A sentence behind its level, and behind its time (UTC) too if it is to be."""

    def __init__(self, arguments: str, *, timed: bool) -> None:
        super().__init__("%(levelname)s %(message)s")
        self._arguments = arguments
        self._timed = timed

    def format(self, record: logging.LogRecord) -> str:
        text = complete(super().format(record), self._arguments)
        return f"{_moment(record)} {text}" if self._timed else text


def _moment(record: logging.LogRecord) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{moment}.{int(record.msecs):03d}Z"


def configure(kind: LogFormat, stream: TextIO, arguments: str = "") -> None:
    """Send all logs to one stream.

    Args:
        kind: ``auto`` is text on a terminal and JSON elsewhere; text elsewhere begins with the time.
        arguments: the options that commands named in the logs get (:func:`~tms_core.logs.printable.complete`).
    """
    as_text = kind == "text" or (kind == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    text = TextFormatter(arguments, timed=not stream.isatty())
    handler.setFormatter(text if as_text else JsonFormatter(arguments))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
