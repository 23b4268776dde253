"""The janitor inside ``tms serve``.

It is the daemon of ``janitor run`` with the store, transaction manager, clock and metrics of the server, and without
signal handlers: the server starts and stops it. Commands of other processes reach it through the control socket. A
store that the server has just created is adopted at once; any other store is a first contact and stays unchanged until
it is adopted. Similarly, an empty topic that this server created with an unused name is not held like an unknown topic
(invariant S8).

Deletions and publishes share one LevelDB, and a publish waits for the batch before it. Therefore batches are small, and
without a configured rate the janitor uses a rate that leaves most of the disk to publishers. In return, a sweep takes a
few times longer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any, cast

from janitor.app.leveldb_place import LevelDBPlace
from janitor.app.options import Common
from janitor.app.place import Place
from janitor.app.serve import open_daemon
from janitor.app.session import Session
from janitor.daemon.daemon import Daemon
from janitor.http.server import check_port
from janitor.run.prepare import Deps, Truncator
from janitor.state.base import State
from janitor.state.records import Mode
from janitor.stats.consumer_lag import LateSource
from janitor.sweep.run import Terms
from tms_core.clock import SystemClock
from tms_core.errors import StateUnavailable, StoreUnavailable
from tms_core.server.companions import CompanionContext
from tms_core.tables.base import Reads, Store
from tms_core.tables.leveldb.clone import remove_stale
from tms_core.tables.side import SideTable
from tms_core.transaction.source.source import SnapshotSource

#: The flags that server and janitor share.
_FLAGS = ("leveldb", "hbase", "snapshots")
#: The maximum number of rows in a batch, and the default rate in rows per second, next to a server.
GENTLE_BATCH_ROWS, GENTLE_ROWS_PER_SECOND = 500, 50_000


class Embedded:
    """A daemon in a separate thread.

    Args:
        daemon: the daemon to run.
        resources: the resources to close after the daemon.
        hold_seconds: the setting ``janitor.hold_seconds``; None if the daemon only makes plans.

    Attributes:
        daemon: the running daemon.
        hold_seconds: the argument.
        url: the address of the status page.
    """

    def __init__(self, daemon: Daemon, resources: ExitStack, url: str, hold_seconds: int | None) -> None:
        self.daemon = daemon
        self.hold_seconds = hold_seconds
        self.url = url
        self._resources = resources
        self._thread = Thread(target=daemon.run, name="janitor")
        self._thread.start()

    def run_now(self) -> None:
        """Request a sweep as soon as possible."""
        self.daemon.sweep_now()

    def stop(self) -> None:
        """Stop the daemon within one batch, and close its resources."""
        self.daemon.request_stop()
        self._thread.join()
        self._resources.close()


class Start:
    """The entry point of the janitor (``tms_core.server.companions.Start``)."""

    def __call__(self, context: CompanionContext) -> Embedded:
        """Start the janitor with the settings of the server.

        Raises:
            TmsError: a setting is wrong, or the state, lease or port is not available.
        """
        with ExitStack() as stack:
            session = EmbeddedSession(context, stack)
            mode: Mode = "apply" if session.settings.janitor.apply else "plan"
            # Among several servers, the next attempt starts the janitor as soon as HBase responds.
            with session.record_failure(mode, skips=(StoreUnavailable, StateUnavailable)):
                daemon, url = stack.enter_context(open_daemon(session))
            if context.created:
                daemon.adopt()
            settings = session.settings.janitor
            return Embedded(daemon, stack.pop_all(), url, settings.hold_seconds if settings.apply else None)

    def check(self, config: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> None:
        """Check the settings and the port of the status page, before the server creates a store.

        Raises:
            ConfigurationError: a setting is wrong, or the port is not available.
        """
        http = Session(_options(config, flags), SystemClock(), environ).settings.janitor.http
        check_port(http.host, http.port)


start = Start()


def _options(config: Path | None, flags: Mapping[str, object]) -> Common:
    leveldb, hbase, snapshots = (cast(str | None, flags.get(name)) for name in _FLAGS)
    return Common(config, leveldb, hbase, snapshots)


class EmbeddedSession(Session):
    """A session that uses the store, the snapshots and the metrics of a server.

    Args:
        context: the objects of the server.
        stack: on exit, removes everything that is created for the session.
    """

    def __init__(self, context: CompanionContext, stack: ExitStack) -> None:
        super().__init__(_options(context.config, context.flags), context.clock, context.environ)
        self.registry = context.registry
        self._context = context
        self._folder = super().state_path
        if self.settings.storage.kind == "memory":
            # The state of a store in memory is temporary, like the store.
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tms-janitor-")))

    def refusal(self) -> str:
        refusal = self._context.service.refusal()
        return f"nothing can be published: {refusal}" if refusal else ""

    def topic_changes(self) -> int:
        return self._context.service.topic_changes

    @property
    def state_path(self) -> Path:
        return self._folder

    @cached_property
    def place(self) -> Place:
        if self.settings.storage.kind == "memory":
            return LevelDBPlace(Path("memory"), self._folder)
        return super().place

    def hold_store(self) -> AbstractContextManager[Store]:
        remove_stale(self._folder)
        # The server closes it.
        return nullcontext(self._context.store.with_own_counter())

    def terms(self) -> Terms:
        terms = super().terms()
        return replace(
            terms,
            batch_rows=min(terms.batch_rows, GENTLE_BATCH_ROWS),
            rows_per_second=terms.rows_per_second or GENTLE_ROWS_PER_SECOND,
        )

    def deps(self, store: Reads, state: State, *, source: SnapshotSource | None = None, **options: Any) -> Deps:
        host = self._context.service
        # Restored rows are older than the server's cached positions of the topic, so the server forgets these.
        return super().deps(
            store, state, source=source, restored=host.invalidate, created_empty=host.was_created_empty, **options
        )

    def side(self) -> AbstractContextManager[SideTable | None]:
        return nullcontext(self._context.service.side)

    def source(self) -> SnapshotSource | None:
        return self._context.transactions or super().source()

    def transactions(self) -> AbstractContextManager[LateSource | None]:
        manager = self._context.transactions
        return nullcontext(manager) if manager is not None else super().transactions()

    def truncator(self) -> AbstractContextManager[Truncator]:
        manager = self._context.transactions
        return nullcontext(manager) if manager is not None else super().truncator()
