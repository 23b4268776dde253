"""Where the installed commands begin, before anything is imported that takes time, and what signals do to them.

The first process of a container does not hear SIGTERM as long as it has no handler for it: the kernel ends no process
with number 1 that did not ask for it. The commands have handlers while they work; until then, and after, this one ends
the process at once. In the images the signal is blocked before Python begins, so that one which comes while it does is
kept until this handler is there.

To a command at work a signal is a request to end, and not an end wherever it happens to be. The first SIGTERM or SIGINT
asks. The second ends the process at once: what was acknowledged is on disk already, and the next start finds it.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def main(module: str = "tms_core.cli.main") -> None:
    """Run a command and exit with its code.

    Args:
        module: has the command's ``main``.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    importlib.import_module(module).main()


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


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
