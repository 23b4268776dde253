"""The session of a command: its settings, and the creation of store or clone, state, snapshots and engine."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from threading import Event
from typing import Any

from prometheus_client import CollectorRegistry

from janitor.app.options import Common
from janitor.app.place import Place, hold_lease
from janitor.app.progress import progress
from janitor.archive.folder import local_folder
from janitor.archive.writer import ParquetArchive
from janitor.control.api import AnyEngine
from janitor.control.client import Caller, RemoteEngine
from janitor.report import Observer, ignore_progress
from janitor.run import record
from janitor.run.engine import Engine
from janitor.run.prepare import Deps, Feedback, Truncator
from janitor.settings import AllSettings, config_digest, load
from janitor.state.base import State
from janitor.state.records import Mode
from janitor.stats.consumer_lag import LateSource
from janitor.status.collect import Deployment
from janitor.sweep.run import Terms
from janitor.sweep.sweep import Threads
from tms_core.cli import entry
from tms_core.clock import Clock
from tms_core.errors import (
    BUSY,
    ConfigurationError,
    Interrupted,
    Refused,
    StateError,
    StoreBusy,
    StoreError,
    TmsError,
)
from tms_core.settings.layers import LoadedSettings
from tms_core.tables.base import Reads, Store
from tms_core.tables.lease import Lease, LeaseRecord
from tms_core.tables.side import SideTable
from tms_core.transaction.rpc.client import TransactionClient, source_of
from tms_core.transaction.source.source import SnapshotSource

#: Handles signals inside a block, as :func:`tms_core.cli.entry.handle_signals`. The first SIGTERM or SIGINT requests a
#: stop between two batches; the second signal stops the process at once. No data is lost: the next run continues.
handle_signals = partial(
    entry.handle_signals, text=b"stopping after this batch; a second Ctrl-C or SIGTERM stops at once\n"
)

logger = logging.getLogger(__name__)


class Session:
    """The settings of a command, and methods that open the store, the state and the snapshots.

    Args:
        loaded: the settings of another session with the same options; None: load the settings.
    """

    def __init__(
        self,
        common: Common,
        clock: Clock,
        environ: Mapping[str, str] = os.environ,
        loaded: LoadedSettings[AllSettings] | None = None,
    ) -> None:
        self.common = common
        self.clock = clock
        flags = {"leveldb": common.leveldb, "hbase": common.hbase, "snapshots": common.snapshots}
        self.loaded = loaded or load(common.config, environ, flags)
        self.settings = self.loaded.settings
        #: The registry of the metrics.
        self.registry = CollectorRegistry()

    @property
    def as_json(self) -> bool:
        return self.common.format == "json"

    @property
    def digest(self) -> str:
        """Return the digest of the settings that affect deletions (:func:`janitor.settings.config_digest`)."""
        return config_digest(self.settings)

    def refusal(self) -> str:
        """Return the reason why the surrounding server cannot work now; empty if it can, or without a server."""
        return ""

    def topic_changes(self) -> int:
        """Return the number of topic changes by the surrounding server; 0 without a server."""
        return 0

    def arguments(self) -> str:
        """Return the options of this command, for use with another verb."""
        return self.common.arguments()

    @cached_property
    def place(self) -> Place:
        """Return the place of the store and its state.

        Raises:
            ConfigurationError: the janitor cannot clean this kind of store.
        """
        storage = self.settings.storage
        if storage.kind == "hbase":
            from janitor.app.hbase_place import HBasePlace  # noqa: PLC0415 a store in LevelDB does not need Thrift

            return HBasePlace(storage.hbase, self.clock)
        if storage.kind == "leveldb":
            from janitor.app.leveldb_place import LevelDBPlace  # noqa: PLC0415 a store in HBase does not need LevelDB

            return LevelDBPlace(Path(storage.leveldb.path), self.state_path)
        raise ConfigurationError(
            f"storage.kind is {storage.kind}, and such a store is lost when its process ends.",
            "Set storage.kind: leveldb or hbase, or give --leveldb DIR or --hbase HOST:PORT.",
        )

    @property
    def state_path(self) -> Path:
        return Path(self.settings.janitor.state)

    def terms(self) -> Terms:
        transactions, janitor = self.settings.transactions, self.settings.janitor
        return Terms(
            hold_seconds=janitor.hold_seconds,
            protect=tuple(janitor.protect),
            lifetime=self.settings.lifetime,
            lifetime_known=transactions.max_lifetime_seconds is not None,
            snapshot_interval_seconds=transactions.snapshot_interval_seconds,
            consumer_hold_seconds=self.settings.server.consumers.hold_seconds,
            is_snapshot_required=transactions.source != "none",
            batch_rows=janitor.batch_rows,
            rows_per_second=janitor.rate_rows_per_second,
            history_days=janitor.history_days,
            archive_days=janitor.archive.keep_days,
        )

    def source(self) -> SnapshotSource | None:
        """Return the source of snapshots; raises as :func:`source_of` does.

        Raises:
            ConfigurationError: the folder of ``--snapshots`` does not exist.
        """
        named = self.common.snapshots
        if named is not None and "://" not in named and not Path(named).is_dir():
            raise ConfigurationError(
                f"--snapshots {named}: the folder does not exist.",
                "Set it to the folder with the transaction snapshots.",
            )
        return source_of(self.settings.transactions)

    @contextmanager
    def feedback(self) -> Iterator[Feedback | None]:
        """Yield the transaction manager that receives proven ids; None without feedback, or if runs are only plans.

        Raises:
            ConfigurationError: the settings enable feedback, but there is no transaction manager.
        """
        settings = self.settings.janitor.boundary
        if not settings.feedback or not self.settings.janitor.apply:
            yield None
            return
        with self.truncator() as manager:
            yield Feedback(manager, settings.participants)

    def transactions(self) -> AbstractContextManager[LateSource | None]:
        """Return the source of late transactions; None without a transaction manager."""
        if self.settings.transactions.source != "thrift":
            return nullcontext()
        return TransactionClient.configured(self.settings.transactions)

    def truncator(self) -> AbstractContextManager[Truncator]:
        """Return a client of the transaction manager.

        Raises:
            ConfigurationError: the settings have no transaction manager.
        """
        transactions = self.settings.transactions
        if transactions.source in ("directory", "none"):
            raise ConfigurationError(
                f"janitor.boundary.feedback is on, but transactions.source is {transactions.source}: there is no "
                "transaction manager that could remove proven transactions.",
                "Set transactions.source: thrift and transactions.thrift: HOST:PORT, or janitor.boundary.feedback: "
                "off.",
            )
        return TransactionClient.configured(transactions)

    def holder(self, observer: Observer = ignore_progress) -> RemoteEngine | None:
        """Return the janitor that holds the store, if one responds in the state folder.

        Args:
            observer: receives the progress of its responses.

        Raises:
            StoreBusy: the janitor does not respond, runs as another user or has another version.
            ConfigurationError: the janitor holds another store.
        """
        if not self.place.exclusive:
            return None
        caller = Caller(self.state_path, observer)
        identity = caller.process_identity()
        if identity is None:
            return None
        if identity.store != self.place.identity():
            raise ConfigurationError(
                f"The janitor that responds in {self.state_path} (process {identity.pid}) holds another store.",
                "Give each store a separate state folder (janitor.state).",
            )
        if identity.settings != self.digest:
            logger.warning(
                "process %d holds the store with settings that differ from this command; the settings of that process "
                "apply",
                identity.pid,
            )
        return RemoteEngine(caller, identity)

    def refresh_status(self) -> None:
        """Make the running janitor show changes of the state at once; they take effect in any case."""
        try:
            holder = self.holder()
            if holder is not None:
                holder.refresh_status()
        except (StoreError, StateError) as error:
            logger.warning("%s", error)

    @contextmanager
    def reading(self, *, records: bool = False) -> Iterator[AnyEngine]:
        """Yield an engine for queries: the janitor that holds the store, or an engine on a clone (invariant S5).

        Args:
            records: whether to open the side table for writing, to record an adoption.
        """
        with ExitStack() as stack:
            yield self._engine_for(partial(self._open_clone, records=records), stack)

    @contextmanager
    def deciding(self) -> Iterator[AnyEngine]:
        """Yield an engine for decisions: the janitor that holds the store, or an engine on the store."""
        with ExitStack() as stack:
            yield self._engine_for(self.writing, stack)

    @contextmanager
    def writing(self, feedback: Feedback | None = None, *, waits: bool = False) -> Iterator[Engine]:
        """Yield an engine on the store.

        Args:
            feedback: the transaction manager that receives proven ids.
            waits: whether to wait for the lease of a dead holder to expire.

        Raises:
            StoreBusy: another process holds the store; if it is a janitor, the hint has the command to reach it.
        """
        stop, opened_bytes = Event(), self.place.disk_bytes()
        with (
            handle_signals(stop.set),
            self.hold_store() as store,
            self.place.state() as state,
            self.lease(state, store, until=stop if waits else None) as lease,
            self.side() as side,
            self._engine(
                store, state, side, lease, is_stopping=stop.is_set, feedback=feedback, opened_bytes=opened_bytes
            ) as engine,
        ):
            # This process holds the store and the lease, so unfinished runs belong to dead processes.
            engine.recover()
            logger.info("opened the store for writing: %s", self.place.name)
            yield engine

    @contextmanager
    def record_failure(self, mode: Mode = "apply", *, skips: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Record a failed run if the block fails to open its objects, and if a state exists.

        Args:
            mode: the mode of the run.
            skips: errors after which the run is skipped or retried, so that it has not failed.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, skips):
                raise
            try:
                self._record_failure(mode, error)
            except TmsError as unrecorded:
                logger.warning("the failed run could not be recorded in %s: %s", self.place.state_name, unrecorded)
            raise

    def _record_failure(self, mode: Mode, error: Exception) -> None:
        if isinstance(error, (Interrupted, Refused)) or not self.place.has_state():
            return
        with self.place.state() as state:
            lease = LeaseRecord.parse(state.lease())
            is_busy = isinstance(error, BUSY)
            if not (is_busy and lease is not None and lease.is_renewed(self.clock.now_ms())):
                record.fail(state, self.clock, secrets.token_hex, mode, error)

    def _engine_for(self, local: Callable[[], AbstractContextManager[Engine]], stack: ExitStack) -> AnyEngine:
        observer = stack.enter_context(progress(sys.stderr))
        holder = self.holder(observer)
        if holder is not None:
            return holder
        try:
            return stack.enter_context(local())
        except BUSY:
            # The janitor may have started in between.
            holder = self.holder(observer)
            if holder is None:
                raise
            return holder

    @contextmanager
    def _open_clone(self, *, records: bool = False) -> Iterator[Engine]:
        # Open the store first, so that no state is created without a store.
        with (
            self.place.readable() as store,
            self.place.state() as state,
            self.place.side(read_only=not records) as side,
            self._engine(store, state, side) as engine,
        ):
            yield engine

    def hold_store(self) -> AbstractContextManager[Store]:
        """Return the store, opened for writing.

        Raises:
            StoreBusy: another process holds the store; if it is a janitor, the hint has the command to reach it.
        """
        try:
            return self.place.writable()
        except StoreBusy as error:
            holder = self.holder()
            if holder is None:
                raise
            raise StoreBusy(
                error.message,
                "That janitor sweeps on its schedule: janitor status (to start a sweep now: janitor sweep-now)",
            ) from error

    def side(self) -> AbstractContextManager[SideTable | None]:
        """Open the side table of a held store, with own TTLs of messages and consumers."""
        return self.place.side(read_only=False)

    def lease(
        self, state: State, store: Reads, standby: Event | None = None, until: Event | None = None
    ) -> AbstractContextManager[Lease]:
        """Hold the lease of the store inside the block (invariant S12).

        Args:
            standby: an event; until it is set, wait for the lease, if several processes can open the store.
            until: an event; until it is set, wait for the lease of a dead holder to expire.

        Raises:
            LeaseHeld: another process has the lease. If only one process can open the store, the state folder belongs
                to another store whose janitor is running.
        """
        settings, exclusive = self.settings.janitor.lease, self.place.exclusive
        # If only one process can open the store, a recorded holder of its lease is dead. But the state of a restored
        # store names another store until adoption, and that store's janitor may be running.
        record, identity = state.store(), store.identity()
        sole = exclusive and (record is None or record.identity == identity)
        standby = None if exclusive else standby
        only = identity if exclusive else ""
        return hold_lease(settings, state, self.clock, sole=sole, store=only, standby=standby, until=until)

    def archive(self) -> ParquetArchive | None:
        """Return the archive for rows before their deletion; None if archiving is off.

        Raises:
            ConfigurationError: pyarrow is not installed, or the path is not on this machine.
        """
        settings = self.settings.janitor.archive
        return ParquetArchive(local_folder(settings.path), self.clock) if settings.enabled else None

    def deployment(self) -> Deployment:
        """Return the description of this janitor for status page and metrics."""
        janitor = self.settings.janitor
        return Deployment(
            store=self.place.name,
            mode="apply" if janitor.apply else "plan_only",
            schedule=janitor.started_by
            or (f"cron {janitor.cron}" if janitor.cron else f"every {janitor.every_seconds} s"),
            terms=self.terms(),
            every_seconds=janitor.every_seconds,
            arguments=self.arguments(),
        )

    def deps(self, store: Reads, state: State, *, source: SnapshotSource | None = None, **options: Any) -> Deps:
        """Return the dependencies from the settings; ``options`` are further fields of ``Deps``, which override."""
        own = {"token_hex": secrets.token_hex, "division": Threads(self.settings.janitor.workers)}
        return Deps(store, state, source or self.source(), self.clock, self.terms(), **{**own, **options})

    def engine(self, store: Reads, state: State, *, source: SnapshotSource | None = None, **options: Any) -> Engine:
        """Return an engine with the settings; ``options`` as for :meth:`deps`."""
        return Engine(self.deps(store, state, source=source, **options))

    @contextmanager
    def _engine(
        self, store: Reads, state: State, side: SideTable | None, lease: Lease | None = None, **options: Any
    ) -> Iterator[Engine]:
        # A query must not need the packages of the archive.
        archive = self.archive() if isinstance(store, Store) else None
        with progress(sys.stderr) as observer:
            yield self.engine(store, state, observer=observer, side=side, lease=lease, archive=archive, **options)
