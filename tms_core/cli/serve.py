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

from tms_core.cli.entry import ending
from tms_core.cli.help import CONFIG_FILE, LOG_FORMAT, Command, shared
from tms_core.cli.outcome import arguments, completing
from tms_core.logs.loggers import LogFormat, configure

if TYPE_CHECKING:
    from tms_core.server.companions import Companion

#: glibc's parameters: the smallest block that is returned to the system when it is freed, and the number of pools.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
#: Larger than a page of messages; otherwise each page would be allocated by the system.
_LARGE_BLOCK_BYTES, _POOLS = 1 << 20, 2
#: The longest time that a thread keeps the interpreter lock while others wait, in seconds. The writer of a batch needs
#: the lock after each call of LevelDB, and with Python's 5 ms it waited longer for the lock than for the disk.
_TURN_SECONDS = 0.001

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
    help="Folder of another manager's transaction snapshots; then this server manages no transactions.",
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
    the janitor inside. The first SIGTERM or Ctrl-C stops it after the accepted requests are finished,
    the second stops it at once. SIGHUP starts a sweep.

    \b
    Examples:
      tms serve
      tms serve --leveldb data/messaging --no-janitor
    """
    flags = {"leveldb": leveldb, "hbase": hbase, "snapshots": snapshots}
    configure(log_format, sys.stderr, arguments(), daemon=True)
    _open_many_files()
    _give_memory_back()
    sys.setswitchinterval(_TURN_SECONDS)
    stop = Event()
    running: list[Companion] = []
    from tms_core.server.serving import serving  # noqa: PLC0415 a help text does without it

    with (
        completing(),
        ending(stop.set, hangup=partial(_run_now, running)),
        serving(config, os.environ, flags, janitor=not no_janitor) as started,
    ):
        running += started.companions.values()
        if started.transactions is not None:
            click.echo(f"transactions: {started.transactions}")
        click.echo(f"REST: {started.url}")
        stop.wait()
    logger.info("all accepted messages are written; the store is closed")


def _run_now(running: Sequence[Companion]) -> None:
    """Start the work of the companions at once, after SIGHUP."""
    if not running:
        logger.info("SIGHUP has no effect: no janitor runs in this server")
    for companion in running:
        companion.run_now()


def _open_many_files() -> None:
    """Allow as many open files as this process may have: each connection is one, and the soft limit is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _give_memory_back() -> None:
    """Configure the C library to return large freed blocks to the system, and to share its pools among threads.

    Otherwise each thread keeps the memory of its largest message, which ``server.memory`` does not count (mallopt(3)).
    Without effect if the C library is not glibc.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        library.mallopt(_M_ARENA_MAX, _POOLS)
