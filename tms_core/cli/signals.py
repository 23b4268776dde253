"""Signals as a request to end, and not as an end wherever the program happens to be.

The first SIGTERM or SIGINT asks. The second ends the process at once: what was acknowledged is on disk already, and
the next start finds it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ending(
    ask: Callable[[], None],
    *,
    said: bytes = b"finishing what was accepted; a second Ctrl-C or SIGTERM stops at once\n",
    hangup: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Handle signals while the block runs; outside the main thread, where no handler can be set, nothing changes.

    Args:
        ask: called by the first SIGTERM or SIGINT.
        said: what a person who sent it is told.
        hangup: called by SIGHUP; None leaves that signal as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        if asked:
            os._exit(128 + number)
        asked.append(number)
        # Not by way of the streams: the signal may have come in the middle of a write to one.
        os.write(2, said)
        ask()

    wanted: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {signal.SIGTERM: end, signal.SIGINT: end}
    if hangup is not None:
        wanted[signal.SIGHUP] = lambda *_: hangup()
    former = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
