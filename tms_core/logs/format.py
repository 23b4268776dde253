"""Logs: sentences for a person at a terminal, one JSON object a line for everything else.

They go to standard error, because standard output belongs to what a command was asked for.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Literal, TextIO

LogFormat = Literal["auto", "text", "json"]

#: Loggers of ours; what libraries say is of interest from warnings on.
OURS = ("janitor", "tms_core")


class JsonFormatter(logging.Formatter):
    """One JSON object: ``time`` (UTC), ``level``, ``logger``, ``message``, the record's ``fields``, ``error``."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    """A sentence behind its level, and behind its time (UTC) too."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_moment(record)} {super().format(record)}"


def _moment(record: logging.LogRecord) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{moment}.{int(record.msecs):03d}Z"


def configure(kind: LogFormat, stream: TextIO) -> None:
    """Send all logs to one stream.

    Args:
        kind: ``auto`` is text on a terminal and JSON elsewhere; text elsewhere begins with the time.
    """
    as_text = kind == "text" or (kind == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    text = logging.Formatter if stream.isatty() else TextFormatter
    handler.setFormatter(text("%(levelname)s %(message)s") if as_text else JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
