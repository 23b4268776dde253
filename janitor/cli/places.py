"""Where a store and its memory are, by kind: what has to be opened, and who else may have it open.

A LevelDB store is one process's at a time, so questions go to a clone of it or to whoever holds it, and its memory is a
file beside it. A store in HBase is open to all, its memory is a table beside its own, and only the lease keeps two
janitors apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from janitor.state.base import State
from janitor.state.hbase import HBaseState
from janitor.state.sqlite import FILE_NAME, SqliteState
from tms_core.clock import Clock
from tms_core.settings import HBaseSettings
from tms_core.tables.base import Store
from tms_core.tables.hbase import HBaseStore
from tms_core.tables.leveldb import LevelDBStore
from tms_core.tables.leveldb_clone import clone, remove_stale
from tms_core.tables.leveldb_layout import find_tables, identity
from tms_core.tables.read_only import read_only

logger = logging.getLogger(__name__)


class Place(Protocol):
    """A store and its memory.

    Attributes:
        name: the store, for people.
        memory_name: the memory, for people.
        exclusive: whether a store that is open is nobody else's.
    """

    name: str
    memory_name: str
    exclusive: bool

    def identity(self) -> str:
        """As ``Store.identity``, without opening it where that is possible."""
        ...

    def require(self) -> None:
        """Nothing, where there is a store.

        Raises:
            StoreNotFound: there is none.
        """
        ...

    def writable(self) -> AbstractContextManager[Store]:
        """The store itself.

        Raises:
            StoreBusy: somebody else has it open.
        """
        ...

    def readable(self) -> AbstractContextManager[Store]:
        """The store's contents, with nothing that could write (rule S5).

        Raises:
            StoreBusy: somebody else has it open.
        """
        ...

    def has_memory(self) -> bool:
        """Whether there is a memory already."""
        ...

    def memory(self) -> AbstractContextManager[State]:
        """The memory, made where there is none."""
        ...


class LevelDBPlace:
    """A LevelDB folder and the state folder.

    Args:
        path: the store.
        state_path: its memory.
    """

    exclusive = True

    def __init__(self, path: Path, state_path: Path) -> None:
        self.name = str(path)
        self.memory_name = str(state_path)
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
    def readable(self) -> Iterator[Store]:
        remove_stale(self._state_path)
        with clone(self._path, self._state_path) as store:
            if not store.linked:
                logger.warning(
                    "the store's files were copied (%d bytes), since they cannot be hard-linked into %s",
                    store.copied_bytes,
                    self._state_path,
                )
            yield store

    def has_memory(self) -> bool:
        return (self._state_path / FILE_NAME).is_file()

    def memory(self) -> AbstractContextManager[State]:
        return SqliteState(self._state_path)


class HBasePlace:
    """Tables in an HBase namespace.

    Args:
        settings: which, and how it is reached.
        clock: what calls are timed by.
    """

    exclusive = False

    def __init__(self, settings: HBaseSettings, clock: Clock) -> None:
        self.name = f"HBase namespace {settings.namespace} at {', '.join(settings.thrift)}"
        self.memory_name = f"table {settings.namespace}:tms.janitor"
        self._settings = settings
        self._clock = clock

    def identity(self) -> str:
        with self.writable() as store:
            return store.identity()

    def require(self) -> None:
        with self.writable():
            """It could be opened, so it is there."""

    def writable(self) -> AbstractContextManager[Store]:
        wanted = self._settings
        return HBaseStore(
            wanted.thrift,
            namespace=wanted.namespace,
            connections=wanted.connections,
            timeout_seconds=wanted.timeout_seconds,
            clock=self._clock,
        )

    @contextmanager
    def readable(self) -> Iterator[Store]:
        with self.writable() as store:
            yield read_only(store)

    def has_memory(self) -> bool:
        # Looking costs as much as opening it, and an empty table does no harm.
        return True

    def memory(self) -> AbstractContextManager[State]:
        wanted = self._settings
        return HBaseState(
            wanted.thrift,
            namespace=wanted.namespace,
            thrift2=wanted.thrift2 or (),
            timeout_seconds=wanted.timeout_seconds,
            clock=self._clock,
        )
