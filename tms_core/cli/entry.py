"""The start of the installed commands before slow imports, and their handling of signals.

The first process of a container does not receive SIGTERM without a handler: the kernel does not stop process 1 by a
default action. Commands have handlers while they work. Before and after that, the handler here stops the process at
once. The images block the signal before Python starts, so that a signal during the start is delivered once this handler
exists.

For a working command, a signal is a request to stop. The first SIGTERM or SIGINT asks it to finish accepted work. The
second one stops the process at once: acknowledged data is on disk, and the next start finds it.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

#: The longest wait of the signal thread for the message to the user, in seconds.
_SAYING_SECONDS = 1.0


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
    text: bytes = b"finishing what was accepted; a second Ctrl-C or SIGTERM stops at once\n",
    hangup: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Handle signals while the block runs; outside the main thread, where handlers cannot be set, do nothing.

    A separate thread reads signals from a pipe that Python writes to (``signal.set_wakeup_fd``), and acts on them. A
    handler in Python runs in the main thread only, when that thread continues. If the main thread waits for a lock and
    the system delivers the signal to another thread, the handler would never run.

    Args:
        ask: called by the first SIGTERM or SIGINT, in another thread.
        text: the message on standard error for the sender of the signal.
        hangup: called by SIGHUP, in another thread; None: SIGHUP is unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, signal.SIGINT, *([] if hangup is None else [signal.SIGHUP])]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    listening = threading.Thread(target=_listen, args=(reading, ask, text, hangup), name="signals", daemon=True)
    listening.start()
    outer = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(outer)
        os.close(writing)
        listening.join()
        os.close(reading)


def _listen(reading: int, ask: Callable[[], None], text: bytes, hangup: Callable[[], None] | None) -> None:
    """Act on signals until their pipe is closed."""
    is_stopping = False
    while came := os.read(reading, 1):
        number = came[0]
        if number == signal.SIGHUP and hangup is not None:
            hangup()
        elif number in (signal.SIGTERM, signal.SIGINT):
            if is_stopping:
                os._exit(128 + number)
            is_stopping = True
            ask()
            # In a separate thread: the message may wait for its reader, but the next signal must not.
            saying = threading.Thread(target=_say, args=(text,), daemon=True)
            saying.start()
            saying.join(_SAYING_SECONDS)


def _say(text: bytes) -> None:
    """Print a message if possible, without the streams: the main thread may be in a write to one of them."""
    with suppress(OSError):
        os.write(2, text)
