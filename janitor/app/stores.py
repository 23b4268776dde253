"""Where a store and its state are, by kind: what has to be opened, and which other processes may have it open.

A LevelDB store is one process's at a time, so questions go to a clone of it or to the process that holds it, and its
state is a file beside it. A store in HBase is open to all, its state is a table beside its own, and only the lease
keeps two janitors apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from janitor.state.base import State
from janitor.state.sqlite.state import FILE_NAME, SqliteState
from tms_core.tables.base import Reads, Store
from tms_core.tables.leveldb.clone import clone, copied, remove_stale
from tms_core.tables.leveldb.layout import disk_bytes, find_tables, holds_database, identity
from tms_core.tables.leveldb.side import LevelDBSide, beside
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.side import SideTable

if TYPE_CHECKING:
    from tms_core.tables.hbase.described import TableSettings

logger = logging.getLogger(__name__)


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

    def disk_bytes(self) -> int | None:
        """As ``Store.disk_bytes``, without opening it; None where that is not known."""
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

    def disk_bytes(self) -> int | None:
        return disk_bytes(self._path)

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
