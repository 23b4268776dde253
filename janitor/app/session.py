"""A session: it makes the objects of a command from its options: settings, store or clone, state, snapshots, engine."""

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
from janitor.app.place import Place, held
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
    ConfigurationError,
    Interrupted,
    Refused,
    StateBusy,
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

#: Handles signals while a block runs (:func:`tms_core.cli.entry.ending`). The first SIGTERM or SIGINT asks to stop
#: between two batches, the second ends the process at once. Nothing is lost by that either: the next janitor goes on.
ending = partial(entry.ending, said=b"stopping after this batch; a second Ctrl-C or SIGTERM stops at once\n")

logger = logging.getLogger(__name__)


class Session:
    """The settings of a command, and methods that open the store, the state and the snapshots."""

    def __init__(self, common: Common, clock: Clock, environ: Mapping[str, str] = os.environ) -> None:
        self.common = common
        self.clock = clock
        flags = {"leveldb": common.leveldb, "hbase": common.hbase, "snapshots": common.snapshots}
        self.loaded: LoadedSettings[AllSettings] = load(common.config, environ, flags)
        self.settings = self.loaded.settings
        #: Where the metrics are registered.
        self.registry = CollectorRegistry()

    @property
    def as_json(self) -> bool:
        return self.common.format == "json"

    @property
    def digest(self) -> str:
        """Return the digest of the settings that decide about deletions (:func:`janitor.settings.config_digest`)."""
        return config_digest(self.settings)

    def refusal(self) -> str:
        """Return why the surrounding process cannot work now; empty: it can, or there is none."""
        return ""

    def topic_changes(self) -> int:
        """Return how many changes of topics this process knows of; 0 where the janitor runs alone."""
        return 0

    def arguments(self) -> str:
        """Return the options that led here, to be typed again after another verb."""
        return self.common.arguments()

    @cached_property
    def place(self) -> Place:
        """Return where the store and its state are.

        Raises:
            ConfigurationError: the store is of a kind that cannot be cleaned from here.
        """
        storage = self.settings.storage
        if storage.kind == "hbase":
            from janitor.app.hbase_place import HBasePlace  # noqa: PLC0415 where no store is in HBase, Thrift is not needed

            return HBasePlace(storage.hbase, self.clock)
        if storage.kind == "leveldb":
            from janitor.app.leveldb_place import LevelDBPlace  # noqa: PLC0415 as little is LevelDB where all is in HBase

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
            snapshots_wanted=transactions.source != "none",
            batch_rows=janitor.batch_rows,
            rows_per_second=janitor.rate_rows_per_second,
            history_days=janitor.history_days,
            archive_days=janitor.archive.keep_days,
        )

    def source(self) -> SnapshotSource | None:
        """Return where snapshots come from; raises as :func:`source_of` does.

        Raises:
            ConfigurationError: ``--snapshots`` names a folder that is not there.
        """
        named = self.common.snapshots
        if named is not None and "://" not in named and not Path(named).is_dir():
            raise ConfigurationError(
                f"--snapshots {named}: there is no such folder.", "Name the folder that has the transaction snapshots."
            )
        return source_of(self.settings.transactions)

    @contextmanager
    def feedback(self) -> Iterator[Feedback | None]:
        """Yield the transaction manager that gets proven boundaries; None: no manager, or nothing is written.

        Raises:
            ConfigurationError: the settings require it, and there is no transaction manager.
        """
        wanted = self.settings.janitor.boundary
        if not wanted.feedback or not self.settings.janitor.apply:
            yield None
            return
        with self.truncator() as manager:
            yield Feedback(manager, wanted.participants)

    def transactions(self) -> AbstractContextManager[LateSource | None]:
        """Return the source of late transactions; None: there is no transaction manager."""
        if self.settings.transactions.source != "thrift":
            return nullcontext()
        return TransactionClient.configured(self.settings.transactions)

    def truncator(self) -> AbstractContextManager[Truncator]:
        """Return the transaction manager, at its address.

        Raises:
            ConfigurationError: there is none.
        """
        transactions = self.settings.transactions
        if transactions.source in ("directory", "none"):
            raise ConfigurationError(
                f"janitor.boundary.feedback is on, but transactions.source is {transactions.source}: there is no "
                "transaction manager that the janitor could tell which transactions are clean.",
                "Set transactions.source: thrift and transactions.thrift to its address, or janitor.boundary.feedback: "
                "off.",
            )
        return TransactionClient.configured(transactions)

    def holder(self, observer: Observer = ignore_progress) -> RemoteEngine | None:
        """Return the janitor that holds the store, where one answers in the state folder.

        Args:
            observer: told how far its answers are.

        Raises:
            StoreBusy: one is there that does not answer, or is another user's or of another version.
            ConfigurationError: it holds another store.
        """
        if not self.place.exclusive:
            return None
        caller = Caller(self.state_path, observer)
        greeting = caller.greeting()
        if greeting is None:
            return None
        if greeting.store != self.place.identity():
            raise ConfigurationError(
                f"The janitor that answers in {self.state_path} (process {greeting.pid}) holds another store.",
                "Give each store a state folder of its own (janitor.state).",
            )
        if greeting.settings != self.digest:
            logger.warning(
                "process %d holds the store and has other settings than this command; the settings of that process "
                "count",
                greeting.pid,
            )
        return RemoteEngine(caller, greeting)

    def refresh_status(self) -> None:
        """Let the running janitor show changes of the state at once; the changes are effective without it, too."""
        try:
            holder = self.holder()
            if holder is not None:
                holder.refresh_status()
        except (StoreError, StateError) as error:
            logger.warning("%s", error)

    @contextmanager
    def reading(self, *, records: bool = False) -> Iterator[AnyEngine]:
        """Yield an engine for questions: the janitor that holds the store, or an engine on a clone (invariant S5).

        Args:
            records: write to the side table itself, which records an adoption.
        """
        with ExitStack() as stack:
            yield self._engine_for(partial(self._cloned, records=records), stack)

    @contextmanager
    def deciding(self) -> Iterator[AnyEngine]:
        """Yield an engine for decisions: the janitor that holds the store, or an engine on the store."""
        with ExitStack() as stack:
            yield self._engine_for(self.writing, stack)

    @contextmanager
    def writing(self, feedback: Feedback | None = None, *, waits: bool = False) -> Iterator[Engine]:
        """Yield an engine on the store.

        Args:
            feedback: the transaction manager that gets proven boundaries.
            waits: wait for the lease of a dead holder to expire.

        Raises:
            StoreBusy: another process holds it; if that is a janitor, the hint tells how to reach it.
        """
        stop, opened_bytes = Event(), self.place.disk_bytes()
        with (
            ending(stop.set),
            self.held_store() as store,
            self.place.state() as state,
            self.lease(state, store, until=stop if waits else None) as lease,
            self.side() as side,
            self._engine(
                store, state, side, lease, is_stopping=stop.is_set, feedback=feedback, opened_bytes=opened_bytes
            ) as engine,
        ):
            engine.recover()
            logger.info("the store is open to be written: %s", self.place.name)
            yield engine

    @contextmanager
    def attempting(self, mode: Mode = "apply", *, skips_busy: bool = False) -> Iterator[None]:
        """Record a run that fails while the block opens its objects; a store without a state gets no record.

        Args:
            mode: the mode of the run.
            skips_busy: whether to skip the run while another process has the store. A working janitor is never a
                failure.
        """
        try:
            yield
        except Exception as error:
            if skips_busy and isinstance(error, (StoreBusy, StateBusy)):
                raise
            try:
                self._record_failure(mode, error)
            except TmsError as unrecorded:
                logger.warning("this failure could not be recorded in %s: %s", self.place.state_name, unrecorded)
            raise

    def _record_failure(self, mode: Mode, error: Exception) -> None:
        if isinstance(error, (Interrupted, Refused)) or not self.place.has_state():
            return
        with self.place.state() as state:
            lease = LeaseRecord.parse(state.lease())
            is_busy = isinstance(error, (StoreBusy, StateBusy))
            if not (is_busy and lease is not None and lease.is_renewed(self.clock.now_ms())):
                record.fail(state, self.clock, secrets.token_hex, mode, error)

    def _engine_for(self, local: Callable[[], AbstractContextManager[Engine]], stack: ExitStack) -> AnyEngine:
        observer = stack.enter_context(progress(sys.stderr))
        holder = self.holder(observer)
        if holder is not None:
            return holder
        try:
            return stack.enter_context(local())
        except (StoreBusy, StateBusy):
            # It may have come up in this very moment.
            holder = self.holder(observer)
            if holder is None:
                raise
            return holder

    @contextmanager
    def _cloned(self, *, records: bool = False) -> Iterator[Engine]:
        # The store first: at a place where there is none, no state is made.
        with (
            self.place.readable() as store,
            self.place.state() as state,
            self.place.side(read_only=not records) as side,
            self._engine(store, state, side) as engine,
        ):
            yield engine

    def held_store(self) -> AbstractContextManager[Store]:
        """Return the store, opened to be written.

        Raises:
            StoreBusy: another process holds it; if that is a janitor, the hint says how to reach it.
        """
        try:
            return self.place.writable()
        except StoreBusy as error:
            holder = self.holder()
            if holder is None:
                raise
            raise StoreBusy(
                error.message,
                "That janitor sweeps by itself: janitor status (to have it sweep now: janitor sweep-now)",
            ) from error

    def side(self) -> AbstractContextManager[SideTable | None]:
        """Open the side table of a held store: TTLs of messages, and consumers."""
        return self.place.side(read_only=False)

    def lease(
        self, state: State, store: Reads, standby: Event | None = None, until: Event | None = None
    ) -> AbstractContextManager[Lease]:
        """Return the lease on the store, held while the block runs (invariant S12).

        Args:
            standby: for one that may wait where several can have the store open, until this is set.
            until: for one that waits only as long as the lease of a dead holder lasts, or until this is set.

        Raises:
            LeaseHeld: another process has it, and this one may not wait, or not any longer. Where only one process can
                open the store, the state folder belongs to another store, and a janitor is at work there.
        """
        wanted, exclusive = self.settings.janitor.lease, self.place.exclusive
        # Where only one process can open the store, a process that is still named as the holder of its lease is dead.
        # The state of a restored store names another one until it is adopted; then the lease says what its holder had.
        record, identity = state.store(), store.identity()
        sole = exclusive and (record is None or record.identity == identity)
        standby = None if exclusive else standby
        only = identity if exclusive else ""
        return held(wanted, state, self.clock, sole=sole, store=only, standby=standby, until=until)

    def archive(self) -> ParquetArchive | None:
        """Return where rows go before they are deleted; None where the settings want none.

        Raises:
            ConfigurationError: pyarrow is not installed, or the place is none on this machine.
        """
        wanted = self.settings.janitor.archive
        return ParquetArchive(local_folder(wanted.path), self.clock) if wanted.enabled else None

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
        """Return a janitor's dependencies by the settings; ``options`` are further fields, which override them."""
        own = {
            "token_hex": secrets.token_hex,
            "division": Threads(self.settings.janitor.workers),
            "state_name": self.place.state_name,
        }
        return Deps(store, state, source or self.source(), self.clock, self.terms(), **{**own, **options})

    def engine(self, store: Reads, state: State, *, source: SnapshotSource | None = None, **options: Any) -> Engine:
        """Return an engine by the settings; ``options`` as of :meth:`deps`."""
        return Engine(self.deps(store, state, source=source, **options))

    @contextmanager
    def _engine(
        self, store: Reads, state: State, side: SideTable | None, lease: Lease | None = None, **options: Any
    ) -> Iterator[Engine]:
        # A question deletes nothing, so it must not need what only the archive needs.
        archive = self.archive() if isinstance(store, Store) else None
        with progress(sys.stderr) as observer:
            yield self.engine(store, state, observer=observer, side=side, lease=lease, archive=archive, **options)
