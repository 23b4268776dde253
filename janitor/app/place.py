"""Where a store and its state are, by kind: what has to be opened, and which other processes may have it open.

A LevelDB store is one process's at a time, so questions go to a clone of it or to the process that holds it, and its
state is a file beside it. A store in HBase is open to all, its state is a table beside its own, and only the lease
keeps two janitors apart.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from janitor.state.base import State
from tms_core.tables.base import Reads, Store
from tms_core.tables.side import SideTable

if TYPE_CHECKING:
    from tms_core.tables.hbase.described import TableSettings


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
        """Return the store itself.

        Raises:
            StoreBusy: another process has it open.
        """
        ...

    def readable(self) -> AbstractContextManager[Reads]:
        """Return the store's contents, with nothing that could write (rule S5).

        Raises:
            StoreBusy: another process has it open.
        """
        ...

    def has_state(self) -> bool:
        """Return whether there is a state already."""
        ...

    def state(self) -> AbstractContextManager[State]:
        """Return the state, made where there is none."""
        ...

    def side(self, *, read_only: bool) -> AbstractContextManager[SideTable | None]:
        """Return the table of messages with a ttl of their own (rule L6) and of consumers; None where there are none.

        Args:
            read_only: read a copy where another process may have it open.
        """
        ...

    def table_settings(self) -> list[TableSettings]:
        """Return how the tables are set, where they can be."""
        ...
