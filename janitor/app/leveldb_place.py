"""The place of a LevelDB store and of its state (:mod:`janitor.app.place`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from janitor.state.base import State
from janitor.state.sqlite.state import FILE_NAME, SqliteState, is_present
from tms_core.tables.base import Reads, Store
from tms_core.tables.leveldb.clone import clone, copy_folder, remove_stale
from tms_core.tables.leveldb.layout import disk_bytes, find_tables, holds_database, identity
from tms_core.tables.leveldb.side import LevelDBSide, side_path
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.side import SideTable

if TYPE_CHECKING:
    from tms_core.tables.hbase.described import TableSettings

logger = logging.getLogger(__name__)


class LevelDBPlace:
    """The folder of a LevelDB store, and the folder of its state.

    Args:
        path: the folder of the store.
        state_path: the folder of the state.
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
                    "copied the files of the store (%d bytes), because they cannot be hard-linked into %s",
                    store.copied_bytes,
                    self._state_path,
                )
            yield store

    def has_state(self) -> bool:
        return is_present(self._state_path / FILE_NAME)

    def state(self) -> AbstractContextManager[State]:
        return SqliteState(self._state_path)

    @contextmanager
    def side(self, *, read_only: bool) -> Iterator[SideTable | None]:
        folder = side_path(self._path)
        with ExitStack() as stack:
            if not holds_database(folder):
                yield None
                return
            if read_only:
                folder = stack.enter_context(copy_folder(folder, self._state_path))
            yield stack.enter_context(LevelDBSide(folder))

    def table_settings(self) -> list[TableSettings]:
        return []
