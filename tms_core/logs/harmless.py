"""The border between messaging and what only watches it: a metric, a log line or a notification that fails.

None of these may turn a message that is on disk into an error. So they are called through here, and what they raise
ends here: with a line on standard error, because the log may be what has failed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, ParamSpec

P = ParamSpec("P")


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
        """Nothing is added to a line."""
        return msg, kwargs


def get_logger(name: str) -> HarmlessLogger:
    """The logger of a module that handles messages."""
    return HarmlessLogger(logging.getLogger(name))
