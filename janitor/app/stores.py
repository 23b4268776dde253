"""Where a store and its state are, by kind: what has to be opened, and which other processes may have it open.

A LevelDB store is one process's at a time, so questions go to a clone of it or to the process that holds it, and its
state is a file beside it. A store in HBase is open to all, its state is a table beside its own, and only the lease
keeps two janitors apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Protocol

from janitor.state.base import State
from janitor.state.hbase.state import HBaseState
from janitor.state.sqlite.state import FILE_NAME, SqliteState
from tms_core.clock import Clock
from tms_core.settings.models import HBaseSettings
from tms_core.tables.base import Reads, Store, TableName
from tms_core.tables.hbase.described import TableSettings, described
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.hbase.thrift import Service
from tms_core.tables.leveldb.clone import clone, copied, remove_stale
from tms_core.tables.leveldb.layout import find_tables, holds_database, identity
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.read_only import read_only
from tms_core.tables.side import HBaseSide, LevelDBSide, SideTable, beside

logger = logging.getLogger(__name__)

#: The tables that a sweep changes.
_SALTED: tuple[TableName, ...] = ("message", "payload")
_OBSERVERS_UNSEEN = (
    "whether the tables still carry CDAP's observers could not be checked, which takes a Thrift 2 server: set "
    "storage.hbase.thrift2, or see that describe in the HBase shell shows no coprocessor of CDAP's"
)


class Place(Protocol):
    """A store and its state.

    Attributes:
        name: the store, for people.
        state_name: the state, for people.
        exclusive: whether only one process can have the store open.
        unseen: what stands in the way of a prune boundary elsewhere and cannot be checked here, a sentence each.
    """

    name: str
    state_name: str
    exclusive: bool
    unseen: tuple[str, ...]

    def identity(self) -> str:
        """As ``Store.identity``, without opening it where that is possible."""
        ...

    def require(self) -> None:
        """Make sure that there is a store.

        Raises:
            StoreNotFound: there is none.
        """
        ...

    def writable(self) -> AbstractContextManager[Store]:
        """The store itself.

        Raises:
            StoreBusy: another process has it open.
        """
        ...

    def readable(self) -> AbstractContextManager[Reads]:
        """The store's contents, with nothing that could write (rule S5).

        Raises:
            StoreBusy: another process has it open.
        """
        ...

    def has_state(self) -> bool:
        """Whether there is a state already."""
        ...

    def state(self) -> AbstractContextManager[State]:
        """The state, made where there is none."""
        ...

    def side(self, *, read_only: bool) -> AbstractContextManager[SideTable | None]:
        """The table of messages with a ttl of their own (rule L6) and of consumers; None where there are none.

        Args:
            read_only: read a copy where another process may have it open.
        """
        ...

    def table_settings(self) -> list[TableSettings]:
        """How the tables are set, where they can be."""
        ...


class LevelDBPlace:
    """A LevelDB folder and the state folder.

    Args:
        path: the store.
        state_path: the folder of its state.
    """

    exclusive = True
    unseen: tuple[str, ...] = ()

    def __init__(self, path: Path, state_path: Path) -> None:
        self.name = str(path)
        self.state_name = str(state_path)
        self._path = path
        self._state_path = state_path

    def identity(self) -> str:
        return identity(self._path)

    def require(self) -> None:
        find_tables(self._path)

    def writable(self) -> AbstractContextManager[Store]:
        remove_stale(self._state_path)
        return LevelDBStore(self._path)

    @contextmanager
    def readable(self) -> Iterator[Reads]:
        remove_stale(self._state_path)
        with clone(self._path, self._state_path) as store:
            if not store.linked:
                logger.warning(
                    "the store's files were copied (%d bytes), since they cannot be hard-linked into %s",
                    store.copied_bytes,
                    self._state_path,
                )
            yield store

    def has_state(self) -> bool:
        return (self._state_path / FILE_NAME).is_file()

    def state(self) -> AbstractContextManager[State]:
        return SqliteState(self._state_path)

    @contextmanager
    def side(self, *, read_only: bool) -> Iterator[SideTable | None]:
        folder = beside(self._path)
        with ExitStack() as stack:
            if not holds_database(folder):
                yield None
                return
            if read_only:
                folder = stack.enter_context(copied(folder, self._state_path))
            yield stack.enter_context(LevelDBSide(folder))

    def table_settings(self) -> list[TableSettings]:
        return []


class HBasePlace:
    """Tables in an HBase namespace.

    Args:
        settings: which, and how it is reached.
        clock: what calls are timed by.
    """

    exclusive = False

    def __init__(self, settings: HBaseSettings, clock: Clock) -> None:
        self.name = f"HBase namespace {settings.namespace} at {', '.join(settings.thrift)}"
        self.state_name = f"table {settings.namespace}:tms.janitor"
        self.unseen: tuple[str, ...] = () if settings.thrift2 else (_OBSERVERS_UNSEEN,)
        self._settings = settings
        self._clock = clock

    def identity(self) -> str:
        with self.writable() as store:
            return store.identity()

    def require(self) -> None:
        with self.writable():
            """It could be opened, so it is there."""

    def writable(self) -> AbstractContextManager[Store]:
        return HBaseStore.configured(self._settings, self._clock)

    @contextmanager
    def readable(self) -> Iterator[Reads]:
        with self.writable() as store:
            yield read_only(store)

    def has_state(self) -> bool:
        # Checking costs as much as opening it, and an empty table does no harm.
        return True

    def state(self) -> AbstractContextManager[State]:
        wanted = self._settings
        return HBaseState(
            wanted.thrift,
            namespace=wanted.namespace,
            thrift2=wanted.thrift2 or (),
            timeout_seconds=wanted.timeout_seconds,
            clock=self._clock,
        )

    @contextmanager
    def side(self, *, read_only: bool) -> Iterator[SideTable | None]:
        # A server of ours makes the table; without one it is not needed, nor the right to make it.
        with HBaseSide(self._pool(self._settings.thrift), self._settings.namespace, self._clock, create=False) as side:
            yield side

    def table_settings(self) -> list[TableSettings]:
        with ExitStack() as stack:
            pool = stack.enter_context(closing(self._pool(self._settings.thrift)))
            thrift2 = self._settings.thrift2
            admin = stack.enter_context(closing(self._pool(thrift2, "HbaseAdmin"))) if thrift2 else None
            return [described(pool, admin, self._settings.namespace, table, self._clock) for table in _SALTED]

    def _pool(self, addresses: Sequence[str], service: Service = "Hbase") -> HBasePool:
        seconds = self._settings.timeout_seconds
        return HBasePool(addresses, connections=1, timeout_seconds=seconds, service=service, clock=self._clock)
