"""The place of a store and its state: how they are opened, and which processes may open them.

Only one process at a time can open a LevelDB store, so queries use a clone or the process that holds the store; its
state is a file next to it. All processes can open a store in HBase; its state is a table next to its tables, and only
the lease excludes a second janitor.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event
from typing import TYPE_CHECKING, Protocol

from janitor.state.base import State
from tms_core.clock import Clock
from tms_core.errors import LeaseHeld, StateError, TmsError
from tms_core.tables.base import Reads, Store
from tms_core.tables.lease import Lease
from tms_core.tables.side import SideTable

if TYPE_CHECKING:
    from janitor.settings import LeaseSettings
    from tms_core.tables.hbase.described import TableSettings


class Place(Protocol):
    """A store and its state.

    Attributes:
        name: the store, for operators.
        state_name: the state, for operators.
        exclusive: whether only one process can have the store open.
        unseen: obstacles to a prune boundary that cannot be checked here, as clauses.
    """

    name: str
    state_name: str
    exclusive: bool
    unseen: tuple[str, ...]

    def identity(self) -> str:
        """Return ``Store.identity``, without opening the store if possible."""
        ...

    def disk_bytes(self) -> int | None:
        """Return ``Store.disk_bytes``, without opening the store; None if unknown."""
        ...

    def require(self) -> None:
        """Check that the store exists.

        Raises:
            StoreNotFound: the store does not exist.
        """
        ...

    def writable(self) -> AbstractContextManager[Store]:
        """Return the store for writing.

        Raises:
            StoreBusy: another process has the store open.
        """
        ...

    def readable(self) -> AbstractContextManager[Reads]:
        """Return the contents of the store, without methods that write (invariant S5).

        Raises:
            StoreBusy: another process has the store open.
        """
        ...

    def has_state(self) -> bool:
        """Return whether the state exists.

        Raises:
            StateError: the place of the state cannot be reached.
        """
        ...

    def state(self) -> AbstractContextManager[State]:
        """Return the state; create it if it does not exist."""
        ...

    def side(self, *, read_only: bool) -> AbstractContextManager[SideTable | None]:
        """Return the side table with own TTLs of messages (rule L6) and consumers; None if it does not exist.

        Args:
            read_only: whether to read a copy, because another process may have the side table open.
        """
        ...

    def table_settings(self) -> list[TableSettings]:
        """Return the settings of the tables, if the store has such settings."""
        ...


# -- the lease ---------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

#: The interval at which a janitor on standby checks whether the lease is free, in seconds.
STANDBY_SECONDS = 5.0


@contextmanager
def hold_lease(
    settings: LeaseSettings,
    state: State,
    clock: Clock,
    *,
    sole: bool,
    store: str = "",
    standby: Event | None = None,
    until: Event | None = None,
) -> Iterator[Lease]:
    """Hold the lease inside the block.

    Args:
        settings: the settings of the lease.
        state: the state that stores the lease.
        sole: whether no other holder can be alive.
        store: the identity of the store, if only one process can open it; see :class:`Lease`.
        standby: an event; until it is set, wait while another process has the lease. None: do not wait.
        until: an event; until it is set, wait for the lease of a dead holder to expire. None: do not wait.

    Raises:
        LeaseHeld: another process has the lease.
    """
    holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    lease = Lease(state, holder, settings.seconds, clock, store=store)
    if standby is not None:
        _wait_for_lease(lease, standby)
    elif until is not None and not sole:
        _wait_out(lease, until)
    else:
        lease.acquire(sole=sole)
    try:
        yield lease
    finally:
        lease.release()


def _wait_for_lease(lease: Lease, end: Event) -> None:
    """Wait until the lease is free or no longer renewed, which needs no wall clock (invariant S12).

    The wait continues while the state cannot be read: its lease may become free then.
    """
    logged: type[TmsError] | None = None
    while True:
        try:
            lease.acquire()
        except (LeaseHeld, StateError) as error:
            if type(error) is not logged:
                logger.warning("on standby: %s This janitor takes over when the lease is free.", error.message)
            logged = type(error)
            if end.wait(STANDBY_SECONDS):
                raise
        else:
            return


def _wait_out(lease: Lease, until: Event) -> None:
    """Wait until the lease of a dead holder expires, but not for a live holder.

    Raises:
        LeaseHeld: its holder has renewed it, or ``until`` was set.
        StateError: the state could not be read at first, or at the last attempt.
    """
    rejection: LeaseHeld | StateError
    try:
        lease.acquire()
    except LeaseHeld as error:
        rejection, found = error, lease.seen
    else:
        return
    if found is None:
        raise rejection
    logger.warning("%s If that process is dead, this run starts in %d s.", rejection.message, found.seconds)
    for _ in range(int(found.seconds / STANDBY_SECONDS) + 2):
        if until.wait(STANDBY_SECONDS):
            break
        try:
            lease.acquire()
        except (LeaseHeld, StateError) as error:
            rejection = error
        else:
            return
        if lease.seen != found:
            break
    raise rejection
