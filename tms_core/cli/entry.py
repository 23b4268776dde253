"""The entry point of the installed commands, and their handling of signals.

The kernel ignores SIGTERM for process 1, the first of a container, unless the process has a handler. Commands install
handlers while they work. Before and after that, the handler here stops the process at once. The images block SIGTERM
before Python starts, so a signal during the start stays pending until this handler exists.

For a working command, the first SIGTERM or SIGINT is a request to finish accepted work and stop. The second signal
stops the process at once; acknowledged data is on disk.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

#: The longest wait of the signal thread for the message to be printed, in seconds.
_PRINT_SECONDS = 1.0


def main(module: str = "tms_core.cli.main") -> None:
    """Run a command and exit with its code.

    Args:
        module: the name of the module with the command's ``main``, imported late because the import is slow.
    """
    _replace_closed_streams()
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _exit_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    importlib.import_module(module).main()


def _replace_closed_streams() -> None:
    """Open the null device for each closed standard stream, so that no other file gets its descriptor.

    Otherwise a message for standard error could be written into a file of the store.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 it stays open


def _exit_at_once(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


@contextmanager
def handle_signals(
    ask: Callable[[], None],
    *,
    text: bytes = b"finishing accepted work; a second Ctrl-C or SIGTERM stops at once\n",
    hangup: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Handle signals while the block runs; do nothing outside the main thread, where handlers cannot be set.

    A separate thread reads the signals from a pipe that Python writes to (``signal.set_wakeup_fd``). Python runs signal
    handlers only in the main thread, and only when that thread continues. If the main thread waits for a lock and the
    system delivers the signal to another thread, a handler would never run.

    Args:
        ask: the function that requests the stop, called in another thread by the first SIGTERM or SIGINT.
        text: the message on standard error after that signal.
        hangup: the function called in another thread by SIGHUP; None: the handling of SIGHUP is unchanged.
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
    while received := os.read(reading, 1):
        number = received[0]
        if number == signal.SIGHUP and hangup is not None:
            hangup()
        elif number in (signal.SIGTERM, signal.SIGINT):
            if is_stopping:
                os._exit(128 + number)
            is_stopping = True
            ask()
            # In a separate thread: a full pipe may block the message, but must not block the next signal.
            printing = threading.Thread(target=_print_message, args=(text,), daemon=True)
            printing.start()
            printing.join(_PRINT_SECONDS)


def _print_message(text: bytes) -> None:
    """Print a message if possible, without ``sys.stderr``, whose lock the main thread may hold."""
    with suppress(OSError):
        os.write(2, text)
