"""``tms serve``: run a server (:mod:`tms_core.server.serving`) until a signal stops it."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import click

from tms_core.cli.entry import handle_signals
from tms_core.cli.help import CONFIG_FILE, LOG_FORMAT, Command, shared
from tms_core.cli.outcome import arguments, complete_hints
from tms_core.logs.loggers import LogFormat, configure

if TYPE_CHECKING:
    from tms_core.server.companions import Companion

#: Parameters of glibc's mallopt: the minimum size of a block with its own mapping, and the maximum number of arenas.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
#: The threshold is larger than a page of messages; otherwise each page would need a system call.
_MMAP_THRESHOLD_BYTES, _ARENAS = 1 << 20, 2
#: The time that a thread keeps the interpreter lock while others wait, in seconds. The batch writer needs the lock
#: after each LevelDB call; with Python's default of 5 ms, it would wait longer for the lock than for the disk.
_SWITCH_SECONDS = 0.001

logger = logging.getLogger(__name__)


@click.command("serve", cls=Command)
@shared("--config", **CONFIG_FILE)
@shared(
    "--leveldb",
    metavar="DIR",
    env="TMS_STORAGE__LEVELDB__PATH",
    shown="data/messaging",
    help="LevelDB store, created if it does not exist; its transactions are in DIR.tx.",
)
@shared("--hbase", metavar="HOST:PORT[,…]", env="TMS_STORAGE__HBASE__THRIFT", help="HBase Thrift servers.")
@click.option(
    "--snapshots",
    metavar="DIR",
    help="Folder with transaction snapshots of another manager; this server then manages no transactions.",
)
@click.option("--no-janitor", is_flag=True, help="Serve without the janitor: nothing is deleted.")
@shared("--log-format", type=click.Choice(["auto", "text", "json"]), default="text", shown="text", help=LOG_FORMAT)
def serve(
    config: Path | None,
    leveldb: str | None,
    hbase: str | None,
    snapshots: str | None,
    *,
    no_janitor: bool,
    log_format: LogFormat,
) -> None:
    """Serve messages and transactions.

    The server listens for REST on server.port and for transactions on transactions.thrift, and runs
    the janitor in the same process. The first SIGTERM or Ctrl-C stops the server after it has finished
    the accepted requests; the second stops it at once. SIGHUP starts a sweep.

    \b
    Examples:
      tms serve
      tms serve --leveldb data/messaging --no-janitor
    """
    flags = {"leveldb": leveldb, "hbase": hbase, "snapshots": snapshots}
    configure(log_format, sys.stderr, arguments(), daemon=True)
    _raise_file_limit()
    _configure_malloc()
    sys.setswitchinterval(_SWITCH_SECONDS)
    stop = Event()
    running: list[Companion] = []
    from tms_core.server.serving import serving  # noqa: PLC0415 help texts do not need it

    with (
        complete_hints(),
        handle_signals(stop.set, hangup=partial(_run_companions, running)),
        serving(config, os.environ, flags, janitor=not no_janitor) as started,
    ):
        running += started.companions.values()
        if started.transactions is not None:
            click.echo(f"transactions: {started.transactions}")
        click.echo(f"REST: {started.url}")
        stop.wait()
    logger.info("all accepted messages are written; the store is closed")


def _run_companions(running: Sequence[Companion]) -> None:
    """Start a run of each companion at once, after SIGHUP."""
    if not running:
        logger.info("SIGHUP ignored: no janitor runs in this server")
    for companion in running:
        companion.run_now()


def _raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit: each connection is a file, and the soft limit is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _configure_malloc() -> None:
    """Configure glibc to return large freed blocks to the system, and to share few arenas among all threads.

    Otherwise each thread keeps the memory of its largest message, which ``server.memory`` does not count (mallopt(3)).
    Other C libraries are not changed.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        library.mallopt(_M_ARENA_MAX, _ARENAS)
