"""Where the installed commands begin: before anything is imported that takes time.

The first process of a container does not hear SIGTERM as long as it has no handler for it: the kernel ends no process
with number 1 that did not ask for it. The commands have handlers while they work; until then, and after, this one ends
the process at once. In the images the signal is blocked before Python begins, so that one which comes while it does is
kept until this handler is there.
"""

from __future__ import annotations

import importlib
import os
import signal
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
